"""`shard_parameter` and `shard_module`: plain models become sharded ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.arguments import whole_number
from shardwise.comm.agreement import agree, agreed_numbers
from shardwise.comm.checks import should_check
from shardwise.comm.process_group import communicator
from shardwise.errors import AbsentNameError, ArgumentTypeError, ArgumentValueError
from shardwise.modules.plan_hooks import add_plan_hooks
from shardwise.modules.replacing import owners_of, put_in_place
from shardwise.sharded_tensor.distributing import digest
from shardwise.sharded_tensor.progress import progress_bar
from shardwise.sharded_tensor.scattering import SEED_PHRASES, checked_full, on_meta, scatter
from shardwise.sharded_tensor.steps import in_steps
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharding_plan.api import ShardingPlan, ShardingPlanner
from shardwise.sharding_plan.matching import Matched, match

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.modules.replacing import Owner
    from shardwise.sharded_tensor.scattering import Full
    from shardwise.sharder import Sharder
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["check_plan", "shard_module", "shard_parameter"]

_LEAST_STEP = 1 << 24  # bytes of a model that go in one exchange anyway


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int | None = 0,
    process_group: ProcessGroup | None = None,
) -> None:
    """Shards one parameter or buffer of `module`, in place of the plain one.

    All ranks call it; the data are those of the rank at position `src_rank` of the group, or with
    None each rank's own, which are the same. As `shard_module`, which does so for many at once.
    """
    members = communicator(process_group)
    problem: Exception | None = None
    items: list[_Item] = []
    try:
        tensor = _own_tensor(module, param_name, members.rank)
        name = f"{type(module).__name__}.{param_name}"
        full = _checked(tensor, sharding_spec, members, src_rank=src_rank, name=name)
        items = [_Item(name, full, [(module, param_name)])]
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    call = _Call("shard_parameter", members, src_rank)
    without_data = _agree(call, items, {"param_name": param_name}, problem)
    _shard(call, items, without_data)


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int | None = 0,
    process_group: ProcessGroup | None = None,
    *,
    max_bytes: int | None = None,
    progress: bool | None = None,
) -> nn.Module:
    """Shards `module` in place as `plan` says, and returns it. All ranks call it.

    The data are those of the rank at position `src_rank` of the group; the other ranks' tensors
    only say size and dtype, and may be on the meta device. With `src_rank=None` every rank has the
    same model and cuts its own part: nothing is sent. What the plan does not name stays as it is,
    and has to be the same on all ranks (`shardwise.set_check("debug")` compares it). If the
    source's tensors are on the meta device, so are the sharded ones; see `shardwise.materialize`.

    The ranks compare their arguments in one small exchange, and if anything is wrong, all raise
    and nothing has changed. All tensors go in one exchange, large models in some 30, each plain
    tensor being given up as soon as it has gone. `max_bytes` caps the staging; `progress` shows a
    bar on the first rank, by default on a terminal. Parameters stay the same objects, with their
    hooks and attributes, but not with gradients; tied ones stay tied.

    >>> import shardwise
    >>> plan = shardwise.ShardingPlan({"0.weight": "chunk(0)", "2.weight": "chunk(1)"})
    >>> def shapes(rank):
    ...     model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    ...     shardwise.shard_module(model, plan)
    ...     return [tuple(model[k].weight.local_tensor().shape) for k in (0, 2)]
    >>> shardwise.run_local(lambda rank: shapes(rank), 2)
    [[(3, 4), (4, 3)], [(3, 4), (4, 3)]]
    """
    members = communicator(process_group)
    problem: Exception | None = None
    prepared = _Prepared([], Matched((), (), (), (), ()), {})
    try:
        prepared = _prepare(module, plan, members, src_rank, max_bytes)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    call = _Call("shard_module", members, src_rank, max_bytes, progress)
    without_data = _agree(call, prepared.items, prepared.compared, problem)
    _run_sharders(module, prepared.matched.sharders, members)
    _shard(call, prepared.items, without_data)
    add_plan_hooks(module, prepared.matched, members)
    return module


class _Call(NamedTuple):
    """What holds for all tensors of a call."""

    what: str
    members: Communicator
    src_rank: int | None
    max_bytes: int | None = None
    progress: bool | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor that is to be sharded."""

    name: str
    full: Full
    owners: Sequence[Owner]  # modules that have it, several if it is tied

    @property
    def nbytes(self) -> int:
        return self.full.nbytes


