"""Plans against brute force, element by element."""

from __future__ import annotations

import itertools
import math
import pickle
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.transfer.plans import plans, small_sums_cut

import shardwise
from shardwise import transfer
from shardwise.errors import ArgumentTypeError, ArgumentValueError, PlanError
from shardwise.geometry import Box, Boxes, Entry, Layout
from shardwise.transfer.moves import NO_GROUP
from shardwise.transfer.plan import TransferPlan
from shardwise.transfer.plan_cache import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.geometry import ReduceOp


def _points(box: Box) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True)))


def _held(layout: Layout) -> dict[int, Counter[tuple[int, ...]]]:
    """rank -> the elements that it holds, and how often."""
    held: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for box, rank, _ in layout:
        held[rank].update(_points(box))
    return held


@given(plans(addends=False))
def test_a_rank_receives_what_it_does_not_hold_and_nothing_else(plan: TransferPlan) -> None:
    before, after = _held(plan.source), _held(plan.target)
    missing = {rank: len(after[rank].keys() - before[rank].keys()) for rank in range(4)}
    for rank in range(4):
        assert plan.bytes_received(rank) == missing[rank] * plan.itemsize
    assert plan.total_bytes == plan.lower_bound == sum(missing.values()) * plan.itemsize


@given(plans())
def test_plans_meet_the_lower_bound_with_addends_too(plan: TransferPlan) -> None:
    assert plan.total_bytes == plan.lower_bound
    assert plan.total_bytes == sum(map(plan.bytes_sent, range(4)))
    assert plan.total_bytes == sum(map(plan.bytes_received, range(4)))


@given(plans(), st.booleans())
def test_moves_give_every_target_element_the_full_value_once(
    plan: TransferPlan, is_cut: bool
) -> None:
    """The moves carried out on sets of (element, term), with plain Python."""
    if is_cut:
        with small_sums_cut(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer.reductions, "_LEAST_PART", 1)
            assert plan.moves is plan.moves
    assert plan.total_bytes == plan.lower_bound
    source, target, moves = plan.source, plan.target, plan.moves
    entries = list(target)
    got: list[dict[tuple[int, ...], Counter[int]]] = [{} for _ in entries]
    terms = source.terms if source.terms is not None else np.zeros(len(source), np.int64)
    assert (np.diff(moves.step) >= 0).all()
    for k in range(len(moves)):
        row, from_row = int(moves.target_row[k]), int(moves.source_row[k])
        assert moves.dst[k] == target.owners[row]
        box = Box(tuple(moves.starts[k]), tuple(moves.stops[k]))
        giver = (source, target)[int(moves.step[k])]
        assert moves.src[k] == giver.owners[from_row]
        assert giver.boxes[from_row].contains(box)
        assert entries[row].box.contains(box)
        for point in _points(box):
            if moves.step[k] == 1:
                assert point not in got[row]
                got[row][point] = got[from_row][point]
            else:
                assert moves.group[k] != NO_GROUP or point not in got[row]
                got[row].setdefault(point, Counter())[int(terms[from_row])] += 1
    value = defaultdict(set)
    for entry in source:
        for point in _points(entry.box):
            value[point].add(entry.term)
    for box_rows in itertools.pairwise(target.box_rows.tolist()):
        rows = range(*box_rows)
        for point in _points(entries[rows[0]].box):
            by_term = {entries[row].term: got[row].get(point, Counter()) for row in rows}
            for row in rows:  # replicas of a term are equal
                assert got[row].get(point, Counter()) == by_term[entries[row].term]
            total = sum(by_term.values(), Counter())
            assert total == Counter(value[point])


