"""Random numbers for one of four shards: ours, by key and global index, and torch's own generator.

The shard is a quarter of the rows or of the columns of a square matrix; torch's generator fills a
tensor of the same shape with numbers that depend on who drew before. Both write into memory that
is there. torch's generator runs on one thread, however many there are; so does ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder

import torch

from benchmarks.harness import Case, System
from benchmarks.report import Report, parse_options
from shardwise.geometry import Box
from shardwise.random import Key, fill_normal_, fill_trunc_normal_, fill_uniform_

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE, QUICK_SIZE = 4096, 512
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
Fill = Callable[..., torch.Tensor]
FILLS: dict[str, tuple[Fill, Fill]] = {
    "uniform": (fill_uniform_, torch.Tensor.uniform_),
    "normal": (fill_normal_, torch.Tensor.normal_),
}
PEER = "torch"
LIMIT = 3.0


def boxes(size: int) -> dict[str, tuple[Box, tuple[int, int]]]:
    """By name: the second of four shards, and the shape of the tensor."""
    quarter = size // 4
    return {
        "rows": (Box((quarter, 0), (2 * quarter, size)), (size, size)),
        "columns": (Box((0, quarter), (size, 2 * quarter)), (size, size)),
    }


def short_boxes(size: int) -> dict[str, tuple[Box, tuple[int, int]]]:
    """Many short rows, which torch need not know of: narrow and wide gaps between them."""
    rows = size * size // 64
    return {
        "3 of 12 columns": (Box((0, 3), (rows, 6)), (rows, 12)),
        "3 of 4,097 columns": (Box((0, 3), (rows, 6)), (rows, 4097)),
    }


def case(
    name: str,
    group: str,
    ours: Fill,
    peer: Fill,
    box: Box,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Case:
    tensor = torch.empty(box.shape, dtype=dtype)
    systems: dict[str, System] = {
        "ours": partial(ours, tensor, box, shape, Key(seed=7, call=1)),
        PEER: partial(peer, tensor),
    }
    return Case(name, systems, group=group)


def plan(size: int) -> Iterator[Callable[[], Case]]:
    for name, (ours, peer) in FILLS.items():
        for cut, (box, shape) in boxes(size).items():
            for dtype in DTYPES:
                yield partial(case, _name(cut, dtype), name, ours, peer, box, shape, dtype)
        for cut, (box, shape) in short_boxes(size).items():
            yield partial(
                case, _name(cut, torch.float32), name, ours, peer, box, shape, torch.float32
            )
    ours, peer = fill_trunc_normal_, torch.nn.init.trunc_normal_
    box, shape = boxes(size)["rows"]
    for dtype in DTYPES:
        yield partial(case, _name("rows", dtype), "truncated", ours, peer, box, shape, dtype)


def _name(cut: str, dtype: torch.dtype) -> str:
    return f"{cut}, {str(dtype).removeprefix('torch.')}"


def main() -> None:
    options = parse_options(__doc__ or "")
    report = Report("random_fill", options)
    report.run(plan(QUICK_SIZE if options.quick else SIZE))
    for group in FILLS if not options.quick else ():
        for cut in boxes(SIZE):
            for dtype in DTYPES:
                report.check_ratio(_name(cut, dtype), group=group, system=PEER, limit=LIMIT)
    report.finish()


if __name__ == "__main__":
    main()
