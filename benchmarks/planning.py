"""How long does it take to plan a reshard of n boxes to about 0.9 n others?

"ours" is all moves of all ranks; "ours, one rank" is what one rank sends, keeps and receives. Both
start from layouts made anew before every sample, so nothing that a layout or the cache of plans
remembers helps; making them is no part of planning and is not timed.

The peer is DCP, torch.distributed.checkpoint, whose `create_read_items_for_chunk_list` plans what
one rank reads: its chunks against all saved ones, by a sweep along the dim of largest extent. "DCP,
all targets" gives it the target boxes of all ranks at once, which is the work of "ours" and costs
it less than a call per rank; "DCP, one rank" gives it those of one rank and finds what that rank
gets, not what it sends. Where DCP runs, both must find the same number of pieces and of elements.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder

from benchmarks.harness import Case, System
from benchmarks.report import Report, parse_options
from benchmarks.tilings import Tiling, grid, guillotine, half_rows_half_columns
from shardwise.geometry import Layout
from shardwise.transfer import Moves, TransferPlan, plan_reshard

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DCP imports a package that is deprecated
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.checkpoint.planner import ReadItem

    from shardwise.geometry import Boxes

OURS, OURS_ONE = "ours", "ours, one rank"
DCP, DCP_ONE = "DCP, all targets", "DCP, one rank"
REPEATED, EQUAL = "ours, repeated", "ours, equal layouts"
SQUARE = (1 << 20, 1 << 20)
CUBE = (1 << 14, 1 << 14, 1 << 14)
SIZES = (100, 1_000, 10_000, 100_000)
QUICK_SIZES = (100, 1_000)
ITEMSIZE = 4
RANK = 0  # of "one rank"; owners are random, so any is like any other
BUDGET_S = 3.0  # per system and case: the largest plans take a second or more
# The largest size at which DCP plans all targets; it takes at most a few seconds there.
DCP_LIMITS = {
    "square grid": 10_000,
    "n x 1 rows": 100_000,
    "rows to columns": 100,
    "rows over columns": 1_000,
    "irregular 2-D": 10_000,
    "irregular 3-D": 1_000,
    "grid to irregular": 10_000,
}
TOO_SLOW = "over 5 s"
# Every row meets every column, so 1,000 boxes make as many pieces as 200,000 elsewhere.
OUR_LIMITS = {"rows to columns": 1_000}


def square(num_boxes: int) -> tuple[int, int]:
    """Sides of the largest square grid of at most `num_boxes` cells."""
    return (math.isqrt(num_boxes),) * 2


# From n and 0.9 n: the tilings before and after.
RESHARDS: dict[str, Callable[[int, int], tuple[Tiling, Tiling]]] = {
    "square grid": lambda n, m: (grid(SQUARE, square(n)), grid(SQUARE, square(m))),
    "n x 1 rows": lambda n, m: (grid(SQUARE, (n, 1)), grid(SQUARE, (m, 1))),
    "rows to columns": lambda n, m: (grid(SQUARE, (n, 1)), grid(SQUARE, (1, m))),
    "rows over columns": lambda n, m: (
        half_rows_half_columns(SQUARE, n),
        half_rows_half_columns(SQUARE, m),
    ),
    "irregular 2-D": lambda n, m: (guillotine(SQUARE, n), guillotine(SQUARE, m, seed=1)),
    "irregular 3-D": lambda n, m: (guillotine(CUBE, n), guillotine(CUBE, m, seed=1)),
    "grid to irregular": lambda n, m: (grid(SQUARE, square(n)), guillotine(SQUARE, m, seed=1)),
}


@dataclass(slots=True)
class Pair:
    """The layouts of one reshard; `renew` drops all that they have remembered."""

    source: Layout
    target: Layout

    @classmethod
    def of(cls, name: str, num_boxes: int) -> Pair:
        """Boxes as `RESHARDS` says, owners random over at most 1,000 ranks."""
        num_ranks = min(1_000, num_boxes // 10)
        rng = np.random.default_rng(2)
        source, target = (
            Layout(t.shape, t.boxes, rng.integers(num_ranks, size=len(t.boxes)))
            for t in RESHARDS[name](num_boxes, num_boxes * 9 // 10)
        )
        return cls(source, target)

    def renew(self) -> None:
        self.source, self.target = (
            Layout(old.shape, old.boxes, old.owners) for old in (self.source, self.target)
        )

    def plan(self) -> TransferPlan:
        return TransferPlan(self.source, self.target, ITEMSIZE)


def dcp(pair: Pair, targets: Boxes) -> Callable[[], list[ReadItem]]:
    """DCP's plan for ranks that hold `targets`, all boxes of the source being saved chunks."""
    shape = torch.Size(pair.source.shape)
    saved = TensorStorageMetadata(TensorProperties(), shape, _chunks(pair.source.boxes))
    return partial(create_read_items_for_chunk_list, "weight", saved, _chunks(targets))


