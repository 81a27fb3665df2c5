from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError, ShardwiseError, TilingError
from shardwise.geometry import Box, Boxes, Entry, Layout
from shardwise.sharding_spec import GridShardingSpec
from shardwise.testing.strategies import boxes, layouts, shapes, specs

if TYPE_CHECKING:
    from collections.abc import Callable

HALVES = [Box((0, 0), (2, 6)), Box((2, 0), (4, 6))]


@given(layouts(), st.randoms(use_true_random=False))
def test_equal_when_the_same_entries_exist_in_any_order(layout: Layout, random: Any) -> None:
    entries = list(layout)
    random.shuffle(entries)
    again = Layout.of(layout.shape, entries, pending=layout.pending)
    assert again == layout
    assert hash(again) == hash(layout)
    assert list(again) == list(layout)
    assert again.fingerprint == layout.fingerprint


@given(layouts())
def test_copies_and_pickles_are_equal(layout: Layout) -> None:
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert copy.deepcopy(layout) is layout
    assert copy.copy(layout) is layout


@given(layouts(), layouts())
def test_different_entries_are_different_layouts(a: Layout, b: Layout) -> None:
    def value(layout: Layout) -> object:
        return layout.shape, layout.pending, Counter(layout)

    assert (a == b) == (value(a) == value(b))


@given(layouts())
def test_every_rank_finds_its_boxes_and_terms(layout: Layout) -> None:
    held = defaultdict(list)
    for box, rank, term in layout:
        held[rank].append((box, term))
    assert layout.ranks == tuple(sorted(held))
    for rank in range(6):
        local = list(zip(layout.boxes_of(rank), layout.terms_of(rank), strict=True))
        assert local == held.get(rank, [])
    expected = {rank: 4 * sum(box.volume for box, _ in local) for rank, local in held.items()}
    assert layout.bytes_per_rank(4) == dict(sorted(expected.items()))


@given(layouts())
def test_replicas_of_a_box_are_its_ranks(layout: Layout) -> None:
    for box, _, term in layout:
        same = {entry.rank for entry in layout if entry.box == box}
        assert layout.replicas_of(box) == tuple(sorted(same))
        of_term = {e.rank for e in layout if (e.box, e.term) == (box, term)}
        assert layout.replicas_of(box, term=term) == tuple(sorted(of_term))


@given(layouts())
def test_bar_has_the_same_boxes_on_the_same_ranks_and_nothing_pending(layout: Layout) -> None:
    bar = layout.bar
    assert bar.pending is None
    assert bar.terms is None
    assert {(e.box, e.rank) for e in bar} == {(e.box, e.rank) for e in layout}
    assert bar.bar is bar
    if layout.pending is None:
        assert bar is layout


@given(layouts())
def test_the_elements_are_all_there(layout: Layout) -> None:
    """Oracle: each element's box is one and the same for all that hold it."""
    holders: dict[tuple[int, ...], set[Box]] = defaultdict(set)
    for box, _, _ in layout:
        for point in np.ndindex(*box.shape):
            holders[tuple(np.add(box.start, point).tolist())].add(box)
    assert len(holders) == math.prod(layout.shape)
    assert all(len(found) == 1 for found in holders.values())


def _is_grid(layout: Layout) -> bool:
    """Oracle: every cell between the cuts is one box."""
    full = {box for box, _, _ in layout if not box.is_empty}
    if not full:
        return False
    cuts = [
        sorted({b.start[d] for b in full} | {b.stop[d] for b in full}) for d in range(layout.ndim)
    ]
    cells = {
        Box(
            tuple(c[i] for c, i in zip(cuts, cell, strict=True)),
            tuple(c[i + 1] for c, i in zip(cuts, cell, strict=True)),
        )
        for cell in np.ndindex(*(len(c) - 1 for c in cuts))
    }
    return full == cells


@given(layouts())
def test_rows_of_one_box_are_found(layout: Layout) -> None:
    same = [len(list(group)) for _, group in itertools.groupby(box for box, _, _ in layout)]
    assert layout.box_rows.tolist() == [0, *itertools.accumulate(same)]


