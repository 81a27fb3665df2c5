"""What a benchmark prints, judges and writes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness import (
    Case,
    Result,
    Samples,
)
from benchmarks.report import Options, Report, parse_options


def result_of(samples: dict[str, list[float]], **fields: object) -> Result:
    named = {"name": "case", "size": None, "group": "", "reasons": {}, "counts": {}} | fields
    taken = {system: Samples(seconds) for system, seconds in samples.items()}
    systems = (*taken, *named["reasons"])  # type: ignore[misc]  # a dict of any fields
    return Result(systems=systems, samples=taken, **named)  # type: ignore[arg-type]  # same


def printed(report: Report) -> str:
    out = io.StringIO()
    report.print_table(Console(file=out, width=80))
    return out.getvalue()


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


def test_verdicts_say_when_samples_scatter_too_much_for_them() -> None:
    samples = {"ours": [0.9, 1.0, 1.1], "peer": [1.9, 2.0, 2.1], "wild peer": [1.0, 2.0, 4.0]}
    report = Report("demo", results=[result_of(samples)])
    for system in ("peer", "wild peer"):
        for limit in (0.4, 0.6):
            report.check_ratio("case", group="", system=system, limit=limit)
    assert [str(bar).rpartition(": ")[-1] for bar in report.bars] == [
        "missed",
        "met",
        "missed (within scatter)",
        "met (within scatter)",
    ]


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
