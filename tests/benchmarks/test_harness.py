"""The benchmarks' harness, with a clock that only the systems move; and one real, small run."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

# Benchmarks are scripts, no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import (
    Case,
    Clock,
    Result,
    Samples,
    System,
    growth_exponent,
    measure,
    peak_bytes,
)
from benchmarks.planning import Pair, check_same_pieces, dcp
from benchmarks.report import Options, Report, parse_options
from benchmarks.tilings import Tiling, grid, guillotine, half_rows_half_columns, near_square
from shardwise.geometry import check_tiling

ROOT = Path(__file__).resolve().parents[2]
MS = 1_000_000  # nanoseconds


@dataclass
class FakeTime:
    """A clock that stands still until a system says how long it takes."""

    ns: int = 0

    def clock(self) -> Clock:
        return Clock(now=lambda: self.ns)

    def takes(self, ns: int, *, log: list[str] | None = None, name: str = "") -> System:
        def run() -> None:
            self.ns += ns
            if log is not None:
                log.append(name)

        return run


def result_of(samples: dict[str, list[float]], **fields: object) -> Result:
    named = {"name": "case", "size": None, "group": "", "reasons": {}, "counts": {}} | fields
    taken = {system: Samples(seconds) for system, seconds in samples.items()}
    systems = (*taken, *named["reasons"])  # type: ignore[misc]  # a dict of any fields
    return Result(systems=systems, samples=taken, **named)  # type: ignore[arg-type]  # same


def printed(report: Report) -> str:
    out = io.StringIO()
    report.print_table(Console(file=out, width=80))
    return out.getvalue()


# -- measuring -----------------------------------------------------------------------------------


def test_systems_take_turns_and_nobody_always_goes_first() -> None:
    fake, log = FakeTime(), list[str]()
    systems = {name: fake.takes(200 * MS, log=log, name=name) for name in "abc"}
    measure(Case("turns", systems), repeats=4, budget_s=9.0, clock=fake.clock())
    assert "".join(log[3:]) == "abcbcacababc"  # after three warm-ups


def test_warm_up_is_not_a_sample() -> None:
    durations = iter([50 * MS, 3 * MS, 1 * MS, 2 * MS])  # warm-up, calibration, two samples
    fake = FakeTime()

    def run() -> None:
        fake.ns += next(durations)

    found = measure(Case("warm", {"a": run}), repeats=2, clock=fake.clock()).samples["a"]
    assert found == Samples([0.001, 0.002])


def test_system_whose_warm_up_spends_the_budget_runs_once() -> None:
    fake, log = FakeTime(), list[str]()
    systems = {"ours": fake.takes(MS), "slow": fake.takes(12_000 * MS, log=log, name="slow")}
    found = measure(Case("slow", systems), repeats=5, budget_s=2.0, clock=fake.clock())
    assert found.samples["slow"] == Samples([12.0], is_warm=False)
    assert log == ["slow"]
    assert len(found.samples["ours"].seconds) == 5
    assert found.ratio("slow") == pytest.approx(12_000)


def test_system_drops_out_when_its_budget_is_spent() -> None:
    fake = FakeTime()
    systems = {"a": fake.takes(300 * MS), "b": fake.takes(MS)}
    found = measure(Case("budget", systems), repeats=9, budget_s=0.5, clock=fake.clock())
    assert {name: len(taken.seconds) for name, taken in found.samples.items()} == {"a": 2, "b": 9}


def test_short_calls_are_repeated_until_a_sample_takes_a_millisecond() -> None:
    fake = FakeTime()
    found = measure(Case("short", {"a": fake.takes(10_000)}), repeats=3, clock=fake.clock())
    assert found.samples["a"].calls == 100
    assert found.samples["a"].seconds == pytest.approx([1e-5] * 3)


def test_prepare_runs_untimed_before_every_sample_of_one_call() -> None:
    fake, log = FakeTime(), list[str]()
    prepare = fake.takes(500 * MS, log=log, name="prepare")
    case = Case("prepare", {"a": fake.takes(10_000, log=log, name="run")}, prepare=prepare)
    found = measure(case, repeats=2, clock=fake.clock())
    assert log == ["prepare", "run"] * 3
    assert found.samples["a"] == Samples([1e-5, 1e-5])


def test_clock_times_settling_and_not_lining_up_and_asks_all_ranks() -> None:
    fake = FakeTime()
    clock = Clock(
        now=lambda: fake.ns,
        line_up=fake.takes(900 * MS),
        settle=fake.takes(30 * MS),
        agree=lambda seconds: seconds + 1.0,  # the slowest rank needs a second more
    )
    found = measure(Case("gpu", {"a": fake.takes(20 * MS)}), repeats=1, budget_s=9.0, clock=clock)
    assert found.samples["a"].seconds == pytest.approx([1.05])


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_off_while_the_clock_runs(was_enabled: bool) -> None:
    seen: list[bool] = []

    def run() -> None:
        seen.append(gc.isenabled())
        raise RuntimeError("stop here")

    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="stop here"):
            measure(Case("gc", {"a": run}))
        assert seen == [False]
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_system_that_cannot_do_the_case_has_a_reason_and_no_samples() -> None:
    fake = FakeTime()
    case = Case("reasons", {"ours": fake.takes(MS), "even cuts only": "uneven", "too slow": None})
    found = measure(case, repeats=1, clock=fake.clock())
    assert found.reasons == {"even cuts only": "uneven", "too slow": "-"}
    assert found.ratio("too slow") is None


def test_median_and_spread_of_known_samples() -> None:
    found = Samples([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.median == 3.0
    assert found.spread == pytest.approx(2 / 3)
    assert Samples([1.0]).spread is None


def test_peak_bytes_counts_what_one_run_holds_at_a_time() -> None:
    def run() -> None:
        for _ in range(3):
            np.zeros(100_000)

    assert 800_000 <= peak_bytes(run) < 810_000


@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_growth_exponent_finds_the_power(power: float) -> None:
    sizes = [100, 1_000, 10_000]
    assert growth_exponent(sizes, [3e-6 * n**power for n in sizes]) == pytest.approx(power)


# -- reporting -----------------------------------------------------------------------------------


def test_table_shows_medians_ratios_and_why_there_is_none() -> None:
    report = Report("demo", Options(repeats=2))
    samples = {"ours": [0.0010, 0.0012], "peer": [0.0121, 0.0121], "slow peer": [12.1]}
    report.results.append(result_of(samples, reasons={"other": "even cuts only"}))
    text = printed(report)
    assert "1.10 ms ±9%" in text
    assert "12.1 ms ±0%" in text
    assert "x 11.0" in text
    assert "x 11,000 n=1" in text
    assert "even cuts only" in text


def test_table_is_plain_and_fits_80_columns() -> None:
    report = Report("demo")
    systems = {f"a system, number {i}": [0.123, 0.16, 0.19] for i in range(4)}
    for size in (10_000, 100_000):
        report.results.append(result_of(systems, name="rows over columns", size=size))
    lines = printed(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)
    assert sum("160 ms ±21%" in line for line in lines) == 2


def test_ours_is_the_first_column_even_where_a_peer_is_not_run_first() -> None:
    report = Report("demo")
    report.results.append(result_of({"ours": [1.0]}, reasons={"peer": "-"}))
    report.results.append(result_of({"ours": [1.0], "peer": [2.0]}))
    header = next(line for line in printed(report).splitlines() if "case" in line)
    assert header.split() == ["case", "ours", "peer"]


def test_counts_are_exact_integers() -> None:
    report = Report("demo")
    report.results.append(result_of({"ours": [1.0]}, counts={"bytes sent": {"ours": 268_435_456}}))
    assert "268,435,456" in printed(report)


def test_growth_is_found_per_name_and_system_with_several_sizes() -> None:
    report = Report("demo")
    for size, seconds in ((10, 1.0), (100, 1.0), (1000, 10.0)):
        peer = {"peer": [size * size * 1.0]} if size < 1000 else {}
        report.results.append(result_of({"ours": [seconds]} | peer, name="grid", size=size))
    growth = report.growth()["grid"]
    assert growth["ours"]["exponent"] == pytest.approx(0.5)
    assert growth["ours"]["last"] == pytest.approx(1.0)
    assert growth["peer"]["exponent"] == pytest.approx(2.0)
    assert "n^0.50" in printed(report)


def test_bars_are_judged_and_missing_one_is_no_error() -> None:
    report = Report("demo")
    report.results.append(result_of({"ours": [0.05]}, name="grid", size=100))
    for limit_s in (0.1, 0.01):
        report.check_bar("grid", size=100, system="ours", limit_s=limit_s)
    report.check_bar("never measured", size=100, system="ours", limit_s=1.0)
    assert printed(report).splitlines()[-2:] == [
        "grid, 100, ours: 50.0 ms, bar 100 ms: met",
        "grid, 100, ours: 50.0 ms, bar 10.0 ms: missed",
    ]


def test_ratios_and_counts_are_judged_too() -> None:
    report = Report("demo")
    counts = {"peak": {"ours": 150}}
    report.results.append(replace(result_of({"ours": [0.5], "peer": [1.0]}), counts=counts))
    name, group = report.results[0].name, report.results[0].group
    for limit in (0.6, 0.4):
        report.check_ratio(name, group=group, system="peer", limit=limit)
    report.check_ratio("never measured", group=group, system="peer", limit=1)
    report.check_count("peak", system="ours", limit=200, unit="%")
    report.check_count("never counted", system="ours", limit=200, unit="%")
    ratios = [bar.verdict for bar in report.bars]
    assert ratios == ["met", "missed", "met"]
    assert "ours / peer: 0.5 x, bar 0.6 x: met" in printed(report)


def test_json_has_every_sample_and_does_not_name_the_machine(tmp_path: Path) -> None:
    report = Report("demo")
    report.run([lambda: Case("sum", {"ours": lambda: sum(range(100)), "peer": None}, size=100)])
    report.write_json(tmp_path / "new" / "demo.json")
    content = json.loads((tmp_path / "new" / "demo.json").read_text())
    [result] = content["results"]
    assert len(result["measured"]["ours"]["samples_s"]) == Options().repeats
    assert result["not_run"] == {"peer": "-"}
    facts = {"python", "numpy", "system", "cpu_count", "torch", "torch_threads", "gpu"}
    assert set(content["machine"]) <= facts


def test_options_of_the_command_line() -> None:
    assert parse_options("demo", []) == Options()
    assert parse_options("demo", ["--quick"]).repeats < Options().repeats
    found = parse_options("demo", ["--quick", "--repeats", "7", "--json", "out.json"])
    assert (found.quick, found.repeats, found.json) == (True, 7, Path("out.json"))


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
        timeout=120,
        cwd=folder,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
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