def _grid_layouts(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    """Grids with several cells per dim, some empty, some on several ranks."""
    return specs(shape, kinds=[GridShardingSpec]).map(lambda spec: spec.layout(shape))


@given(layouts() | shapes().flatmap(_grid_layouts))
def test_a_grid_is_found_whenever_there_is_one(layout: Layout) -> None:
    grid = layout.grid
    assert (grid is not None) == _is_grid(layout)
    if grid is None:
        return
    for cell in np.ndindex(*grid.shape):
        box = Box(
            tuple(int(c[i]) for c, i in zip(grid.cuts, cell, strict=True)),
            tuple(int(c[i + 1]) for c, i in zip(grid.cuts, cell, strict=True)),
        )
        rows = [row for row in grid.rows[cell].tolist() if row >= 0]
        assert [layout.boxes[row] for row in rows] == [box] * len(rows)
        expected = sorted(entry.rank for entry in layout if entry.box == box)
        assert [rank for rank in grid.owners[cell].tolist() if rank >= 0] == expected


@given(layouts(replicas=False, addends=False))
def test_a_dim_is_whole_if_no_box_cuts_it(layout: Layout) -> None:
    for dim in range(layout.ndim):
        cut = any(b.shape[dim] != layout.shape[dim] for b, _, _ in layout if not b.is_empty)
        assert layout.is_whole(dim) is layout.is_whole(dim - layout.ndim) is (not cut)


def test_a_pending_operation_with_one_term_per_box_is_none() -> None:
    one = Layout((4, 6), HALVES, [0, 1], terms=[0, 3], pending="sum")
    assert one == Layout((4, 6), HALVES, [0, 1])
    assert (one.pending, one.terms) == (None, None)
    two = Layout((4, 6), [*HALVES, HALVES[1]], [0, 1, 1], terms=[0, 0, 1], pending="avg")
    assert two.pending == "avg"
    assert two != Layout((4, 6), [*HALVES, HALVES[1]], [0, 1, 1], terms=[0, 0, 1], pending="sum")
    assert two.bar == one


def test_replicated_means_the_whole_on_every_rank_and_nothing_pending() -> None:
    whole = Box.whole((3, 2))
    assert Layout((3, 2), [whole] * 3, [0, 5, 2]).is_replicated
    assert Layout.replicated((3, 2), [0, 5, 2]) == Layout((3, 2), [whole] * 3, [0, 5, 2])
    assert not Layout((3, 2), [whole] * 2, [0, 1], terms=[0, 1], pending="sum").is_replicated
    assert not Layout((4, 6), HALVES, [0, 1]).is_replicated


def test_a_rank_may_hold_only_empty_boxes_even_the_same_twice() -> None:
    empty = Box((4, 0), (4, 6))
    layout = Layout((4, 6), [*HALVES, empty, empty], [0, 1, 2, 2])
    assert layout.boxes_of(2) == (empty, empty)
    assert layout.bytes_per_rank(8) == {0: 96, 1: 96, 2: 0}
    assert layout != Layout((4, 6), [*HALVES, empty], [0, 1, 2])
    assert layout.grid is not None


def test_0d_and_empty_tensors_have_layouts() -> None:
    point = Layout((), [Box((), ())] * 2, [3, 1])
    assert (point.ranks, point.boxes_of(3), point.grid is None) == ((1, 3), (Box((), ()),), False)
    nothing = Layout((0, 3), [], [])
    assert (nothing.ranks, len(nothing), nothing.grid) == ((), 0, None)
    assert nothing.is_whole(1)
    assert Layout((0, 3), [Box((0, 0), (0, 3))], [1]).boxes_of(1)[0].volume == 0


def test_words() -> None:
    layout = Layout((4, 6), HALVES, [1, 0])
    assert str(layout) == repr(layout) == "Layout((4, 6): grid 2x1, ranks 0, 1)"
    assert layout.describe(itemsize=4) == (
        "Layout((4, 6): grid 2x1, ranks 0, 1)\n"
        "  rank 0: [2:4, 0:6] (48 bytes)\n"
        "  rank 1: [0:2, 0:6] (48 bytes)"
    )
    many = Layout((100,), [Box((k,), (k + 1,)) for k in range(100)], list(range(100)))
    assert many.describe(max_lines=2).splitlines()[-1] == "  and 98 more ranks"
    assert "ranks 0-99" in str(many)
    assert "pending max" in str(
        Layout((1,), [Box((0,), (1,))] * 2, [0, 1], terms=[0, 1], pending="max")
    )


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_cells_that_are_not_in_line_are_no_grid(moved: int) -> None:
    cuts = [[0, 2, 4], [0, 2, 4], [0, 2, 4]]
    cuts[moved][1] = 3  # in one row of three
    boxes = [
        Box((2 * row, a), (2 * row + 2, b))
        for row in range(3)
        for a, b in itertools.pairwise(cuts[row])
    ]
    layout = Layout((6, 4), boxes, range(6))
    assert layout.grid is None
    turned = [Box(box.start[::-1], box.stop[::-1]) for box in boxes]
    assert Layout((4, 6), turned, range(6)).grid is None


def test_a_hundred_thousand_shards_are_fine() -> None:
    cells = np.stack([axis.ravel() for axis in np.indices((250, 400))], axis=1)
    owners = np.arange(len(cells)) % 1000
    layout = Layout((250, 400), Boxes(cells, cells + 1), owners)
    assert layout.grid is not None
    assert layout.grid.shape == (250, 400)
    assert len(layout.boxes_of(999)) == 100
    assert {layout: 1}[Layout((250, 400), Boxes(cells[::-1], cells[::-1] + 1), owners[::-1])] == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Layout((4, 6), HALVES[:1], [0]), TilingError, r"nothing covers \[2:4, 0:6\]"),
        (lambda: Layout((3, 6), HALVES, [0, 1]), TilingError, r"\[2:4, 0:6\] on rank 1 exceeds"),
        (
            lambda: Layout((4, 6), [*HALVES, Box((1, 0), (3, 6))], [0, 1, 2]),
            TilingError,
            r"\[0:2, 0:6\] on rank 0 and \[1:3, 0:6\] on rank 2 overlap in \[1:2, 0:6\]",
        ),
        (lambda: Layout((4, 6), HALVES, [0]), LayoutError, "owners: expected 2 whole numbers"),
        (lambda: Layout((4, 6), HALVES, [0, -1]), LayoutError, "expected numbers >= 0 and below"),
        (lambda: Layout((4, 6), HALVES, [0.0, 1.0]), LayoutError, "whole numbers"),  # type: ignore[list-item]  # wrong on purpose
        (
            lambda: Layout((4, 6), [*HALVES, HALVES[0]], [0, 1, 0]),
            LayoutError,
            "rank 0 holds box .* twice",
        ),
        (
            lambda: Layout((4, 6), HALVES, [0, 1], terms=[0, 1]),
            LayoutError,
            "expected both or neither, got terms",
        ),
        (lambda: Layout((4, 6), HALVES, [0, 1], pending="xor"), LayoutError, "one of .*'sum'"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Layout((4, 6), HALVES, [0, 1]).is_whole(2), LayoutError, "one of the 2 dims"),
        (lambda: Layout((4, -6), HALVES, [0, 1]), ShardwiseError, "numbers >= 0"),
        (lambda: Layout((2**40, 2**40), [], []), ShardwiseError, r"fewer than 2\*\*63 elements"),
    ],
)
def test_what_is_no_layout_is_refused(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_layout_cannot_change() -> None:
    layout = Layout((4, 6), HALVES, [0, 1])
    with pytest.raises(LayoutError, match="A Layout is a value"):
        layout.shape = (1,)
    with pytest.raises(LayoutError, match="A Layout is a value"):
        del layout.shape
    with pytest.raises(ValueError, match="read-only"):
        layout.owners[0] = 1


def test_a_box_of_other_dims_is_no_box_of_the_layout() -> None:
    layout = Layout((4, 6), HALVES, [0, 1])
    with pytest.raises(LayoutError, match=r"a Box of 2 dims, got \[0:4\]"):
        layout.replicas_of(Box((0,), (4,)))
    with pytest.raises(TypeError, match="rank: expected a whole number, got str: '0'"):
        layout.boxes_of("0")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="itemsize: expected a whole number >= 1, got 0"):
        layout.bytes_per_rank(0)


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_copies_cannot_change_either(copied: Callable[[Any], Any]) -> None:
    layout = Layout((4, 6), HALVES, [0, 1])
    assert layout.grid is not None
    again, boxes, grid = copied(layout), copied(layout.boxes), copied(layout.grid)
    arrays = (again.boxes.starts, again.owners, boxes.starts, boxes.stops, grid.owners, *grid.cuts)
    assert not any(array.flags.writeable for array in arrays)


