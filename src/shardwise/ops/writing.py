"""Writing by indices that are tensors: `scatter`, `index_add` and their kin.

[Note: owners write] The result is cut like the tensor that is written. Every rank needs the indices
and values that may fall into its boxes: all along the dim that is indexed, and its own range of the
others. Where a box is only a range of the indexed dim, what does not fall into it goes to a place
beside it, which is cut off again. So every function is torch's own on a local tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import OpError
from shardwise.geometry import Box
from shardwise.ops.call_arguments import arguments_of
from shardwise.ops.looking_up import (
    are_neighbours,
    check_plain_index,
    check_range,
    dim_of,
    indexed_shape,
)
from shardwise.ops.names import functions_named
from shardwise.ops.own_functions import own_function
from shardwise.ops.phantoms import as_tie, tie_of_operands
from shardwise.ops.rule import Decision, Need, Operand, Rule, composite, register
from shardwise.ops.work import needed_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.geometry import Layout
    from shardwise.ops.rule import Call, Invoke, OperandPieces, OutputPieces
    from shardwise.ops.work import Spot

__all__ = ["write_at", "write_at_"]

_aten: Any = torch.ops.aten  # whose index_put leaves dims out, as Python's does not
# Of each dim of an operand: the dim of the written tensor with which it is cut, and how much of
# the operand is used of it; None: all of it goes to every box.
Follows = tuple[tuple[int, int] | None, ...]


@own_function
def write_at(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor],
    dims: tuple[int, ...],
    values: torch.Tensor,
    accumulate: bool,
) -> torch.Tensor:
    """`x` after `x[..., index, ...] = values` with these indices in place of `dims`, ascending.

    With `accumulate`, `+=`, where an element may be written several times.
    """
    written: torch.Tensor = _aten.index_put(x, _index(indices, dims), values, accumulate)
    return written


@own_function
def write_at_(
    x: torch.Tensor,
    indices: Sequence[torch.Tensor],
    dims: tuple[int, ...],
    values: torch.Tensor,
    accumulate: bool,
) -> torch.Tensor:
    """The same in place."""
    _aten.index_put_(x, _index(indices, dims), values, accumulate)
    return x


def _index(indices: Sequence[torch.Tensor], dims: tuple[int, ...]) -> Any:
    """As `index_put` takes it: None for a dim that is not indexed."""
    by_dim = dict(zip(dims, indices, strict=True))
    return [by_dim.get(dim) for dim in range(max(dims) + 1)]


# -- the rule --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Write:
    """A call that writes."""

    name: str
    dims: tuple[int, ...]  # that are indexed
    follows: tuple[Follows, ...]  # of all operands but the first: the indices, then the values
    least: int = 0  # index, for each unit of size: 0, or -1 if they may be negative
    mutes: bool = False  # whether values that fall elsewhere may not even be computed with
    in_place: bool = False
    tie: Callable[..., torch.Tensor] = tie_of_operands  # what stands for a result of no elements


def _decide_write(call: Call, write: _Write) -> Decision | None:
    x = call.operands[0]
    if x.layout.pending is not None and write.in_place:
        return None  # written with what is gathered
    layout = x.layout.bar
    boxes = layout.boxes_of(call.rank)
    found = [
        _needed(operand, follows, layout, call.rank)
        for operand, follows in zip(call.operands[1:], write.follows, strict=True)
    ]
    rows = list(zip(*[spots for _, spots in found], strict=True)) if found else [()] * len(boxes)

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        results = []
        for box, piece, row in zip(boxes, pieces[0], rows, strict=True):
            given = [spot.of(held) for spot, held in zip(row, pieces[1:], strict=True)]
            results.append(_written(write, x.shape, box, piece, given, invoke))
        return [results]

    return Decision(
        (Need(layout), *[need for need, _ in found]),
        (layout,),
        kernel,
        phantom=write.tie,
        is_in_place=write.in_place,
    )


def _needed(
    operand: Operand, follows: Follows, layout: Layout, rank: int
) -> tuple[Need, tuple[Spot, ...]]:
    """Who needs which part of an operand, and where each local box finds its own."""
    parts = {box: _part(box, follows, operand.shape) for box in layout.boxes}
    return needed_parts(operand, layout, parts, rank)


def _part(box: Box, follows: Follows, shape: tuple[int, ...]) -> Box:
    """What a box of the written tensor needs of an operand."""
    start, stop = [0] * len(shape), list(shape)
    for dim, followed in enumerate(follows):
        if followed is not None:
            along, size = followed
            start[dim], stop[dim] = min(box.start[along], size), min(box.stop[along], size)
    return Box(tuple(start), tuple(stop))


def _written(
    write: _Write,
    shape: tuple[int, ...],
    box: Box,
    piece: torch.Tensor,
    given: Sequence[torch.Tensor],
    invoke: Invoke,
) -> torch.Tensor:
    """A box after the write. [Note: owners write]"""
    count = len(write.dims)
    for dim, index in zip(write.dims, given[:count], strict=True):
        size = shape[dim]
        check_range(index, size, what=write.name, least=write.least * size)
    if box.is_empty:  # in the graph of all operands all the same
        tie = write.tie(piece, *given).reshape(piece.shape)
        return piece.copy_(tie) if write.in_place else tie
    if all(box.shape[dim] == shape[dim] for dim in write.dims):
        result: torch.Tensor = invoke(piece, *given)
        return result
    first = write.dims[0]
    is_inside, local = _local(write, shape, box, given[:count])
    values = [
        torch.where(is_inside, value, value.new_ones(())) if write.mutes else value
        for value in given[count:]
    ]
    beside = piece.detach().narrow(first, 0, 1)
    wider = invoke(torch.cat([piece, torch.ones_like(beside)], first), *local, *values)
    found: torch.Tensor = wider.narrow(first, 0, piece.shape[first])
    return piece.copy_(found) if write.in_place else found


def _local(
    write: _Write, shape: tuple[int, ...], box: Box, indices: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Which indices fall into a box, and all of them counted from its start, or put beside it."""
    is_inside: Any = True
    moved = []
    for dim, index in zip(write.dims, indices, strict=True):
        index = torch.where(index < 0, index + shape[dim], index) if write.least else index
        is_inside = is_inside & (index >= box.start[dim]) & (index < box.stop[dim])
        moved.append(index - box.start[dim])
    beside = [box.shape[dim] if k == 0 else 0 for k, dim in enumerate(write.dims)]
    return is_inside, [
        torch.where(is_inside, index, place) for index, place in zip(moved, beside, strict=True)
    ]