class _Prepared(NamedTuple):
    """All that a plan asks for, found right on this rank."""

    items: list[_Item]
    matched: Matched
    compared: Mapping[str, object]


def _own_tensor(module: nn.Module, name: str, rank: int) -> torch.Tensor:
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError("module", rank=rank, expected="a torch.nn.Module", got=kind)
    if not hasattr(module, name):
        known = [own for own, _ in _own_tensors(module)]
        raise AbsentNameError(
            f"{kind} has no attribute {name!r} to shard",
            rank=rank,
            expected=f"one of {', '.join(known)}" if known else "a parameter or buffer",
            got=repr(name),
            fix="One of a submodule is sharded by shard_module, or as that submodule's own."
            if "." in name
            else None,
        )
    tensor = getattr(module, name)
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentValueError(
            f"Expected {kind}.{name} to be a Tensor, but found {type(tensor).__name__}", rank=rank
        )
    if nn.utils.parametrize.is_parametrized(module, name):
        raise ArgumentValueError(
            f"{kind}.{name}, which a parametrization computes",
            rank=rank,
            expected="a parameter or buffer",
            fix="Shard what it is computed from: shard_parameter("
            f"module.parametrizations.{name}, 'original', spec).",
        )
    return tensor


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _checked(
    tensor: torch.Tensor,
    spec: ShardingSpec,
    members: Communicator,
    *,
    src_rank: int | None,
    name: str,
) -> Full:
    if isinstance(tensor, ShardedTensor):
        raise ArgumentValueError(
            f"{name} to shard",
            rank=members.rank,
            expected="a plain tensor",
            got=f"one that is sharded already, {tensor.shard_layout}",
            fix="Change a sharded model's plan by shardwise.reshard_module.",
        )
    if nn.parameter.is_lazy(tensor):
        raise ArgumentValueError(
            f"{name} to shard",
            rank=members.rank,
            expected="a tensor that has a shape",
            got=type(tensor).__name__,
            fix="Call the lazy module once, on an input, before it is sharded.",
        )
    try:
        return checked_full(tensor, spec, members, src_rank=src_rank, name=name)
    except Exception as error:
        error.add_note(f"while sharding {name}")
        raise


def _prepare(
    module: nn.Module,
    plan: ShardingPlan,
    members: Communicator,
    src_rank: int | None,
    max_bytes: int | None,
) -> _Prepared:
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            "module of shard_module", expected="a torch.nn.Module", got=type(module).__name__
        )
    check_plan(plan, "shard_module")
    matched = match(plan, module, tuple(members.ranks), members.wire_device.type)
    items = [
        _Item(
            one.names[0],
            _checked(one.tensor, one.spec, members, src_rank=src_rank, name=repr(one.names[0])),
            owners_of(module, one.names),
        )
        for one in matched.tensors
    ]
    if max_bytes is not None:
        largest = max((item.full.tensor.dtype.itemsize for item in items), default=1)
        whole_number(max_bytes, "max_bytes", least=largest)
    compared = _compared(matched) | {"max_bytes": max_bytes}
    if should_check(hot=True):
        compared |= _digests(module, items, src_rank)
    # Without the tensors, since it would hold what has gone.
    return _Prepared(items, replace(matched, tensors=()), compared)


def check_plan(plan: object, call: str) -> None:
    """Raises unless the plan of this call is one; a planner has to make it first."""
    if not isinstance(plan, ShardingPlan):
        raise ArgumentTypeError(
            f"plan of {call}",
            expected="a ShardingPlan",
            got=type(plan).__name__,
            fix="Pass planner.build_plan(module)."
            if isinstance(plan, ShardingPlanner)
            else "E.g. shardwise.ShardingPlan({'fc1.weight': shardwise.chunk(0)}).",
        )


def _compared(matched: Matched) -> dict[str, object]:
    return {
        "tensors": [one.names for one in matched.tensors],
        "sharders": [(path, type(sharder)) for path, sharder in matched.sharders],
        "output_plan": matched.outputs,
        "return_local_tensor": matched.locals,
        "input_plan": matched.inputs,
    }


def _digests(module: nn.Module, items: Sequence[_Item], src_rank: int | None) -> dict[str, object]:
    """Of data that must be the same on all ranks: what stays plain, and what each cuts itself."""
    moved = {id(item.full.tensor) for item in items} if src_rank is not None else set()
    named = [*module.named_parameters(), *module.named_buffers()]
    plain = [(n, t) for n, t in named if id(t) not in moved and not isinstance(t, ShardedTensor)]
    return {f"data of {name!r}": digest(t) for name, t in plain if not t.is_meta}


