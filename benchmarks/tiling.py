"""Do n boxes tile a tensor? Our check beside that of torch.distributed._shard.

Every system gets its input ready in its own form. "ours" gets arrays (`Boxes`); the list of
`Box` and the list of `ShardMetadata` are turned into arrays inside the timed region.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder

from benchmarks.harness import Case, System, peak_bytes
from benchmarks.report import Report, parse_options
from benchmarks.tilings import Tiling, grid, guillotine, half_rows_half_columns, near_square
from shardwise.geometry import Layout, check_tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENTRY_POINT = "ours, _shard's entry point"
OURS = ("ours", "ours, from a list of Box", ENTRY_POINT)
SQUARE = (1 << 20, 1 << 20)
CUBE = (1 << 14, 1 << 14, 1 << 14)
SIZES = (100, 1_000, 10_000, 100_000)
QUICK_SIZES = (100, 1_000)
# The largest size at which torch is run: more where its time grows about linearly, and one
# case of 15 s is enough to show where it is quadratic.
TORCH_LIMIT = 10_000
TORCH_LIMITS = {"n x 1 rows": 100_000, "2 x n/2, lucky": 100_000, "rows over columns": 1_000}


def two_rows(num_boxes: int, *, lucky: bool) -> Tiling:
    """A 2 x n/2 grid, shuffled, but for the first box.

    torch sweeps along the dim in which the *first* shard ends furthest. Along dim 1 only two
    boxes are side by side; along dim 0 all of a row are, and the sweep is quadratic.
    """
    tiling = grid(SQUARE, (2, num_boxes // 2)).shuffled()
    ends = tiling.boxes.stops
    return tiling.starting_with(int((ends[:, 1] - ends[:, 0] if lucky else ends[:, 0]).argmax()))


TILINGS: dict[str, Callable[[int], Tiling]] = {
    "square grid": lambda n: grid(SQUARE, near_square(n)).shuffled(),
    "n x 1 rows": lambda n: grid(SQUARE, (n, 1)).shuffled(),
    "2 x n/2, lucky": partial(two_rows, lucky=True),
    "2 x n/2, unlucky": partial(two_rows, lucky=False),
    "irregular 2-D": lambda n: guillotine(SQUARE, n).shuffled(),
    "irregular 3-D": lambda n: guillotine(CUBE, n).shuffled(),
    "rows over columns": lambda n: half_rows_half_columns(SQUARE, n).shuffled(),
}


def ours(tiling: Tiling, *, is_list: bool, ok: bool = True) -> System:
    """`check_tiling` on arrays or on a list of `Box`; raises if its answer is not `ok`."""
    boxes = list(tiling.boxes) if is_list else tiling.boxes

    def run() -> None:
        if check_tiling(boxes, tiling.shape).ok is not ok:
            raise AssertionError(f"check_tiling should have said {ok}")

    return run


def entry_point(package: str, tiling: Tiling) -> System:
    """The two checks of torch.distributed._shard, there or here: the paths differ by prefix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the package is deprecated is why we are here
        internals = importlib.import_module(f"{package}.sharding_spec._internals")
        shard = importlib.import_module(f"{package}.metadata").ShardMetadata
    boxes = tiling.boxes
    rows = zip(boxes.starts.tolist(), boxes.shapes.tolist(), strict=True)
    shards = [shard(offsets, sizes) for offsets, sizes in rows]

    def run() -> None:
        internals.validate_non_overlapping_shards_metadata(shards)
        internals.check_tensor(shards, tiling.shape)

    return run


def valid_case(name: str, num_boxes: int) -> Case:
    tiling = TILINGS[name](num_boxes)
    systems: dict[str, System | None] = {
        OURS[0]: ours(tiling, is_list=False),
        OURS[1]: ours(tiling, is_list=True),
        ENTRY_POINT: entry_point("shardwise", tiling),
    }
    fits = num_boxes <= TORCH_LIMITS.get(name, TORCH_LIMIT)
    systems["torch"] = entry_point("torch.distributed._shard", tiling) if fits else None
    counts = {}
    if name == "square grid" and num_boxes <= TORCH_LIMIT:
        counts["peak bytes"] = {k: peak_bytes(run) for k, run in systems.items() if run}
    return Case(name, systems, size=num_boxes, group="is it a tiling?", counts=counts)


def faulty_case(name: str, num_boxes: int) -> Case:
    """A fault costs more than none: it is searched for and named."""
    tiling = TILINGS[name](num_boxes)
    systems = {
        "no fault": ours(tiling, is_list=False),
        "one box missing": ours(tiling.with_gap(), is_list=False, ok=False),
        "two boxes overlap": ours(tiling.with_overlap(), is_list=False, ok=False),
    }
    return Case(name, systems, group=f"ours, naming one fault among {num_boxes:,} boxes")


def layout_case(name: str, num_boxes: int) -> Case:
    """A Layout checks its tiling, and sorts its entries."""
    tiling = TILINGS[name](num_boxes)
    listed, owners = list(tiling.boxes), range(num_boxes)
    systems: dict[str, System] = {
        "check_tiling": ours(tiling, is_list=False),
        "Layout": lambda: Layout(tiling.shape, tiling.boxes, owners),
        "Layout, from a list of Box": lambda: Layout(tiling.shape, listed, owners),
    }
    return Case(name, systems, group=f"ours, building a Layout of {num_boxes:,} boxes")


def plan(sizes: tuple[int, ...]) -> Iterator[Callable[[], Case]]:
    for name in TILINGS:
        yield from (partial(valid_case, name, size) for size in sizes)
    for name in ("square grid", "irregular 2-D", "irregular 3-D", "rows over columns"):
        yield partial(faulty_case, name, sizes[-1])
    for name in ("square grid", "irregular 3-D"):
        yield partial(layout_case, name, sizes[-1])


def main() -> None:
    options = parse_options(__doc__ or "")
    report = Report("tiling", options)
    report.run(plan(QUICK_SIZES if options.quick else SIZES))
    for name, limit_s in (("square grid", 0.1), ("irregular 2-D", 1.0), ("irregular 3-D", 1.0)):
        for system in OURS:
            report.check_bar(name, size=SIZES[-1], system=system, limit_s=limit_s)
    report.finish()


if __name__ == "__main__":
    main()
