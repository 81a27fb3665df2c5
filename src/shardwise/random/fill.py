"""The random words of a box, slab by slab, and what is made of them put where it belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.geometry import Box
from shardwise.random.arrays import Array, as_tensor, library, repeated, up_to, viewed_as
from shardwise.random.philox import BLOCK, Philox, cost_at_once, cost_of_run
from shardwise.random.regions import Rows, slabs

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.random.key import Key

__all__ = ["fill_by_words"]

# Most elements and blocks to work on at a time. On the CPU they should stay in the cache; a GPU is
# busy with much more. torch copies 32,768 elements or more on several threads, and to wake those
# costs more than they save, so where torch has to do the copying the chunks are smaller.
_CHUNK = {"numpy": (1 << 16, 1 << 13), "cpu": (1 << 15, 1 << 13), "gpu": (1 << 22, 1 << 19)}


def fill_by_words(
    tensor: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    key: Key,
    bits: int,
    values: Callable[[Array], Array],
) -> torch.Tensor:
    """Fills `tensor` with `values` of random words of `bits` 32 or 64, one to an element.

    Element i of the global tensor gets word i % n of block i // n; a block has n = 256 / bits.
    """
    if tensor.is_complex():
        box, shape = Box((*box.start, 0), (*box.stop, 2)), (*shape, 2)
        fill_by_words(torch.view_as_real(tensor.detach()), box, shape, key, bits, values)
        return tensor
    if box.is_empty or tensor.is_meta:
        return tensor
    per_block, philox = BLOCK * 64 // bits, Philox(key)
    with torch.no_grad(), np.errstate(over="ignore"):  # what is too large is infinite
        target = _native(tensor.detach())
        for slab in slabs(box, shape, _slab_size(Rows.of(box, shape), per_block, target)):
            found = values(_words(slab.rows, philox, bits, tensor.device)).reshape(slab.shape)
            if isinstance(target, np.ndarray):
                target[slab.index] = found
            else:
                target[slab.index].copy_(as_tensor(found))
    return tensor


def _native(tensor: torch.Tensor) -> Array:
    """Its memory as an array of numpy's if that rounds to its dtype as torch does."""
    on_cpu = tensor.device.type == "cpu" and not tensor.is_neg()
    return tensor.numpy() if on_cpu and tensor.dtype in (torch.float32, torch.float64) else tensor


def _slab_size(rows: Rows, per_block: int, target: Array) -> int:
    """How many elements to fill at a time."""
    place = "numpy"
    if isinstance(target, torch.Tensor):
        place = "cpu" if target.device.type == "cpu" else "gpu"
    elements, blocks = _CHUNK[place]
    return max(1, min(elements, blocks * rows.length // _most_blocks(rows.length, per_block)))


def _words(rows: Rows, philox: Philox, bits: int, device: torch.device) -> Array:
    """The words of all elements, a row for each run. The caller may overwrite them."""
    per_block = BLOCK * 64 // bits
    most_blocks = _most_blocks(rows.length, per_block)
    first = rows.first // per_block
    spanned = rows.last // per_block + 1 - first
    on_cpu = device.type == "cpu"
    # [Note: ways to the words]; elsewhere a block costs less than to find its place.
    cost = min(cost_of_run(most_blocks), cost_at_once(most_blocks)) if on_cpu else 4 * most_blocks
    if spanned <= rows.count * cost:
        words = _cut(philox.run(first, spanned, device), bits)
        if rows.count == 1:
            return words[rows.first % per_block :][: rows.length]
        places = rows.starts(device) - first * per_block
    elif on_cpu and cost == cost_of_run(most_blocks):
        blocks, places = np.divmod(rows.starts(device), per_block)
        words = _cut(philox.runs(blocks.tolist(), most_blocks), bits)
        offset = rows.offset(per_block)
        if offset is not None:  # no need to pick them one by one
            return words.reshape(rows.count, -1)[:, offset : offset + rows.length]
        places += np.arange(rows.count) * (most_blocks * per_block)
    else:
        starts = rows.starts(device)
        places = starts % per_block
        needed = (places + (rows.length - 1)) // per_block + 1
        before = needed.cumsum(0) - needed  # blocks of the rows before
        blocks = repeated(starts // per_block - before, needed)
        words = _cut(philox.at_once(blocks + up_to(len(blocks), like=blocks)), bits)
        places += before * per_block
    return library(words).take(words, places[:, None] + up_to(rows.length, like=places))


def _cut(words: Array, bits: int) -> Array:
    """Words of 64 bits, or twice as many of 32."""
    return words if bits == 64 else viewed_as(words, torch.int32)


def _most_blocks(length: int, per_block: int) -> int:
    """In how many blocks a run of `length` can lie."""
    return (length + per_block - 2) // per_block + 1
