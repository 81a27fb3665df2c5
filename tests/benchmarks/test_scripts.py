"""What single benchmarks measure, and small runs of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planning import Pair, check_same_pieces, dcp
from benchmarks.tilings import Tiling, grid, guillotine, half_rows_half_columns, near_square
from shardwise.geometry import check_tiling

ROOT = Path(__file__).resolve().parents[2]


# -- what the tiling benchmark measures ----------------------------------------------------------


@pytest.mark.parametrize(
    "tiling",
    [
        grid((64, 1000), near_square(96)),
        half_rows_half_columns((101, 77), 61),
        guillotine((1000, 1000), 300),
        guillotine((64, 64, 64), 301, seed=5),
    ],
)
def test_tilings_tile_until_a_fault_is_made(tiling: Tiling) -> None:
    shuffled = tiling.shuffled().starting_with(7)
    assert check_tiling(tiling.boxes, tiling.shape).ok
    assert check_tiling(shuffled.boxes, tiling.shape).ok
    assert len(check_tiling(shuffled.with_gap().boxes, tiling.shape).gaps) >= 1
    assert len(check_tiling(shuffled.with_overlap().boxes, tiling.shape).overlaps) >= 1


def test_guillotine_makes_exactly_the_number_of_boxes_and_the_same_each_time() -> None:
    one, two = (guillotine((1 << 20, 1 << 20), 1_234) for _ in range(2))
    assert len(one.boxes) == 1_234
    assert np.array_equal(one.boxes.starts, two.boxes.starts)


def run_quickly(name: str, folder: Path) -> tuple[str, str]:
    """What the benchmark prints, and its JSON."""
    path = folder / f"{name}.json"
    script = str(ROOT / "benchmarks" / f"{name}.py")
    done = subprocess.run(
        [sys.executable, script, "--quick", "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert all(line.endswith(" ...") for line in done.stderr.splitlines()), done.stderr
    tables = [line for line in done.stdout.splitlines() if ", bar " not in line]
    assert max(map(len, tables)) <= 80
    assert str(ROOT) not in path.read_text()
    return done.stdout, path.read_text()


def test_tiling_benchmark_prints_its_table_and_writes_its_json(tmp_path: Path) -> None:
    printed, written = run_quickly("tiling", tmp_path)
    for text in ("square grid", "irregular 3-D", "torch", "±", "x ", "n^"):
        assert text in printed
    first = json.loads(written)["results"][0]
    assert (first["case"], first["size"], first["ours"]) == ("square grid", 100, "ours")
    assert first["measured"]["torch"]["ratio_to_ours"] > 0


# -- what the planning benchmark measures --------------------------------------------------------


@pytest.mark.long
def test_planning_benchmark_prints_its_table_and_writes_its_json(tmp_path: Path) -> None:
    printed, written = run_quickly("planning", tmp_path)
    for text in ("grid to irregular", "one rank", "DCP", "over 5 s", "±", "x ", "n^"):
        assert text in printed
    results = json.loads(written)["results"]
    first = results[0]
    assert (first["case"], first["size"], first["ours"]) == ("square grid", 100, "ours")
    assert first["measured"]["DCP, all targets"]["ratio_to_ours"] > 0
    [rows] = [r for r in results if r["case"] == "n x 1 rows" and r["counts"]]
    assert rows["counts"]["pieces"] == {"ours": 1_800, "DCP, all targets": 1_800}
    assert rows["counts"]["bytes moved"] == rows["counts"]["lower bound"]


@pytest.mark.long
def test_checkpoint_planning_benchmark_prints_its_table(tmp_path: Path) -> None:
    printed, _ = run_quickly("checkpoint_planning", tmp_path)
    for text in ("rows, 4 replicas", "the first rank", "bytes of the index"):
        assert text in printed


def test_planning_benchmark_stops_where_dcp_finds_other_pieces() -> None:
    pair = Pair.of("irregular 2-D", 100)
    items = dcp(pair, pair.target.boxes)()
    check_same_pieces(pair.plan().moves, items)
    with pytest.raises(AssertionError, match="pieces and elements"):
        check_same_pieces(pair.plan().moves, items[1:])


@pytest.mark.long
@pytest.mark.parametrize("name", ["checkpoint", "create", "ops", "random_fill", "reshard", "train"])
def test_benchmarks_beside_peers_agree_with_them_and_measure_all(name: str, tmp_path: Path) -> None:
    _, written = run_quickly(name, tmp_path)  # which stops where results differ
    results = json.loads(written)["results"]
    assert results
    assert all("ours" in result["measured"] for result in results if result["ours"] == "ours")