def _chunks(boxes: Boxes) -> list[ChunkStorageMetadata]:
    rows = zip(boxes.starts.tolist(), boxes.shapes.tolist(), strict=True)
    return [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in rows]


def check_same_pieces(moves: Moves, items: Sequence[ReadItem]) -> None:
    """Raises unless ours and DCP's are as many pieces with as many elements."""
    ours = len(moves), int(moves.volumes.sum())
    theirs = len(items), sum(math.prod(item.lengths) for item in items)
    if ours != theirs:
        raise AssertionError(f"pieces and elements: ours {ours}, DCP {theirs}")


def whole_case(name: str, num_boxes: int, *, with_counts: bool) -> Case:
    pair = Pair.of(name, num_boxes)
    plan = pair.plan()
    systems: dict[str, System | str] = {OURS: lambda: pair.plan().moves, DCP: TOO_SLOW}
    pieces = {OURS: len(plan.moves)}
    if num_boxes <= DCP_LIMITS[name]:
        systems[DCP] = run = dcp(pair, pair.target.boxes)
        items = run()
        check_same_pieces(plan.moves, items)
        pieces[DCP] = len(items)
    if plan.total_bytes != plan.lower_bound:
        raise AssertionError(f"{plan.total_bytes} bytes, lower bound {plan.lower_bound}")
    counts = {
        "pieces": pieces,
        "bytes moved": {OURS: plan.total_bytes},
        "lower bound": {OURS: plan.lower_bound},
    }
    return Case(
        name,
        systems,
        size=num_boxes,
        group="all moves of all ranks",
        counts=counts if with_counts else {},
        prepare=pair.renew,
    )


def one_rank_case(name: str, num_boxes: int) -> Case:
    pair = Pair.of(name, num_boxes)
    run = dcp(pair, pair.target.boxes[pair.target.rows_of(RANK)])
    moves = pair.plan().moves_of(RANK)
    check_same_pieces(moves[moves.dst == RANK], run())
    systems: dict[str, System] = {OURS_ONE: lambda: pair.plan().moves_of(RANK), DCP_ONE: run}
    return Case(name, systems, size=num_boxes, group="the part of one rank", prepare=pair.renew)


def repeated_case(name: str, num_boxes: int) -> Case:
    """A plan that is known is found by its layouts: the same objects, or others that are equal."""
    pair = Pair.of(name, num_boxes)
    other = replace(pair)
    other.renew()
    known = plan_reshard(pair.source, pair.target, ITEMSIZE)
    if plan_reshard(other.source, other.target, ITEMSIZE) is not known or not len(known.moves):
        raise AssertionError("a plan that is known was made again")
    systems: dict[str, System] = {
        REPEATED: lambda: plan_reshard(pair.source, pair.target, ITEMSIZE).moves,
        EQUAL: lambda: plan_reshard(other.source, other.target, ITEMSIZE).moves,
    }
    return Case(name, systems, size=num_boxes, group="the same plan again")


def cases(sizes: tuple[int, ...]) -> Iterator[Callable[[], Case]]:
    able = {name: [n for n in sizes if n <= OUR_LIMITS.get(name, n)] for name in RESHARDS}
    for name, fitting in able.items():
        for size in fitting:
            yield partial(whole_case, name, size, with_counts=size == fitting[-1])
    for name, fitting in able.items():
        yield from (partial(one_rank_case, name, size) for size in fitting)
    for name in ("square grid", "irregular 3-D"):
        yield partial(repeated_case, name, sizes[-1])


def main() -> None:
    options = parse_options(__doc__ or "")
    if not options.quick:
        options = replace(options, budget_s=BUDGET_S)
    report = Report("planning", options)
    report.run(cases(QUICK_SIZES if options.quick else SIZES))
    for name, system, limit_s in (
        ("irregular 2-D", OURS, 1.5),
        ("square grid", OURS, 0.1),
        ("square grid", REPEATED, 1e-4),
        ("irregular 3-D", REPEATED, 1e-4),
    ):
        report.check_bar(name, size=SIZES[-1], system=system, limit_s=limit_s)
    report.finish()


if __name__ == "__main__":
    main()
