"""Relabellings against brute force over all permutations."""

from __future__ import annotations

import importlib
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise.errors import ArgumentTypeError, ArgumentValueError, PlanError
from shardwise.geometry import Box, Layout
from shardwise.testing.strategies import layouts, shapes
from shardwise.transfer import Relabelling, TransferPlan, plan_reshard, relabel

Tensor = tuple[Layout, Layout, int]


@st.composite
def sets(draw: st.DrawFn, *, addends: bool = False, world_size: int = 4) -> list[Tensor]:
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(shapes(max_ndim=3, max_size=5))
        ends = layouts(shape=shape, world_size=world_size, addends=addends)
        tensors.append((draw(ends), draw(ends), draw(st.sampled_from([1, 2, 4]))))
    return tensors


def _bytes(tensors: list[Tensor]) -> int:
    return sum(TransferPlan(*tensor).total_bytes for tensor in tensors)


def _renamed(layout: Layout, new_rank: dict[int, int]) -> Layout:
    owners = [new_rank[rank] for rank in layout.owners.tolist()]
    return Layout(layout.shape, layout.boxes, owners, terms=layout.terms, pending=layout.pending)


def _best(tensors: list[Tensor], ranks: list[int]) -> tuple[int, int]:
    """Fewest bytes over all choices of ranks, and the most labels that then keep theirs."""
    labels = sorted({rank for _, target, _ in tensors for rank in target.ranks})
    outcomes = []
    for chosen in itertools.permutations(ranks, len(labels)):
        new_rank = dict(zip(labels, chosen, strict=True))
        moved = [(a, _renamed(b, new_rank), size) for a, b, size in tensors]
        outcomes.append((_bytes(moved), -sum(a == b for a, b in new_rank.items())))
    fewest, kept = min(outcomes)
    return fewest, -kept


@given(sets())
def test_no_permutation_moves_fewer_bytes_nor_keeps_more_ranks(tensors: list[Tensor]) -> None:
    found = relabel(tensors)
    labels = sorted({rank for _, target, _ in tensors for rank in target.ranks})
    fewest, kept = _best(tensors, labels)
    assert found.bytes_before == _bytes(tensors)
    assert found.bytes_after == fewest
    assert _bytes([(a, found.apply(b), size) for a, b, size in tensors]) == fewest
    assert sorted(found.new_rank.values()) == list(found.new_rank) == labels
    assert sum(label == rank for label, rank in found.new_rank.items()) == kept
    assert found.is_identity == (found.saving == 0)


@given(sets(world_size=3), st.permutations(range(5)), st.integers(3, 5))
def test_of_the_ranks_that_are_allowed_the_best_are_taken(
    tensors: list[Tensor], order: list[int], count: int
) -> None:
    ranks = order[:count]
    found = relabel(tensors, ranks=ranks)
    fewest, kept = _best(tensors, ranks)
    assert found.bytes_after == fewest
    assert set(found.new_rank.values()) <= set(ranks)
    if set(found.labels) <= set(ranks):
        assert sum(label == rank for label, rank in found.new_rank.items()) == kept


@given(sets(addends=True))
def test_with_addends_it_is_never_worse_than_no_change(tensors: list[Tensor]) -> None:
    found = relabel(tensors)
    moved = [(a, found.apply(b), size) for a, b, size in tensors]
    assert found.bytes_before == _bytes(tensors)
    assert found.bytes_after == _bytes(moved) <= found.bytes_before
    assert found.is_identity == (found.saving == 0)


def test_addends_with_one_destination_each_are_reduced_where_they_are() -> None:
    pending = shardwise.partial(ranks=[0, 1, 2, 3]).layout((12, 4))
    target = shardwise.chunk(0, ranks=[4, 5, 1]).layout((12, 4))
    found = relabel([(pending, target, 2)], ranks=range(6))
    assert found.new_rank[1] == 1
    assert set(found.new_rank.values()) <= {0, 1, 2, 3}
    assert found.bytes_after == 12 * 4 * 2 * (4 + 1 - 2)
    assert found.saving == 8 * 4 * 2


