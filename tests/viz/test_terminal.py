"""Pictures of layouts: what is written, where, how large, and in which colours."""

from __future__ import annotations

import io
import re
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.geometry import REDUCE_OPS, Box, Boxes, Layout, block_cuts, even_cuts
from shardwise.geometry.splits import product_boxes
from shardwise.viz import draw_layout, print_layout
from shardwise.viz.bands import scaled_cells
from shardwise.viz.colors import rank_color, rank_keys, rank_style
from shardwise.viz.labels import box_label

if TYPE_CHECKING:
    from collections.abc import Sequence

PINWHEEL = Layout(
    (6, 6),
    [
        Box((0, 0), (2, 4)),
        Box((0, 4), (4, 6)),
        Box((4, 2), (6, 6)),
        Box((2, 0), (6, 2)),
        Box((2, 2), (4, 4)),
    ],
    range(5),
)


def grid(cuts: Sequence[Sequence[int] | np.ndarray[Any, Any]], owners: Any, **terms: Any) -> Layout:
    """Layout of a grid; `owners` has one rank a cell or one row of ranks a cell."""
    edges = [np.asarray(cut, dtype=np.int64) for cut in cuts]
    starts, stops = product_boxes([(cut[:-1], cut[1:]) for cut in edges])
    ranks = np.asarray(owners).reshape(len(starts), -1)
    copies = ranks.shape[1]
    boxes = Boxes(np.repeat(starts, copies, axis=0), np.repeat(stops, copies, axis=0))
    return Layout([int(cut[-1]) for cut in edges], boxes, ranks.reshape(-1), **terms)


def rendered(layout: Layout, *, width: int = 80, tty: bool = False, **options: Any) -> str:
    """What a console of the given width prints."""
    file = io.StringIO()
    system: Literal["truecolor", "auto"] = "truecolor" if tty else "auto"
    console = Console(
        file=file, width=width, force_terminal=tty, color_system=system, no_color=False
    )
    console.print(draw_layout(layout, **options))
    return file.getvalue()


def in_boxes(text: str, *, slices: bool = False) -> list[str]:
    """What stands between walls: labels of boxes, left to right and top to bottom."""
    if slices:  # offsets of a picture to the right of another
        text = re.sub("([┐┤┘]) +[0-9]+ (?=[┌├└])", r"\1", text)
    parts = [re.split("[│├┤┼┬┴┌┐└┘─|]+", line)[1:-1] for line in text.splitlines()]
    return [part.strip() for line in parts for part in line if part.strip()]


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


