"""Looking elements up by indices that are tensors: products in the sense of `contraction.py`.

[Note: look-ups] The result of `x[ids]` has the labels of `ids`, and those of `x` but for the dim
that is indexed, which is as if summed over: exactly one of its positions adds something. So a rank
that holds a range of that dim looks up what falls in it, and has zeros for the rest; different
ranges leave a pending sum. Where the dim is whole, torch's own function does it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import assert_async
from shardwise.errors import OpError, OutOfRangeError
from shardwise.ops.contraction import decide_product
from shardwise.ops.forms import Factor, Form
from shardwise.ops.names import functions_named
from shardwise.ops.own_functions import own_function
from shardwise.ops.phantoms import tie_of_operands
from shardwise.ops.rule import Rule, composite, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Box, Layout
    from shardwise.ops.rule import Call, Decision, Invoke, Operand

__all__ = [
    "are_neighbours",
    "check_plain_index",
    "check_range",
    "dim_of",
    "has_all",
    "indexed_shape",
    "take_along",
    "take_at",
    "with_zeros_outside",
    "within",
]


@own_function
def take_at(
    x: torch.Tensor, indices: Sequence[torch.Tensor], dims: tuple[int, ...]
) -> torch.Tensor:
    """`x[..., index, ...]` with these indices in place of `dims`, which are ascending.

    Indices may be negative and are broadcast together, as torch does it.
    """
    if len(dims) == 1 and indices[0].dim() == 1 and x.shape[dims[0]]:
        places = _from_zero(indices[0], x.shape[dims[0]])
        return x.index_select(dims[0], places)  # whose gradient is faster
    index: list[Any] = [slice(None)] * x.dim()
    for dim, one in zip(dims, indices, strict=True):
        index[dim] = one
    return x[tuple(index)]


@own_function
def take_along(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """`torch.gather` with the other dims broadcast together, for a dim from 0."""
    sizes = torch.broadcast_shapes(*[(*t.shape[:dim], 1, *t.shape[dim + 1 :]) for t in (x, index)])
    others = sizes[:dim], sizes[dim + 1 :]
    wide, asked = (t.expand(*others[0], t.shape[dim], *others[1]) for t in (x, index))
    return torch.gather(wide, dim, asked)


# -- what falls in a range -------------------------------------------------------------------------


def check_range(index: torch.Tensor, size: int, *, what: str, least: int = 0) -> None:
    """Raises if an index is none of `least` to `size - 1`; of CUDA tensors later, as torch does."""
    if not index.numel():
        return
    low, high = torch.aminmax(index)
    if index.device.type != "cpu":
        assert_async((low >= least) & (high < size), f"{what}: index out of range")
        return
    if int(low) < least or int(high) >= size:
        raise OutOfRangeError(
            f"{what}: index out of range in self",
            expected=f"indices from {least} to {size - 1}",
            got=int(low) if int(low) < least else int(high),
        )


def check_plain_index(index: Any, size: int, *, what: str, least: int = 0) -> None:
    """The same for an index that all ranks see, also those that look nothing up."""
    if type(index) is torch.Tensor:
        check_range(index, size, what=what, least=least)


def _from_zero(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index)


def within(index: torch.Tensor, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices counted from `low`, any for those that are not in the range, and which are in it."""
    return (index - low).clamp_(0, high - low - 1), (index >= low) & (index < high)


def with_zeros_outside(found: torch.Tensor, is_inside: torch.Tensor) -> torch.Tensor:
    """What was found, and zeros where the index is another piece's."""
    return torch.where(is_inside, found, found.new_zeros(()))