def test_a_3_cycle_is_undone_and_moves_nothing() -> None:
    source = shardwise.chunk(0, ranks=[0, 1, 2]).layout((12, 4))
    target = shardwise.chunk(0, ranks=[1, 2, 0]).layout((12, 4))
    found = relabel([(source, target, 4)])
    assert dict(found.new_rank) == {1: 0, 2: 1, 0: 2}
    assert found.apply(target) == source
    assert (found.bytes_before, found.bytes_after, found.saving) == (192, 0, 192)
    assert found.saving_share == 1.0


def test_the_larger_tensor_decides_where_two_disagree() -> None:
    ahead, back = (shardwise.chunk(0, ranks=ranks).layout((8,)) for ranks in ([0, 1], [1, 0]))
    assert relabel([(ahead, ahead, 2), (ahead, back, 4)]).new_rank[0] == 1
    assert relabel([(ahead, ahead, 4), (ahead, back, 2)]).is_identity
    assert relabel([*[(ahead, ahead, 2)] * 3, (ahead, back, 4)]).is_identity
    assert relabel([(ahead, ahead, 4), (ahead, back, 4)]).is_identity  # a tie


def test_labels_move_to_ranks_that_had_none_if_those_hold_the_data() -> None:
    source = shardwise.chunk(0, ranks=[8, 9]).layout((8,))
    target = shardwise.chunk(0, ranks=[0, 1]).layout((8,))
    assert relabel([(source, target, 1)]).is_identity
    found = relabel([(source, target, 1)], ranks=range(10))
    assert dict(found.new_rank) == {0: 8, 1: 9}
    assert found.bytes_after == 0


def test_ranks_may_leave_out_the_labels_themselves() -> None:
    layout = shardwise.chunk(0, ranks=[0, 1]).layout((8,))
    found = relabel([(layout, layout, 1)], ranks=[5, 4, 1])
    assert dict(found.new_rank) == {0: 4, 1: 1}
    assert (found.bytes_before, found.bytes_after, found.saving) == (0, 4, -4)
    assert found.saving_share == 0.0


def test_only_ranks_change_in_a_layout_that_is_relabelled() -> None:
    pending = shardwise.partial(ranks=[0, 1]).layout((4,))
    swap = Relabelling((0, 1), (1, 0), 0, 0)
    assert [tuple(entry) for entry in swap.apply(pending)] == [
        (Box((0,), (4,)), 0, 1),
        (Box((0,), (4,)), 1, 0),
    ]


def test_a_hundred_thousand_boxes_are_relabelled() -> None:
    cuts = shardwise.geometry.even_cuts(632, 316).tolist()
    spans = list(itertools.pairwise(cuts))
    boxes = [Box((a, c), (b, d)) for (a, b), (c, d) in itertools.product(spans, spans)]
    owners = np.random.default_rng(0).integers(0, 64, len(boxes))
    permutation = np.random.default_rng(1).permutation(64)
    source = Layout((632, 632), boxes, owners)
    target = Layout((632, 632), boxes, permutation[owners])
    found = relabel([(source, target, 2)] * 100)
    assert found.bytes_after == 0
    assert found.apply(target) == source


@given(sets(), st.integers(1, 6))
def test_large_sets_are_summed_up_in_batches(tensors: list[Tensor], size: int) -> None:
    at_once = relabel(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("shardwise.transfer.relabel"), "_BATCH", size)
        assert relabel(tensors) == at_once


@pytest.mark.parametrize("tensors", [[], [(Layout((0,), [], []), Layout((0,), [], []), 1)]])
def test_nothing_is_relabelled_as_nothing(tensors: list[Tensor]) -> None:
    found = relabel(tensors)
    assert found == Relabelling((), (), 0, 0)
    assert found.saving_share == 0.0
    assert found.explain() == "every one of 0 labels keeps its rank: 0 B to move"


