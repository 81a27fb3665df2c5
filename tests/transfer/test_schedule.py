"""Rounds: everything moves once, and staging stays under the cap."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise.errors import ArgumentTypeError, ArgumentValueError, PlanError
from shardwise.geometry import Box, Entry, Layout
from shardwise.testing.strategies import layouts, shapes
from shardwise.transfer import Moves, Schedule, TransferPlan, make_schedule, plan_reshard
from shardwise.transfer.moves import NO_GROUP
from shardwise.transfer.schedule import LEAST_CAP

if TYPE_CHECKING:
    from collections.abc import Sequence


@st.composite
def plan_sets(draw: st.DrawFn) -> list[TransferPlan]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(shapes(max_size=5))
        source, target = draw(layouts(shape=shape)), draw(layouts(shape=shape))
        found.append(TransferPlan(source, target, draw(st.sampled_from([1, 2, 4]))))
    return found


def _least_cap(plans: Sequence[TransferPlan]) -> int:
    """Room for one element of every addend of a reduction."""
    return max(plan.itemsize for plan in plans) * 4


def _elements(moves: Sequence[Moves]) -> Counter[tuple[object, ...]]:
    """Every element that moves: from which row to which, in which step."""
    found: Counter[tuple[object, ...]] = Counter()
    for part in moves:
        for k in range(len(part)):
            ends = zip(part.starts[k].tolist(), part.stops[k].tolist(), strict=True)
            rows = int(part.source_row[k]), int(part.target_row[k]), int(part.step[k])
            for point in itertools.product(*(range(a, b) for a, b in ends)):
                found[(point, *rows)] += 1
    return found


@given(plan_sets(), st.integers(0, 100))
def test_rounds_move_every_element_of_the_plan_once(plans: list[TransferPlan], extra: int) -> None:
    schedule = make_schedule(plans, _least_cap(plans) + extra)
    for tensor, plan in enumerate(plans):
        assert _elements([moves[tensor] for moves in schedule.rounds]) == _elements([plan.moves])


def _traffic(schedule: Schedule) -> list[dict[int, int]]:
    """Bytes that each rank sends and receives in each round, counted item by item."""
    found = []
    for moves in schedule.rounds:
        used: dict[int, int] = defaultdict(int)
        for plan, part in zip(schedule.plans, moves, strict=True):
            for k in range(len(part)):
                if part.is_wire[k]:
                    nbytes = int(part.volumes[k]) * plan.itemsize
                    used[int(part.src[k])] += nbytes
                    used[int(part.dst[k])] += nbytes
        found.append(used)
    return found


@given(plan_sets(), st.integers(0, 60))
def test_no_rank_has_more_in_flight_than_the_cap(plans: list[TransferPlan], extra: int) -> None:
    cap = _least_cap(plans) + extra
    schedule = make_schedule(plans, cap)
    traffic = _traffic(schedule)
    assert max((n for used in traffic for n in used.values()), default=0) <= cap
    for rank in range(4):
        assert schedule.staging_bytes(rank) == max((used[rank] for used in traffic), default=0)


@given(plan_sets(), st.integers(0, 60))
def test_addends_of_an_element_arrive_in_one_round(plans: list[TransferPlan], extra: int) -> None:
    schedule = make_schedule(plans, _least_cap(plans) + extra)
    for moves in schedule.rounds:
        for plan, part in zip(plans, moves, strict=True):
            for group in set(part.group.tolist()) - {NO_GROUP}:
                rows = part.group == group
                assert len(set(part.target_row[rows].tolist())) == 1
                assert len({tuple(start) for start in part.starts[rows].tolist()}) == 1
                whole = plan.moves.group == _group_at(plan, part, rows.argmax())
                assert sorted(part.source_row[rows]) == sorted(plan.moves.source_row[whole])


def _group_at(plan: TransferPlan, part: Moves, row: int) -> int:
    """The plan's group that holds the region of a round's move."""
    box = Box(tuple(part.starts[row].tolist()), tuple(part.stops[row].tolist()))
    for k in range(len(plan.moves)):
        region = Box(tuple(plan.moves.starts[k].tolist()), tuple(plan.moves.stops[k].tolist()))
        same = plan.moves.target_row[k] == part.target_row[row]
        if same and plan.moves.group[k] != NO_GROUP and region.contains(box):
            return int(plan.moves.group[k])
    raise AssertionError("no group of the plan holds this region")


@given(plan_sets(), st.integers(0, 60))
def test_spreading_follows_reducing(plans: list[TransferPlan], extra: int) -> None:
    schedule = make_schedule(plans, _least_cap(plans) + extra)
    steps = [{int(s) for part in moves for s in part.step} for moves in schedule.rounds]
    assert [max(found, default=0) for found in steps] == sorted(max(s, default=0) for s in steps)
    assert all(len(found) <= 1 for found in steps)


@given(plan_sets(), st.integers(0, 60))
def test_no_message_waits_while_both_of_its_ends_have_room(
    plans: list[TransferPlan], extra: int
) -> None:
    """What goes on in round k could not have been in an earlier round of its step."""
    cap = _least_cap(plans) + extra
    schedule = make_schedule(plans, cap)
    largest = max(plan.itemsize for plan in plans)
    traffic = _traffic(schedule)
    step_of = [
        max((int(s) for part in moves for s in part.step), default=0) for moves in schedule.rounds
    ]
    for later, moves in enumerate(schedule.rounds):
        for earlier in range(later):
            if step_of[earlier] != step_of[later]:
                continue
            room = {rank: cap - traffic[earlier][rank] for rank in range(4)}
            for part in moves:
                for k in range(len(part)):
                    if part.src[k] != part.dst[k] and part.group[k] == NO_GROUP:
                        ends = room[int(part.src[k])], room[int(part.dst[k])]
                        assert min(ends) < largest


def test_everybody_sends_in_every_round_of_an_all_to_all() -> None:
    shape = (64, 64)
    rows, columns = (shardwise.chunk(dim, ranks=range(4)).layout(shape) for dim in (0, 1))
    schedule = plan_reshard(rows, columns, 4).schedule(max_bytes=1024)
    assert len(schedule.rounds) == 6  # 3 messages of 1 KiB out and 3 in for each rank
    for used in _traffic(schedule):
        assert {used[rank] for rank in range(4)} == {1024}


def test_a_box_larger_than_the_cap_is_cut() -> None:
    source, target = (shardwise.on_rank(rank).layout((100, 30)) for rank in (0, 1))
    plan = plan_reshard(source, target, 4)
    schedule = plan.schedule(max_bytes=1000)
    assert len(schedule.rounds) == 12
    assert plan.peak_bytes(1, max_bytes=1000) == 100 * 30 * 4 + 1000
    assert plan.peak_bytes(0, max_bytes=1000) == 1000


def test_what_goes_straight_into_its_shard_needs_no_staging() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=range(4)).layout((64, 64)) for dim in (0, 1))
    there = plan_reshard(rows, columns, 4)
    assert there.peak_bytes(0) == 64 * 16 * 4 + 3 * 16 * 16 * 4  # packed to be sent
    turned = shardwise.chunk(0, ranks=[1, 2, 3, 0]).layout((64, 64))
    assert plan_reshard(rows, turned, 4).peak_bytes(0) == 64 * 16 * 4


def test_large_reductions_take_rounds_without_being_asked() -> None:
    """Four addends for one rank would be three times the output."""
    shape = (2048, 4096)
    plan = plan_reshard(
        shardwise.partial(ranks=range(4)).layout(shape), shardwise.on_rank(0).layout(shape), 4
    )
    assert LEAST_CAP < 2048 * 4096 * 4
    assert plan.peak_bytes(0) <= 2 * 2048 * 4096 * 4
    assert len(plan.schedule().rounds) > 1


def test_small_reductions_take_one_round_a_step() -> None:
    shape = (16, 16)
    plan = plan_reshard(
        shardwise.partial(ranks=range(4)).layout(shape),
        shardwise.replicate(ranks=range(4)).layout(shape),
        4,
    )
    assert len(plan.schedule().rounds) == 2


@pytest.mark.parametrize(
    ("max_bytes", "kind", "message"),
    [
        (11, PlanError, "max_bytes: expected at least 12, .* got 11. Allow more"),
        (0, ArgumentValueError, "max_bytes: expected a whole number >= 1"),
        (1.5, ArgumentTypeError, "max_bytes: expected a whole number"),
    ],
)
def test_a_cap_that_nothing_fits_under_is_refused(
    max_bytes: int, kind: type[Exception], message: str
) -> None:
    plan = plan_reshard(
        shardwise.partial(ranks=range(4)).layout((8,)), shardwise.on_rank(0).layout((8,)), 4
    )
    with pytest.raises(kind, match=message):
        plan.schedule(max_bytes)


def _least_rounds(schedule: Schedule, cap: int) -> int:
    """Rounds in which the busiest rank of each step is busy from the first to the last."""
    steps: dict[int, Counter[int]] = defaultdict(Counter)
    for moves, used in zip(schedule.rounds, _traffic(schedule), strict=True):
        steps[max(int(part.step.max(initial=0)) for part in moves)].update(used)
    return sum(-(-max(used.values(), default=0) // cap) for used in steps.values())


def _num_receivers(schedule: Schedule) -> list[int]:
    """Ranks to which addends go, for each round of step 0."""
    first_step = [moves for moves in schedule.rounds if not any(p.step.any() for p in moves)]
    parts = [[part[part.is_wire].dst.tolist() for part in moves] for moves in first_step]
    return [len(set(itertools.chain(*ranks))) for ranks in parts]


@pytest.mark.parametrize(("num_ranks", "cap"), [(4, 1 << 12), (8, 1 << 12), (8, 5000), (16, 9999)])
@pytest.mark.parametrize("target", ["chunk(0)", "replicate()"])
def test_everybody_receives_in_nearly_every_round_of_a_sum(
    target: str, num_ranks: int, cap: int
) -> None:
    shape = (1 << 16,)
    source, wanted = (
        shardwise.parse_spec(text, ranks=range(num_ranks)).layout(shape)
        for text in ("partial()", target)
    )
    schedule = TransferPlan(source, wanted, 4).schedule(cap)
    assert len(schedule.rounds) <= 1.5 * _least_rounds(schedule, cap)
    found = _num_receivers(schedule)
    assert found.count(num_ranks) >= 0.9 * len(found)
    assert max(schedule.staging_bytes(rank) for rank in range(num_ranks)) <= cap


def test_a_large_sum_keeps_everybody_busy_without_a_cap() -> None:
    shape = (1 << 26,)  # 256 MiB
    source, target = (
        shardwise.parse_spec(text, ranks=range(4)).layout(shape)
        for text in ("partial()", "chunk(0)")
    )
    plan = TransferPlan(source, target, 4)
    assert _num_receivers(plan.schedule()) == [4] * 8
    assert plan.peak_bytes(0) == (64 + 24) << 20


@pytest.mark.parametrize("divisor", [5, 25])
def test_many_small_sums_are_not_cut_in_every_round(divisor: int) -> None:
    """Of each region other ranks have the addends, so each is a reduction by itself."""
    rng, num_ranks, size, num_boxes = np.random.default_rng(0), 16, 60, 400
    boxes = [Box((k * size,), ((k + 1) * size,)) for k in range(num_boxes)]
    holders = [rng.permutation(num_ranks)[:3].tolist() for _ in boxes]
    entries = [
        Entry(box, rank, term)
        for box, ranks in zip(boxes, holders, strict=True)
        for term, rank in enumerate(ranks)
    ]
    source = Layout.of((num_boxes * size,), entries, pending="sum")
    owners = rng.integers(num_ranks, size=num_boxes).tolist()
    rows = [Entry(box, rank, 0) for box, rank in zip(boxes, owners, strict=True)]
    plan = TransferPlan(source, Layout.of((num_boxes * size,), rows), 4)
    busiest = max(plan.bytes_sent(rank) + plan.bytes_received(rank) for rank in range(num_ranks))
    schedule = plan.schedule(busiest // divisor)
    assert len(schedule.rounds) <= 1.5 * divisor
    num_moves = sum(len(moves) for round_ in schedule.rounds for moves in round_)
    assert num_moves <= len(plan.moves) + 10 * 3 * num_ranks * len(schedule.rounds)  # ten cuts each


@given(st.lists(st.integers(0, 40), min_size=4, max_size=4), st.integers(1, 4), st.integers(0, 99))
def test_uneven_sums_beside_copies_take_few_more_rounds_than_the_least(
    sizes: list[int], num_copies: int, extra: int
) -> None:
    """Two rounds for every one at most, and those that a few leftovers take."""
    shape, cap = (sum(sizes), 8), 200 + extra
    rows = shardwise.chunk(0, sizes=sizes, ranks=range(4)).layout(shape)
    added = TransferPlan(shardwise.partial(ranks=range(4)).layout(shape), rows, 4)
    turned = TransferPlan(shardwise.chunk(1, ranks=range(4)).layout(shape), rows, 2)
    schedule = make_schedule([added, *[turned] * num_copies], cap)
    assert len(schedule.rounds) <= 2 * _least_rounds(schedule, cap) + 3


def test_the_cap_that_an_error_names_is_enough() -> None:
    """Also if the second step needs more than the first."""
    whole = Box.whole((3,))
    halves = Layout.of((3,), [Entry(whole, 0, 0), Entry(whole, 0, 1)], pending="sum")
    one, other = (shardwise.on_rank(rank).layout((1,)) for rank in (3, 2))
    plans = [
        TransferPlan(one, other, 2),
        TransferPlan(halves, shardwise.replicate(ranks=[0, 2]).layout((3,)), 8),
    ]
    for cap in (1, 2, 7):
        with pytest.raises(PlanError, match=f"expected at least 8, .* got {cap}"):
            make_schedule(plans, cap)
    assert len(make_schedule(plans, 8).rounds) == 4


def test_ranks_may_be_any_that_a_layout_may_have() -> None:
    shape, most = (8, 8), 2**63 - 1
    rows, columns = (shardwise.chunk(dim, ranks=[0, most]).layout(shape) for dim in (0, 1))
    plan = TransferPlan(rows, columns, 4)
    assert plan.peak_bytes(most) == plan.peak_bytes(0)
    assert rows.boxes_of(most) == (Box((4, 0), (8, 8)),)
    assert plan.bytes_received(most) == sum(m.nbytes for m in plan.messages(most) if m.dst == most)
    assert len(plan.moves_of(most)) == len(plan.moves_of(0))
    assert len(plan.schedule(max_bytes=64).rounds) == 2
    ends = [0, 2**32, 2**32 - 1]  # their pairs must not be taken for one another's
    source = shardwise.chunk(0, ranks=ends[:2]).layout((16,))
    target = shardwise.on_rank(ends[2]).layout((16,))
    plan = TransferPlan(source, target, 4)
    assert [plan.peak_bytes(rank) for rank in ends] == [0, 0, 64]


@pytest.mark.parametrize("name", ["program", "staging_bytes"])
def test_a_schedule_is_asked_about_ranks(name: str) -> None:
    rows, columns = (shardwise.chunk(dim, ranks=[0, 1]).layout((4, 4)) for dim in (0, 1))
    schedule = plan_reshard(rows, columns, 4).schedule()
    asked = getattr(schedule, name)
    assert asked(np.int64(1)) == asked(1)
    with pytest.raises(ArgumentValueError, match="rank: expected a whole number >= 0, got -1"):
        asked(-1)
    for wrong in ("x", True, [0], None, 0.0):
        with pytest.raises(ArgumentTypeError, match="rank: expected a whole number"):
            asked(wrong)


def test_a_schedule_is_made_of_plans() -> None:
    layout = shardwise.on_rank(0).layout((4,))
    plan = TransferPlan(layout, layout, 4)
    for wrong in ([1, 2], [plan, layout], ["x"], [plan, None]):
        with pytest.raises(ArgumentTypeError, match=r"plans of a schedule: expected TransferPlans"):
            make_schedule(wrong)  # type: ignore[arg-type]  # as an untyped caller may
    for single in (plan, None, 3):
        with pytest.raises(ArgumentTypeError, match="expected a list of TransferPlans"):
            make_schedule(single)  # type: ignore[arg-type]  # as an untyped caller may
    assert len(make_schedule(iter([plan, plan])).plans) == 2  # type: ignore[arg-type]  # no list


def test_elements_of_any_size_share_an_exchange_and_are_aligned() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=[0, 1]).layout((4, 4)) for dim in (0, 1))
    plans = [TransferPlan(rows, columns, itemsize) for itemsize in (3, 2, 1, 12)]
    for max_bytes in (None, 24):
        schedule = make_schedule(plans, max_bytes)
        assert max(n for used in _traffic(schedule) for n in used.values()) <= (max_bytes or 10**9)
        for round_ in schedule.program(0).rounds:
            for message in round_.sends:
                at = 0
                for part in message.parts:
                    itemsize = plans[part.tensor].itemsize
                    assert at % (itemsize & -itemsize) == 0
                    at += part.numel * itemsize
                assert at == message.nbytes