def dim_of(call: str, dim: int, ndim: int) -> int:
    """The dim, counted from 0."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise OutOfRangeError(
            f"{call}: Dimension out of range", expected=f"a dim of {ndim}", got=dim
        )
    return dim % max(ndim, 1)


def are_neighbours(dims: Sequence[int]) -> bool:
    """Whether no other dim stands between these."""
    return dims[-1] - dims[0] == len(dims) - 1


def has_all(layout: Layout, dim: int) -> bool:
    """Whether no box cuts `dim`, nor does one without elements, on which a kernel runs as well."""
    return bool((layout.boxes.shapes[:, dim] == layout.shape[dim]).all())


def indexed_shape(indices: Sequence[Operand], rank: int) -> tuple[int, ...]:
    """The shape that indices have together."""
    try:
        return tuple(torch.broadcast_shapes(*[index.shape for index in indices]))
    except RuntimeError as error:
        raise OpError(
            "an index of tensors: shape mismatch: indexing tensors could not be broadcast together",
            rank=rank,
            got=" and ".join(str(index.shape) for index in indices),
        ) from error


# -- rules -----------------------------------------------------------------------------------------


def _decide_take_at(call: Call) -> Decision:
    x, indices, dims = call.args
    ndim = len(x.shape)
    block = indexed_shape(indices, call.rank)
    labels = tuple(range(ndim, ndim + len(block)))
    factors = [Factor(0, tuple(range(ndim)))]
    for place, index in enumerate(indices, start=1):
        own = zip(index.shape, block[len(block) - len(index.shape) :], strict=True)
        last = labels[len(block) - len(index.shape) :]
        factors.append(
            Factor(place, tuple(k if n == m else None for k, (n, m) in zip(last, own, strict=True)))
        )
    first = dims[0] if are_neighbours(dims) else 0
    left = [dim for dim in range(ndim) if dim not in dims]
    output = (*left[:first], *labels, *left[first:])
    num_after = len(left) - first
    is_whole = all(has_all(x.layout, dim) for dim in dims)

    def run(invoke: Invoke, tensors: Sequence[torch.Tensor], space: Box) -> Any:
        local, inside = [], []
        for index, dim in zip(tensors[1:], dims, strict=True):
            size = x.shape[dim]
            check_range(index, size, what="an index of tensors", least=-size)
            places, is_inside = within(_from_zero(index, size), space.start[dim], space.stop[dim])
            local.append(places)
            inside.append(is_inside)
        mask = functools.reduce(torch.logical_and, inside)
        found = invoke(tensors[0], *local)
        return with_zeros_outside(found, mask.reshape(*mask.shape, *[1] * num_after))

    form = Form((*x.shape, *block), tuple(factors), output, run=None if is_whole else run)
    return replace(decide_product(call, form), phantom=tie_of_operands)


def _decide_take_along(call: Call) -> Decision:
    x, index, dim = call.args
    ndim = len(x.shape)
    sizes = [index.shape[d] if d == dim else max(x.shape[d], index.shape[d]) for d in range(ndim)]
    for d, (n, m, size) in enumerate(zip(x.shape, index.shape, sizes, strict=True)):
        if d != dim and not {n, m} <= {1, size}:
            raise OpError(
                "a look-up along a dim: shapes do not fit together",
                rank=call.rank,
                got=f"{x.shape} and indices of {index.shape}, dim {dim}",
            )
        if d != dim and 0 in (n, m):
            sizes[d] = 0
    of_x = tuple(ndim if d == dim else (d if x.shape[d] == sizes[d] else None) for d in range(ndim))
    of_index = tuple(d if index.shape[d] == sizes[d] else None for d in range(ndim))

    def run(invoke: Invoke, tensors: Sequence[torch.Tensor], space: Box) -> Any:
        piece, asked = tensors
        check_range(asked, x.shape[dim], what="a look-up along a dim")
        places, is_inside = within(asked, space.start[ndim], space.stop[ndim])
        return with_zeros_outside(invoke(piece, places), is_inside)

    form = Form(
        (*sizes, x.shape[dim]),
        (Factor(0, of_x), Factor(1, of_index)),
        tuple(range(ndim)),
        run=None if has_all(x.layout, dim) else run,
    )
    return replace(decide_product(call, form), phantom=tie_of_operands)


register(Rule("take_at", _decide_take_at), [take_at])
register(Rule("take_along", _decide_take_along), [take_along])


# -- functions in these terms ----------------------------------------------------------------------


@composite("index_select", functions_named(["index_select"]))
def _index_select(input: Any, dim: int, index: Any) -> Any:
    dim = dim_of("index_select", dim, input.dim())
    if index.dim() > 1:
        raise OpError("index_select: Index is supposed to be a vector", got=f"{index.dim()} dims")
    check_plain_index(index, input.shape[dim] if input.dim() else 1, what="index_select")
    if input.dim() == 0:
        return take_at(input.unsqueeze(0), (index,), (0,)).reshape(())
    return take_at(input, (index if index.dim() else index.unsqueeze(0),), (dim,))


@composite("gather", [torch.gather, torch.Tensor.gather])
def _gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    dim = dim_of("gather", dim, input.dim())
    if 0 in index.shape:  # of any number of dims
        nothing = (input if input.dim() else input.reshape(1)).narrow(0, 0, 0)
        return take_along(nothing.reshape(0), index.reshape(0), 0).reshape(index.shape)
    if max(input.dim(), 1) != max(index.dim(), 1):
        raise OpError(
            "gather: Index tensor must have the same number of dimensions as input tensor",
            got=f"{index.dim()} and {input.dim()}",
        )
    if input.dim() == 0 or index.dim() == 0:
        return torch.gather(input.reshape(-1), 0, index.reshape(-1)).reshape(index.shape)
    for d in range(input.dim()):
        if d != dim and index.shape[d] > input.shape[d]:
            raise OpError(
                "gather: an index that is larger than the input apart from dim",
                got=f"{tuple(index.shape)} and {tuple(input.shape)}, dim {dim}",
            )
        if d != dim and index.shape[d] < input.shape[d]:
            input = input.narrow(d, 0, index.shape[d])
    check_plain_index(index, input.shape[dim], what="gather")
    return take_along(input, index, dim)


@composite("take_along_dim", functions_named(["take_along_dim"]))
def _take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return torch.gather(input.reshape(-1), 0, indices.reshape(-1))
    if input.dim() != indices.dim():
        raise OpError(
            "take_along_dim: input and indices should have the same number of dimensions",
            got=f"{input.dim()} and {indices.dim()}",
        )
    dim = dim_of("take_along_dim", dim, input.dim())
    if indices.dtype != torch.int64:
        raise OpError("take_along_dim: dtype of indices should be Long", got=indices.dtype)
    size = input.shape[dim]
    # As torch counts them, which so takes negative ones.
    return take_along(input, indices.remainder(size) if size else indices, dim)
