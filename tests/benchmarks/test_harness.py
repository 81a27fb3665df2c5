"""How samples are taken, with a clock that only the systems move."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.harness import (
    Case,
    Clock,
    Samples,
    System,
    growth_exponent,
    measure,
    peak_bytes,
)

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


@pytest.mark.parametrize("count", range(1, 7))
def test_systems_take_turns_and_each_follows_every_other_equally_often(count: int) -> None:
    fake, log = FakeTime(), list[str]()
    names = "abcdef"[:count]
    systems = {name: fake.takes(200 * MS, log=log, name=name) for name in names}
    repeats = count * (1 + count % 2)
    measure(Case("turns", systems), repeats=repeats, budget_s=99.0, clock=fake.clock())
    taken = log[count:]  # after the warm-ups
    rounds = [taken[k : k + count] for k in range(0, len(taken), count)]
    assert len(rounds) == repeats
    assert all(sorted(order) == list(names) for order in rounds)
    assert set(Counter(order[0] for order in rounds).values()) == {repeats // count}
    followed = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(followed) == count * (count - 1)
    assert len(set(followed.values())) <= 1


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
    longer = Case("longer", {"a": fake.takes(10_000)}, sample_s=0.02)
    assert measure(longer, repeats=3, clock=fake.clock()).samples["a"].calls == 2000


def test_all_systems_make_as_many_calls_a_sample_as_the_quickest_needs() -> None:
    fake, log = FakeTime(), list[str]()
    systems = {
        "quick": fake.takes(10_000),
        "slower": fake.takes(700_000, log=log, name="slower"),
        "slow": fake.takes(25 * MS),
        "very slow": fake.takes(300 * MS),
    }
    found = measure(Case("calls", systems), repeats=2, budget_s=99.0, clock=fake.clock())
    calls = {system: taken.calls for system, taken in found.samples.items()}
    assert calls == {"quick": 100, "slower": 100, "slow": 4, "very slow": 1}
    assert log.count("slower") >= 200
    assert found.samples["slower"].seconds == pytest.approx([7e-4] * 2)


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
