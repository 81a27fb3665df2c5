"""The legend of a layout, and the words around its picture."""

from __future__ import annotations

import re
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from tests.viz.drawn import PINWHEEL, drawn, grid, in_boxes

from shardwise.geometry import REDUCE_OPS, Box, Layout, block_cuts, even_cuts

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_the_first_lines_say_what_it_is() -> None:
    layout = grid([[0, 4]], [[0, 1]], terms=[0, 1], pending="sum")
    lines = drawn(layout, title="fc1.weight").splitlines()
    assert lines[0] == "fc1.weight"
    assert lines[1].startswith("Layout((4,): grid 1")
    assert lines[1].endswith("pending sum)")


def test_the_legend_counts_boxes_elements_and_bytes() -> None:
    layout = grid([[0, 5, 7, 8, 8], [0, 600]], [0, 1, 0, 3])
    text = drawn(layout, itemsize=4, world_size=6)
    assert re.search(r"\b0 +2 +3,600 +14\.1 KiB\b", text)
    assert re.search(r"\b1 +1 +1,200 +4\.7 KiB\b", text)
    assert re.search(r"\b3 +1 +empty +0 B\b", text)
    assert sorted(re.findall(r"(\d) +0 +holds nothing +0 B", text)) == ["2", "4", "5"]


def test_long_legends_are_shortened() -> None:
    layout = grid([even_cuts(999, 1000), [0, 4]], range(1000))
    assert "... and 968 more ranks (1 empty)" in drawn(layout)
    assert "... and 968 more ranks (1 empty)" in drawn(layout, width=48)  # no room beside
    text = drawn(layout, world_size=1010)
    assert "... and 968 more ranks (1 empty)" in text
    assert "ranks 1000-1009 hold nothing" in text


def test_ranks_with_elements_have_their_rows_before_empty_ones() -> None:
    cuts = [0] * 40 + [4, 8]  # ranks 0-38 have an empty box each
    text = drawn(grid([cuts], range(41)))
    assert re.search(r"\b39 +1 +4\b", text)
    assert re.search(r"\b40 +1 +4\b", text)
    assert "... and 9 more ranks (9 empty)" in text


@pytest.mark.parametrize(
    ("ranks", "world_size", "words"),
    [
        ([99], 4, "ranks 0-3 hold nothing"),
        ([5, 2], 8, "ranks 0-1, 3-4, 6-7 hold nothing"),
        ([1, 3], 6, "ranks 0, 2, 4-5 hold nothing"),
        (range(1, 19, 2), 20, "11 ranks (0, 2, ..., 18-19) hold nothing"),
        ([2**63 - 1], 10**30, "hold nothing"),
    ],
)
def test_many_ranks_that_hold_nothing_are_one_line(
    ranks: Sequence[int], world_size: int, words: str
) -> None:
    layout = grid([block_cuts(len(ranks), 1)], ranks)
    text = drawn(layout, world_size=world_size)
    assert words in " ".join(text.split())
    assert "holds nothing" not in text
    for rank in ranks:
        assert re.search(rf"\b{rank} +1 +\d+( |$)", text, re.MULTILINE)


def test_the_legend_costs_what_its_holders_cost() -> None:
    tracemalloc.start()
    text = drawn(grid([[0, 2, 4]], [10**9, 2**63 - 1]), world_size=10**15)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert f"ranks 0-{10**9 - 1}, {10**9 + 1}-{10**15 - 1} hold nothing" in " ".join(text.split())
    assert peak < 10**7


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_the_pending_operation_is_explained(op: str) -> None:
    layout = grid([[0, 4]], [[0, 1]], terms=[0, 1], pending=op)
    text = " ".join(drawn(layout).split())
    words = {"sum": "sum", "avg": "average", "max": "maximum", "min": "minimum"}
    assert f"pending {op}: the value is the {words.get(op, op)} of the terms" in text
    assert "replicas" not in text


def test_replicas_are_explained_where_there_are_any() -> None:
    both = grid([[0, 4]], [[0, 1, 2]], terms=[0, 1, 1], pending="sum")
    assert "(replicas)" in drawn(both)
    assert "(replicas)" in drawn(grid([[0, 4]], [[0, 1]]))
    assert "(replicas)" not in drawn(PINWHEEL)


@pytest.mark.parametrize(
    ("ranks", "notes"),
    [
        ([0, 1], ["a,b: the same box on ranks a and b (replicas)"]),
        (range(4), ["a-c: the same box on ranks a to c (replicas)"]),
        (
            [0, 1, 2, 5],
            [
                "a,b: the same box on ranks a and b (replicas)",
                "a-c: the same box on ranks a to c (replicas)",
            ],
        ),
    ],
)
def test_the_note_on_replicas_fits_the_label(ranks: Sequence[int], notes: list[str]) -> None:
    assert re.findall("a[,-].*", drawn(grid([[0, 4]], [ranks]))) == notes


def test_a_label_that_is_cut_short_is_explained() -> None:
    text = drawn(grid([block_cuts(10, 1)], [[i, i + 10] for i in range(10)]), width=48)
    assert in_boxes(text)[0] == "0…"
    assert "a…: on rank a and others" in text


@pytest.mark.parametrize("shape", [(0,), (0, 6), (3, 0, 2)])
def test_a_tensor_without_elements_says_so(shape: tuple[int, ...]) -> None:
    text = drawn(Layout(shape, [Box.whole(shape)], [1]), world_size=3)
    assert "no elements" in text
    assert re.search(r"\b1 +1 +empty", text)
    assert re.search(r"\b2 +0 +holds nothing", text)
    assert not in_boxes(text)


def test_a_layout_without_entries_can_be_drawn() -> None:
    assert "no elements" in drawn(Layout((0, 2), [], []))