# -- write_at and what is written in it ------------------------------------------------------------


def _decide_write_at(call: Call, *, in_place: bool) -> Decision | None:
    x, indices, dims, values, _ = call.args
    if x.is_plain and in_place:
        return None
    block = indexed_shape(indices, call.rank)
    left = [dim for dim in range(len(x.shape)) if dim not in dims]
    first = dims[0] if are_neighbours(dims) else 0
    along: list[int | None] = [*left[:first], *[None] * len(block), *left[first:]]
    sizes = [
        *[x.shape[dim] for dim in left[:first]],
        *block,
        *[x.shape[dim] for dim in left[first:]],
    ]
    own = sizes[len(sizes) - len(values.shape) :]
    fits = all(n in (1, size) for n, size in zip(values.shape, own, strict=False))
    if len(values.shape) > len(sizes) or not fits:
        raise OpError(
            "a write by indices: shape mismatch: values cannot be broadcast to what is written",
            rank=call.rank,
            expected=tuple(sizes),
            got=values.shape,
        )
    if values.dtype != x.dtype:
        raise OpError(
            "a write by indices: Index put requires the source and destination dtypes match",
            rank=call.rank,
            expected=x.dtype,
            got=values.dtype,
        )
    follows = tuple(
        None if dim is None or values.shape[k] != x.shape[dim] else (dim, x.shape[dim])
        for k, dim in enumerate(along[len(along) - len(values.shape) :])
    )
    of_indices = [(None,) * len(index.shape) for index in indices]
    write = _Write("index_put", dims, (*of_indices, follows), -1, in_place=in_place)
    return _decide_write(call, write)


register(Rule("write_at", lambda call: _decide_write_at(call, in_place=False)), [write_at])
register(Rule("write_at_", lambda call: _decide_write_at(call, in_place=True)), [write_at_])


def _vector(name: str, x: Any, dim: int, index: Any) -> tuple[Any, int]:
    """The index of `index_add` and its kin as a vector, and the dim from 0."""
    dim = dim_of(name, dim, x.dim())
    if index.dim() > 1:
        raise OpError(f"{name}: Index is supposed to be a vector", got=f"{index.dim()} dims")
    check_plain_index(index, x.shape[dim], what=name)
    return (index if index.dim() else index.unsqueeze(0)), dim


def _check_source(name: str, x: Any, dim: int, index: Any, source: Any) -> None:
    expected = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    if tuple(source.shape) != tuple(expected):
        raise OpError(
            f"{name}: source does not fit", expected=tuple(expected), got=tuple(source.shape)
        )
    if source.dtype != x.dtype:
        raise OpError(f"{name}: source of another dtype", expected=x.dtype, got=source.dtype)


