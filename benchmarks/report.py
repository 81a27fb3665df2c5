"""What a benchmark prints and writes: its command line, tables, growth, bars and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from benchmarks.harness import Case, Clock, Result, growth_exponent, measure

Row = tuple[str, Mapping[str, str]]  # a case, and a cell per system
_LEGEND = """\
median ± interquartile range; x 12.3: takes 12.3 times as long as column one;
{repeats} samples, or n; growth: over all sizes, last: over the two largest; -: not run"""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line that all benchmarks share."""

    quick: bool = False
    repeats: int = 9
    budget_s: float = 0.5  # per system and case
    json: Path | None = None


def parse_options(description: str, argv: Sequence[str] | None = None) -> Options:
    """Options from the command line; `--quick` lowers the defaults of the others."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, few samples")
    parser.add_argument("--repeats", type=int, help="samples per system (9; quick: 3)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all samples to PATH")
    found = parser.parse_args(argv)
    repeats = max(1, found.repeats or (3 if found.quick else 9))
    return Options(found.quick, repeats, 0.1 if found.quick else 0.5, found.json)


@dataclass(frozen=True, slots=True)
class Bar:
    """A claim, that `what` is at most `limit`, and what was measured."""

    what: str
    measured: float
    limit: float
    unit: str = "s"  # or "x" for a ratio, "%" for a share
    is_clear: bool = True  # False: with as much scatter it could be the other way round

    @property
    def verdict(self) -> str:
        return "met" if self.measured <= self.limit else "missed"

    def __str__(self) -> str:
        if self.unit == "s":
            numbers = f"{_duration(self.measured)}, bar {_duration(self.limit)}"
        else:
            numbers = f"{self.measured:.3g} {self.unit}, bar {self.limit:.3g} {self.unit}"
        scatter = "" if self.is_clear else " (within scatter)"
        return f"{self.what}: {numbers}: {self.verdict}{scatter}"


@dataclass(slots=True)
class Report:
    """The results of one benchmark: measured, printed as tables, written as JSON."""

    title: str
    options: Options = field(default_factory=Options)
    results: list[Result] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def run(self, makers: Iterable[Callable[[], Case]], *, clock: Clock | None = None) -> None:
        """Makes and measures one case after the other: only one case's data is alive."""
        console = Console(stderr=True)
        # Refreshed by hand: the bar's own thread would run inside the samples.
        with Progress(
            console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
        ) as progress:
            for make in progress.track(list(makers), description=self.title):
                progress.refresh()
                repeats, budget_s = self.options.repeats, self.options.budget_s
                self.results.append(
                    measure(make(), repeats=repeats, budget_s=budget_s, clock=clock)
                )

    def check_bar(self, name: str, *, size: int | None, system: str, limit_s: float) -> None:
        """Notes whether a measured case stays under `limit_s`; being slow is no error."""
        for result in self.results:
            if (result.name, result.size) == (name, size) and system in result.samples:
                what = f"{_label(name, size)}, {system}"
                self.bars.append(Bar(what, result.samples[system].median, limit_s))

    def check_ratio(
        self, name: str, *, group: str, system: str, limit: float, ours: str | None = None
    ) -> None:
        """Notes whether `ours` takes at most `limit` times as long as `system` in a measured case.

        `ours` is the case's first system if it is not said.
        """
        for result in self.results:
            if (result.name, result.group) == (name, group):
                ratio = result.ratio(system, to=ours)
                if ratio is not None:
                    first = ours or result.systems[0]
                    what = f"{name}, {group}: {first} / {system}"
                    low, high = result.samples[first].quartiles
                    least, most = (limit * time for time in result.samples[system].quartiles)
                    is_clear = high <= least or low > most
                    self.bars.append(Bar(what, 1 / ratio, limit, "x", is_clear))

    def check_count(self, what: str, *, system: str, limit: float, unit: str) -> None:
        """Notes whether the largest count of that name over all cases is at most `limit`."""
        found = [
            (result.counts[what][system], f"{result.name}, {result.group}")
            for result in self.results
            if system in result.counts.get(what, {})
        ]
        if found:
            most, where = max(found)
            self.bars.append(Bar(f"{what}, {system}, at most ({where})", most, limit, unit))

    def growth(self) -> dict[str, dict[str, dict[str, float]]]:
        """Exponents by case name and system: over all sizes, and over the two largest."""
        medians: dict[str, dict[str, dict[int, float]]] = {}
        for result in self.results:
            for system, samples in result.samples.items():
                if result.size is not None:
                    sizes = medians.setdefault(result.name, {}).setdefault(system, {})
                    sizes[result.size] = samples.median
        several = {
            name: {system: _exponents(sizes) for system, sizes in systems.items() if len(sizes) > 1}
            for name, systems in medians.items()
        }
        return {name: systems for name, systems in several.items() if systems}

    def print_table(self, console: Console | None = None) -> None:
        """A table per group of cases, then exact counts, growth exponents and bars."""
        console = console or Console()
        tables: dict[str, Iterable[Row]] = {}
        for group in dict.fromkeys(result.group for result in self.results):
            results = [result for result in self.results if result.group == group]
            tables[group] = _time_rows(results, self.options.repeats)
            tables[f"{group}, exact counts" if group else "exact counts"] = _count_rows(results)
        tables |= {"growth": self._growth_rows()}
        console.print(Text(_LEGEND.format(repeats=self.options.repeats)))
        for name, rows in tables.items():
            if listed := list(rows):
                console.print(_table(f"{self.title}: {name}" if name else self.title, listed))
        for bar in self.bars:
            console.print(Text(str(bar)), soft_wrap=True)

    def _growth_rows(self) -> Iterator[Row]:
        for name, found in self.growth().items():
            cells = {
                system: f"n^{p['exponent']:.2f}\nlast n^{p['last']:.2f}"
                for system, p in found.items()
            }
            yield f"{name}\nfrom {min(p['from'] for p in found.values()):,}", cells

    def finish(self) -> None:
        """Prints everything, and writes it where the command line says."""
        self.print_table()
        if self.options.json is not None:
            self.write_json(self.options.json)

    def write_json(self, path: Path) -> None:
        """Writes everything that was measured, every sample, and facts of the machine."""
        content = {
            "benchmark": self.title,
            "quick": self.options.quick,
            "machine": _machine(),
            "results": [result.as_dict() for result in self.results],
            "growth": self.growth(),
            "bars": [asdict(bar) | {"verdict": bar.verdict} for bar in self.bars],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def _exponents(found: Mapping[int, float]) -> dict[str, float]:
    sizes = sorted(found)
    seconds = [found[size] for size in sizes]
    return {
        "from": sizes[0],
        "to": sizes[-1],
        "exponent": growth_exponent(sizes, seconds),
        "last": growth_exponent(sizes[-2:], seconds[-2:]),
    }


def _machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers; nothing that names the machine or its owner."""
    facts = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
    }
    torch = sys.modules.get("torch")  # a benchmark without torch need not wait for its import
    if torch is not None:
        facts |= {"torch": str(torch.__version__), "torch_threads": torch.get_num_threads()}
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _time_rows(results: Sequence[Result], repeats: int) -> Iterator[Row]:
    for result in results:
        cells = {system: _time_cell(result, system, repeats) for system in result.systems}
        yield _label(result.name, result.size, between="\n"), cells


def _count_rows(results: Sequence[Result]) -> Iterator[Row]:
    for result in results:
        for what, counts in result.counts.items():
            cells = {system: f"{count:,}" for system, count in counts.items()}
            yield f"{_label(result.name, result.size)}\n{what}", cells


def _time_cell(result: Result, system: str, repeats: int) -> str:
    """`1.23 ms ±4%` over `x 12.3`; names the number of samples if it is smaller than asked."""
    if system in result.reasons:
        return result.reasons[system]
    samples, ratio = result.samples[system], result.ratio(system)
    spread = "" if samples.spread is None else f" ±{samples.spread:.0%}"
    notes = [] if ratio is None or system == result.systems[0] else [f"x {_three_digits(ratio)}"]
    if len(samples.seconds) < repeats:
        notes.append(f"n={len(samples.seconds)}")
    return f"{_duration(samples.median)}{spread}\n{' '.join(notes)}"


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("case", no_wrap=True)
    systems = list(dict.fromkeys(system for _, cells in rows for system in cells))
    for system in systems:
        table.add_column(Text(system), justify="right")
    for name, cells in rows:
        table.add_row(Text(name), *(Text(cells.get(system, "-")) for system in systems))
    return table


def _label(name: str, size: int | None, *, between: str = ", ") -> str:
    return name if size is None else f"{name}{between}{size:,}"


def _duration(seconds: float) -> str:
    """Three digits and a unit: `1.23 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"