def test_the_callers_arrays_do_not_reach_into_a_layout() -> None:
    base = np.array([[0], [2]])
    view = base.view()
    view.setflags(write=False)
    layout = Layout((4,), Boxes(view, np.array([[2], [4]])), [0, 1])
    base[0, 0] = 1
    assert layout.boxes_of(0) == (Box((0,), (2,)),)


def test_forgotten_operations_and_terms_are_refused() -> None:
    whole = Box((0,), (4,))
    with pytest.raises(LayoutError, match=r"entries with terms.*Pass pending='sum'"):
        Layout.of((4,), [Entry(whole, 0, 0), Entry(whole, 1, 1)])
    with pytest.raises(LayoutError, match="both or neither, got pending 'sum'"):
        Layout((4,), [whole, whole], [0, 1], pending="sum")
    with pytest.raises(LayoutError, match="below 2"):
        Layout((4,), [whole], np.array([2**63 + 1], np.uint64))
    with pytest.raises(LayoutError, match="whole numbers"):
        Layout((4,), [whole], [True])


def test_the_fingerprint_tells_empty_boxes_apart() -> None:
    layouts = [Layout((4, 6), [*HALVES, Box((4, 0), (4, width))], [0, 1, 2]) for width in (0, 6)]
    assert layouts[0].fingerprint != layouts[1].fingerprint


