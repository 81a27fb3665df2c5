"""The one harness of all benchmarks: systems in turns, medians with spread, exact counts.

[Note: fair timing] The systems of a case run in turns. The order changes every round, such that
each system goes first and follows every other equally often: neither a noisy moment nor what the
one before has left in caches and memory favours anybody. Garbage collection is off while the clock
runs. Short calls are repeated until a sample takes a millisecond, or longer if the case says so.
All systems make as many in a sample as the quickest needs: the first call finds caches cold, and on
several ranks any call may stall until a rank that it waits for gets a processor, so with other
numbers systems would pay for different things. One that is so slow that this would take long makes
as many as fit. A system that has spent its budget drops out with the samples it has; if its warm-up
alone spends the budget, that run is its sample.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

System = Callable[[], object]  # one run
_SAMPLE_S = 1e-3  # a shorter sample is mostly the clock's own error
_LONG_S = 0.1  # of a sample, which is long enough whatever the others do


@dataclass(frozen=True, slots=True)
class Case:
    """One task and the systems that do it. The first system is ours; ratios refer to it."""

    name: str
    systems: Mapping[str, System | str | None]  # a reason or None: this system does not do it
    size: int | None = None  # cases of one name and several sizes get a growth exponent
    group: str = ""  # the table in which the case is shown
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # [what][system]
    prepare: System | None = None  # untimed, before every sample, which is then one call
    sample_s: float = _SAMPLE_S  # that a sample of several calls lasts at least


@dataclass(frozen=True, slots=True)
class Clock:
    """How a sample is timed. The default suits one process on the CPU.

    On a GPU, `settle` is `torch.cuda.synchronize`. With several ranks, `line_up` is a barrier and
    `agree` the maximum over ranks: then all ranks take the same samples in the same order.
    """

    now: Callable[[], int] = time.perf_counter_ns
    line_up: System = lambda: None  # untimed, before a sample
    settle: System = lambda: None  # timed, at the end of a sample
    agree: Callable[[float], float] = lambda seconds: seconds

    def time(self, run: System, calls: int, prepare: System | None) -> float:
        """Seconds that `calls` calls take."""
        if prepare is not None:
            prepare()
        self.line_up()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            start = self.now()
            for _ in itertools.repeat(None, calls):
                run()
            self.settle()
            elapsed = self.now() - start
        finally:
            if was_enabled:
                gc.enable()
        return self.agree(elapsed / 1e9)


@dataclass(slots=True)
class Samples:
    """Seconds per call of one system in one case."""

    seconds: list[float] = field(default_factory=list)
    calls: int = 1  # in each sample
    is_warm: bool = True  # False: the first run was so slow that it is the only sample

    @property
    def spent_s(self) -> float:
        return sum(self.seconds) * self.calls

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float | None:
        """Interquartile range as a share of the median; None for a single sample."""
        if len(self.seconds) < 2:
            return None
        low, high = self.quartiles
        return (high - low) / self.median

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the samples lie between them."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of a case; holds none of the case's data."""

    name: str
    size: int | None
    group: str
    systems: tuple[str, ...]  # ours is the first
    samples: Mapping[str, Samples]
    reasons: Mapping[str, str]  # of the systems without samples
    counts: Mapping[str, Mapping[str, int]]

    def ratio(self, system: str, *, to: str | None = None) -> float | None:
        """How many times as long as `to`, or else ours, `system` takes."""
        ours, other = self.samples.get(to or self.systems[0]), self.samples.get(system)
        return other.median / ours.median if ours and other else None

    def as_dict(self) -> dict[str, Any]:
        measured = {
            system: {
                "median_s": samples.median,
                "spread": samples.spread,
                "ratio_to_ours": self.ratio(system),
                "calls_per_sample": samples.calls,
                "is_warm": samples.is_warm,
                "samples_s": samples.seconds,
            }
            for system, samples in self.samples.items()
        }
        named = {"case": self.name, "size": self.size, "group": self.group}
        found = {"measured": measured, "not_run": self.reasons, "counts": self.counts}
        return named | {"ours": self.systems[0]} | found


def measure(
    case: Case, *, repeats: int = 9, budget_s: float = 0.5, clock: Clock | None = None
) -> Result:
    """Samples of all systems of `case`, at most `repeats` each. [Note: fair timing]"""
    clock = clock or Clock()
    runs = {system: run for system, run in case.systems.items() if callable(run)}
    warmed = {system: _warm_up(run, case, clock, budget_s) for system, run in runs.items()}
    samples = {system: taken for system, (taken, _) in warmed.items()}
    most = max((taken.calls for taken in samples.values()), default=1)
    for taken, seconds in warmed.values():
        taken.calls = max(taken.calls, min(most, int(_LONG_S / max(seconds, 1e-9))))
    names = list(runs)
    for order in itertools.islice(itertools.cycle(_orders(len(names))), repeats):
        for system in (names[place] for place in order):
            taken = samples[system]
            if taken.spent_s < budget_s:
                elapsed = clock.time(runs[system], taken.calls, case.prepare)
                taken.seconds.append(elapsed / taken.calls)
    reasons = {system: str(run or "-") for system, run in case.systems.items() if not callable(run)}
    systems = tuple(case.systems)
    return Result(case.name, case.size, case.group, systems, samples, reasons, case.counts)


def _orders(count: int) -> list[list[int]]:
    """Orders in which each number is first, and follows each other one, equally often.

    Those that E. J. Williams gave: 0, 1, n - 1, 2, n - 2, ..., and the same counted on from every
    other number; of an odd n also backwards.
    """
    zigzag = [-(k // 2) % count if k % 2 == 0 else k // 2 + 1 for k in range(count)]
    found = [[(place + start) % count for place in zigzag] for start in range(count)]
    return found if count % 2 == 0 else found + [order[::-1] for order in found]


def _warm_up(run: System, case: Case, clock: Clock, budget_s: float) -> tuple[Samples, float]:
    """No samples yet, but the number of calls that one needs, and the seconds that a call takes."""
    elapsed = clock.time(run, 1, case.prepare)
    if elapsed >= budget_s:
        return Samples([elapsed], is_warm=False), elapsed
    # A first run may be slow because it is the first, but not a hundred times.
    if case.prepare is not None or elapsed >= 100 * case.sample_s:
        return Samples(), elapsed
    calls = 1
    while (elapsed := clock.time(run, calls, None)) < case.sample_s:
        calls = max(2 * calls, math.ceil(calls * case.sample_s / max(elapsed, 1e-9)))
    return Samples(calls=calls), elapsed / calls


def peak_bytes(run: System) -> int:
    """Most bytes that one run holds at a time beyond what was there, in Python and numpy."""
    run()  # caches that the first run fills are not the run's own
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def growth_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Least-squares slope of log seconds over log size: 1 is linear, 2 quadratic."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
