"""Functions that put tensors together: every piece stays where it is.

An operand that is whole on all ranks of one that is cut is cut like it: that sends nothing, and
what comes out is cut as the operand was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.geometry import Box, Layout
from shardwise.ops.call_arguments import arguments_of
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outline, outlines
from shardwise.ops.pieces import Mapped, Part, decide_parts
from shardwise.ops.rule import Rule, composite, register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.ops.rule import Call, Decision, Operand

__all__: list[str] = []


def _decide_cat(call: Call) -> Decision:
    """Boxes are shifted along the dim."""
    (result,) = outlines(call)
    dim = arguments_of(call, "tensors dim").get("dim", 0) % result.ndim
    layouts = _layouts(call, result.dtype, dim)
    mapped, at = [], 0
    for operand, layout in zip(call.operands, layouts, strict=True):
        if len(operand.shape) < result.ndim:  # torch leaves tensors of shape (0,) out
            mapped.append(Mapped(layout, lambda _: ()))
            continue
        is_cast = operand.dtype != result.dtype
        mapped.append(Mapped(layout, _shifted(dim, at, result.dtype, is_cast=is_cast)))
        at += operand.shape[dim]
    shape = tuple(result.shape)
    return decide_parts(call, mapped, shape, merge=[dim], dtype=result.dtype)


def _shifted(
    dim: int, at: int, dtype: torch.dtype, *, is_cast: bool
) -> Callable[[Box], list[Part]]:
    def parts(box: Box) -> list[Part]:
        moved = box.with_range(dim, box.start[dim] + at, box.stop[dim] + at)
        return [Part(moved, lambda piece: piece.to(dtype), is_new=is_cast)]

    return parts


def _decide_stack(call: Call) -> Decision:
    """Boxes get a new dim, in which each operand has a place."""
    (result,) = outlines(call)
    dim = arguments_of(call, "tensors dim").get("dim", 0) % result.ndim
    layouts = _layouts(call, result.dtype, None)
    mapped = [
        Mapped(layout, _placed(dim, at, result.dtype, is_cast=operand.dtype != result.dtype))
        for at, (operand, layout) in enumerate(zip(call.operands, layouts, strict=True))
    ]
    shape = tuple(result.shape)
    return decide_parts(call, mapped, shape, merge=[dim], dtype=result.dtype)


def _placed(dim: int, at: int, dtype: torch.dtype, *, is_cast: bool) -> Callable[[Box], list[Part]]:
    def parts(box: Box) -> list[Part]:
        placed = Box(
            (*box.start[:dim], at, *box.start[dim:]), (*box.stop[:dim], at + 1, *box.stop[dim:])
        )
        return [Part(placed, lambda piece: piece.to(dtype).unsqueeze(dim), is_new=is_cast)]

    return parts


def _layouts(call: Call, dtype: torch.dtype, dim: int | None) -> list[Layout]:
    """In which layout each operand is needed."""
    kinds = {operand.layout.pending for operand in call.operands} - {None}
    layouts = [
        operand.layout if len(kinds) == 1 and _passes(operand, dtype) else operand.layout.bar
        for operand in call.operands
    ]
    sharded = [
        layout
        for operand, layout in zip(call.operands, layouts, strict=True)
        if not operand.is_plain
    ]
    cut = [layout for layout in sharded if _leads(layout, dim)]
    if cut:
        return [_followed(layout, cut[0], dim) for layout in layouts]
    return [
        _followed(layout, sharded[0], dim) if operand.is_plain else layout
        for operand, layout in zip(call.operands, layouts, strict=True)
    ]


def _passes(operand: Operand, dtype: torch.dtype) -> bool:
    """Whether what is pending may stay so: reducing and rounding are not the same either way."""
    return operand.dtype == dtype or operand.is_linear_sum


def _leads(layout: Layout, dim: int | None) -> bool:
    """Whether a layout has a cut that others can follow."""
    is_cut = not layout.bar.is_replicated and 0 not in layout.shape
    return is_cut and (dim is None or layout.is_whole(dim))


def _followed(layout: Layout, lead: Layout, dim: int | None) -> Layout:
    """The layout cut as `lead` is in all dims but `dim`, if no data has to move for it."""
    is_here = layout.is_replicated and set(lead.ranks) <= set(layout.ranks)
    if not is_here or layout.ndim != lead.ndim or 0 in lead.shape:
        return layout
    if dim is not None and not lead.is_whole(dim):
        return layout
    boxes, owners = [], []
    for box, owner, _ in lead.bar:
        part = box if dim is None else box.with_range(dim, 0, layout.shape[dim])
        if box.volume or not part.volume:  # else it is empty along `dim` only
            boxes.append(part)
            owners.append(owner)
    return Layout(layout.shape, boxes, owners)


register(Rule("cat", _decide_cat), functions_named(["cat", "concat", "concatenate"]))
register(Rule("stack", _decide_stack), functions_named(["stack"]))


# -- written in these ------------------------------------------------------------------------------


def _at_least_2d(x: Any) -> Any:
    """A row of a 1-d tensor, as torch.atleast_2d."""
    for _ in range(x.dim(), 2):
        x = x.unsqueeze(0)
    return x


@composite("hstack", [torch.hstack])
def _hstack(tensors: Sequence[Any]) -> Any:
    at_least_1d = [x if x.dim() else x.unsqueeze(0) for x in tensors]
    return torch.cat(at_least_1d, 0 if at_least_1d[0].dim() == 1 else 1)


@composite("vstack", functions_named(["vstack", "row_stack"]))
def _vstack(tensors: Sequence[Any]) -> Any:
    return torch.cat([_at_least_2d(x) for x in tensors], 0)


@composite("dstack", [torch.dstack])
def _dstack(tensors: Sequence[Any]) -> Any:
    planes = [_at_least_2d(x) for x in tensors]
    return torch.cat([x.unsqueeze(2) if x.dim() == 2 else x for x in planes], 2)


@composite("column_stack", [torch.column_stack])
def _column_stack(tensors: Sequence[Any]) -> Any:
    columns = [x if x.dim() > 1 else x.reshape(-1, 1) for x in tensors]
    return torch.cat(columns, 1)


@composite("block_diag", [torch.block_diag])
def _block_diag(*tensors: Any) -> Any:
    """Each row of blocks is a block between zeros."""
    blocks = [_at_least_2d(x) for x in tensors]
    width, at, rows = sum(block.shape[1] for block in blocks), 0, []
    for block in blocks:
        after = width - at - block.shape[1]
        rows.append(torch.nn.functional.pad(block, (at, after)))
        at += block.shape[1]
    return torch.cat(rows, 0)


@composite("meshgrid", functions_named(["meshgrid"]))
def _meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Any, ...]:
    """Each tensor along its dim, the same along the others'."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    shape = torch.meshgrid(*map(outline, given), indexing=indexing)[0].shape
    order = list(range(len(given)))
    if indexing == "xy" and len(given) > 1:
        order[:2] = [1, 0]
    sizes = [[-1 if dim == place else 1 for dim in order] for place in range(len(given))]
    return tuple(x.reshape(size).expand(shape) for x, size in zip(given, sizes, strict=True))


@composite("kron", functions_named(["kron"]))
def _kron(input: Any, other: Any) -> Any:  # torch's name
    """All products, those of one element of `input` side by side."""
    ndim = max(input.dim(), other.dim())
    first = [1] * (ndim - input.dim()) + list(input.shape)
    second = [1] * (ndim - other.dim()) + list(other.shape)
    wide = input.reshape([size for n in first for size in (n, 1)])
    tall = other.reshape([size for n in second for size in (1, n)])
    return (wide * tall).reshape([a * b for a, b in zip(first, second, strict=True)])
