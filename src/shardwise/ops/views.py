"""Views that have a part of each dim, in any order: transposes, slices, splits, expanded dims.

Which part is read from the strides of what torch gives of a tensor without data. So one rule serves
all of these functions, with every form of their arguments. Windows, which overlap, have their own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shardwise.geometry import Box
from shardwise.ops.call_arguments import arguments_of
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import listed_results, outline_of
from shardwise.ops.pieces import Part, decide_view, operand_of
from shardwise.ops.rule import Rule, composite, register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.ops.rule import Call, Decision

__all__ = ["is_basic_index"]

_Tensor: Any = torch.Tensor

_VIEWS = """
    adjoint broadcast_to chunk dsplit expand hsplit moveaxis movedim narrow permute select split
    split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unsafe_chunk
    unsafe_split unsafe_split_with_sizes unsqueeze vsplit
"""
_GETTERS = "T mT H mH"


class _Slice(NamedTuple):
    """What a dim of the result has of a dim of the operand: `start`, `start + step`, ..."""

    dim: int
    start: int
    step: int


class _View(NamedTuple):
    """What a result shows of its operand."""

    shape: tuple[int, ...]
    along: tuple[_Slice | None, ...]  # per dim of the result; None: one of size 1, or expanded
    at: dict[int, int]  # the one position that is shown, of each other dim of the operand
    is_conj: bool

    def parts(self, box: Box) -> list[Part]:
        """What of a box is in the result: one box, or nothing."""
        start, stop = [0] * len(self.shape), list(self.shape)
        index: dict[int, slice | int] = {}
        for dim, position in self.at.items():
            if not box.start[dim] <= position < box.stop[dim]:
                return []
            index[dim] = position - box.start[dim]
        for k, piece in enumerate(self.along):
            if piece is None:
                continue
            dim, first, step = piece
            # How many come before the box, and before its end.
            start[k] = max(-((first - box.start[dim]) // step), 0)
            stop[k] = min(-((first - box.stop[dim]) // step), self.shape[k])
            if start[k] >= stop[k]:
                return []
            low = first + start[k] * step - box.start[dim]
            index[dim] = slice(low, low + (stop[k] - start[k] - 1) * step + 1, step)
        return [Part(Box(tuple(start), tuple(stop)), self._show(box, index))]

    def _show(
        self, box: Box, index: dict[int, slice | int]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """As few torch calls as do it: an index, a permutation, another index, `expand`, `conj`."""
        sizes = box.shape
        dims = [piece.dim for piece in self.along if piece is not None]
        steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
        if dims == sorted(dims):
            _add_index(steps, self._merged(index, sizes))
        else:
            _add_index(steps, [_or_all(index[dim], sizes[dim]) for dim in sorted(index)])
            order = [sorted(dims).index(dim) for dim in dims]
            steps.append(lambda piece: piece.permute(order))
            _add_index(steps, [None if one is None else slice(None) for one in self.along])
        wide = [one is None and size > 1 for one, size in zip(self.along, self.shape, strict=True)]
        if any(wide):
            sized = [n if w else -1 for n, w in zip(self.shape, wide, strict=True)]
            steps.append(lambda piece: piece.expand(sized))
        if self.is_conj:
            steps.append(torch.conj)
        return _chain(steps or [lambda piece: piece[...]])

    def _merged(self, index: dict[int, slice | int], sizes: Sequence[int]) -> list[Any]:
        """One index that cuts and adds dims, where they stay in order."""
        merged: list[Any] = []
        dim = 0
        for piece in self.along:
            if piece is None:
                merged.append(None)
                continue
            while dim <= piece.dim:
                merged.append(_or_all(index[dim], sizes[dim]))
                dim += 1
        return merged + [index[left] for left in range(dim, len(sizes))]


def _or_all(index: slice | int, size: int) -> slice | int:
    """The index, as `:` if it takes all of a dim."""
    if isinstance(index, slice) and (index.start, index.stop) == (0, size) and index.step == 1:
        return slice(None)
    return index


def _add_index(steps: list[Callable[[torch.Tensor], torch.Tensor]], index: Sequence[Any]) -> None:
    given = list(index)
    while given and given[-1] == slice(None):
        given.pop()
    if given:
        found = tuple(given) if len(given) > 1 else given[0]
        steps.append(lambda piece: piece[found])


def _chain(
    steps: Sequence[Callable[[torch.Tensor], torch.Tensor]],
) -> Callable[[torch.Tensor], torch.Tensor]:
    if len(steps) == 1:
        return steps[0]

    def show(piece: torch.Tensor) -> torch.Tensor:
        for step in steps:
            piece = step(piece)
        return piece

    return show


def _read(shape: tuple[int, ...], result: torch.Tensor) -> _View:
    """What a view of a contiguous tensor of this shape shows, by its strides."""
    strides = {dim: math.prod(shape[dim + 1 :]) for dim, size in enumerate(shape) if size > 1}
    along: list[_Slice | None] = []
    offset = result.storage_offset()
    at = dict.fromkeys(range(len(shape)), 0)
    for dim, stride in strides.items():
        at[dim] = offset // stride % shape[dim]
    for size, stride in zip(result.shape, result.stride(), strict=True):
        if size == 1 or stride == 0:
            along.append(None)
            continue
        # The outermost dim of which the stride is a multiple: inner ones are shorter than that.
        dim = next(dim for dim, unit in strides.items() if stride >= unit)
        along.append(_Slice(dim, at.pop(dim), stride // strides[dim]))
    return _View(tuple(result.shape), tuple(along), at, result.is_conj())


def _decide(call: Call) -> Decision | None:
    operand = operand_of(call)
    if operand is None:
        return None
    given = outline_of(call)
    results = listed_results(given)
    if not results:  # of `unbind` along a dim without elements
        return None
    shown = [
        (tuple(result.shape), _read(operand.shape, result).parts if result.numel() else _no_parts)
        for result in results
    ]
    return decide_view(call, shown, pack=None if isinstance(given, torch.Tensor) else tuple)


def _no_parts(_: Box) -> list[Part]:
    return []


# -- indices ---------------------------------------------------------------------------------------


def is_basic_index(index: Any) -> bool:
    """Whether `x[index]` is a view: of whole numbers, slices, None and ..., or a tuple of them."""
    listed = index if isinstance(index, tuple) else (index,)
    return all(map(_is_basic, listed))


def _is_basic(one: Any) -> bool:
    if one is None or one is ... or isinstance(one, slice):
        return True
    return isinstance(one, int | np.integer) and not isinstance(one, bool)  # which is a mask


def _decide_index(call: Call) -> Decision | None:
    """`x[index]`. With tensors, lists or masks in the index it is not a view."""
    if len(call.args) != 2 or not is_basic_index(call.args[1]):
        return None  # `sharded_tensor/indexing.py` knows those
    return _decide(call)


# -- windows ---------------------------------------------------------------------------------------


def _decide_windows(call: Call) -> Decision | None:
    """`x.unfold(dim, size, step)`: each window has elements of the next; None if `dim` is cut."""
    (operand,), result = call.operands, outline_of(call)
    given = arguments_of(call, "input dimension size step")
    dim, size, step = given["dimension"], given["size"], given["step"]
    if not operand.shape or not operand.layout.is_whole(dim):
        return None
    dim %= len(operand.shape)

    def parts(box: Box) -> list[Part]:
        stop = [*box.stop, size]
        stop[dim] = result.shape[dim]
        target = Box((*box.start, 0), tuple(stop))
        return [Part(target, lambda piece: piece.unfold(dim, size, step))]

    return decide_view(call, [(tuple(result.shape), parts)])


# -- the table -------------------------------------------------------------------------------------

for _name in _VIEWS.split():
    register(Rule(_name, _decide), functions_named([_name]))
for _name in _GETTERS.split():
    register(Rule(_name, _decide), [getattr(_Tensor, _name).__get__])
register(Rule("__getitem__", _decide_index), functions_named(["__getitem__"]))
register(Rule("unfold", _decide_windows), [_Tensor.unfold])


@composite("narrow_copy", functions_named(["narrow_copy"]))
def _narrow_copy(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.narrow(*args, **kwargs).clone()


@composite("expand_as", functions_named(["expand_as"]))
def _expand_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return input.expand(other.shape)


@composite("broadcast_tensors", functions_named(["broadcast_tensors"]))
def _broadcast_tensors(*tensors: Any) -> tuple[torch.Tensor, ...]:
    listed = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], _Tensor) else tensors
    shape = torch.broadcast_shapes(*[tensor.shape for tensor in listed])
    return tuple(tensor.expand(shape) for tensor in listed)


def _at_least(ndim: int) -> Callable[..., Any]:
    """`atleast_1d` and its kin: dims of size 1 are added, before, or behind in 3-d."""

    def one(x: torch.Tensor) -> torch.Tensor:
        if x.dim() >= ndim:
            return x
        if x.dim() == 0:
            return x[(None,) * ndim]
        return x[None] if ndim == 2 else (x[None, :, None] if x.dim() == 1 else x[..., None])

    def run(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], _Tensor):
            return one(tensors[0])
        listed = tensors[0] if len(tensors) == 1 else tensors
        return tuple(map(one, listed))

    return run


for _ndim in (1, 2, 3):
    composite(f"atleast_{_ndim}d", functions_named([f"atleast_{_ndim}d"]))(_at_least(_ndim))
