"""States as JSON: what goes in comes out, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.structure import flatten, tensor_names, unflatten
from shardwise.errors import CheckpointError, DamagedError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float8_e4m3fn, torch.Size([2, 3]), torch.device("cuda", 1)])
)
LETTERS = st.characters(exclude_categories=["Nd", "Cs"], exclude_characters=".-")
KEYS = st.text(LETTERS, min_size=1, max_size=3) | st.integers() | st.just("$tensor")
STATES = st.recursive(
    SCALARS,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(KEYS, parts, max_size=3)
    ),
    max_leaves=12,
)


def through_json(structure: Any) -> Any:
    return json.loads(json.dumps(structure))


@given(STATES)
def test_values_come_back_as_they_were(state: Any) -> None:
    found = unflatten(through_json(flatten(state).structure), pytest.fail)
    assert found == state
    assert repr(found) == repr(state)  # 1 is not True, a tuple is no list


def test_tensors_have_dotted_names() -> None:
    a, b, c = (torch.full((1,), float(k)) for k in range(3))
    state = {"model": {"fc.weight": a}, "optimizer": {"state": {0: {"exp_avg": b}}}, "more": [c, 1]}
    flat = flatten(state)
    assert list(flat.tensors) == ["model.fc.weight", "optimizer.state.0.exp_avg", "more.0"]
    structure = through_json(flat.structure)
    assert tensor_names(structure) == list(flat.tensors)
    assert unflatten(structure, flat.tensors.__getitem__) == state


def test_an_object_stands_for_its_state_dict() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    flat = flatten({"model": model, "optimizer": optimizer})
    assert list(flat.tensors) == ["model.weight", "model.bias"]
    found = unflatten(through_json(flat.structure), flat.tensors.__getitem__)
    assert found["optimizer"] == optimizer.state_dict()


def test_what_cannot_be_said_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'a\.b' of the state: expected a tensor.* got set"):
        flatten({"a": {"b": {1, 2}}})
    with pytest.raises(CheckpointError, match=r"'a' of the state: .* got int of 4097 bits"):
        flatten({"a": 1 << 4096})
    with pytest.raises(CheckpointError, match="'__metadata__' of the state: expected another name"):
        flatten({"__metadata__": torch.ones(1)})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contain itself"):
        flatten(loop)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "a.b"),
        ({"a": {"b": 1}, "a.b": 2}, "a.b"),
        ({"a": {"b": {"c": 1}}, "a.b": {"d": 2}}, "a.b"),
        ({1: 2, "1": 3}, "1"),
        ({"": 1}, ""),
    ],
    ids=["tensors", "values", "containers", "numbers", "empty"],
)
def test_two_parts_of_a_state_never_have_one_name(state: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"two parts of the state have the name {name!r}"):
        flatten(state)


@pytest.mark.parametrize(
    "structure",
    [
        {"$dtype": "nn"},
        {"$dtype": 3},
        {"$unknown": 1},
        {"$bytes": "%%%"},
        {"$float": []},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$complex": [1]},
        {"$device": "nowhere"},
        {"$tuple": 3},
    ],
    ids=str,
)
def test_what_nobody_wrote_is_refused(structure: Any) -> None:
    with pytest.raises(DamagedError, match="in the state"):
        unflatten(structure, lambda name: name)