def _by_vector(name: str, write: Callable[..., Any]) -> Callable[..., Any]:
    """`index_add` or `index_copy`, new or in place."""
    adds = name == "index_add"

    def run(input: Any, dim: int, index: Any, source: Any, **options: Any) -> Any:
        if not set(options) <= ({"alpha"} if adds else set()):
            raise TypeError(f"{name}() got an unexpected keyword argument {min(options)!r}")
        if adds and (not source.dim()) != (not input.dim()):
            raise OpError(
                f"{name}: source does not fit",
                expected=f"{input.dim()} dims",
                got=tuple(source.shape),
            )
        source = source if source.dim() else source.reshape(1)
        if not input.dim():  # as a vector that has the number alone
            made = run(input.view(1), dim, index, source, **options)
            return input if write is write_at_ else made.view(())
        index, dim = _vector(name, input, dim, index)
        _check_source(name, input, dim, index, source)
        values = source * options["alpha"] if options.get("alpha", 1) != 1 else source
        return write(input, (index,), (dim,), values, adds)

    return run


for _name in ("index_add", "index_copy"):
    composite(_name, functions_named([_name]))(_by_vector(_name, write_at))
    composite(f"{_name}_", functions_named([f"{_name}_"]))(_by_vector(_name, write_at_))


# -- scatter and its kin ---------------------------------------------------------------------------


def _decide_scatter(call: Call) -> Decision | None:
    name = call.name
    in_place = name.endswith("_")
    given = arguments_of(call, "input dim index")
    dim, index = given.get("dim"), given.get("index")
    x, src = call.operands[0], call.operands[-1] if len(call.operands) == 3 else None
    if not x.shape or not isinstance(dim, int) or not isinstance(index, Operand):
        return None
    if len(call.operands) > 3 or not index.shape or (x.is_plain and in_place):
        return None
    dim = dim_of(name, dim, len(x.shape))
    if not _fits(x, dim, index, src):
        if 0 in index.shape:
            return None  # torch takes it, since nothing is written
        raise OpError(
            f"{name}: shapes do not fit together",
            rank=call.rank,
            expected="an index that is nowhere larger than src, nor, but for dim, than self",
            got=" and ".join(str(operand.shape) for operand in call.operands if operand.shape),
        )
    follows = _follows(dim, index.shape)
    both = (follows,) if src is None else (follows, _follows(dim, index.shape) if src.shape else ())
    mutes = "reduce" in name and src is not None and src.shape == index.shape
    is_product = arguments_of(call, "input dim index src reduce").get("reduce") == "prod"
    tie = _tie_of_product if is_product else tie_of_operands
    write = _Write(name, (dim,), both, mutes=mutes, in_place=in_place, tie=tie)
    return _decide_write(call, write)


def _tie_of_product(x: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """No elements, whose gradient follows from both, as that of a product does."""
    return as_tie(x) * as_tie(src)


def _decide_fill(call: Call) -> Decision | None:
    """`index_fill`, of whose value the gradient counts an index that stands twice once."""
    name = call.name
    given = arguments_of(call, "input dim index")
    dim, index = given.get("dim"), given.get("index")
    x, values = call.operands[0], call.operands[2:]
    if not x.shape or not isinstance(dim, int) or not isinstance(index, Operand):
        return None
    if x.is_plain and name.endswith("_"):
        return None
    if len(values) > 1 or any(value.shape for value in values) or len(index.shape) > 1:
        return None
    follows: list[Follows] = [(None,) * len(index.shape), *[() for _ in values]]
    dims = (dim_of(name, dim, len(x.shape)),)
    return _decide_write(call, _Write(name, dims, tuple(follows), -1, in_place=name[-1] == "_"))


def _follows(dim: int, used: tuple[int, ...]) -> Follows:
    return tuple(None if d == dim else (d, n) for d, n in enumerate(used))


def _fits(x: Operand, dim: int, index: Operand, src: Operand | None) -> bool:
    """Whether an index is nowhere larger than `src`, nor, but for `dim`, than `x`."""
    others = [src.shape] if src is not None and src.shape else []
    return all(len(shape) == len(index.shape) for shape in (x.shape, *others)) and all(
        n <= shape[d]
        for d, n in enumerate(index.shape)
        for shape in (x.shape if d != dim else index.shape, *others)
    )


for _name in ("scatter", "scatter_add", "scatter_reduce", "index_fill"):
    for _one in (_name, f"{_name}_"):
        _decide = _decide_fill if _name == "index_fill" else _decide_scatter
        register(Rule(_one, _decide), functions_named([_one]))