@given(plans())
def test_a_sum_has_the_bytes_of_the_bound_in_the_design(plan: TransferPlan) -> None:
    """n(t + d - 2) or n(t + d - 1), where every rank holds one term at most and nobody all."""
    if plan.target.pending is not None:
        return
    held: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    wanted: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for box, rank, term in plan.source:
        for point in _points(box):
            held[point].append((rank, term))
    for box, rank, _ in plan.target:
        for point in _points(box):
            wanted[point].add(rank)
    bound = 0
    for point, holders in held.items():
        ranks, terms = {rank for rank, _ in holders}, {term for _, term in holders}
        if len(ranks) != len(holders):
            return
        if len(terms) == 1:
            bound += len(wanted[point] - ranks)
        else:
            bound += len(terms) + len(wanted[point]) - (2 if ranks & wanted[point] else 1)
    assert plan.total_bytes == bound * plan.itemsize


_Terms = dict[int, set[int]]  # term -> its ranks


def _fewest_to_cover(held: dict[int, set[int]], *, within: set[int]) -> int:
    """How few ranks hold all terms, one of `within` among them."""
    terms = set.union(*held.values())
    return next(
        size
        for size in range(1, len(held) + 1)
        for ranks in itertools.combinations(held, size)
        if within & set(ranks) and set.union(*(held[rank] for rank in ranks)) == terms
    )


def _fewest_to_one_term(addends: _Terms, wanted: set[int]) -> int:
    """How often an element has to change ranks to be reduced and be on all ranks of `wanted`."""
    held: dict[int, set[int]] = defaultdict(set)
    for term, ranks in addends.items():
        for rank in ranks:
            held[rank].add(term)
    if complete := {rank for rank in wanted if held.get(rank, set()) == addends.keys()}:
        return len(wanted - complete)
    counts = [_fewest_to_cover(held, within=set(held)) + len(wanted) - 1]
    if able := wanted & held.keys():
        counts.append(_fewest_to_cover(held, within=able) + len(wanted) - 2)
    return min(counts)


def _fewest(addends: _Terms, wanted: _Terms, *, may_part: bool) -> int:
    """The same if the target is pending, too: all ways to deal out addends to its terms."""
    ways = (
        itertools.product(wanted, repeat=len(addends))
        if may_part
        else ((to,) * len(addends) for to in wanted)
    )
    return min(
        sum(
            _fewest_to_one_term(
                {term: addends[term] for term, its in zip(addends, way, strict=True) if its == to},
                wanted[to],
            )
            for to in set(way)
        )
        for way in ways
    )


def _one_element(terms: _Terms, pending: ReduceOp) -> Layout:
    box = Box((0,), (1,))
    entries = [Entry(box, rank, term) for term, ranks in terms.items() for rank in ranks]
    return Layout.of((1,), entries, pending=pending)


_terms_of = st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=5)


@given(
    _terms_of,
    st.lists(st.sets(st.integers(0, 4), min_size=1), max_size=3, min_size=1),
    st.booleans(),
)
@example([{1, 3}, {1}], [{2, 3}, {0, 1}], True)  # [{0}, {3}] apart cost 3
@example([{3}, {0}], [{1, 2}, {0, 1}], True)
@example([{2, 3}, {4}, {2, 4}, {3}, {0}], [{1}, {2}, {0}], False)
def test_sums_move_the_fewest_bytes_of_all_ways(
    sources: list[set[int]], targets: list[set[int]], is_same: bool
) -> None:
    addends, wanted = dict(enumerate(sources)), dict(enumerate(targets))
    target = _one_element(wanted, "sum" if is_same else "max")
    plan = TransferPlan(_one_element(addends, "sum"), target, 1)
    may_part = is_same and len(wanted) > 1 and len(addends) > 1
    expected = _fewest(addends, wanted, may_part=may_part)
    assert plan.total_bytes == plan.lower_bound == expected


def test_the_bound_is_that_of_the_plan_where_not_all_ways_are_tried() -> None:
    """Of the second element others have much to send, which must not change how many send it."""
    holders = [[0, 2, 6], [4, 7, 10], [3, 8, 9, 11], [10], [5, 7], [3, 5], [9]]
    source = Layout.of(
        (2,),
        [
            Entry(Box((low,), (low + 1,)), rank, term)
            for low in (0, 1)
            for term, ranks in enumerate(holders)
            for rank in ranks
        ],
        pending="sum",
    )
    plan = TransferPlan(source, shardwise.on_rank(20).layout((2,)), 4)
    assert plan.total_bytes == plan.lower_bound


