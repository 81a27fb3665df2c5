"""`diff`: whether two checkpoints hold the same, whatever their layouts and formats are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.arguments import whole_number
from shardwise.checkpoint.blocks import blocks_of, read_block
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.structure import without_tensors
from shardwise.geometry import Box
from shardwise.sharded_tensor.progress import bytes_bar

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = ["Diff", "TensorDiff", "ValueDiff", "diff"]

_MOST_BYTES = 1 << 26  # of each of the two tensors, at once


class TensorDiff(NamedTuple):
    """A tensor that is not the same in both: (shape, dtype) of each, and how values differ.

    `num_different` elements of different bits (of different values, if the dtypes differ), and the
    largest absolute difference of those that are numbers; None where shapes differ.
    """

    name: str
    a: tuple[tuple[int, ...], torch.dtype]
    b: tuple[tuple[int, ...], torch.dtype]
    num_different: int | None = None
    max_abs: float | None = None


class ValueDiff(NamedTuple):
    """A plain value that is not the same in both; `...` where it is absent."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Diff:
    """What two checkpoints do not have in common."""

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    tensors: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...]
    num_same: int  # tensors

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_in_a or self.only_in_b or self.tensors or self.values)


def diff(
    a: str | os.PathLike[str] | Index,
    b: str | os.PathLike[str] | Index,
    *,
    max_bytes: int = _MOST_BYTES,
    jobs: int = 1,
    progress: bool | None = None,
) -> Diff:
    """Compares two checkpoints of any layouts and formats: names, shapes, dtypes, bits, values.

    At most `max_bytes` of each are in memory for each of the `jobs` tensors compared at once. A
    NaN equals a NaN of the same bits.
    """
    limit = whole_number(max_bytes, "max_bytes", least=1)
    workers = whole_number(jobs, "jobs", least=1)
    first, second = (one if isinstance(one, Index) else load_index(one) for one in (a, b))
    common = [name for name in first.tensors if name in second.tensors]
    total = sum(first.tensors[name].nbytes for name in common)
    with (
        bytes_bar("diff", total, show=progress) as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        compare = partial(_tensor_diff, first, second, max_bytes=limit, advance=advance)
        found = list(pool.map(compare, common))
    differing = tuple(one for one in found if one is not None)
    return Diff(
        tuple(sorted(set(first.tensors) - set(second.tensors))),
        tuple(sorted(set(second.tensors) - set(first.tensors))),
        differing,
        _value_diffs(first.structure, second.structure),
        len(common) - len(differing),
    )


# -- tensors ---------------------------------------------------------------------------------------


def _tensor_diff(
    a: Index, b: Index, name: str, *, max_bytes: int, advance: Callable[[int], None]
) -> TensorDiff | None:
    one, other = a.tensors[name], b.tensors[name]
    heads = (one.shape, one.dtype), (other.shape, other.dtype)
    if one.shape != other.shape:
        advance(one.nbytes)
        return TensorDiff(name, *heads)
    count, largest = 0, 0.0
    itemsize = max(one.dtype.itemsize, other.dtype.itemsize)
    for box in blocks_of(Box.whole(one.shape), one.shape, itemsize, max_bytes):
        different, distance = _block_diff(read_block(a, name, box), read_block(b, name, box))
        count, largest = count + different, max(largest, distance)
        advance(box.volume * one.dtype.itemsize)
    if not count and one.dtype == other.dtype:
        return None
    return TensorDiff(name, *heads, count, largest)


def _block_diff(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """How many elements differ, and by how much at most; 0 where one is not a number."""
    if a.dtype == b.dtype:
        bits = [one.reshape(-1).view(torch.uint8).view(-1, one.itemsize) for one in (a, b)]
        if torch.equal(*bits):
            return 0, 0.0
        is_other = (bits[0] != bits[1]).any(dim=1)
    else:
        x, y = _widened(a).reshape(-1), _widened(b).reshape(-1)
        is_other = (x != y) & ~((x != x) & (y != y))
    x, y = (_widened(one.reshape(-1)[is_other]) for one in (a, b))
    distances = (x - y).abs()
    distances = distances[~distances.isnan()]
    return int(is_other.sum()), float(distances.max()) if len(distances) else 0.0


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# -- plain values ----------------------------------------------------------------------------------


def _value_diffs(a: Any, b: Any) -> tuple[ValueDiff, ...]:
    one, other = dict(without_tensors(a)), dict(without_tensors(b))
    return tuple(
        ValueDiff(name, one.get(name, ...), other.get(name, ...))
        for name in one | other
        if not _is_same(one.get(name, ...), other.get(name, ...))
    )


def _is_same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)  # True is not 1
