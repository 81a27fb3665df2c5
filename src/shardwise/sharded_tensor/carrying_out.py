"""Carrying a decision out: operands are brought where they are needed, a kernel works on pieces.

[Note: phantoms] A rank that holds nothing of the result has no kernel to run, but must be in the
graph ([Note: every rank is in every graph] in `comm/differentiable.py`), and must know the dtype of
the result. So it calls the function on tensors without elements that come from its operands.

[Note: pieces of one graph] Nor may it matter which pieces of a tensor a rank goes on with: views
leave some out, kernels pass over those without elements. So all pieces that a rank has of a tensor
follow from the same exchanges. Functions of one operand keep it so, and those that make each piece
from a piece of every operand; others, which may make one piece of the one and another of the other,
as `cat` does, get pieces that follow from all. They do on all ranks, if any of them needs it: what
follows from too much would in gradients of gradients come to exchanges that others have no use for.

[Note: views of nothing] Once a view or what it shows was written, autograd follows the view by its
strides, and a gradient by strides that has no elements is a new tensor: in gradients of gradients
ranks without elements would miss the exchanges of the others. So views without elements are made in
a way that has autograd follow them by the functions that made them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import replayed_views
from shardwise.comm.differentiable import exchange_of
from shardwise.ops.phantoms import unit_of
from shardwise.ops.work import bytes_moved
from shardwise.sharded_tensor.deciding import call_with
from shardwise.sharded_tensor.entering_once import enter_once
from shardwise.sharded_tensor.implicit import announce
from shardwise.sharded_tensor.resharding import replicated, reshard_state
from shardwise.sharded_tensor.state import Seen, State
from shardwise.sharded_tensor.tensor import check_writable, show_written, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.geometry import Layout
    from shardwise.ops import Decision, Need, Operand, Then
    from shardwise.sharded_tensor.deciding import Found, Known

__all__ = ["as_one_graph", "run_pieces"]


def run_pieces(
    known: Known,
    decision: Decision,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Sequence[Found],
) -> Any:
    """What a call gives, by its decision, for any number of pieces on any ranks."""
    states = [one for one in found if isinstance(one, State)]
    first = states[0]
    rank = first.rank
    if known.moved_bytes:
        announce(
            func,
            [
                o.layout
                for o, n in zip(known.operands, decision.needs, strict=True)
                if bytes_moved(o, n)
            ],
            known.moved_bytes,
            rank,
        )
    if decision.is_in_place:
        check_writable(args[0], func)
    pieces = [_pieces(one, need, first) for one, need in zip(found, decision.needs, strict=True)]

    def invoke(*tensors: torch.Tensor) -> Any:
        return call_with(func, args, kwargs, known.slots, tensors)

    if decision.is_in_place:
        if decision.outputs[0].boxes_of(rank):
            decision.kernel(pieces, invoke)
        else:
            _write_into_tie(pieces, known.operands, invoke)
        if torch.is_grad_enabled():
            show_written(args[0])
        return args[0]
    if known.is_joined:
        pieces = _of_one_graph(pieces)
    ndims = [1 if decision.is_view else len(operand.shape) for operand in known.operands]

    def make() -> list[State]:
        return _made(
            decision.outputs,
            lambda: decision.kernel(pieces, invoke),
            lambda: _ties(decision.phantom or invoke, pieces, ndims, is_view=decision.is_view),
            first,
        )

    made = make()
    if decision.is_view and not all([one.numel() for state in made for one in state.carriers]):
        with replayed_views(True):  # [Note: views of nothing]
            made = make()
    if decision.finish is not None:
        made = [reshard_state(one, to) for one, to in zip(made, decision.finish, strict=True)]
    if decision.then is not None:
        made = _afterwards(decision.then, made, pieces, is_joined=known.is_joined_then)
    if known.like is not None and made[0].layout == known.operands[known.like].layout:
        made[0].spec = found[known.like].spec  # type: ignore[union-attr]  # `like` is sharded
    is_from_rows = any([state.is_from_rows for state in states])
    view_of = _lost(decision, first) if decision.is_view else ()
    beside = _beside(first) if decision.is_view else ()
    for one in made if is_from_rows or view_of or beside else ():
        one.is_from_rows, one.view_of, one.beside = is_from_rows, view_of, beside
        one.is_special = bool(is_from_rows or view_of)
    tensors = [wrap(one) for one in made]
    if decision.pack is not None:
        return decision.pack(tensors)
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _beside(base: State) -> tuple[torch.Tensor, ...]:
    """The pieces that a write into a view of `base` reaches. [Note: pieces of one graph]"""
    return (*base.beside, *base.carriers) if len(base.carriers) > 1 else base.beside


def _lost(decision: Decision, base: State) -> tuple[Seen, ...]:
    """What views of `base` show a copy of. [Note: lost views] in `state.py`"""
    is_copy = decision.needs[0].layout != base.layout
    return (*base.view_of, Seen.now(base.carriers)) if is_copy else base.view_of


def _pieces(one: Found, need: Need, first: State) -> Sequence[torch.Tensor]:
    """The local pieces of an operand where it is needed: one per entry of the work, or a tie."""
    rank = first.rank
    entries = need.layout if need.work is None else need.work
    if isinstance(one, torch.Tensor):
        has_grad = one.requires_grad and torch.is_grad_enabled()
        if not has_grad and need.layout.pending is None:  # of a sum it would be every term
            boxes = entries.boxes_of(rank)
            return [one if box.shape == one.shape else one[box.slices()] for box in boxes] or [
                one.new_empty(0)
            ]
        ranks = tuple(sorted(first.comm.ranks))
        one = first.with_carriers([one], layout=replicated(tuple(one.shape), ranks), spec=None)
    if need.work is None and need.layout == one.layout:
        return one.carriers
    devices = (one.device,) * len(need.layout.boxes_of(rank))
    job = exchange_of(one.layout, need.layout, one.devices, devices, first.comm, work=need.work)
    return enter_once(one, job)


def _made(
    layouts: Sequence[Layout],
    compute: Callable[[], list[list[torch.Tensor]]],
    ties: Callable[[], list[torch.Tensor]],
    first: State,
) -> list[State]:
    """What a kernel computes, in these layouts, with ties for what this rank has none of."""
    has_output = [bool(layout.boxes_of(first.rank)) for layout in layouts]
    outputs = compute() if any(has_output) else [[] for _ in layouts]
    if not all(has_output):
        outputs = [held or [tie] for held, tie in zip(outputs, ties(), strict=True)]
    return [
        State(layout, tuple(held), first.rank, first.members, None, first.process_group)
        for held, layout in zip(outputs, layouts, strict=True)
    ]


class _OneGraph(torch.autograd.Function):
    """Tensors as they are, each of which follows from all."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Sequence[torch.Tensor]:
        # Those of pieces that went nowhere on this rank are zeros, which come from nothing.
        return as_one_graph(grads)