def test_layouts_do_not_equal_other_things() -> None:
    assert Layout((4, 6), HALVES, [0, 1]) != "layout"
    assert Entry(HALVES[0], 1) == (HALVES[0], 1, 0)


@given(shapes(), st.data())
def test_a_missing_piece_is_always_noticed(shape: tuple[int, ...], data: st.DataObject) -> None:
    layout = data.draw(layouts(shape=shape, replicas=False, addends=False))
    lost = data.draw(boxes(shape))
    kept = [entry for entry in layout if (entry.box & lost) is None]
    if len(kept) < len(layout):
        with pytest.raises(TilingError, match="nothing covers"):
            Layout.of(shape, kept)


def test_a_grid_of_which_one_cell_has_most_owners_takes_no_padding() -> None:
    """Its factored form would be a thousand times as large as the layout."""
    size = 2000
    cells = [Box((k,), (k + 1,)) for k in range(size)]
    layout = Layout((size,), [*cells, *[cells[0]] * (size - 1)], [*range(size), *range(1, size)])
    assert layout.grid is None
    even = Layout((4,), [Box((k,), (k + 1,)) for k in (0, 0, 1, 2, 3)], [0, 1, 0, 0, 0])
    assert even.grid is not None


def test_a_listing_tells_layouts_that_look_alike_apart() -> None:
    one = Layout.of((4,), [Entry(Box((0,), (1,)), 2), Entry(Box((1,), (4,)), 0)])
    assert one.listing == "[0:1] on 2, [1:4] on 0"
    both = [Entry(Box((0,), (4,)), 0, 0), Entry(Box((0,), (4,)), 1, 1)]
    assert Layout.of((4,), both, pending="sum").listing == "[0:4] on 0 term 0, [0:4] on 1 term 1"
    many = Layout.of((300,), [Entry(Box((k,), (k + 1,)), 0) for k in range(300)])
    assert many.listing.endswith("[255:256] on 0, ...")