@st.composite
def tilings(draw: st.DrawFn, max_ndim: int = 4) -> Layout:
    """Guillotine tilings with random owners, replicas, addends, and an empty box now and then."""
    shape = tuple(draw(st.lists(st.integers(1, 40), max_size=max_ndim)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(box.start[dim], box.stop[dim]))
        low, high = list(box.stop), list(box.start)
        low[dim] = high[dim] = cut
        boxes += [Box(box.start, tuple(low)), Box(tuple(high), box.stop)]
    copies = draw(st.integers(1, 3))
    ranks = draw(st.permutations(range(copies * len(boxes))))
    pending = draw(st.sampled_from([None, *REDUCE_OPS]))
    terms = [i % 2 for i in range(copies) for _ in boxes] if pending else None
    return Layout(shape, boxes * copies, ranks, terms=terms, pending=pending)


# -- the picture -------------------------------------------------------------------------------


def test_irregular_boxes_have_the_right_walls_labels_and_offsets() -> None:
    picture = [line[:18].rstrip() for line in rendered(PINWHEEL, height=6).splitlines()[1:]]
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
    assert in_boxes(rendered(layout), slices=layout.ndim > 2) == labels


@given(layout=tilings(), width=st.integers(40, 100))
@settings(max_examples=30, deadline=None)
def test_no_line_is_wider_than_the_console(layout: Layout, width: int) -> None:
    assert max(map(len, rendered(layout, width=width, title="w").splitlines())) <= width


@given(layout=tilings(max_ndim=2))
@settings(max_examples=30, deadline=None)
def test_every_box_with_elements_has_its_label_once(layout: Layout) -> None:
    first = dict.fromkeys(entry.box for entry in layout if not entry.box.is_empty)
    assert len(in_boxes(rendered(layout))) == len(first)


@given(layout=tilings(max_ndim=2))
@settings(max_examples=30, deadline=None)
def test_walls_meet_walls(layout: Layout) -> None:
    """A wall that leaves a cell to the right arrives in the next one from the left, and so on."""
    arms = dict(zip("╵╶└╷│┌├╴┘─┴┐┤┬┼", range(1, 16), strict=True))
    lines = [line.ljust(80) for line in rendered(layout).splitlines()]
    cells = np.array([[arms.get(char, 0) for char in line] for line in lines])
    assert np.array_equal((cells[:, :-1] & 2) > 0, (cells[:, 1:] & 8) > 0)
    assert np.array_equal((cells[:-1] & 4) > 0, (cells[1:] & 1) > 0)


def test_offsets_stand_at_the_walls() -> None:
    lines = rendered(grid([[0, 5, 8], [0, 200, 1024]], range(4))).splitlines()
    top = lines[2]
    assert [match.group() for match in re.finditer(r"\d+", lines[1])][:3] == ["0", "200", "1024"]
    walls = [at for at, char in enumerate(top) if char in "┌┬┐"]
    assert [lines[1].index(tick) for tick in ("0", "200", "1024")] == walls
    assert [line[0] for line in lines[2:] if line[2] in "┌├└"] == ["0", "5", "8"]


def test_a_long_label_is_shortened_where_it_has_no_room() -> None:
    layout = grid([block_cuts(8, 1), [0, 2]], [list(range(i, 128, 8)) for i in range(8)])
    assert in_boxes(rendered(layout))[0] == ",".join(map(str, range(0, 128, 8)))
    assert in_boxes(rendered(layout, width=40))[0] == "0,8,…,120"


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


def test_ranks_have_colours_of_their_own() -> None:
    colors = [rank_color(rank).get_truecolor() for rank in range(64)]
    assert len(set(colors)) == 64
    nearest = min(
        max(abs(a - b) for a, b in zip(one, two, strict=True))
        for i, one in enumerate(colors[:16])
        for two in colors[:i]
    )
    assert nearest > 24


# What each kind of colour blindness makes of linear red, green and blue (Machado and others, 2009).
VISIONS = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def lab(rank: int, vision: str) -> np.ndarray:
    """The colour of a rank as this eye sees it, in CIELAB, where distances are differences seen."""
    srgb = np.array(rank_color(rank).get_truecolor()) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISIONS[vision]) @ linear, 0, 1)
    to_xyz = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]
    xyz = np.array(to_xyz) @ seen
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_the_first_ranks_differ_for_every_kind_of_colour_vision(vision: str) -> None:
    seen = [lab(rank, vision) for rank in range(8)]
    nearest = min(np.linalg.norm(one - two) for i, one in enumerate(seen) for two in seen[:i])
    assert nearest > 15  # 2 is a difference that one just sees


def test_text_on_a_rank_has_contrast() -> None:
    for rank in range(64):
        style = rank_style(rank)
        assert style.color is not None
        ink, ground = (sum(color.get_truecolor()) for color in (style.color, rank_color(rank)))
        assert abs(ink - ground) > 150


def test_replicas_are_striped_with_the_colours_of_all_their_ranks() -> None:
    single = cells_by_rank(grid([[0, 4], [0, 6]], [0]))
    paired = cells_by_rank(grid([[0, 4], [0, 6]], [[0, 1]]))
    assert set(single) == {0}
    assert set(paired) == {0, 1}
    assert abs(paired[0] - paired[1]) < 12  # the label stands on neither


@pytest.mark.parametrize("color", [True, False])
def test_colour_is_for_terminals_and_only_if_wanted(color: bool) -> None:
    layout = grid([[0, 4, 8], [0, 6]], range(2))
    assert "\x1b" not in rendered(layout, color=color)
    assert ("\x1b" in rendered(layout, tty=True, color=color)) is color


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
        lines = rendered(layout, title="w", itemsize=2, world_size=20, **options).splitlines()
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
    assert len(file.getvalue().splitlines()) == len(rendered(PINWHEEL, width=48).splitlines())


# -- slices --------------------------------------------------------------------------------------


