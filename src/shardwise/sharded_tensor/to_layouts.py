"""Many tensors to other layouts, in one exchange or in steps that free sources.

`reshard_all` makes new tensors, `reshard_all_in_place` changes those that are there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardwise.arguments import cap, items
from shardwise.comm.agreement import agree
from shardwise.comm.differentiable import carriers_of, home_of, transfer_of
from shardwise.comm.executor import execute_all
from shardwise.comm.leftovers import Leftovers
from shardwise.comm.tracing import recorded
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError, ShardwiseError
from shardwise.sharded_tensor.comparing import all_ranks
from shardwise.sharded_tensor.progress import progress_bar
from shardwise.sharded_tensor.reshard_target import ReshardTarget, reshard_to, target_in_group
from shardwise.sharded_tensor.resharding import job_for
from shardwise.sharded_tensor.spec_trees import listed_like
from shardwise.sharded_tensor.steps import in_steps
from shardwise.sharded_tensor.telling import tell_of_arguments
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharded_tensor.to_layout import (
    gradient_to_move,
    land,
    land_gradient,
    reshard_in_place,
)
from shardwise.sharded_tensor.usable import live_state

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.differentiable import Exchange
    from shardwise.sharded_tensor.state import State

__all__ = ["Move", "carry_out", "reshard_all", "reshard_all_in_place"]

Tensors = TypeVar("Tensors", bound="Sequence[Any] | Mapping[str, Any]")
_LEAST = 1 << 26  # bytes of a step in place: what is less goes in one exchange


@dataclass(slots=True)
class Move:
    """One tensor and where it goes."""

    name: Any  # the key in a dict, or `[3]` in a list
    tensor: ShardedTensor
    state: State
    target: ReshardTarget
    also: tuple[Any, ...] = ()  # other names of the same tensor
    is_gradient: bool = False  # whether it is the tensor's gradient that moves

    @property
    def job(self) -> Exchange:
        """The exchange that carries it out."""
        return job_for(self.state, self.target.layout, self.target.devices, None)

    @property
    def is_sent(self) -> bool:
        """Whether boxes may change hands: alike on all ranks, as a change of devices is not."""
        return self.target.layout != self.state.layout

    @property
    def changes_devices(self) -> bool:
        """Whether a tensor that keeps its layout leaves a device of this rank."""
        return not self.job.changes_nothing or self.home != self.state.device

    @property
    def home(self) -> torch.device:
        """Where the result is on this rank, or is taken to be if it gets nothing of it."""
        has_shards = bool(self.target.layout.boxes_of(self.state.rank))
        if has_shards or self.target.home is None:
            return home_of(self.job, self.state.carriers)
        return self.target.home

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.state.layout.shape) * self.state.dtype.itemsize


def reshard_all(
    tensors: Tensors,
    specs: Any,
    *,
    max_bytes: int | None = None,
    free_source: bool = False,
    progress: bool | None = None,
) -> Tensors:
    """The tensors in other layouts, moved in one exchange: one message per pair of ranks.

    `tensors` is a list or a dict (values that are no ShardedTensors are kept as they are), `specs`
    one target for all (a spec, a Layout, a ShardedTensor) or as many in the same form; of a dict,
    names that are left out stay where they are. All ranks of the tensors' group call it. Values
    only: the results are new leaves that require grad if their sources do.

    `max_bytes` caps the staging. With `free_source` the tensors go in steps, and each source is
    given up as soon as it has moved, so that the peak is near the larger of both sides; the
    sources cannot be used any more. `progress` shows a bar on the first rank: by default on a
    terminal.
    """
    try:
        names, listed = _listed(tensors)
    except Exception as problem:
        given = _values_of(tensors)
        tell_of_arguments("reshard_all", problem, given, process_group=None, hot=False)
        raise
    done: dict[Any, Any] = dict(zip(names, listed, strict=True))
    first = next((t for t in listed if isinstance(t, ShardedTensor)), None)
    if first is None:
        cap(max_bytes, "reshard_all")  # nothing moves, and nobody waits
    else:
        members = first._state.comm
        moves = _agreed_moves(names, listed, specs, members, max_bytes)
        _change_devices(moves, done, free_source=free_source)
        moves = [move for move in moves if move.is_sent]
        steps = in_steps(moves) if free_source else deque([moves] if moves else [])
        del moves
        total = sum(move.nbytes for step in steps for move in step)
        with progress_bar("resharding", total, members, show=progress) as advance:
            leftovers = Leftovers()
            while steps:
                freed = _bytes_on_cpu(steps[0]) if free_source else 0
                # What has moved is held by nobody here: a step is done when it is gone.
                advance(_do(steps.popleft(), done, members, max_bytes, free_source=free_source))
                leftovers.add(freed)
    return _like(tensors, done)  # type: ignore[no-any-return]  # of the same type


def reshard_all_in_place(
    tensors: Mapping[str, ShardedTensor],
    targets: Mapping[str, Any],
    *,
    max_bytes: int | None = None,
    progress: bool | None = None,
) -> None:
    """Brings the tensors themselves to other layouts, gradients with them; hooks stay.

    As `reshard_all(..., free_source=True)`: in steps, each of which gives up what has moved. All
    ranks of the tensors' group call it.
    """
    if not tensors:
        return
    members = next(iter(tensors.values()))._state.comm
    moves = _agreed_moves(list(tensors), list(tensors.values()), targets, members, max_bytes)
    _change_devices_in_place(moves)
    moves = _with_gradients([move for move in moves if move.is_sent], members)
    steps = in_steps(moves, least=_LEAST if max_bytes is None else min(_LEAST, max_bytes))
    total = sum(move.nbytes for move in moves)
    del moves  # what has moved is held by nobody here
    with progress_bar("resharding", total, members, show=progress) as advance:
        leftovers = Leftovers()
        while steps:
            freed = _bytes_on_cpu(steps[0])
            advance(_do_in_place(steps.popleft(), members, max_bytes))
            leftovers.add(freed)


def _bytes_on_cpu(step: Sequence[Move]) -> int:
    """What this rank holds of the tensors of a step."""
    held = [carrier for move in step for carrier in move.state.carriers]
    return sum(carrier.nbytes for carrier in held if carrier.device.type == "cpu")


def _change_devices_in_place(moves: Sequence[Move]) -> None:
    """Does what is to be done of tensors that keep their layouts. Nothing is sent."""
    for move in moves:
        if not move.is_sent:
            changes = move.changes_devices
            if move.state.init_rrefs:  # new references are made by all ranks or by none
                changes = not all_ranks(not changes, move.state)
            if changes:
                reshard_in_place(move.tensor, move.target, is_by_all=False)


def _with_gradients(moves: Sequence[Move], members: Communicator) -> list[Move]:
    """The same, each followed by that of its gradient where some rank has one.

    All ranks ask, since backward may have reached the shards of some of them only.
    """
    have_grads = [any(c.grad is not None for c in move.state.carriers) for move in moves]
    if len(members.ranks) > 1 and any(move.state.requires_grad for move in moves):
        flags = torch.tensor(have_grads, dtype=torch.int32, device=members.wire_device)
        with recorded("compare results", members, flags.nbytes):
            members.all_reduce(flags, "max")
        have_grads = flags.bool().tolist()
    found = []
    for move, has_grad in zip(moves, have_grads, strict=True):
        found.append(move)
        if has_grad:
            found.append(_gradient_move(move))
    return found


def _gradient_move(move: Move) -> Move:
    layout, home = move.target.layout.bar, move.home
    devices = (home,) * len(layout.boxes_of(move.state.rank))
    target = ReshardTarget(layout, None, devices, home)
    name = f"gradient of {move.name}"
    return Move(name, move.tensor, gradient_to_move(move.state), target, is_gradient=True)


def _do_in_place(step: Sequence[Move], members: Communicator, max_bytes: int | None) -> int:
    for move, state in zip(step, carry_out(step, members, max_bytes), strict=True):
        if move.is_gradient:  # of a tensor that has landed before it
            land_gradient(move.tensor, state)
        else:
            land(move.tensor, state)
    return sum(move.nbytes for move in step)


def _agreed_moves(
    names: Sequence[Any],
    tensors: Sequence[Any],
    specs: Any,
    members: Communicator,
    max_bytes: int | None,
) -> list[Move]:
    """All moves, once the ranks are known to speak of the same ones."""
    problem: Exception | None = None
    moves: list[Move] = []
    try:
        max_bytes = cap(max_bytes, "reshard_all")
        moves = _moves(names, tensors, specs)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    values: dict[str, object] = {"tensors": [move.name for move in moves], "max_bytes": max_bytes}
    for move in moves:
        values[f"{move.name!r} source layout"] = move.state.layout
        values[f"{move.name!r} target layout"] = move.target.layout
        values[f"{move.name!r} dtype"] = move.state.dtype
    agree("reshard_all", values, group=members, problem=problem)
    return moves


def _listed(tensors: Any) -> tuple[list[Any], list[Any]]:
    """Names and tensors; raises unless the results can be put together as they are."""
    if isinstance(tensors, torch.Tensor):
        call = "reshard" if isinstance(tensors, ShardedTensor) else "distribute"
        raise _no_list(f"one {type(tensors).__name__}", f"Use shardwise.{call}(x, spec).")
    if isinstance(tensors, Mapping):
        names, listed = list(tensors), list(tensors.values())
    elif isinstance(tensors, Iterator):  # another, as that of `zip`, would be made of anything
        raise _no_list(type(tensors).__name__, "Pass list(...) of it.")
    else:
        listed = items(tensors, "tensors of reshard_all", of="ShardedTensors")
        names = _numbers(listed)
    if type(tensors) not in (list, tuple, dict):
        _check_type(tensors, dict(zip(names, listed, strict=True)))
    return names, listed


def _values_of(tensors: Any) -> Collection[object]:
    """What there is of tensors in an argument that is perhaps no list of them."""
    if isinstance(tensors, Mapping):
        return tensors.values()
    # Nothing is asked of an iterator, which may have no end, or communicate.
    return tensors if isinstance(tensors, list | tuple) else (tensors,)


def _numbers(listed: Sequence[object]) -> list[str]:
    """Names of tensors in a list, which holds nothing else."""
    for number, tensor in enumerate(listed):
        if not isinstance(tensor, ShardedTensor):
            raise ArgumentTypeError(
                f"tensors[{number}] of reshard_all",
                expected="a ShardedTensor",
                got=type(tensor).__name__,
                fix="Shard a plain tensor by shardwise.distribute(x, spec). In a dict, such as "
                "dict(model.named_parameters()), what is no ShardedTensor is kept as it is.",
            )
    return [f"[{number}]" for number in range(len(listed))]


def _check_type(tensors: Any, named: dict[Any, Any]) -> None:
    """Raises unless another of the same type can be made, before anything has moved."""
    got, kind = type(tensors).__name__, "dict" if isinstance(tensors, Mapping) else "list"
    try:
        _like(tensors, named)
    except Exception as error:  # whatever the type says of what it takes
        raise _no_list(got, f"Pass {kind}(...) of it.") from error


def _no_list(got: str, fix: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        "tensors of reshard_all",
        expected="a list, tuple or dict of ShardedTensors",
        got=got,
        fix=fix,
    )


def _like(tensors: Any, named: dict[Any, Any]) -> Any:
    """What is named, in a list, tuple, namedtuple, dict, ... as the tensors are in one."""
    if isinstance(tensors, Mapping):
        return type(tensors)(named)  # type: ignore[call-arg]  # a dict, OrderedDict, ...
    return listed_like(tensors, named.values())


def _moves(names: Sequence[Any], tensors: Sequence[Any], specs: Any) -> list[Move]:
    targets = _targets(names, specs)
    known: dict[tuple[int, tuple[int, ...]], ReshardTarget] = {}  # by what is asked for, and shape
    by_tensor: dict[Any, Move] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, ShardedTensor) or name not in targets:
            continue
        state = live_state(tensor)
        if state.requires_grad and torch.is_grad_enabled() and not tensor.is_leaf:
            raise OpError(
                f"reshard_all of {name!r}, which autograd computed",
                rank=state.rank,
                fix="It moves values only: use torch.no_grad(), or shardwise.reshard for each.",
            )
        asked = id(targets[name]), state.layout.shape
        target = known.get(asked)
        if target is None:
            target = known[asked] = _target(name, targets[name], state)
        # Tied: one tensor by two names moves once, and stays tied.
        key = (id(tensor), target.layout, target.devices)
        if key in by_tensor:
            by_tensor[key].also += (name,)
        else:
            by_tensor[key] = Move(name, tensor, state, target)
    found = list(by_tensor.values())
    members = {id(move.state.comm): move.state.comm for move in found}
    groups = {tuple(one.ranks) for one in members.values()}
    if len(groups) > 1:
        raise ArgumentValueError(
            "tensors of reshard_all",
            expected="one process group",
            got=f"{len(groups)} different ones",
            fix="Call it once for each group.",
        )
    return found


def _target(name: Any, to: object, state: State) -> ReshardTarget:
    """Where one of the tensors goes; what is wrong with that is said of its name."""
    try:
        return target_in_group(to, state, what="its target")
    except ShardwiseError as error:
        text = str(error).removeprefix(f"[rank {error.rank}] ")
        raise type(error)(f"reshard_all of {name!r}: {text}", rank=error.rank) from error
    except Exception as error:  # of a spec that is not ours
        error.add_note(f"in reshard_all of {name!r}")
        raise


def _targets(names: Sequence[Any], specs: Any) -> dict[Any, Any]:
    """Name -> where it goes."""
    if isinstance(specs, Mapping):
        known = set(names)
        strangers = [name for name in specs if name not in known]
        if strangers:
            raise ArgumentValueError(
                "specs of reshard_all",
                expected=f"names of the tensors, such as {', '.join(map(repr, names[:3]))}",
                got=", ".join(map(repr, strangers[:5])),
                fix="Pass one spec for all, or as many as there are tensors, in the same form.",
            )
        return dict(specs)
    if isinstance(specs, list | tuple):
        if len(specs) != len(names):
            raise ArgumentValueError(
                "specs of reshard_all", expected=f"{len(names)}, one per tensor", got=len(specs)
            )
        return dict(zip(names, specs, strict=True))
    return dict.fromkeys(names, specs)


def _do(
    step: Sequence[Move],
    done: dict[Any, Any],
    members: Communicator,
    max_bytes: int | None,
    *,
    free_source: bool,
) -> int:
    """Moves the tensors of a step into `done`; how many bytes they have."""
    for move, state in zip(step, carry_out(step, members, max_bytes), strict=True):
        _keep(move, state, done, free_source=free_source)
    return sum(move.nbytes for move in step)


def _keep(move: Move, state: State, done: dict[Any, Any], *, free_source: bool) -> None:
    made = wrap(state)
    for name in (move.name, *move.also):
        done[name] = made
    if free_source:
        _free(move.tensor)


def _change_devices(moves: Sequence[Move], done: dict[Any, Any], *, free_source: bool) -> None:
    """Puts tensors that keep their layouts, but not their devices, into `done`. Nothing is sent."""
    for move in moves:
        if move.is_sent or not move.changes_devices:
            continue
        there = reshard_to(move.state.map(torch.detach), move.target)
        for carrier in there.carriers:
            carrier.requires_grad_(move.state.requires_grad)
        _keep(move, there, done, free_source=free_source)


def carry_out(moves: Sequence[Move], members: Communicator, max_bytes: int | None) -> list[State]:
    """What the tensors are in their new layouts, in new memory; one exchange for all."""
    with torch.no_grad():
        transfers = [
            transfer_of(move.job, move.state.carriers, name=str(move.name)) for move in moves
        ]
        moved = execute_all(transfers, group=members, max_bytes=max_bytes)
    found = []
    for move, shards in zip(moves, moved, strict=True):
        state, target = move.state, move.target
        carriers = shards or carriers_of((), dtype=state.dtype, device=move.home)
        if state.requires_grad:
            for carrier in carriers:
                carrier.requires_grad_()
        found.append(state.with_carriers(carriers, layout=target.layout, spec=target.spec))
    return found


def _free(tensor: ShardedTensor) -> None:
    """Lets go of the local tensors; what the tensor says of itself stays."""
    tensor._state = tensor._state.with_carriers(
        [carrier.new_empty(0) for carrier in tensor._state.carriers], is_freed=True
    )
