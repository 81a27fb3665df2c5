"""What ranks bring to a save, merged: pure, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.checkpoint import collecting
from shardwise.checkpoint.collecting import Brought, Described, all_alike, merge, reduced
from shardwise.checkpoint.structure import flatten
from shardwise.comm.alone import ALONE
from shardwise.errors import AgreementError, CheckpointError
from shardwise.geometry import Box, Layout


def bring(state: Any) -> Brought:
    return collecting.bring(flatten(state), ALONE)


ROWS = Layout((4, 2), [Box((0, 0), (1, 2)), Box((1, 0), (4, 2))], [2, 0])


def brought(state: Any, **layouts: Layout) -> Brought:
    """What a rank brings whose tensors of these names have these layouts."""
    flat = flatten(state)
    tensors = {
        name: Described(tensor.dtype, tuple(tensor.shape), layouts.get(name))
        for name, tensor in flat.tensors.items()
    }
    return Brought(flat.structure, tensors)


def test_ranks_that_bring_the_same_have_one_digest_whatever_the_order_of_keys() -> None:
    one = brought({"a": torch.ones(2), "b": [1, 2.5, None]})
    assert one.digest == brought({"b": [1, 2.5, None], "a": torch.zeros(2)}).digest
    for other in (
        {"a": torch.ones(2), "b": [1, 2.5, 0]},
        {"a": torch.ones(3), "b": [1, 2.5, None]},
        {"a": torch.ones(2).double(), "b": [1, 2.5, None]},
        {"c": torch.ones(2), "b": [1, 2.5, None]},
    ):
        assert one.digest != brought(other).digest


def test_stages_of_a_pipeline_are_merged() -> None:
    stages = [
        (0, brought({"model": {"0": torch.ones(3)}, "opt": {0: {"lr": 0.1}}, "steps": [1, {}]})),
        (1, brought({"model": {"1": torch.ones(4)}, "opt": {}, "steps": [1, {"x": 2}]})),
        (2, brought({"model": {"1": torch.ones(4)}, "opt": {1: {"lr": 0.2}}, "steps": [1, {}]})),
    ]
    merged = merge(stages)
    assert merged.structure == {
        "model": {"0": {"$tensor": "model.0"}, "1": {"$tensor": "model.1"}},
        "opt": {"$dict": [[0, {"lr": 0.1}], [1, {"lr": 0.2}]]},
        "steps": [1, {"x": 2}],
    }
    layouts = {one.name: one.layout for one in merged.wanted}
    assert layouts == {
        "model.0": Layout.replicated((3,), [0]),
        "model.1": Layout.replicated((4,), [1, 2]),
    }


def test_a_tensor_of_a_group_is_merged_with_that_of_ranks_that_have_other_ones() -> None:
    state = {"w": torch.ones(4, 2)}
    merged = merge([(0, brought(state, w=ROWS)), (1, brought({})), (2, brought(state, w=ROWS))])
    assert [(one.name, one.layout) for one in merged.wanted] == [("w", ROWS)]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"epoch": 3}, {"epoch": 4}, r"differ in 'epoch' \(rank 0: 3; rank 1: 4\)"),
        ({"a": {"b": (1, 2)}}, {"a": {"b": (1, 3)}}, r"differ in 'a.b.1' \(rank 0: 2; rank 1: 3\)"),
        ({"a": [1]}, {"a": [1, 2]}, r"differ in 'a' \(rank 0: \[1\]; rank 1: \[1, 2\]\)"),
        ({"a": {}}, {"a": [1]}, r"differ in 'a'"),
        ({"a": 1}, {"a": torch.ones(1)}, r"differ in 'a'"),
        (
            {"w": torch.ones(2), "x": 1},
            {"w": torch.ones(3)},
            r"differ in 'w' \(rank 0: plain \(2,\) of float32; rank 1: plain \(3,\) of float32\)",
        ),
    ],
)
def test_what_ranks_contradict_each_other_in_is_named(one: Any, other: Any, message: str) -> None:
    with pytest.raises(AgreementError, match=message):
        merge([(0, brought(one)), (1, brought(other))])


def test_owners_that_do_not_bring_their_shards_are_named() -> None:
    state = {"w": torch.ones(4, 2)}
    expected = "'w' has shards on ranks 0, 2: expected all of them .*got nothing from rank 2"
    with pytest.raises(AgreementError, match=expected):
        merge([(0, brought(state, w=ROWS)), (1, brought({"x": 1}))])
    with pytest.raises(AgreementError, match=expected):
        all_alike(brought(state, w=ROWS), (0, 1), are_tied=True)


def test_tied_tensors_are_known_by_their_memory() -> None:
    weight = torch.ones(4, 3)
    state = {"a": weight, "b": weight.detach(), "c": weight[:2], "d": weight.t(), "e": weight[:0]}
    found = bring({**state, "f": weight[:0], "g": weight[:2]})
    assert found.same_as == {"b": "a", "g": "c"}
    merged = all_alike(found, (0,), are_tied=True)
    assert [one.name for one in merged.wanted] == ["a", "c", "d", "e", "f"]
    assert len(all_alike(found, (0,), are_tied=False).wanted) == 7
    assert found.tied_digest != bring({"a": weight, "b": weight.clone()}).tied_digest


def test_what_is_pending_is_reduced_to_one_rank_per_box_in_turns() -> None:
    boxes = [Box((0,), (2,)), Box((2,), (4,))]
    pending = Layout(
        (4,),
        [box for box in boxes for _ in range(2)],
        [0, 1, 0, 1],
        terms=[0, 1] * 2,
        pending="sum",
    )
    assert reduced(pending) == Layout((4,), boxes, [0, 1])
    assert reduced(ROWS) is ROWS


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, dtype=torch.complex128), "'w'.*safetensors.*got complex128"),
        (torch.ones(2, device="meta"), "'w' of the state.*meta device.*materialize"),
        (torch.ones(2, 2).to_sparse(), "'w' of the state.*sparse_coo.*to_dense"),
        (object(), "'w' of the state.*got object"),
    ],
)
def test_what_cannot_be_saved_is_named(value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        bring({"w": value})
