"""Pictures of plans: what stands in the matrix, what fits, and what is said below."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.transfer.plans import plans
from tests.viz.drawn import printed

import shardwise
from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.geometry import Box, Boxes, Layout
from shardwise.transfer import TransferPlan, plan_reshard
from shardwise.viz import draw_plan, print_plan
from shardwise.viz.colors import rank_color
from shardwise.viz.matrix import Matrix, write_matrix

SQUARE = (8192, 8192)
PLANS = plans(world_size=6, itemsizes=(1, 4, 1 << 20))


def chunked(num_ranks: int, *, dim: int = 0, shape: tuple[int, ...] = SQUARE) -> Layout:
    return shardwise.chunk(dim, ranks=range(num_ranks)).layout(shape)


ALL_TO_ALL = plan_reshard(chunked(4), chunked(4, dim=1), 4)
TRAIN_TO_SERVE = plan_reshard(
    chunked(4, shape=(1000,)),
    shardwise.chunk(0, sizes=[100, 200, 300, 400], ranks=[4, 5, 6, 7]).layout((1000,)),
    4,
)
PENDING = plan_reshard(
    shardwise.partial(ranks=range(4)).layout(SQUARE),
    shardwise.replicate(ranks=range(4)).layout(SQUARE),
    4,
)


def rendered(plan: TransferPlan, *, width: int = 80, tty: bool = False, **options: Any) -> str:
    """What a console of the given width prints of a plan."""
    return printed(draw_plan(plan, **options), width=width, tty=tty)


def matrix_lines(text: str) -> list[str]:
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if "from\\to" in line)
    last = next(at for at, line in enumerate(lines) if line.lstrip().startswith("received"))
    return lines[first : last + 1]


# -- the matrix --------------------------------------------------------------------------------


def test_the_matrix_shows_who_sends_what_to_whom() -> None:
    assert matrix_lines(rendered(ALL_TO_ALL)) == [
        " from\\to     0         1         2         3      │     sent",
        "       0 =16.0 MiB  16.0 MiB  16.0 MiB  16.0 MiB  │ 48.0 MiB",
        "       1  16.0 MiB =16.0 MiB  16.0 MiB  16.0 MiB  │ 48.0 MiB",
        "       2  16.0 MiB  16.0 MiB =16.0 MiB  16.0 MiB  │ 48.0 MiB",
        "       3  16.0 MiB  16.0 MiB  16.0 MiB =16.0 MiB  │ 48.0 MiB",
        "──────────────────────────────────────────────────┼─────────",
        "received  48.0 MiB  48.0 MiB  48.0 MiB  48.0 MiB  │",
    ]


def test_ranks_that_only_send_have_no_column_and_those_that_only_receive_no_row() -> None:
    assert matrix_lines(rendered(TRAIN_TO_SERVE)) == [
        " from\\to     4        5        6        7     │   sent",
        "       0    400 B    600 B        ·        ·  │ 1000 B",
        "       1        ·    200 B    800 B        ·  │ 1000 B",
        "       2        ·        ·    400 B    600 B  │ 1000 B",
        "       3        ·        ·        ·   1000 B  │ 1000 B",
        "──────────────────────────────────────────────┼───────",
        "received    400 B    800 B  1.2 KiB  1.6 KiB  │",
    ]


@given(PLANS, st.integers(1, 7), st.integers(1, 7))
def test_cells_add_up_to_the_traffic_of_their_ranks(
    plan: TransferPlan, max_rows: int, max_columns: int
) -> None:
    traffic = plan.traffic
    matrix = Matrix.of(traffic, max_rows=max_rows, max_columns=max_columns)
    assert len(matrix.rows) <= max_rows
    assert len(matrix.columns) <= max_columns
    assert matrix.cells.sum() == plan.total_bytes + traffic.kept.sum()
    full = np.zeros((6, 6), np.int64)
    full[traffic.pair_src, traffic.pair_dst] = traffic.pair_bytes
    full[traffic.ranks, traffic.ranks] += traffic.kept
    for row, block in enumerate(matrix.rows.tolist()):
        for column, other in enumerate(matrix.columns.tolist()):
            ranks = np.ix_(matrix.ranks_of(block), matrix.ranks_of(other))
            assert matrix.cells[row, column] == full[ranks].sum()
    for sums, blocks, of_rank in (
        (matrix.sent, matrix.rows, traffic.sent),
        (matrix.received, matrix.columns, traffic.received),
    ):
        for total, block in zip(sums.tolist(), blocks.tolist(), strict=True):
            assert total == of_rank[np.isin(traffic.ranks, matrix.ranks_of(block))].sum()
        assert sums.sum() == plan.total_bytes
    if matrix.block_size == 1:
        assert matrix.moved.sum() == plan.total_bytes


@given(PLANS, st.integers(40, 120), st.integers(1, 8))
@settings(max_examples=30)
def test_no_line_is_wider_than_the_console(plan: TransferPlan, width: int, most: int) -> None:
    text = rendered(plan, width=width, max_ranks=most, title="w")
    assert max(map(len, text.splitlines())) <= width
    assert [line.rstrip() for line in text.splitlines()] == text.splitlines()


def test_16_ranks_fit_80_columns_with_one_unit_for_all() -> None:
    text = rendered(plan_reshard(chunked(16), chunked(16, dim=1), 4))
    head, first, *_ = matrix_lines(text)
    assert head.split() == ["from\\to", *map(str, range(16)), "│", "sent"]
    assert first.split() == ["0", "=1.0", *["1.0"] * 15, "│", "15"]
    assert "in MiB; =: stays on its rank" in text


def test_more_ranks_are_put_together_in_blocks() -> None:
    shape = (64, 640)
    plan = plan_reshard(chunked(64, shape=shape), chunked(64, dim=1, shape=shape), 1)
    text = rendered(plan)
    head, first, *_ = matrix_lines(text)
    assert head.split() == ["from\\to", *map(str, range(0, 64, 4)), "│", "sent"]
    assert first.split() == ["0-3", "=.16", *[".16"] * 15, "│", "2.5"]
    words = "=: stays in its block (1.9 KiB moves inside, and counts as sent and received)"
    assert f"in KiB; 64 ranks in blocks of 4; {words}" in " ".join(text.split())
    assert "blocks of 16" in rendered(plan, max_ranks=4)
    assert "blocks of 64" in rendered(plan, max_ranks=1)


def test_what_moves_inside_a_block_is_sent_and_received() -> None:
    gathered = shardwise.on_rank(0).layout((1024, 64))
    text = rendered(plan_reshard(chunked(1024, shape=(1024, 64)), gathered, 4), layouts=False)
    _, first, second, *_, foot = matrix_lines(text)
    assert first.split()[-2:] == ["15.8", "KiB"]
    assert second.split()[-2:] == ["16.0", "KiB"]
    assert "255.8 KiB" in foot


def test_ranks_that_do_not_fit_the_width_are_put_together() -> None:
    text = rendered(plan_reshard(chunked(16), chunked(16, dim=1), 4), width=40)
    assert matrix_lines(text)[0].split() == ["from\\to", "0", "4", "8", "12", "│", "sent"]
    assert "16 ranks in blocks of 4" in " ".join(text.split())


def test_blocks_are_made_of_the_ranks_that_take_part() -> None:
    source = shardwise.chunk(0, ranks=[10, 20, 30]).layout((12,))
    target = shardwise.chunk(0, ranks=[30, 1000, 10]).layout((12,))
    text = rendered(plan_reshard(source, target, 1), max_ranks=2)
    names = [line.split()[0] for line in matrix_lines(text)[1:3]]
    assert names == ["10-20", "30-1000"]
    assert "4 ranks in blocks of 2" in text


def test_a_thousand_ranks_are_drawn() -> None:
    shape = (1000, 1000)
    plan = plan_reshard(chunked(1000, shape=shape), chunked(1000, dim=1, shape=shape), 4)
    text = rendered(plan)
    assert "1,000 ranks in blocks of 64" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ([512, 3], ["512", "3"]),
        ([1000, 100, 4], [".98", ".10", "~0"]),
        ([900 << 10, 15 << 9, 1 << 9], ["900", "7.5", ".50"]),
        ([1 << 30, 1 << 24, 1 << 22], ["1.0", ".02", "~0"]),
    ],
)
def test_numbers_of_one_unit_have_three_characters(sizes: list[int], numbers: list[str]) -> None:
    columns = np.arange(len(sizes))
    sent, received = np.array([sum(sizes)]), np.array(sizes)
    cells = np.array([sizes])
    matrix = Matrix(np.arange(9), 1, np.array([8]), columns, cells, sent, received)
    for text in list(write_matrix(matrix, ascii_only=True))[1:]:
        assert text.lines[1].plain.split()[1 : len(sizes) + 1] == numbers


# -- around the matrix -------------------------------------------------------------------------


def test_layouts_stand_beside_each_other_above_the_matrix() -> None:
    lines = rendered(ALL_TO_ALL, title="fc1.weight").splitlines()
    assert lines[:3] == [
        "fc1.weight",
        "from Layout((8192, 8192): grid 4x1, ranks 0-3)",
        "to   Layout((8192, 8192): grid 1x4, ranks 0-3)",
    ]
    assert lines[4].split() == ["before", "after"]
    assert any(line.count("┌") == 2 for line in lines)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (plan_reshard(chunked(1024), chunked(1024, dim=1), 4), "1,024 boxes"),
        (plan_reshard(chunked(16), chunked(16, dim=1), 4), "no room for labels"),
        (
            plan_reshard(chunked(2, shape=(2, 2, 2)), chunked(2, dim=2, shape=(2, 2, 2)), 4),
            "3 dims",
        ),
    ],
)
def test_layouts_that_cannot_be_drawn_in_full_are_left_out_and_it_is_said(
    plan: TransferPlan, reason: str
) -> None:
    lines = rendered(plan).splitlines()
    assert f"layouts not drawn: {reason} (save_picture or --svg shows them)" in lines
    assert not any("before" in line for line in lines)
    assert "layouts not drawn" not in rendered(plan, layouts=False)


def test_layouts_without_elements_need_no_reason() -> None:
    text = rendered(plan_reshard(chunked(1, shape=(0, 2)), chunked(1, shape=(0, 2)), 4))
    assert "before" not in text
    assert "layouts" not in text.replace("the layouts are equal", "")


def test_layouts_of_one_number_are_drawn() -> None:
    one, other = (shardwise.on_rank(rank).layout(()) for rank in (0, 1))
    text = rendered(plan_reshard(one, other, 4))
    assert "before" in text
    assert "after" in text


def test_ranks_with_an_empty_shard_are_named() -> None:
    plan = plan_reshard(chunked(4, shape=(8, 6)), chunked(4, dim=1, shape=(8, 6)), 4)
    assert "empty shards after: rank 3" in rendered(plan).splitlines()
    assert "empty shards before" not in rendered(plan)
    back = plan_reshard(plan.target, shardwise.on_rank(7).layout((8, 6)), 4)
    assert "empty shards before: rank 3" in rendered(back).splitlines()
    assert "empty shards after" not in rendered(back)


def test_layouts_are_drawn_only_if_wanted() -> None:
    text = rendered(ALL_TO_ALL, layouts=False)
    assert "before" not in text
    assert matrix_lines(text) == matrix_lines(rendered(ALL_TO_ALL))


def test_long_strips_stand_one_above_the_other() -> None:
    source = chunked(16, shape=(1600,))
    plan = plan_reshard(source, shardwise.chunk(0, ranks=range(16, 32)).layout((1600,)), 4)
    lines = rendered(plan).splitlines()
    assert "before" in lines
    assert "after" in lines


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        (ALL_TO_ALL, {}, "moves 192.0 MiB = lower bound; stays 64.0 MiB; 1 round"),
        (
            ALL_TO_ALL,
            {"max_bytes": 16 << 20},
            "moves 192.0 MiB = lower bound; stays 64.0 MiB; 6 rounds with max_bytes 16.0 MiB",
        ),
        (TRAIN_TO_SERVE, {}, "moves 3.9 KiB = lower bound; stays 0 B; 1 round"),
        (PENDING, {}, "moves 1.5 GiB = lower bound; stays 256.0 MiB; 2 rounds"),
    ],
)
def test_the_last_line_has_the_totals(
    plan: TransferPlan, options: dict[str, Any], words: str
) -> None:
    assert words in rendered(plan, **options).splitlines()


def test_sums_are_told_below_and_explained_in_the_pictures() -> None:
    text = rendered(PENDING)
    assert "reduces 4 regions of 4 addends (sum), then spreads the results (768.0 MiB)" in text
    assert "a+b: a term on rank a and one on rank b" in text
    assert "a-c: the same box on ranks a to c (replicas)" in text


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            plan_reshard(chunked(4), chunked(4), 4),
            "nothing moves: the layouts are equal; stays 256.0 MiB; 1 round",
        ),
        (
            plan_reshard(Layout((0,), [], []), Layout((0,), [], []), 4),
            "nothing moves: the tensor has no elements; stays 0 B; 1 round",
        ),
        (
            plan_reshard(Layout((4,), [Box((0,), (4,))] * 2, [0, 1]), chunked(2, shape=(4,)), 4),
            "nothing moves: every rank has what it needs; stays 16 B; 1 round",
        ),
    ],
)
def test_a_plan_that_moves_nothing_has_no_matrix(plan: TransferPlan, words: str) -> None:
    text = rendered(plan)
    assert words in text.splitlines()
    assert "from\\to" not in text


# -- colours -----------------------------------------------------------------------------------


def _grounds(plan: TransferPlan, **options: Any) -> list[tuple[str, Any]]:
    console = Console(width=80, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    segments = console.render(draw_plan(plan, layouts=False, **options))
    return [(s.text.strip(), s.style.bgcolor) for s in segments if s.style and s.style.bgcolor]


def test_names_of_ranks_have_their_colours() -> None:
    swatches = _grounds(TRAIN_TO_SERVE)
    for rank in range(8):
        assert (f"{rank}", rank_color(rank)) in swatches


def test_larger_messages_have_deeper_shades_and_what_stays_has_none() -> None:
    sizes = [1, 2, 3, 4, 5, 60, 5]
    cuts = np.cumsum([0, *sizes])
    source = shardwise.on_rank(0).layout((80,))
    boxes = Boxes(cuts[:-1, None], cuts[1:, None])
    plan = plan_reshard(source, Layout((80,), boxes, [1, 2, 3, 4, 5, 6, 0]), 1)
    shades = dict(_grounds(plan))
    blue = {size: shades[f"{size} B"].get_truecolor().blue for size in (1, 60)}
    assert blue[60] > blue[1]
    assert "=5 B" not in shades
    assert "=5 B" in rendered(plan)


def test_blocks_have_no_colour_of_a_rank() -> None:
    grounds = {ground for _, ground in _grounds(ALL_TO_ALL, max_ranks=2)}
    assert grounds.isdisjoint(rank_color(rank) for rank in range(4))


@pytest.mark.parametrize("color", [True, False])
def test_colour_is_for_terminals_and_only_if_wanted(color: bool) -> None:
    assert "\x1b" not in rendered(ALL_TO_ALL, color=color)
    assert ("\x1b" in rendered(ALL_TO_ALL, tty=True, color=color)) is color
    assert rendered(ALL_TO_ALL, tty=True, color=False) == rendered(ALL_TO_ALL)


def test_a_pipe_gets_plain_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    shardwise.print_plan(ALL_TO_ALL, title="w", max_bytes=16 << 20)
    assert capsys.readouterr().out == rendered(ALL_TO_ALL, title="w", max_bytes=16 << 20)


@pytest.mark.parametrize("plan", [ALL_TO_ALL, TRAIN_TO_SERVE, PENDING])
def test_ascii_consoles_get_ascii(plan: TransferPlan) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    Console(file=file, width=80).print(draw_plan(plan, title="für w"))
    file.seek(0)
    text = file.read()
    assert text.startswith("f\\xfcr w")
    assert re.search(r"^-+\+-+$", text, re.MULTILINE)


def test_shades_stay_apart_in_16_colours() -> None:
    file = io.StringIO()
    console = Console(
        file=file, width=80, force_terminal=True, color_system="standard", no_color=False
    )
    console.print(draw_plan(TRAIN_TO_SERVE, layouts=False))
    grounds = dict(re.findall(r"\x1b\[97;(\d+)m +(\d+ B) +\x1b", file.getvalue()))
    assert len(grounds) > 1


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 20}, ArgumentValueError, "width: expected a whole number >= 40, got 20"),
        ({"max_ranks": 0}, ArgumentValueError, "max_ranks: expected a whole number >= 1, got 0"),
        ({"max_bytes": 0}, ArgumentValueError, "max_bytes: expected a whole number >= 1, got 0"),
        ({"max_ranks": "4"}, ArgumentTypeError, "max_ranks: expected a whole number, got str"),
        ({"title": 3}, ArgumentTypeError, "title: expected a str or None, got int"),
    ],
)
def test_impossible_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        draw_plan(ALL_TO_ALL, **options)


@pytest.mark.parametrize("given", [None, chunked(4)])
def test_only_plans_are_drawn(given: Any) -> None:
    message = f"plan: expected a TransferPlan, got {type(given).__name__}. Call plan_reshard"
    for draw in (draw_plan, print_plan):
        with pytest.raises(ArgumentTypeError, match=re.escape(message)):
            draw(given)
