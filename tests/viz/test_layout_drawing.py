"""Pictures of layouts: what is written, where, how large, and in which colours."""

from __future__ import annotations

import io
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.viz.drawn import PINWHEEL, any_layout, drawn, grid, in_boxes

from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.geometry import Box, Layout, block_cuts, even_cuts
from shardwise.viz import draw_layout, print_layout
from shardwise.viz.bands import scaled_cells
from shardwise.viz.colors import rank_color, rank_keys
from shardwise.viz.labels import box_label


def cells_by_rank(layout: Layout, **options: Any) -> Counter[int]:
    """Cells of the picture in each rank's colour."""
    console = Console(width=80, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    colors = {rank_color(rank): rank for rank in layout.ranks}
    count: Counter[int] = Counter()
    for segment in console.render(draw_layout(layout, **options)):
        if segment.style is not None and segment.style.bgcolor in colors:
            count[colors[segment.style.bgcolor]] += len(segment.text)
    swatches = dict.fromkeys(layout.ranks, len("rank"))
    return count - Counter(swatches)


# -- the picture -------------------------------------------------------------------------------


def test_irregular_boxes_have_the_right_walls_labels_and_offsets() -> None:
    picture = [line[:18].rstrip() for line in drawn(PINWHEEL, height=6).splitlines()[1:]]
    assert picture == [
        "  0    2    4    6",
        "0 ┌─────────┬────┐",
        "  │    0    │    │",
        "  │         │    │",
        "2 ├────┬────┤ 1  │",
        "  │    │ 4  │    │",
        "  │    │    │    │",
        "4 │ 3  ├────┴────┤",
        "  │    │    2    │",
        "  │    │         │",
        "6 └────┴─────────┘",
    ]


@pytest.mark.parametrize(
    ("layout", "labels"),
    [
        (grid([even_cuts(8, 4), [0, 6]], range(4)), ["0", "1", "2", "3"]),
        (grid([[0, 4, 8], [0, 3, 6]], [3, 1, 0, 2]), ["3", "1", "0", "2"]),
        (grid([[0, 3, 7, 10]], [2, 0, 1]), ["2", "0", "1"]),
        (Layout((), [Box((), ())], [7]), ["7"]),
        (Layout((), [Box((), ())] * 3, [0, 1, 3]), ["0,1,3"]),
        (grid([[0, 1, 1001], [0, 1, 1001]], range(4)), ["0", "1", "2", "3"]),
        (grid([[0, 4, 8], [0, 6]], [[0, 5], [1, 4]]), ["0,5", "1,4"]),
        (grid([[0, 4]], [[0, 1, 2, 3]], terms=[0, 0, 1, 1], pending="sum"), ["0,1 + 2,3"]),
        (grid([[0, 2, 4]], [[0, 1], [2, 3]], terms=[0, 1, 1, 0], pending="max"), ["0+1", "3+2"]),
        (grid([[0, 2, 4], [0, 3], [0, 3, 6]], range(4)), ["0", "1", "2", "3"]),
        (grid([even_cuts(640, 64), [0, 8]], range(64)), [str(rank) for rank in range(64)]),
    ],
)
def test_each_box_is_labelled_with_its_ranks(layout: Layout, labels: list[str]) -> None:
    assert in_boxes(drawn(layout), slices=layout.ndim > 2) == labels


@given(layout=any_layout(40, 20), width=st.integers(40, 100))
@settings(max_examples=30, deadline=None)
def test_no_line_is_wider_than_the_console(layout: Layout, width: int) -> None:
    assert max(map(len, drawn(layout, width=width, title="w").splitlines())) <= width


@given(layout=any_layout(40, 20, max_ndim=2))
@settings(max_examples=30, deadline=None)
def test_every_box_with_elements_has_its_label_once(layout: Layout) -> None:
    first = dict.fromkeys(entry.box for entry in layout if not entry.box.is_empty)
    assert len(in_boxes(drawn(layout))) == len(first)


@given(layout=any_layout(40, 20, max_ndim=2))
@settings(max_examples=30, deadline=None)
def test_walls_meet_walls(layout: Layout) -> None:
    """A wall that leaves a cell to the right arrives in the next one from the left, and so on."""
    arms = dict(zip("╵╶└╷│┌├╴┘─┴┐┤┬┼", range(1, 16), strict=True))
    lines = [line.ljust(80) for line in drawn(layout).splitlines()]
    cells = np.array([[arms.get(char, 0) for char in line] for line in lines])
    assert np.array_equal((cells[:, :-1] & 2) > 0, (cells[:, 1:] & 8) > 0)
    assert np.array_equal((cells[:-1] & 4) > 0, (cells[1:] & 1) > 0)


def test_offsets_stand_at_the_walls() -> None:
    lines = drawn(grid([[0, 5, 8], [0, 200, 1024]], range(4))).splitlines()
    top = lines[2]
    assert [match.group() for match in re.finditer(r"\d+", lines[1])][:3] == ["0", "200", "1024"]
    walls = [at for at, char in enumerate(top) if char in "┌┬┐"]
    assert [lines[1].index(tick) for tick in ("0", "200", "1024")] == walls
    assert [line[0] for line in lines[2:] if line[2] in "┌├└"] == ["0", "5", "8"]


def test_a_long_label_is_shortened_where_it_has_no_room() -> None:
    layout = grid([block_cuts(8, 1), [0, 2]], [list(range(i, 128, 8)) for i in range(8)])
    assert in_boxes(drawn(layout))[0] == ",".join(map(str, range(0, 128, 8)))
    assert in_boxes(drawn(layout, width=40))[0] == "0,8,…,120"


@pytest.mark.parametrize(
    ("ranks", "labels"),
    [
        ([[5]], ["5", "5", "5", "5"]),
        ([[0, 1]], ["0,1", "0,1", "0,1", "0…"]),
        ([list(range(8))], ["0-7", "0-7", "0-7", "0…"]),
        ([[0, 1, 2, 8, 9]], ["0-2,8,9", "0-2,8,9", "0-2,…,9", "0…"]),
        ([list(range(0, 64, 2))], ["0,2,…,62", "0,2,…,62", "0,…,62", "0…"]),
        ([[0], [1], [2], [3]], ["0+1+2+3", "0+1+…+3", "0+…+3", "0…"]),
        ([[4, 5], [0, 1]], ["4,5 + 0,1", "4,5 + 0,1", "4,5 + 0,1", "4…"]),
    ],
)
def test_labels_shorten_level_by_level(ranks: list[list[int]], labels: list[str]) -> None:
    assert [box_label(ranks, level) for level in range(4)] == labels


def test_a_box_is_filled_with_its_colour_across_the_cuts_of_others() -> None:
    cells = cells_by_rank(PINWHEEL, height=6)
    assert cells == {0: 9 * 2, 1: 4 * 5, 2: 9 * 2, 3: 4 * 5, 4: 4 * 2}
    around = [(0, 4, 2, 6), (2, 4, 4, 6), (4, 0, 6, 2), (4, 2, 6, 4), (4, 4, 6, 6)]
    boxes = [Box((0, 0), (4, 4)), *(Box(place[:2], place[2:]) for place in around)]
    assert cells_by_rank(Layout((6, 6), boxes, range(6)), height=6)[0] == 9 * 5


# -- scale ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8], [3, 3, 10, 3], [1, 1000], [5, 4, 3, 2, 1]])
def test_larger_pieces_get_more_cells_and_equal_ones_the_same(sizes: list[int]) -> None:
    cuts = np.cumsum([0, *sizes])
    for layout in (
        grid([cuts], range(len(sizes))),
        grid([cuts, [0, 6]], range(len(sizes))),
        grid([[0, 6], cuts], range(len(sizes))),
    ):
        cells = cells_by_rank(layout)
        pairs = [(sizes[rank], cells[rank]) for rank in range(len(sizes))]
        assert all(cells for _, cells in pairs)
        assert all(a[1] == b[1] for a in pairs for b in pairs if a[0] == b[0])
        assert all(a[1] <= b[1] for a in pairs for b in pairs if a[0] <= b[0])
        assert max(pairs)[1] > min(pairs)[1]


def test_cells_are_in_proportion_to_elements() -> None:
    cells = cells_by_rank(grid([[0, 2, 8], [0, 6]], range(2)))
    assert cells[1] == 3 * cells[0]


@given(
    sizes=st.lists(st.integers(1, 10**12), min_size=1, max_size=30),
    total=st.integers(1, 100),
    least=st.integers(1, 4),
)
def test_scaled_cells_fit_and_keep_the_order(sizes: list[int], total: int, least: int) -> None:
    cells = scaled_cells(np.array(sizes), total=total, least=least)
    assert cells.min() >= least
    assert cells.sum() <= max(total, least * len(sizes))
    assert (np.diff(cells[np.argsort(sizes, kind="stable")]) >= 0).all()


# -- colours -------------------------------------------------------------------------------------


def test_replicas_are_striped_with_the_colours_of_all_their_ranks() -> None:
    single = cells_by_rank(grid([[0, 4], [0, 6]], [0]))
    paired = cells_by_rank(grid([[0, 4], [0, 6]], [[0, 1]]))
    assert set(single) == {0}
    assert set(paired) == {0, 1}
    assert abs(paired[0] - paired[1]) < 12  # the label stands on neither


@pytest.mark.parametrize("color", [True, False])
def test_colour_is_for_terminals_and_only_if_wanted(color: bool) -> None:
    layout = grid([[0, 4, 8], [0, 6]], range(2))
    assert "\x1b" not in drawn(layout, color=color)
    assert ("\x1b" in drawn(layout, tty=True, color=color)) is color


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_pipe_gets_plain_text(
    term: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    print_layout(PINWHEEL, title="w", itemsize=2)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert sorted(in_boxes(text)) == ["0", "1", "2", "3", "4"]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "layout",
    [PINWHEEL, grid([[0, 4]], [list(range(0, 64, 2))]), grid([block_cuts(90, 1)] * 2, [0] * 8100)],
)
def test_ascii_consoles_get_ascii(layout: Layout) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    Console(file=file, width=80).print(draw_layout(layout, title="w"))
    file.seek(0)
    text = file.read()
    assert "+--" in text
    assert in_boxes(text)


def test_a_legend_without_room_is_still_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    layout = grid([[0, 2**61]], [10**9])
    Console(file=file, width=40).print(draw_layout(layout, itemsize=8))
    file.seek(0)
    assert max(len(line.rstrip("\n")) for line in file) <= 40


@pytest.mark.parametrize(
    ("encoding", "title", "shown"),
    [
        ("ascii", "Gewichte für é→", r"Gewichte f\xfcr \xe9\u2192"),
        ("latin-1", "für →", r"für \u2192"),
        ("utf-8", "für → \udcff", r"für → \udcff"),
    ],
)
def test_a_title_has_escapes_for_what_the_console_cannot_print(
    encoding: str, title: str, shown: str
) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    Console(file=file, width=80).print(draw_layout(PINWHEEL, title=title))
    file.seek(0)
    assert file.readline() == shown + "\n"


@pytest.mark.parametrize("options", [{}, {"tty": True, "color": False}])
def test_plain_lines_have_no_trailing_blanks(options: dict[str, Any]) -> None:
    for layout in (PINWHEEL, grid([[0, 4, 5], [0, 2, 3], [0, 1000]], range(4))):
        lines = drawn(layout, title="w", itemsize=2, world_size=20, **options).splitlines()
        assert lines == [line.rstrip() for line in lines]


def test_ranks_stay_apart_in_16_colours() -> None:
    file = io.StringIO()
    console = Console(
        file=file, width=80, force_terminal=True, color_system="standard", no_color=False
    )
    console.print(draw_layout(grid([[0, 2], block_cuts(8, 1)], range(8))))
    grounds = re.findall(r"\x1b\[1;\d+;(\d+)m *([0-7]) *\x1b", file.getvalue())
    assert {rank for _, rank in grounds} == set("01234567")
    assert len(set(grounds)) == len({ground for ground, _ in grounds}) == 8


def test_drawings_can_stand_side_by_side() -> None:
    from rich.table import Table

    page = Table.grid(padding=(0, 4, 0, 0))
    page.add_row(draw_layout(PINWHEEL, width=48), draw_layout(PINWHEEL, width=48))
    file = io.StringIO()
    Console(file=file, width=110).print(page)
    assert sum(line.count("┌") for line in file.getvalue().splitlines()) == 2
    assert len(file.getvalue().splitlines()) == len(drawn(PINWHEEL, width=48).splitlines())


# -- slices --------------------------------------------------------------------------------------


def test_leading_dims_are_shown_as_slabs_between_their_cuts() -> None:
    layout = grid([[0, 4, 5], [0, 2, 3], [0, 3], [0, 2]], range(4))
    text = drawn(layout)
    names = ["[0:4, 0:2, :, :]", "[0:4, 2:3, :, :]", "[4:5, 0:2, :, :]", "[4:5, 2:3, :, :]"]
    assert re.findall(r"\[\d[^]]*\]", text) == names
    assert in_boxes(text, slices=True) == ["0", "1", "2", "3"]
    assert "more slices" not in text
    assert text.splitlines()[1].count("[") > 1  # side by side


def test_crowded_slices_are_small_and_stand_two_in_a_row() -> None:
    text = drawn(grid([[0, 1, 2], block_cuts(90, 1), block_cuts(90, 1)], [0, 1] * 8100))
    assert text.count("┐") == 2
    assert len([line for line in text.splitlines() if line.count("│") == 4]) == 16
    assert text.count("showing") == 1
    assert "showing 16 x 32 samples of 90 x 90; 8,100 boxes" in text


def test_slices_are_limited() -> None:
    layout = grid([block_cuts(20, 1), [0, 3], [0, 2]], range(20))
    assert "... and 12 more slices" in drawn(layout)
    assert in_boxes(drawn(layout), slices=True) == [str(rank) for rank in range(8)]
    assert "... and 17 more slices" in drawn(layout, max_slices=3)
    assert in_boxes(drawn(layout, max_slices=3), slices=True) == ["0", "1", "2"]


def test_a_box_over_several_slabs_is_in_each() -> None:
    boxes = [Box((0, 0, 0), (2, 2, 2)), Box((2, 0, 0), (4, 2, 2)), Box((0, 0, 2), (4, 2, 3))]
    text = drawn(Layout((4, 2, 3), boxes, range(3)))
    assert in_boxes(text, slices=True) == ["0", "2", "1", "2"]


# -- many boxes ----------------------------------------------------------------------------------


def test_samples_show_the_owner_at_the_centre_of_each_cell() -> None:
    owners = np.random.default_rng(0).integers(0, 40, (90, 120))
    layout = grid([block_cuts(270, 3), block_cuts(600, 5)], owners)
    text = drawn(layout)
    shown = in_boxes(text)
    rows, columns = len(shown), len(shown[0])
    assert f"showing {rows} x {columns} samples of 270 x 600; 10,800 boxes" in text
    for i, line in enumerate(shown):
        row = (2 * i + 1) * 270 // (2 * rows)
        at = [(2 * j + 1) * 600 // (2 * columns) for j in range(columns)]
        assert line == "".join(rank_keys(owners[row // 3, [column // 5 for column in at]].tolist()))
    assert re.search(r"\ba +10 +\d", text)  # the legend has the keys


def test_many_rows_are_sampled_and_keep_their_labels() -> None:
    text = drawn(grid([block_cuts(2000, 2), [0, 8]], range(1000)))
    assert "showing 32 of 2,000 rows; 1,000 boxes" in text
    assert in_boxes(text) == [str((2 * i + 1) * 2000 // 64 // 2) for i in range(32)]


def test_more_columns_than_numbers_fit_are_named_by_keys() -> None:
    text = drawn(grid([even_cuts(640, 64)], range(64)))
    assert in_boxes(text) == ["".join(rank_keys(range(64)))]
    assert "each character is the key of a rank; keys repeat after 62 ranks" in " ".join(
        text.split()
    )
    assert "showing" not in text  # nothing is left out


def test_keys_count_the_ranks_of_the_layout() -> None:
    text = drawn(grid([[0, 2], block_cuts(80, 1)], [0, 62] * 40), width=60)
    assert set("".join(in_boxes(text))) == {"0", "1"}
    assert re.search(r"\b1 +62 +40 +80\b", text)  # key, rank, boxes, elements
    assert "repeat" not in text
    assert "repeat" not in drawn(grid([block_cuts(62, 1)], range(2, 64)), width=60)
    assert "; keys repeat after 62" in drawn(grid([block_cuts(63, 1)], range(63)), width=60)


def test_a_hundred_thousand_boxes_are_sampled() -> None:
    layout = grid([even_cuts(948, 316)] * 2, np.arange(316 * 316) % 24)
    text = drawn(layout)
    assert "samples of 948 x 948; 99,856 boxes" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_hundred_thousand_slabs_are_cut_short() -> None:
    layout = grid([block_cuts(100_000, 1), [0, 2], [0, 2]], np.arange(100_000))
    assert "... and 99,992 more slices" in drawn(layout)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 20}, r"width: expected a whole number >= 40, got 20"),
        ({"height": 0}, r"height: expected a whole number >= 1, got 0"),
        ({"max_slices": 0}, r"max_slices: expected a whole number >= 1, got 0"),
        ({"itemsize": 0}, r"itemsize: expected a whole number >= 1, got 0"),
        ({"world_size": 0}, r"world_size: expected a whole number >= 1, got 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        draw_layout(PINWHEEL, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": "80"}, r"width: expected a whole number, got str: '80'"),
        ({"height": 2.5}, r"height: expected a whole number, got float: 2.5"),
        ({"max_slices": None}, r"max_slices: expected a whole number, got NoneType"),
        ({"itemsize": True}, r"itemsize: expected a whole number, got bool: True"),
        ({"world_size": [4]}, r"world_size: expected a whole number, got list: \[4\]"),
        ({"title": 3}, r"title: expected a str or None, got int"),
    ],
)
def test_options_of_the_wrong_type_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        draw_layout(PINWHEEL, **options)


@pytest.mark.parametrize("given", [None, (8, 6), "chunk(0)"])
def test_only_layouts_are_drawn(given: Any) -> None:
    message = f"layout: expected a Layout, got {type(given).__name__}. Call spec.layout"
    for draw in (draw_layout, print_layout):
        with pytest.raises(ArgumentTypeError, match=re.escape(message)):
            draw(given)
