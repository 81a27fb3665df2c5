"""How long does it take to plan a save of 2,000 tensors by 1,024 ranks?

"a rank" is what every rank does before it writes: all boxes to files and bytes, and the header of
its own file. "the first rank" does that, too, and makes the index of all files from what the others
report. Nothing is exchanged for the one; the other needs a few bytes per box. Layouts are known, as
they are in a model that is trained; what planning finds is not kept between samples.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder

from benchmarks.harness import Case, System
from benchmarks.report import Report, parse_options
from shardwise.checkpoint.headers import header_of
from shardwise.checkpoint.index_file import encode_index
from shardwise.checkpoint.placing import Placing, Wanted, place
from shardwise.checkpoint.reporting import index_of, report_of
from shardwise.geometry import Box, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardwise.geometry.box import Ints

RANK, FIRST = "a rank", "the first rank"
SIZES = (16, 128, 1024)  # ranks
QUICK_SIZES = (4, 16)
NUM_TENSORS, QUICK_TENSORS = 2000, 100
NUM_SHAPES = 12  # of the tensors of a layer
NUM_REPLICAS = 4
LIMIT_S = 1.0


def rows(shape: tuple[int, int], num_ranks: int, num_replicas: int = 1) -> Layout:
    """Cut along dim 0 over groups of ranks, each of which has a copy."""
    parts = num_ranks // num_replicas
    size = shape[0] // parts
    boxes = [Box.at((k * size, 0), (size, shape[1])) for k in range(parts)]
    return Layout(shape, boxes * num_replicas, range(num_ranks))


def replicated(shape: tuple[int, int], num_ranks: int) -> Layout:
    return Layout.replicated(shape, range(num_ranks))


LAYOUTS: dict[str, Callable[[tuple[int, int], int], Layout]] = {
    "rows": rows,
    "rows, 4 replicas": partial(rows, num_replicas=NUM_REPLICAS),
    "replicated": replicated,
}


def plan_rank(wanted: list[Wanted], num_ranks: int) -> Placing:
    """What every rank does; the last one's header."""
    placing = place(wanted, range(num_ranks))
    last = len(placing.files) - 1
    assert header_of(placing.pieces_of(last), is_unsharded=placing.is_unsharded)
    return placing


def plan_first(wanted: list[Wanted], num_ranks: int, reports: dict[int, Ints]) -> bytes:
    """What the first rank does."""
    placing = plan_rank(wanted, num_ranks)
    index = index_of(placing, reports, path=Path(), structure={}, same_as={}, world_size=num_ranks)
    return encode_index(index)


def reports_of(placing: Placing) -> dict[int, Ints]:
    """What ranks with one file report: headers of different lengths, and checksums."""
    numbers = np.random.default_rng(0)
    found = {}
    for file, count in zip(placing.files, placing.num_pieces.tolist(), strict=True):
        sums = numbers.integers(0, 2**63, count).tolist()
        found[file.rank] = report_of([int(numbers.integers(1000)) * 64], sums)
    return found


def case(name: str, num_ranks: int, num_tensors: int) -> Case:
    layouts = [LAYOUTS[name]((1024 * (k + 1), 128), num_ranks) for k in range(NUM_SHAPES)]
    wanted = [
        Wanted(f"layers.{n // NUM_SHAPES}.weight_{n % NUM_SHAPES}", layout, torch.bfloat16)
        for n, layout in ((n, layouts[n % NUM_SHAPES]) for n in range(num_tensors))
    ]
    placing = plan_rank(wanted, num_ranks)
    assert sum(file.nbytes for file in placing.files) == sum(
        Box.whole(one.layout.shape).volume * one.dtype.itemsize for one in wanted
    )
    reports = reports_of(placing)
    systems: dict[str, System | str | None] = {
        RANK: partial(plan_rank, wanted, num_ranks),
        FIRST: partial(plan_first, wanted, num_ranks, reports),
    }
    counts = {"bytes of the index": {FIRST: len(plan_first(wanted, num_ranks, reports))}}
    return Case(name, systems, size=num_ranks, counts=counts)


def plan(sizes: tuple[int, ...], num_tensors: int) -> Iterator[Callable[[], Case]]:
    for name in LAYOUTS:
        yield from (partial(case, name, size, num_tensors) for size in sizes)


def main() -> None:
    options = parse_options(__doc__ or "")
    report = Report("checkpoint_planning", options)
    report.run(plan(QUICK_SIZES, QUICK_TENSORS) if options.quick else plan(SIZES, NUM_TENSORS))
    for name in LAYOUTS:
        for system in (RANK, FIRST):
            report.check_bar(name, size=SIZES[-1], system=system, limit_s=LIMIT_S)
    report.finish()


if __name__ == "__main__":
    main()
