"""`local_map`: a user's function on local pieces, with declared layouts and exact gradients."""

from __future__ import annotations

from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import torch

from shardwise._torch_compat import StopRecomputation, autocast_dtype, tree_leaves
from shardwise.comm.agreement import heard_by_all
from shardwise.comm.differentiable import carriers_of, make_tie
from shardwise.comm.process_group import communicator
from shardwise.comm.tracing import TRACES, doing
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError
from shardwise.geometry import Layout
from shardwise.geometry.box import as_shape
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.distributing import as_replicated
from shardwise.sharded_tensor.entering import Entry, enter, leave_elsewhere, tie
from shardwise.sharded_tensor.implicit import announce_move
from shardwise.sharded_tensor.local_outputs import Outputs
from shardwise.sharded_tensor.reshard_target import reshard_to, target_of
from shardwise.sharded_tensor.resharding import at_home, check_one_group, job_for
from shardwise.sharded_tensor.spec_trees import is_one, leaves, matched, rebuilt
from shardwise.sharded_tensor.state import State, only_layout
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharded_tensor.usable import live_state
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.differentiable import Carriers
    from shardwise.sharded_tensor.local_outputs import Outcome, Pieces
    from shardwise.sharded_tensor.spec_trees import Specs

__all__ = ["local_map"]


def local_map(
    fn: Callable[..., Any],
    in_specs: Specs,
    out_specs: Specs,
    *,
    redistribute: bool = True,
    out_shapes: Sequence[Sequence[int]] | Literal["once", "exchange"] = "once",
    process_group: ProcessGroup | Communicator | None = None,
) -> Callable[..., Any]:
    """A function of sharded tensors that runs `fn` on the local tensors of each rank.

    `in_specs` has a spec, or a Layout, for each positional argument (one alone is for all tensors):
    the argument comes to that layout, and `fn` gets the local piece; None passes an argument as it
    is. With `redistribute=False` nothing is moved, and an argument elsewhere raises. `out_specs`
    says which layouts what `fn` returns has, in tuples, lists or dicts as it returns them: cut,
    replicated (every rank computed the same), pending (`shardwise.partial()`: ranks computed
    addends), or None for what is no tensor. All ranks of the group call; keyword arguments are
    passed as they are. `process_group` is for calls without sharded tensors.

    Gradients are exact for every `fn` that autograd can follow and that does not communicate by
    itself: those of replicas that enter work split over ranks are summed, once per distinct work.

    A rank with several pieces runs `fn` once for each, with whole tensors shared; one with none
    does not run it. Ranks tell each other the shapes of what came out, to know the global ones,
    "once" per layouts of the arguments; where shapes change with the same layouts, at every call
    ("exchange"). A list of global shapes, one per output with a spec, is for specs that do not say
    them.

    >>> import shardwise
    >>> def scaled(rank):
    ...     x = shardwise.distribute(torch.ones(4, 6), shardwise.chunk(0))
    ...     double = shardwise.local_map(lambda x: 2 * x, shardwise.chunk(0), shardwise.chunk(0))
    ...     return double(x).sum().item()
    >>> shardwise.run_local(lambda rank: scaled(rank), 2)
    [48.0, 48.0]
    """
    _check_specs("in_specs", in_specs)
    _check_specs("out_specs", out_specs)
    shapes = _checked_shapes(out_shapes, sum(spec is not None for spec in leaves(out_specs)))
    mapped = _LocalMap(fn, in_specs, out_specs, redistribute, shapes, process_group)

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with doing(mapped.name) if TRACES else nullcontext():
            return mapped(args, kwargs)

    return call


def _check_specs(name: str, specs: Specs) -> None:
    for spec in leaves(specs):
        if spec is not None and not isinstance(spec, ShardingSpec | Layout | ShardedTensor):
            raise ArgumentTypeError(
                f"{name} of local_map",
                expected="specs, Layouts or None, in tuples, lists or dicts",
                got=repr(spec),
                fix="E.g. shardwise.chunk(0).",
            )


def _checked_shapes(shapes: Any, count: int) -> Any:
    if isinstance(shapes, str):
        if shapes not in ("once", "exchange"):
            raise ArgumentValueError(
                "out_shapes of local_map", expected='"once", "exchange" or shapes', got=shapes
            )
        return shapes
    found = tuple(as_shape(shape) for shape in shapes)
    if len(found) != count:
        raise ArgumentValueError(
            "out_shapes of local_map",
            expected=f"{count}, one per output with a spec",
            got=f"{len(found)} shapes",
        )
    return found


