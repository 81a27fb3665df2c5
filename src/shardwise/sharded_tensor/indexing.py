"""Indexing with tensors, lists and masks: `x[ids]`, `x[:, ids] = v`, `x[mask]`, `index_put`.

Integer tensors are looked up by a rule, `take_at`, and written by `write_at`. The slices and
numbers beside them are applied first, by indexing without tensors. A mask says how many elements
there are, so it is brought together on every rank (a byte per element), and becomes integers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shardwise.comm.agreement import heard_by_all
from shardwise.comm.differentiable import carriers_of
from shardwise.errors import OpError, OutOfRangeError
from shardwise.ops.looking_up import check_plain_index, take_at
from shardwise.ops.names import functions_named
from shardwise.ops.views import is_basic_index
from shardwise.ops.writing import write_at, write_at_
from shardwise.sharded_tensor import running  # noqa: F401  # which fills RUNNERS
from shardwise.sharded_tensor.dispatch import RUNNERS, handles
from shardwise.sharded_tensor.embedding_ids import with_columns
from shardwise.sharded_tensor.implicit import announce_move, settle
from shardwise.sharded_tensor.resharding import replicated_layout, reshard_state
from shardwise.sharded_tensor.tensor import ShardedTensor, compute_by_gathering, wrap
from shardwise.sharded_tensor.usable import live_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.sharded_tensor.state import State

__all__ = ["index_by_tensors", "write_by_tensors"]

_Tensor: Any = torch.Tensor
_EVERYTHING = slice(None)


class _Index(NamedTuple):
    """An index: its part without tensors, then tensors at these dims of what that gives."""

    basic: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    dims: tuple[int, ...]

    @property
    def is_all(self) -> bool:
        """Whether the part without tensors leaves everything as it is."""
        return all(isinstance(one, slice) and one == _EVERYTHING for one in self.basic)


def index_by_tensors(x: Any, index: Any) -> Any:
    """`x[index]`, or NotImplemented for forms that only torch knows."""
    parsed = _parsed(_Tensor.__getitem__, x, index)
    if parsed is None:
        return NotImplemented
    seen = x if parsed.is_all else x[parsed.basic]
    return take_at(seen, parsed.tensors, parsed.dims) if parsed.dims else seen


def write_by_tensors(x: ShardedTensor, index: Any, values: Any) -> Any:
    """`x[index] = values`, or NotImplemented for forms that only torch knows."""
    parsed = _parsed(_Tensor.__setitem__, x, index)
    if parsed is None or not parsed.dims:
        return NotImplemented
    target = x if parsed.is_all else x[parsed.basic]
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=x.dtype, device=x.device)
    values = values.to(x.dtype)
    room = target.dim() - len(parsed.dims) + max(one.dim() for one in parsed.tensors)
    while values.dim() > room and values.shape[0] == 1:
        values = values.squeeze(0)
    write_at_(target, parsed.tensors, parsed.dims, values, False)
    return None


def _parsed(func: Any, x: Any, index: Any) -> _Index | None:
    items = _as_tensors(index, x)
    if items is None:
        return None
    used = [
        one.dim() if _is_mask(one) else int(one is not None and one is not ...) for one in items
    ]
    missing = x.dim() - sum(used)
    if missing < 0:
        raise OutOfRangeError(f"too many indices for tensor of dimension {x.dim()}", got=sum(used))
    dots = [k for k, one in enumerate(items) if one is ...]
    if len(dots) > 1:
        return None
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [_EVERYTHING] * missing
    basic: list[Any] = []
    tensors: list[torch.Tensor] = []
    dims: list[int] = []
    dim = num_seen = 0  # of x, and of what the part without tensors gives
    for one in items:
        listed = [one]
        if isinstance(one, torch.Tensor):
            _check_index(func, one, x, dim)
            listed = _places_of(func, one) if _is_mask(one) else [one]
            tensors += listed
            dims += range(num_seen, num_seen + len(listed))
            basic += [_EVERYTHING] * len(listed)
        else:
            basic.append(one)
        dim += 0 if one is None else len(listed)
        num_seen += 0 if isinstance(one, int) else len(listed)
    return _Index(tuple(basic), tuple(tensors), tuple(dims))


def _as_tensors(index: Any, x: Any) -> list[Any] | None:
    """The items of an index, lists as tensors; None if there is one that only torch knows."""
    items: list[Any] = []
    for one in index if isinstance(index, tuple) else (index,):
        if isinstance(one, list | range):
            if any(isinstance(e, torch.Tensor | slice) or e is None or e is ... for e in one):
                return None
            one = torch.tensor(list(one), dtype=None if len(one) else torch.int64)
        elif isinstance(one, np.ndarray):
            one = torch.from_numpy(one)
        if isinstance(one, torch.Tensor):
            if one.dtype in (torch.bool, torch.uint8) and one.dim() == 0:
                return None
            if one.dim() == 0:
                whole = one.full_tensor() if isinstance(one, ShardedTensor) else one
                one = int(whole.item())  # torch selects, too
            elif type(one) is torch.Tensor:
                one = one.to(x.device)
        elif isinstance(one, bool):
            return None
        elif hasattr(one, "__index__"):
            one = int(one)
        elif not (one is None or one is ... or isinstance(one, slice)):
            return None
        items.append(one)
    return items


def _is_mask(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)


def _check_index(func: Any, one: torch.Tensor, x: Any, dim: int) -> None:
    """Raises, on every rank, what is wrong with an index at a dim of `x`."""
    if _is_mask(one):
        shape = tuple(x.shape[dim : dim + one.dim()])
        if tuple(one.shape) != shape:
            raise OutOfRangeError(
                "a mask: The shape of the mask does not match the shape of the indexed tensor",
                expected=shape,
                got=tuple(one.shape),
            )
    elif one.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        raise OutOfRangeError(
            "tensors used as indices must be long, int, byte or bool tensors", got=one.dtype
        )
    else:
        size = x.shape[dim]
        check_plain_index(one, size, what="an index of tensors", least=-size)


# -- masks -----------------------------------------------------------------------------------------


def _places_of(func: Any, mask: torch.Tensor) -> list[torch.Tensor]:
    """The places at which a mask is true, a tensor per dim, on every rank."""
    if not isinstance(mask, ShardedTensor):
        return list(mask.nonzero().unbind(1))
    state = _everywhere(func, live_state(mask))
    found = state.shards[0].nonzero()
    return [_replicated(column, state) for column in found.unbind(1)]


def _everywhere(func: Any, state: State) -> State:
    layout = replicated_layout(state.layout.shape, state)
    announce_move(func, state, layout)
    return reshard_state(state, layout)


def _replicated(tensor: torch.Tensor, like: State) -> ShardedTensor:
    layout = replicated_layout(tuple(tensor.shape), like)
    return wrap(like.with_carriers([tensor.contiguous()], layout=layout, spec=None))


@handles(*functions_named(["nonzero", "argwhere"]))
def _nonzero(input: Any, *, as_tuple: bool = False) -> Any:
    """On every rank; whether elements are zero is exchanged, a byte each."""
    if as_tuple and not input.dim():
        input = input.reshape(1)  # as torch does
    mask = input if input.dtype == torch.bool else input != 0
    state = _everywhere(torch.nonzero, live_state(mask).map(torch.Tensor.detach))
    found = state.shards[0].nonzero()
    if as_tuple:
        return tuple(_replicated(column, state) for column in found.unbind(1))
    return _replicated(found, state)


@handles(*functions_named(["masked_select"]))
def _masked_select(input: Any, mask: Any) -> Any:
    if mask.dtype != torch.bool:
        raise OpError("masked_select: expected BoolTensor for mask", got=mask.dtype)
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x = input if input.shape == shape else input.expand(shape)
    mask = mask if mask.shape == shape else mask.expand(shape)
    if not shape:
        return compute_by_gathering(torch.masked_select, (x, mask), {})
    return index_by_tensors(x, mask)


@handles(*functions_named(["one_hot"]))
def _one_hot(tensor: Any, num_classes: int = -1) -> Any:
    """Cut like the indices, with whole rows of classes."""
    state = live_state(tensor)
    if num_classes == -1:
        if not tensor.numel():
            raise OpError("one_hot: Can not infer total number of classes from empty tensor")
        num_classes = int(tensor.max().item()) + 1
    state = settle(torch.nn.functional.one_hot, state)
    with heard_by_all("one_hot", state.comm):  # of whose indices only some ranks may be wrong
        pieces = [torch.nn.functional.one_hot(shard, num_classes) for shard in state.shards]
    layout = with_columns(state.layout, num_classes)
    carriers = carriers_of(pieces, dtype=torch.int64, device=state.device)
    return wrap(state.with_carriers(carriers, layout=layout, spec=None))


# -- flat indices ----------------------------------------------------------------------------------


def _unravelled(name: str, x: Any, index: Any) -> list[Any]:
    """A flat index as one per dim."""
    size = x.numel()
    check_plain_index(index, size, what=name, least=-size)
    rest = torch.where(index < 0, index + size, index)
    found = []
    for n in reversed(x.shape):
        found.append(rest % n)
        rest = rest // n
    return found[::-1]


@handles(*functions_named(["take"]))
def _take(input: Any, index: Any) -> Any:
    if input.dim() == 0 or not input.numel():
        return compute_by_gathering(torch.take, (input, index), {})
    return take_at(input, _unravelled("take", input, index), tuple(range(input.dim())))


@handles(_Tensor.put_)
def _put_(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    if input.dim() == 0 or not input.numel() or source.shape != index.shape:
        return compute_by_gathering(_Tensor.put_, (input, index, source, accumulate), {})
    places = _unravelled("put_", input, index)
    return write_at_(input, places, tuple(range(input.dim())), source, accumulate)


# -- x[index] --------------------------------------------------------------------------------------


_index_without_tensors = RUNNERS[_Tensor.__getitem__]


def _getitem(args: tuple[Any, ...], kwargs: dict[str, Any], known: Any) -> Any:
    """By the rule of views, or else by that of index tensors."""
    if len(args) != 2 or is_basic_index(args[1]):
        return _index_without_tensors.run(args, kwargs, known)
    found = index_by_tensors(*args)
    return compute_by_gathering(_Tensor.__getitem__, args, {}) if found is NotImplemented else found


RUNNERS[_Tensor.__getitem__] = replace(_index_without_tensors, run=_getitem)


def _index_put(write: Any, func: Any) -> Any:
    def run(input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
        index = tuple(_EVERYTHING if one is None else one for one in indices)
        parsed = None if is_basic_index(index) else _parsed(func, input, index)
        if parsed is None or not parsed.is_all or not parsed.dims:
            return compute_by_gathering(func, (input, indices, values, accumulate), {})
        return write(input, parsed.tensors, parsed.dims, values, accumulate)

    return run


for _function in functions_named(["index_put"]):
    handles(_function)(_index_put(write_at, _function))
for _function in functions_named(["index_put_"]):
    handles(_function)(_index_put(write_at_, _function))