@pytest.mark.parametrize("spec", ["chunk(0)", "replicate()"])
def test_addends_in_many_replicas_are_planned(spec: str) -> None:
    """A gradient that is partial over one axis of a mesh and replicated over the other."""
    num_terms, num_replicas, shape = 64, 4, (4096,)
    ranks, whole = range(num_terms * num_replicas), Box.whole(shape)
    entries = [Entry(whole, rank, rank // num_replicas) for rank in ranks]
    source = Layout.of(shape, entries, pending="sum")
    plan = TransferPlan(source, shardwise.parse_spec(spec, ranks=ranks).layout(shape), 4)
    spread = len(ranks) - 1 if spec == "replicate()" else 0
    assert plan.lower_bound == plan.total_bytes == 4 * shape[0] * (num_terms - 1 + spread)


def test_addends_go_together_where_that_saves_the_spreading() -> None:
    source = _one_element({0: {3}, 1: {0}}, "sum")
    target = _one_element({0: {1, 2}, 1: {0, 1}}, "sum")
    plan = plan_reshard(source, target, 1)
    assert plan.total_bytes == plan.lower_bound == 2  # 3 if each took the term that is nearest


@given(plans(), st.integers(0, 4))
def test_a_ranks_part_is_the_same_alone_and_cut_from_the_whole(
    plan: TransferPlan, rank: int
) -> None:
    alone = plan.moves_of(rank)
    whole = TransferPlan(plan.source, plan.target, plan.itemsize)
    _ = whole.moves
    cut = whole.moves_of(rank)
    for name in ("starts", "stops", "source_row", "target_row", "src", "dst", "step", "group"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(cut, name))


def _grid(shape: tuple[int, int], parts: tuple[int, int], num_ranks: int) -> Layout:
    splits = [shardwise.geometry.even_cuts(n, k) for n, k in zip(shape, parts, strict=True)]
    cells = itertools.product(*(itertools.pairwise(cuts.tolist()) for cuts in splits))
    boxes = [Box((a, c), (b, d)) for (a, b), (c, d) in cells]
    return Layout(shape, boxes, [k % num_ranks for k in range(len(boxes))])


def test_one_ranks_part_of_a_grid_plan_does_not_make_the_whole() -> None:
    source, target = _grid((1000, 1000), (50, 40), 500), _grid((1000, 1000), (20, 25), 500)
    plan = TransferPlan(source, target, 4)
    messages = plan.messages(7)
    assert messages
    assert {"regions", "moves"}.isdisjoint(plan.__dict__)
    assert all(7 in (message.src, message.dst) for message in messages)
    assert sum(m.nbytes for m in messages if m.src == 7) == plan.bytes_sent(7)


# -- senders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_wanting", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_holders", [2, 3, 4])
def test_replicas_share_the_sending_evenly(num_holders: int, num_wanting: int) -> None:
    shape = (1024, 512)
    source = shardwise.replicate(ranks=range(num_holders)).layout(shape)
    wanting = range(num_holders, num_holders + num_wanting)
    target = shardwise.replicate(ranks=wanting).layout(shape)
    plan = plan_reshard(source, target, 4)
    sent = [plan.bytes_sent(rank) for rank in range(num_holders)]
    mean = num_wanting * 1024 * 512 * 4 / num_holders
    assert sum(sent) == plan.lower_bound == num_wanting * 1024 * 512 * 4
    assert max(sent) <= 1.25 * mean


def test_a_holder_that_is_busy_elsewhere_sends_less() -> None:
    top, bottom = Box((0, 0), (512, 512)), Box((512, 0), (1024, 512))
    source = Layout.of((1024, 512), [Entry(top, 0), Entry(bottom, 0), Entry(bottom, 1)])
    target = shardwise.replicate(ranks=[2]).layout((1024, 512))
    plan = plan_reshard(source, target, 4)
    assert plan.bytes_sent(0) == plan.bytes_sent(1) == 512 * 512 * 4


def test_small_pieces_are_not_split_among_their_holders() -> None:
    source = shardwise.replicate(ranks=[0, 1]).layout((16, 16))
    plan = plan_reshard(source, shardwise.on_rank(2).layout((16, 16)), 4)
    assert len(plan.messages(2)) == 1


def _sum_to_all(shape: tuple[int, ...], itemsize: int) -> TransferPlan:
    return plan_reshard(
        shardwise.partial(ranks=range(4)).layout(shape),
        shardwise.replicate(ranks=range(4)).layout(shape),
        itemsize,
    )


def test_addends_are_reduced_on_all_destinations_alike() -> None:
    shape = (640, 8)
    plan = _sum_to_all(shape, 4)
    assert plan.total_bytes == math.prod(shape) * 4 * (4 + 4 - 2)
    assert len({plan.bytes_sent(rank) for rank in range(4)}) == 1
    assert len({plan.bytes_received(rank) for rank in range(4)}) == 1


def test_a_small_sum_is_reduced_on_one_destination() -> None:
    shape = (64, 8)
    plan = _sum_to_all(shape, 4)
    assert plan.total_bytes == plan.lower_bound == math.prod(shape) * 4 * (4 + 4 - 2)
    messages = [message for rank in range(4) for message in plan.messages(rank)]
    assert len(messages) == 2 * 6  # which both ends name; 24 if it were cut
    # Thousands of them in one exchange are one plan of long elements, which is cut.
    assert len({_sum_to_all(shape, 4 * 4096).bytes_sent(rank) for rank in range(4)}) == 1


def test_scalars_that_are_pending_take_turns_as_to_who_reduces() -> None:
    boxes = [Box((k,), (k + 1,)) for k in range(8)]
    entries = [Entry(box, rank, rank) for box in boxes for rank in range(4)]
    source = Layout.of((8,), entries, pending="sum")
    plan = plan_reshard(source, shardwise.replicate(ranks=range(4)).layout((8,)), 4)
    assert {plan.bytes_received(rank) for rank in range(4)} == {plan.total_bytes // 4}


def _addends(shape: tuple[int, int], ranks_of_terms: list[list[int]]) -> Layout:
    whole = Box.whole(shape)
    entries = [Entry(whole, rank, t) for t, ranks in enumerate(ranks_of_terms) for rank in ranks]
    return Layout.of(shape, entries, pending="sum")


@pytest.mark.parametrize(
    ("ranks_of_terms", "wanting", "sent"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [8], [1 / 4] * 8),
        ([[0, 1], [2, 3]], [0], [0, 0, 1 / 2, 1 / 2]),
        ([[0, 1], [2, 3, 4]], [5], [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3]),
        ([[0, 1], [0, 1]], [2], [1 / 2, 1 / 2]),
        ([[0, 1], [0, 1]], [0, 1, 2], [1 / 2, 1 / 2, 0]),
        ([[0, 1], [0, 1]], [0, 1, 2, 3, 4], [3 / 2, 3 / 2, 0, 0, 0]),
        ([[0, 1], [2, 3]], [0, 1, 2, 3], [1, 1, 1, 1]),
    ],
)
def test_replicas_of_addends_share_the_sending(
    ranks_of_terms: list[list[int]], wanting: list[int], sent: list[float]
) -> None:
    shape = (1200, 1024)
    plan = plan_reshard(
        _addends(shape, ranks_of_terms), shardwise.replicate(ranks=wanting).layout(shape), 4
    )
    nbytes = math.prod(shape) * 4
    assert [plan.bytes_sent(rank) / nbytes for rank in range(len(sent))] == pytest.approx(sent)
    assert plan.total_bytes == plan.lower_bound
    terms = plan.source.terms
    assert terms is not None
    groups = np.unique(plan.moves.group[plan.moves.group != NO_GROUP])
    assert len(groups)
    for group in groups:
        rows = plan.moves.source_row[plan.moves.group == group]
        assert terms[rows].tolist() == list(range(len(ranks_of_terms)))


def test_small_addends_and_fair_loads_are_not_cut() -> None:
    small = _addends((16, 16), [[0, 1], [2, 3]])
    assert plan_reshard(small, shardwise.on_rank(4).layout((16, 16)), 4).num_messages == 2
    large = _addends((1024, 1024), [[0, 1], [2, 3]])
    for wanting, num_messages in (([4], 4), ([4, 5], 4 + 2)):
        target = shardwise.replicate(ranks=wanting).layout((1024, 1024))
        assert plan_reshard(large, target, 4).num_messages == num_messages


# -- the value -------------------------------------------------------------------------------


def test_a_plan_is_a_value() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=[0, 1]).layout((6, 8)) for dim in (0, 1))
    plan = TransferPlan(rows, columns, 4)
    assert plan == TransferPlan(rows, columns, 4) == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(TransferPlan(rows, columns, 4))
    assert plan != TransferPlan(columns, rows, 4)
    assert plan != 3
    with pytest.raises(PlanError, match=r"TransferPlan.itemsize cannot be set\. A plan is a value"):
        plan.itemsize = 2