def test_leading_dims_are_shown_as_slabs_between_their_cuts() -> None:
    layout = grid([[0, 4, 5], [0, 2, 3], [0, 3], [0, 2]], range(4))
    text = rendered(layout)
    names = ["[0:4, 0:2, :, :]", "[0:4, 2:3, :, :]", "[4:5, 0:2, :, :]", "[4:5, 2:3, :, :]"]
    assert re.findall(r"\[\d[^]]*\]", text) == names
    assert in_boxes(text, slices=True) == ["0", "1", "2", "3"]
    assert "more slices" not in text
    assert text.splitlines()[1].count("[") > 1  # side by side


def test_crowded_slices_are_small_and_stand_two_in_a_row() -> None:
    text = rendered(grid([[0, 1, 2], block_cuts(90, 1), block_cuts(90, 1)], [0, 1] * 8100))
    assert text.count("┐") == 2
    assert len([line for line in text.splitlines() if line.count("│") == 4]) == 16
    assert text.count("showing") == 1
    assert "showing 16 x 32 samples of 90 x 90; 8,100 boxes" in text


def test_slices_are_limited() -> None:
    layout = grid([block_cuts(20, 1), [0, 3], [0, 2]], range(20))
    assert "... and 12 more slices" in rendered(layout)
    assert in_boxes(rendered(layout), slices=True) == [str(rank) for rank in range(8)]
    assert "... and 17 more slices" in rendered(layout, max_slices=3)
    assert in_boxes(rendered(layout, max_slices=3), slices=True) == ["0", "1", "2"]


def test_a_box_over_several_slabs_is_in_each() -> None:
    boxes = [Box((0, 0, 0), (2, 2, 2)), Box((2, 0, 0), (4, 2, 2)), Box((0, 0, 2), (4, 2, 3))]
    text = rendered(Layout((4, 2, 3), boxes, range(3)))
    assert in_boxes(text, slices=True) == ["0", "2", "1", "2"]


# -- legend and words ----------------------------------------------------------------------------


def test_the_first_lines_say_what_it_is() -> None:
    layout = grid([[0, 4]], [[0, 1]], terms=[0, 1], pending="sum")
    lines = rendered(layout, title="fc1.weight").splitlines()
    assert lines[0] == "fc1.weight"
    assert lines[1].startswith("Layout((4,): grid 1")
    assert lines[1].endswith("pending sum)")


def test_the_legend_counts_boxes_elements_and_bytes() -> None:
    layout = grid([[0, 5, 7, 8, 8], [0, 600]], [0, 1, 0, 3])
    text = rendered(layout, itemsize=4, world_size=6)
    assert re.search(r"\b0 +2 +3,600 +14\.1 KiB\b", text)
    assert re.search(r"\b1 +1 +1,200 +4\.7 KiB\b", text)
    assert re.search(r"\b3 +1 +empty +0 B\b", text)
    assert sorted(re.findall(r"(\d) +0 +holds nothing +0 B", text)) == ["2", "4", "5"]


def test_long_legends_are_shortened() -> None:
    layout = grid([even_cuts(999, 1000), [0, 4]], range(1000))
    assert "... and 968 more ranks (1 empty)" in rendered(layout)
    assert "... and 968 more ranks (1 empty)" in rendered(layout, width=48)  # no room beside
    text = rendered(layout, world_size=1010)
    assert "... and 968 more ranks (1 empty)" in text
    assert "ranks 1000-1009 hold nothing" in text


def test_ranks_with_elements_have_their_rows_before_empty_ones() -> None:
    cuts = [0] * 40 + [4, 8]  # ranks 0-38 have an empty box each
    text = rendered(grid([cuts], range(41)))
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
    text = rendered(layout, world_size=world_size)
    assert words in " ".join(text.split())
    assert "holds nothing" not in text
    for rank in ranks:
        assert re.search(rf"\b{rank} +1 +\d+( |$)", text, re.MULTILINE)


def test_the_legend_costs_what_its_holders_cost() -> None:
    tracemalloc.start()
    text = rendered(grid([[0, 2, 4]], [10**9, 2**63 - 1]), world_size=10**15)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert f"ranks 0-{10**9 - 1}, {10**9 + 1}-{10**15 - 1} hold nothing" in " ".join(text.split())
    assert peak < 10**7


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_the_pending_operation_is_explained(op: str) -> None:
    layout = grid([[0, 4]], [[0, 1]], terms=[0, 1], pending=op)
    text = " ".join(rendered(layout).split())
    words = {"sum": "sum", "avg": "average", "max": "maximum", "min": "minimum"}
    assert f"pending {op}: the value is the {words.get(op, op)} of the terms" in text
    assert "replicas" not in text