def _agree(
    call: _Call,
    items: Sequence[_Item],
    compared: Mapping[str, object],
    problem: Exception | None,
) -> list[bool]:
    """Which items are on the meta device on the source rank, once all ranks agree. One exchange."""
    values: dict[str, object] = {"src_rank": call.src_rank, **compared}
    phrases = {"src_rank": SEED_PHRASES["src_rank"]}
    for item in items:
        values |= {f"{item.name!r} {key}": value for key, value in item.full.compared.items()}
        phrases[f"{item.name!r} sharding_spec"] = SEED_PHRASES["sharding_spec"]
    mine = [item.full.tensor.is_meta for item in items]
    kind = 2 if len(set(mine)) > 1 else int(any(mine))
    kinds = agreed_numbers(
        call.what, values, kind, group=call.members, problem=problem, phrases=phrases
    )
    if 2 in kinds:  # some of each, on some rank
        listed: list[Any] = call.members.gather_objects(mine)
    else:
        listed = [[bool(kind)] * len(items) for kind in kinds]
    sources = listed if call.src_rank is None else [listed[call.src_rank]]
    _check_data(call, items, listed, sources)
    return list(sources[0])


def _check_data(
    call: _Call,
    items: Sequence[_Item],
    is_meta: Sequence[Sequence[bool]],
    sources: Sequence[Sequence[bool]],
) -> None:
    """Raises if data of some rank would be lost; all ranks see the same."""
    for number, item in enumerate(items):
        having = [k for k, row in enumerate(is_meta) if not row[number]]
        if having and any(row[number] for row in sources):
            ranks = call.members.ranks
            raise ArgumentValueError(
                f"{item.name!r} on the source rank",
                rank=call.members.rank,
                expected=f"data, since rank {ranks.rank_at(having[0])} has some",
                got="a tensor on the meta device",
                fix=f"Pass src_rank={having[0]}, or make the model on the meta device everywhere.",
            )


def _run_sharders(
    module: nn.Module, sharders: Sequence[tuple[str, Sharder]], members: Communicator
) -> None:
    """Replaces the submodules that have a Sharder; before any tensor has moved."""
    if not sharders:
        return
    problem: Exception | None = None
    made: list[tuple[str, nn.Module]] = []
    known: dict[nn.Module, object] = {}  # a submodule with two paths is sharded once
    try:
        for path, sharder in sharders:
            plain = module.get_submodule(path)
            if plain not in known:
                known[plain] = sharder.shard(plain)
            found = known[plain]
            if not isinstance(found, nn.Module):
                raise ArgumentTypeError(
                    f"what {type(sharder).__name__}.shard returned for {path!r}",
                    rank=members.rank,
                    expected="a torch.nn.Module, which takes the submodule's place",
                    got=type(found).__name__,
                )
            made.append((path, found))
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    kinds = [(path, type(found)) for path, found in made]
    agree("sharders of shard_module", {"modules": kinds}, group=members, problem=problem)
    for path, found in made:
        parent, _, name = path.rpartition(".")
        module.get_submodule(parent).register_module(name, found)


def _shard(call: _Call, items: list[_Item], without_data: Sequence[bool]) -> None:
    """Moves the data, and gives up each plain tensor once it has gone."""
    members = call.members
    moving = []
    for item, is_meta in zip(items, without_data, strict=True):
        if is_meta:
            put_in_place(item.full.tensor, on_meta(item.full, members), item.owners)
        else:
            moving.append(item)
    items.clear()  # so that nobody holds what has gone
    steps = in_steps(moving, least=_LEAST_STEP)
    total = sum(item.nbytes for item in moving)
    moving.clear()
    with progress_bar("sharding", total, members, show=call.progress) as advance:
        while steps:
            advance(_do(steps.popleft(), call))


def _do(step: Sequence[_Item], call: _Call) -> int:
    """Moves the tensors of a step and puts them in place; how many bytes they have."""
    nbytes = sum(item.nbytes for item in step)
    made = scatter(
        [item.full for item in step],
        call.members,
        src_rank=call.src_rank,
        max_bytes=call.max_bytes,
    )
    for item, tensor in zip(step, made, strict=True):
        put_in_place(item.full.tensor, tensor, item.owners)
    return nbytes