def test_layouts_of_two_shapes_have_no_plan() -> None:
    source, target = (shardwise.replicate(ranks=[0]).layout(shape) for shape in ((4, 6), (6, 4)))
    with pytest.raises(PlanError, match=r"expected two of one shape, the source's \(4, 6\), got"):
        plan_reshard(source, target, 4)


def test_more_bytes_than_can_be_counted_are_refused() -> None:
    layout = shardwise.replicate(ranks=[0, 1]).layout((2**59,))
    with pytest.raises(PlanError, match=r"2\*\*63 bytes on all ranks .* Check the shape: no ranks"):
        TransferPlan(layout, layout, 8)


def test_a_spec_in_place_of_a_layout_gets_a_hint() -> None:
    layout = shardwise.replicate(ranks=[0]).layout((4,))
    with pytest.raises(ArgumentTypeError, match=r"target of a plan: .*Call spec.layout\(shape\)"):
        plan_reshard(layout, shardwise.replicate(ranks=[0]), 4)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentValueError, match="itemsize"):
        plan_reshard(layout, layout, 0)


def test_messages_are_boxes_by_sender_and_receiver() -> None:
    rows, columns = (shardwise.chunk(dim, ranks=[0, 1]).layout((4, 4)) for dim in (0, 1))
    sent, received = plan_reshard(rows, columns, 4).messages(0)
    assert (sent.src, sent.dst, sent.nbytes) == (0, 1, 16)
    assert isinstance(sent.boxes, Boxes)
    assert list(sent.boxes) == [Box((0, 2), (2, 4))]
    assert list(received.boxes) == [Box((2, 0), (4, 2))]


def test_equal_layouts_move_nothing() -> None:
    layout = shardwise.partial(ranks=[0, 2]).layout((3, 3))
    plan = plan_reshard(layout, layout, 4)
    assert plan.total_bytes == plan.lower_bound == 0
    assert plan.messages(0) == ()


def test_addends_and_terms_of_a_pending_target_are_told_apart_from_region_to_region() -> None:
    """Of one region two addends go to three terms, of the other three of the same to two."""
    first, second = Box((0,), (1,)), Box((1,), (2,))
    entries = [(first, 0), (first, 1), (second, 0), (second, 1), (second, 2)]
    wanted = [(first, 2), (first, 3), (first, 4), (second, 3), (second, 4)]
    source, target = (
        Layout.of((2,), [Entry(box, rank, rank) for box, rank in listed], pending="sum")
        for listed in (entries, wanted)
    )
    plan = TransferPlan(source, target, 4)
    assert plan.total_bytes == plan.lower_bound == 4 * (2 + 3)