def test_replicas_are_explained_where_there_are_any() -> None:
    both = grid([[0, 4]], [[0, 1, 2]], terms=[0, 1, 1], pending="sum")
    assert "(replicas)" in rendered(both)
    assert "(replicas)" in rendered(grid([[0, 4]], [[0, 1]]))
    assert "(replicas)" not in rendered(PINWHEEL)


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
    assert re.findall("a[,-].*", rendered(grid([[0, 4]], [ranks]))) == notes


def test_a_label_that_is_cut_short_is_explained() -> None:
    text = rendered(grid([block_cuts(10, 1)], [[i, i + 10] for i in range(10)]), width=48)
    assert in_boxes(text)[0] == "0…"
    assert "a…: on rank a and others" in text


@pytest.mark.parametrize("shape", [(0,), (0, 6), (3, 0, 2)])
def test_a_tensor_without_elements_says_so(shape: tuple[int, ...]) -> None:
    text = rendered(Layout(shape, [Box.whole(shape)], [1]), world_size=3)
    assert "no elements" in text
    assert re.search(r"\b1 +1 +empty", text)
    assert re.search(r"\b2 +0 +holds nothing", text)
    assert not in_boxes(text)


def test_a_layout_without_entries_can_be_drawn() -> None:
    assert "no elements" in rendered(Layout((0, 2), [], []))


# -- many boxes ----------------------------------------------------------------------------------


def test_samples_show_the_owner_at_the_centre_of_each_cell() -> None:
    owners = np.random.default_rng(0).integers(0, 40, (90, 120))
    layout = grid([block_cuts(270, 3), block_cuts(600, 5)], owners)
    text = rendered(layout)
    shown = in_boxes(text)
    rows, columns = len(shown), len(shown[0])
    assert f"showing {rows} x {columns} samples of 270 x 600; 10,800 boxes" in text
    for i, line in enumerate(shown):
        row = (2 * i + 1) * 270 // (2 * rows)
        at = [(2 * j + 1) * 600 // (2 * columns) for j in range(columns)]
        assert line == "".join(rank_keys(owners[row // 3, [column // 5 for column in at]].tolist()))
    assert re.search(r"\ba +10 +\d", text)  # the legend has the keys


def test_many_rows_are_sampled_and_keep_their_labels() -> None:
    text = rendered(grid([block_cuts(2000, 2), [0, 8]], range(1000)))
    assert "showing 32 of 2,000 rows; 1,000 boxes" in text
    assert in_boxes(text) == [str((2 * i + 1) * 2000 // 64 // 2) for i in range(32)]


def test_more_columns_than_numbers_fit_are_named_by_keys() -> None:
    text = rendered(grid([even_cuts(640, 64)], range(64)))
    assert in_boxes(text) == ["".join(rank_keys(range(64)))]
    assert "each character is the key of a rank; keys repeat after 62 ranks" in " ".join(
        text.split()
    )
    assert "showing" not in text  # nothing is left out


def test_keys_count_the_ranks_of_the_layout() -> None:
    text = rendered(grid([[0, 2], block_cuts(80, 1)], [0, 62] * 40), width=60)
    assert set("".join(in_boxes(text))) == {"0", "1"}
    assert re.search(r"\b1 +62 +40 +80\b", text)  # key, rank, boxes, elements
    assert "repeat" not in text
    assert "repeat" not in rendered(grid([block_cuts(62, 1)], range(2, 64)), width=60)
    assert "; keys repeat after 62" in rendered(grid([block_cuts(63, 1)], range(63)), width=60)


def test_a_hundred_thousand_boxes_are_sampled() -> None:
    layout = grid([even_cuts(948, 316)] * 2, np.arange(316 * 316) % 24)
    text = rendered(layout)
    assert "samples of 948 x 948; 99,856 boxes" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_hundred_thousand_slabs_are_cut_short() -> None:
    layout = grid([block_cuts(100_000, 1), [0, 2], [0, 2]], np.arange(100_000))
    assert "... and 99,992 more slices" in rendered(layout)


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