def as_one_graph(pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The pieces of a tensor, each of which follows from all, if any of them has a graph."""
    if len(pieces) == 1 or not any([piece.requires_grad for piece in pieces]):
        return pieces
    found: Sequence[torch.Tensor] = _OneGraph.apply(*pieces)  # type: ignore[no-untyped-call]  # torch's
    return found


def _of_one_graph(pieces: list[Sequence[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
    """The pieces, each of which follows from all. [Note: pieces of one graph]"""
    if len(pieces) == 1 or not torch.is_grad_enabled():
        return pieces
    follow = [piece for held in pieces for piece in held if piece.requires_grad]
    if len(follow) < 2:
        return pieces
    found = iter(_OneGraph.apply(*follow))  # type: ignore[no-untyped-call]  # torch's
    return [[next(found) if one.requires_grad else one for one in held] for held in pieces]


def _afterwards(
    then: Then,
    made: Sequence[State],
    given: Sequence[Sequence[torch.Tensor]],
    *,
    is_joined: bool,
) -> list[State]:
    """What is computed of outputs once they are where they are needed; `given` are operands."""
    first = made[0]
    pieces = [_pieces(one, need, first) for one, need in zip(made, then.needs, strict=True)]
    pieces += [given[k] for k in then.operands]
    if is_joined:
        pieces = _of_one_graph(pieces)
    return _made(
        then.outputs,
        lambda: then.kernel(pieces),
        lambda: _ties(then.phantom, pieces, [1] * len(pieces)),
        first,
    )


def _ties(
    phantom: Callable[..., Any],
    pieces: Sequence[Sequence[torch.Tensor]],
    ndims: Sequence[int],
    *,
    is_view: bool = False,
) -> list[torch.Tensor]:
    """What a rank that has none of an output carries in its place. [Note: phantoms]"""
    results = phantom(*[_phantom(held[0], ndim) for held, ndim in zip(pieces, ndims, strict=True)])
    listed = list(results) if isinstance(results, tuple | list) else [results]
    ties = [result.reshape(-1)[:0] for result in listed]
    # A phantom may hand its tie on. Only that of a view is written when the operand is, or else a
    # graph would differ from those of the others, and see writes that they do not see.
    return ties if is_view else [tie.clone() for tie in ties]


def _write_into_tie(
    pieces: Sequence[Sequence[torch.Tensor]],
    operands: Sequence[Operand],
    invoke: Callable[..., Any],
) -> None:
    """What an in-place function does on a rank that holds nothing of its target.

    The tie is written as the others' shards are: it comes to depend on what the function reads,
    counts a version, and raises what they raise.
    """
    tie, ndim = pieces[0][0], len(operands[0].shape)
    others = [
        _phantom(held[0], len(operand.shape))
        for held, operand in zip(pieces[1:], operands[1:], strict=True)
    ]
    with replayed_views(True):  # [Note: views of nothing]
        target = tie.view((0,) * ndim) if ndim else tie
    invoke(target, *others)


def _phantom(piece: torch.Tensor, ndim: int) -> torch.Tensor:
    if ndim == 0:
        return unit_of([piece], ())  # a number by which any other can be divided
    # A view, since what is written into a view has to reach what it shows.
    some = piece if piece.dim() else piece.view(1)
    return some.narrow(0, 0, 0).view((0,) * ndim)