class _LocalMap:
    """What `local_map` returns, less its name."""

    def __init__(
        self,
        fn: Callable[..., Any],
        in_specs: Specs,
        out_specs: Specs,
        redistribute: bool,
        out_shapes: Any,
        process_group: Any,
    ) -> None:
        self.fn = fn
        self.name = f"local_map of {function_name(fn)}"
        self.in_specs = in_specs
        self.out_specs = out_specs
        self.targets = [spec for spec in leaves(out_specs) if spec is not None]
        self.outputs = Outputs(self.name, self.targets, out_shapes)
        self.redistribute = redistribute
        self.process_group = process_group

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pairs = self._arguments(args, kwargs)
        states = [value for spec, value in pairs if spec is not None]
        first = states[0] if states else None
        members = communicator(self.process_group) if first is None else first.comm
        check_one_group(self.name, states or [_nowhere(members)])
        moved, entries = self._brought(pairs, states, members)
        layouts = [state.layout for state in moved]
        calls = {rank: self._num_calls(layouts, rank, members.rank) for rank in members.ranks}
        key = self._key(moved, members)
        made, others, problem = self._run(pairs, moved, calls[members.rank], args, kwargs)
        outcome = self.outputs.outcome(key, made, moved, members, problem)
        for entry in entries:
            entry.learn(outcome.works)
        carriers = _tied(outcome, made, moved, members)
        return self._wrapped(outcome, carriers, others, members)

    @staticmethod
    def _key(moved: Sequence[State], members: Communicator) -> Hashable:
        """What is known of the arguments on all ranks, and decides what the outputs are."""
        has_grad = torch.is_grad_enabled()
        kind = moved[0].device.type if moved else members.wire_device.type
        tensors = [(one.layout, one.dtype, has_grad and one.requires_grad) for one in moved]
        return tuple(tensors), has_grad, autocast_dtype(kind)

    # -- arguments -----------------------------------------------------------------------------

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Each argument, those in lists too, with its spec; tensors that have one as states."""
        specs = self.in_specs
        if is_one(specs):
            specs = tuple(specs if isinstance(arg, torch.Tensor) else None for arg in args)
        pairs = list(matched(specs, args, f"in_specs of {self.name}"))
        if any(isinstance(leaf, ShardedTensor) for leaf in tree_leaves(kwargs)):
            raise ArgumentTypeError(
                f"keyword arguments of {self.name}",
                expected="no ShardedTensor, since they have no specs",
                got="one",
                fix="Pass it by position.",
            )
        group = next((v._state.comm for _, v in pairs if isinstance(v, ShardedTensor)), None)
        return [(spec, self._state_of(spec, value, group)) for spec, value in pairs]

    def _state_of(self, spec: Any, value: Any, group: Communicator | None) -> Any:
        if spec is None:
            if isinstance(value, ShardedTensor):
                raise ArgumentTypeError(
                    f"an argument of {self.name}",
                    expected="a spec for it in in_specs",
                    got="a ShardedTensor without",
                    fix="Give one, or pass st.local_tensor().",
                )
            return value
        if isinstance(value, ShardedTensor):
            return live_state(value)
        members: Any = communicator(self.process_group) if group is None else group
        return as_replicated(value, process_group=members)._state

    def _brought(
        self, pairs: list[tuple[Any, Any]], states: list[State], members: Communicator
    ) -> tuple[list[State], list[Entry]]:
        """The arguments in their layouts, and those whose gradients may have to be summed."""
        found, entries = [], []
        specs = [spec for spec, _ in pairs if spec is not None]
        for spec, state in zip(specs, states, strict=True):
            with heard_by_all(self.name, members):
                target = target_of(spec, state.layout.shape, state.rank)
                members.ranks.check_members(target.layout.ranks, what=f"in_specs of {self.name}")
                self._check_move(state, target.layout)
            layout = target.layout
            if state.layout.pending is not None or layout.pending is not None:
                state = reshard_to(state, target)
            has_grad = state.requires_grad and torch.is_grad_enabled()
            if not has_grad or layout.pending is not None or layout.has_every_box_once:
                found.append(reshard_to(state, target))
                continue
            entry = Entry(job_for(state, layout, target.devices, None))
            entries.append(entry)
            carriers = enter(entry, state.carriers)
            there = state.with_carriers(carriers, layout=layout, spec=target.spec)
            found.append(at_home(there, target.home))
        return found, entries

    def _check_move(self, state: State, layout: Layout) -> None:
        if state.layout == layout:
            return
        if not self.redistribute:
            raise OpError(
                f"an argument of {self.name} with redistribute=False",
                rank=state.rank,
                expected=str(layout),
                got=str(state.layout),
                fix="Bring it there first: shardwise.reshard(x, spec).",
            )
        announce_move(self.fn, state, layout)

    def _num_calls(self, layouts: Sequence[Layout], rank: int, here: int) -> int:
        """How often a rank runs the function: once per piece; whole tensors are for all of them."""
        counts = {len(layout.boxes_of(rank)) for layout in layouts if not _is_whole(layout, rank)}
        if len(counts) > 1:
            raise OpError(
                f"{self.name}: rank {rank} has different numbers of pieces of the arguments",
                rank=here,
                expected="as many pieces of each as of the others, or one that is the whole tensor",
                got=", ".join(str(len(layout.boxes_of(rank))) for layout in layouts),
                fix="Choose in_specs that cut all arguments alike.",
            )
        return counts.pop() if counts else 1

    # -- the function --------------------------------------------------------------------------

    def _run(
        self,
        pairs: list[tuple[Any, Any]],
        moved: Sequence[State],
        num_calls: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[list[Pieces], list[list[Any]], Exception | None]:
        """Pieces of each output that has a spec, and what the others are, call by call."""
        made: list[Pieces] = [[] for _ in self.targets]
        others: list[list[Any]] = [[] for spec in leaves(self.out_specs) if spec is None]
        try:
            for number in range(num_calls):
                pieces = [_piece(state, number) for state in moved]
                given = _with_pieces(pairs, pieces)
                specs = self.in_specs
                if is_one(specs):
                    specs = (None,) * len(args)
                result = self.fn(*rebuilt(specs, iter(given)), **kwargs)
                self._sort(result, made, others, pieces)
        except StopRecomputation:  # of a checkpointed function, which is at its end
            raise
        except Exception as error:  # whatever it is, the other ranks want to know
            return made, others, error
        return made, others, None

    def _sort(
        self, result: Any, made: list[Pieces], others: list[list[Any]], given: Pieces
    ) -> None:
        tensors, rest = iter(made), iter(others)
        for spec, value in matched(self.out_specs, result, f"what {self.name} returns"):
            if spec is None:
                next(rest).append(value)
                continue
            if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor):
                raise ArgumentTypeError(
                    f"an output of {self.name}",
                    expected="a plain torch.Tensor, as out_specs say",
                    got=type(value).__name__,
                )
            if any(value is one for one in given):
                value = value.view_as(value)  # a tensor of its own
            next(tensors).append(value)

    # -- what came out -------------------------------------------------------------------------

    def _wrapped(
        self,
        outcome: Outcome,
        carriers: Sequence[Carriers],
        others: list[list[Any]],
        members: Communicator,
    ) -> Any:
        group = getattr(members, "process_group", None)
        specs = [spec if isinstance(spec, ShardingSpec) else None for spec in self.targets]
        tensors = iter(
            [
                wrap(State(only_layout(layout), held, members.rank, members, spec, group))
                for layout, held, spec in zip(outcome.layouts, carriers, specs, strict=True)
            ]
        )
        rest = iter([None if not one else one[0] if len(one) == 1 else one for one in others])
        found = [next(rest) if spec is None else next(tensors) for spec in leaves(self.out_specs)]
        return rebuilt(self.out_specs, iter(found))


# -- pieces and layouts ----------------------------------------------------------------------------


def _nowhere(members: Communicator) -> State:
    tie = make_tie(torch.get_default_dtype(), members.wire_device)
    return State(Layout((0,), [], []), (tie,), members.rank, members)


def _is_whole(layout: Layout, rank: int) -> bool:
    boxes = layout.boxes_of(rank)
    return len(boxes) == 1 and boxes[0].shape == layout.shape


def _piece(state: State, number: int) -> torch.Tensor:
    shards = state.shards
    return shards[0 if _is_whole(state.layout, state.rank) else number]


def _with_pieces(pairs: list[tuple[Any, Any]], pieces: Pieces) -> list[Any]:
    given = iter(pieces)
    return [value if spec is None else next(given) for spec, value in pairs]


def _tied(
    outcome: Outcome,
    made: Sequence[Pieces],
    moved: Sequence[State],
    members: Communicator,
) -> list[Carriers]:
    """The carriers of the outputs, in every rank's graph."""
    device = moved[0].device if moved else members.wire_device
    found: list[Carriers] = []
    for pieces, kind, homes in zip(made, outcome.kinds, outcome.is_home, strict=True):
        kept = [
            piece if is_home or not piece.requires_grad else leave_elsewhere(piece)
            for piece, is_home in zip(pieces, homes, strict=True)
        ]
        found.append(carriers_of(kept, dtype=kind[0], device=device))
    if not torch.is_grad_enabled():
        return found
    followed = [k for k, (_, has_grad) in enumerate(outcome.kinds) if has_grad]
    inputs = [
        (carrier, not any(made) and number in outcome.used)
        for number, state in enumerate(moved)
        for carrier in state.carriers
        if carrier.requires_grad
    ]
    if not inputs:
        for k in followed:
            if not made[k]:
                found[k][0].requires_grad_()
        return found
    outs = [carrier for k in followed for carrier in found[k]]
    if outs:
        tied = iter(tie(outs, inputs))
        for k in followed:
            found[k] = tuple([next(tied) for _ in found[k]])
    return found
