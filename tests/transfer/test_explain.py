"""Plans in words, and the sums behind them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.plans import plans

import shardwise
from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.geometry import Boxes, Layout
from shardwise.transfer import TransferPlan, plan_reshard
from shardwise.transfer.units import format_bytes

SQUARE = (8192, 8192)
ROWS, COLUMNS = (shardwise.chunk(dim, ranks=range(4)).layout(SQUARE) for dim in (0, 1))


def _table(text: str) -> dict[int, list[str]]:
    """rank -> sent, received, kept, peers, peak"""
    rows = re.findall(r"^ *(\d+)((?:  +[\d.,]+(?: [KMGT]?i?B)?){5})$", text, re.MULTILINE)
    return {int(rank): re.split("  +", cells.strip()) for rank, cells in rows}


# -- traffic ---------------------------------------------------------------------------------


@given(plans())
def test_traffic_is_what_the_messages_add_up_to(plan: TransferPlan) -> None:
    pairs: Counter[tuple[int, int]] = Counter()
    peers = defaultdict(set)
    for rank in plan.ranks:
        for message in plan.messages(rank):
            if message.src == rank:
                pairs[message.src, message.dst] += message.nbytes
                peers[message.src].add(message.dst)
                peers[message.dst].add(message.src)
    traffic = plan.traffic
    found = zip(traffic.pair_src.tolist(), traffic.pair_dst.tolist(), strict=True)
    assert dict(zip(found, traffic.pair_bytes.tolist(), strict=True)) == pairs
    assert traffic.ranks.tolist() == list(plan.ranks)
    assert traffic.num_peers.tolist() == [len(peers[rank]) for rank in plan.ranks]
    for slot, rank in enumerate(plan.ranks):
        assert traffic.sent[slot] == sum(n for (src, _), n in pairs.items() if src == rank)
        assert traffic.received[slot] == sum(n for (_, dst), n in pairs.items() if dst == rank)


@given(plans())
def test_messages_are_counted_as_they_are_sent(plan: TransferPlan) -> None:
    sent = [m for rank in plan.ranks for m in plan.messages(rank) if m.src == rank]
    assert plan.num_messages == len(sent)


@given(plans())
def test_what_is_kept_and_received_fills_the_target_where_nothing_is_reduced(
    plan: TransferPlan,
) -> None:
    if plan.source.pending is None and plan.target.pending is None:
        filled = plan.traffic.kept + plan.traffic.received
        assert filled.tolist() == [plan.output_bytes.get(rank, 0) for rank in plan.ranks]


@given(plans(), st.integers(0, 5))
def test_bytes_of_a_rank_are_the_same_before_and_after_the_whole_is_known(
    plan: TransferPlan, rank: int
) -> None:
    alone = plan.bytes_sent(rank), plan.bytes_received(rank)
    _ = plan.moves
    assert (plan.bytes_sent(rank), plan.bytes_received(rank)) == alone


def test_bytes_of_a_known_plan_need_no_cut_by_rank() -> None:
    plan = TransferPlan(ROWS, COLUMNS, 4)
    _ = plan.moves
    assert plan.bytes_sent(2) == plan.bytes_received(2) == 48 << 20
    assert "_parts" not in plan.__dict__
    assert plan.nbytes >= plan.moves.nbytes + plan.traffic.nbytes
    with pytest.raises(ArgumentValueError, match="rank: expected a whole number >= 0"):
        plan.bytes_sent(-1)


# -- words -----------------------------------------------------------------------------------


def test_a_plan_is_explained_in_full() -> None:
    assert plan_reshard(ROWS, COLUMNS, 4).explain(max_bytes=16 << 20).splitlines() == [
        "from      Layout((8192, 8192): grid 4x1, ranks 0-3)",
        "to        Layout((8192, 8192): grid 1x4, ranks 0-3)",
        "tensor    256.0 MiB: 67,108,864 elements of 4 bytes",
        "moves     192.0 MiB (201,326,592 bytes) = lower bound",
        "stays     64.0 MiB on the ranks that hold it",
        "messages  12 messages, at most 16.0 MiB (rank 0 to 1)",
        "busiest   4 ranks send 48.0 MiB each",
        "          4 ranks receive 48.0 MiB each",
        "memory    1 round, peak 112.0 MiB on rank 0 (output 64.0 MiB, staging 48.0 MiB)",
        "          with at most 16.0 MiB of staging: 6 rounds, peak 80.0 MiB on rank 0",
        "          (output 64.0 MiB, staging 16.0 MiB)",
        "",
        "rank      sent  received      kept  peers      peak",
        "   0  48.0 MiB  48.0 MiB  16.0 MiB      3  80.0 MiB",
        "   1  48.0 MiB  48.0 MiB  16.0 MiB      3  80.0 MiB",
        "   2  48.0 MiB  48.0 MiB  16.0 MiB      3  80.0 MiB",
        "   3  48.0 MiB  48.0 MiB  16.0 MiB      3  80.0 MiB",
    ]


@given(plans(), st.none() | st.integers(1 << 20, 1 << 30))
def test_every_rank_has_its_numbers_in_80_columns_of_ascii(
    plan: TransferPlan, max_bytes: int | None
) -> None:
    text = plan.explain(max_bytes=max_bytes)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    table = _table(text)
    assert list(table) == list(plan.ranks)
    for rank, (sent, received, _, _, peak) in table.items():
        assert sent == format_bytes(plan.bytes_sent(rank))
        assert received == format_bytes(plan.bytes_received(rank))
        assert peak == format_bytes(plan.peak_bytes(rank, max_bytes))


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (ROWS, ROWS, "nothing moves: the layouts are equal"),
        (
            shardwise.replicate(ranks=range(4)).layout(SQUARE),
            ROWS,
            "nothing moves: every rank has what it needs",
        ),
        (
            shardwise.on_rank(0).layout((0, 3)),
            shardwise.on_rank(1).layout((0, 3)),
            "nothing moves: the tensor has no elements",
        ),
        (Layout((0, 3), [], []), Layout((0, 3), [], []), "the tensor has no elements"),
        (shardwise.on_rank(5).layout(()), shardwise.on_rank(5).layout(()), "layouts are equal"),
    ],
)
def test_a_plan_that_moves_nothing_says_why(source: Layout, target: Layout, words: str) -> None:
    text = plan_reshard(source, target, 4).explain()
    assert words in text
    assert "messages" not in text
    assert "busiest" not in text


def test_the_only_sender_is_named() -> None:
    one, other = (shardwise.on_rank(rank).layout((4,)) for rank in (3, 1))
    text = plan_reshard(one, other, 1).explain()
    assert "busiest   rank 3 alone sends: 4 B" in text
    assert "          rank 1 alone receives: 4 B" in text


def test_an_uneven_load_is_compared_with_the_mean() -> None:
    source = shardwise.chunk(0, sizes=[6, 1, 1], ranks=[0, 1, 2]).layout((8,))
    text = plan_reshard(source, shardwise.on_rank(7).layout((8,)), 1).explain()
    assert "rank 0 sends 6 B, 2.25 x the mean of the 3 ranks that send" in text


def test_replicas_share_the_sending_in_the_table() -> None:
    plan = plan_reshard(
        shardwise.replicate(ranks=[0, 1]).layout(SQUARE), shardwise.on_rank(7).layout(SQUARE), 4
    )
    table = _table(plan.explain())
    assert table[0][0] == table[1][0] == "128.0 MiB"
    assert table[7][1] == "256.0 MiB"


def test_pending_sums_have_a_line_with_addends_and_steps() -> None:
    pending = shardwise.partial(ranks=range(4)).layout(SQUARE)
    both = plan_reshard(pending, shardwise.replicate(ranks=range(4)).layout(SQUARE), 4).explain()
    assert "24 messages between 12 pairs of ranks, at most 128.0 MiB a pair" in both
    assert "4 regions of 4 addends (sum), then spreads the results (768.0 MiB) in" in both
    assert "a second step" in both
    one = plan_reshard(pending, COLUMNS, 4).explain()
    assert re.search(r"^reduces   4 regions of 4 addends \(sum\)$", one, re.MULTILINE)
    assert "reduces" not in plan_reshard(ROWS, pending, 4).explain()
    assert "reduces" not in plan_reshard(pending, pending, 4).explain()


def test_many_ranks_are_cut_to_the_busiest() -> None:
    cuts = np.cumsum([0, *([2] * 500), *([1] * 500)])
    boxes = Boxes(cuts[:-1, None], cuts[1:, None])
    source = Layout((1500,), boxes, np.arange(1000))
    target = Layout((1500,), boxes, (np.arange(1000) + 1) % 1000)
    plan = plan_reshard(source, target, 4)
    text = plan.explain(max_lines=5)
    assert list(_table(text)) == [1, 2, 3, 4, 5]  # rank 0 receives less
    assert text.endswith("... and 995 more, each sending at most 8 B and receiving at most 8 B")
    assert "rank  sent" not in plan.explain(max_lines=0)
    with pytest.raises(ArgumentTypeError, match="max_lines"):
        plan.explain(max_lines=None)  # type: ignore[arg-type]  # wrong on purpose


def test_the_repr_is_one_line_and_makes_nothing() -> None:
    plan = TransferPlan(ROWS, COLUMNS, 4)
    assert repr(plan).startswith("TransferPlan(Layout((8192, 8192): grid 4x1, ranks 0-3) -> Lay")
    assert "\n" not in repr(plan)
    assert {"regions", "moves"}.isdisjoint(plan.__dict__)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 51, "2,048.0 TiB"),
    ],
)
def test_bytes_have_the_largest_unit_that_fits(count: int, words: str) -> None:
    assert format_bytes(count) == words