def test_a_relabelling_is_a_value() -> None:
    swap = Relabelling((0, 1), (1, 0), 8, 4)
    assert pickle.loads(pickle.dumps(swap)) == swap
    assert len({swap, Relabelling((0, 1), (1, 0), 8, 4)}) == 1
    with pytest.raises(TypeError):
        swap.new_rank[0] = 3  # type: ignore[index]  # that it cannot be set is the test


def test_a_relabelling_is_explained() -> None:
    source = shardwise.chunk(0, ranks=[0, 1, 2, 3]).layout((4096,))
    target = shardwise.chunk(0, ranks=[1, 0, 2, 3]).layout((4096,))
    assert relabel([(source, target, 4)]).explain().splitlines() == [
        "2 of 4 labels change ranks: 0 B to move instead of 8.0 KiB",
        "saves 8.0 KiB (100.0%)",
        "  label 0 -> rank 1",
        "  label 1 -> rank 0",
    ]
    assert relabel([(source, target, 4)]).explain(max_lines=1).endswith("  ... and 1 more")
    kept = relabel([(source, source, 4)]).explain()
    assert kept == "every one of 4 labels keeps its rank: 0 B to move"
    forced = relabel([(source, source, 4)], ranks=[4, 5, 6, 7]).explain()
    assert "16.0 KiB to move instead of 0 B\ncosts 16.0 KiB" in forced


def test_a_plan_of_the_relabelled_target_moves_what_was_promised() -> None:
    rows = shardwise.chunk(0, ranks=range(4)).layout((64, 64))
    uneven = shardwise.chunk(0, sizes=[8, 8, 40, 8], ranks=[3, 1, 0, 2]).layout((64, 64))
    found = relabel([(rows, uneven, 4)])
    assert plan_reshard(rows, found.apply(uneven), 4).total_bytes == found.bytes_after
    assert found.saving > 0


# -- refusals --------------------------------------------------------------------------------


LAYOUT = shardwise.chunk(0, ranks=[0, 1]).layout((8,))


@pytest.mark.parametrize(
    ("pairs", "options", "error", "message"),
    [
        ([LAYOUT], {}, ArgumentTypeError, r"pairs: expected triples \(source, target, itemsize\)"),
        (3, {}, ArgumentTypeError, r"pairs: expected a list of \(source, target, itemsize\)"),
        ([(LAYOUT, LAYOUT)], {}, ArgumentTypeError, r"pairs: expected triples"),
        ([(LAYOUT, LAYOUT, 0)], {}, ArgumentValueError, "itemsize"),
        ([(LAYOUT, LAYOUT, 1)], {"ranks": [0]}, PlanError, r"ranks: expected at least 2, one for"),
        ([(LAYOUT, LAYOUT, 1)], {"ranks": [0, 0]}, PlanError, r"each rank once, got rank 0 twice"),
        ([(LAYOUT, LAYOUT, 1)], {"ranks": [0, -1]}, ArgumentValueError, "ranks"),
        ([(LAYOUT, LAYOUT, 1)], {"ranks": "01"}, ArgumentTypeError, "ranks"),
    ],
)
def test_wrong_arguments_are_refused(
    pairs: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        relabel(pairs, **options)


def test_a_layout_with_other_ranks_is_not_relabelled() -> None:
    found = relabel([(LAYOUT, LAYOUT, 1)])
    other = shardwise.chunk(0, ranks=[0, 5, 6]).layout((8,))
    with pytest.raises(PlanError, match=r"got ranks 5, 6\. Pass every target to relabel"):
        found.apply(other)
    with pytest.raises(ArgumentTypeError, match=r"layout: expected a Layout, got int. Call spec.l"):
        found.apply(3)  # type: ignore[arg-type]  # wrong on purpose
