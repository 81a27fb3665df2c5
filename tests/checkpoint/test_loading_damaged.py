"""Checkpoints that are damaged or made by strangers: an error in words, and nothing else."""

from __future__ import annotations

import json
import tracemalloc
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.folders import flip
from tests.checkpoint.loaded import full, numbers, rows, to_fill
from tests.checkpoint.saved import write_checkpoint

import shardwise
from shardwise.checkpoint import load, load_index
from shardwise.checkpoint.index import INDEX_NAME
from shardwise.checkpoint.reading import Reader
from shardwise.comm.simulate import simulate
from shardwise.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from pathlib import Path

SMALL = 8 << 20  # bytes: no damaged checkpoint of these tests makes anybody need as many


def state() -> dict[str, Any]:
    return {
        "w": torch.arange(12.0).view(4, 3),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "n": {"step": 3, 1: [True, None]},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = shardwise.chunk(0, ranks=[0, 1]).layout((4, 3))
    return write_checkpoint(tmp_path, state(), {"w": rows})


def zeros() -> dict[str, Any]:
    return {"w": torch.zeros(4, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "n": {}}


def outcome(folder: Path, *, verify: bool = False) -> str:
    """The error of a load, or "" where it loaded what was saved; anything else fails."""
    found = zeros()
    tracemalloc.start()
    try:
        load(found, folder, verify=verify)
    except CheckpointError as error:
        return str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < SMALL
    assert str(found) == str(state())
    return ""


def sealed(body: dict[str, Any]) -> bytes:
    """An index with a right checksum, as a stranger can make it."""
    body = {key: value for key, value in body.items() if key != "checksum"}
    text = (json.dumps(body, separators=(",", ":"))[:-1] + ',"checksum":"').encode()
    return text + f'{xxhash.xxh3_64_hexdigest(text)}"}}\n'.encode()


def body_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / INDEX_NAME).read_bytes())
    return found


def test_an_untouched_checkpoint_loads(folder: Path) -> None:
    assert outcome(folder, verify=True) == ""
    (folder / INDEX_NAME).write_bytes(sealed(body_of(folder)))
    assert outcome(folder, verify=True) == ""


@given(data=st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_of_the_index_is_found(folder: Path, data: st.DataObject) -> None:
    path = folder / INDEX_NAME
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != good[at]))
    bad = data.draw(st.sampled_from([good[:at], good[:at] + bytes([byte]) + good[at + 1 :]]))
    try:
        path.write_bytes(bad)
        assert INDEX_NAME in outcome(folder) or "newer shardwise" in outcome(folder)
    finally:
        path.write_bytes(good)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all parts of a JSON value."""
    keys = list(node) if isinstance(node, dict) else range(len(node) if type(node) is list else 0)
    return [path, *(way for key in keys for way in places(node[key], (*path, key)))]


VALUES = [-1, 0, 1, 7, 2**31, 2**62, 2**63, 2**70, 1.5, "", "w", "../x", None, True, [], {}, [[9]]]


@given(data=st.data())
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_strangers_index_never_breaks_anything(folder: Path, data: st.DataObject) -> None:
    path = folder / INDEX_NAME
    good = path.read_bytes()
    body = json.loads(good)
    for _ in range(data.draw(st.integers(1, 2))):
        way = data.draw(st.sampled_from(places(body)[1:]))
        parent = body
        for key in way[:-1]:
            parent = parent[key]
        parent[way[-1]] = deepcopy(data.draw(st.sampled_from(VALUES)))  # the next goes into it
    found = zeros()
    tracemalloc.start()
    try:
        path.write_bytes(sealed(body))
        load(found, folder, strict=False, verify=True)
    except CheckpointError:
        pass
    finally:
        path.write_bytes(good)
        assert tracemalloc.get_traced_memory()[1] < SMALL
        tracemalloc.stop()
    # Bytes are checked by their sums, so wrong numbers cannot come from other bytes.
    assert found["w"].shape == (4, 3)


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_that_are_cut_off_changed_or_gone_are_found(
    folder: Path, data: st.DataObject
) -> None:
    index = load_index(folder)
    file = folder / data.draw(st.sampled_from(index.files)).name
    good = file.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "longer", "gone", "flip"]))
    try:
        if kind == "gone":
            file.unlink()
        elif kind == "flip":
            piece = data.draw(
                st.sampled_from(
                    [
                        piece
                        for tensor in index.tensors.values()
                        for piece in tensor.pieces()
                        if index.files[piece.file].name == file.name
                    ]
                )
            )
            at = data.draw(st.integers(piece.start, piece.start + piece.nbytes - 1))
            file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        else:
            size = data.draw(st.integers(0, len(good) - 1))
            file.write_bytes(good[:size] if kind == "cut" else good + b"x")
        text = outcome(folder, verify=kind == "flip")
        assert file.name in text
        assert "again" in text or "Put it back" in text
    finally:
        file.write_bytes(good)


def changed(folder: Path, way: tuple[Any, ...], value: Any) -> str:
    body = body_of(folder)
    parent = body
    for key in way[:-1]:
        parent = parent[key]
    parent[way[-1]] = value
    (folder / INDEX_NAME).write_bytes(sealed(body))
    return outcome(folder)


@pytest.mark.parametrize(
    ("way", "value", "text"),
    [
        (("files", 0, 0), "../outside", "'../outside' is not in the folder of the checkpoint"),
        (("files", 0, 0), "/etc/passwd", "'/etc/passwd' is not in the folder"),
        (("cuts", 0, "sizes", 0, 0), 3, "boxes of"),
        (("tensors", "w", "shape"), [2**40, 2**40], "fewer than 2**63"),
        (("tensors", "b", "start"), 2**40, "is said to be at byte"),
        (("tensors", "w", "dtype"), "PICKLE", "dtype of 'w'"),
        (("version",), 99, "A newer shardwise wrote it"),
        (("state", "n"), {"$pickle": "x"}, "$pickle in the state"),
    ],
)
def test_what_cannot_be_is_named(folder: Path, way: tuple[Any, ...], value: Any, text: str) -> None:
    assert text in changed(folder, way, value)


def test_a_file_of_another_checkpoint_is_found_without_checksums(folder: Path) -> None:
    file = folder / load_index(folder).files[0].name
    good = file.read_bytes()
    file.write_bytes(bytes([good[0] ^ 64]) + good[1:])
    text = outcome(folder)
    assert f"file {file.name!r}" in text
    assert "expected a header of" in text


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_deep_nesting_is_refused(folder: Path, depth: int) -> None:
    good = (folder / INDEX_NAME).read_bytes()
    deep = b"[" * depth + b"]" * depth
    bad = good.replace(b'["step",3]', b'["step",' + deep + b"]")
    assert bad != good
    end = len(bad) - 19
    bad = bad[:end] + f'{xxhash.xxh3_64_hexdigest(bad[:end])}"}}\n'.encode()
    (folder / INDEX_NAME).write_bytes(bad)
    assert INDEX_NAME in outcome(folder)


def test_no_room_is_made_for_what_the_files_do_not_hold(folder: Path, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.SGD([parameter], momentum=0.5)
    parameter.grad = torch.ones(4, 3)
    optimizer.step()
    other = write_checkpoint(tmp_path / "optimizer", optimizer)
    body = body_of(other)
    name = "state.0.momentum_buffer"
    body["files"][0][1] = 2**50
    body["tensors"][name]["shape"] = [2**20, 2**20]
    body["cuts"][body["tensors"][name]["cut"]]["sizes"] = [[2**20, 2**20]]
    (other / INDEX_NAME).write_bytes(sealed(body))
    fresh = torch.optim.SGD([torch.nn.Parameter(torch.ones(2**20, 1).expand(2**20, 2**20))])
    with pytest.raises(CheckpointError, match=f"expected {2**50} bytes"):
        load(fresh, other)
    body["state"]["param_groups"] = [{"params": 3}]
    (other / INDEX_NAME).write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match="param_groups"):
        load(fresh, other)


# -- of which all ranks hear --------------------------------------------------------------------


def test_files_of_a_checkpoint_that_was_replaced_are_not_read(tmp_path: Path) -> None:
    state = {"x": torch.zeros(4)}
    index = load_index(write_checkpoint(tmp_path, state))
    write_checkpoint(tmp_path, {"x": torch.ones(4)})  # of the same names and sizes
    with Reader(index) as reader, pytest.raises(CheckpointError, match="was replaced or removed"):
        reader.read("x", rows((4,), 1).boxes[0], state["x"])
    assert state["x"].tolist() == [0] * 4


def test_a_flipped_byte_is_found_before_anything_changes(tmp_path: Path) -> None:
    layout = rows((6, 4), 2)
    folder = write_checkpoint(tmp_path, {"x": numbers((6, 4))}, {"x": layout})
    piece = load_index(folder).tensors["x"].piece(1)
    name = load_index(folder).files[piece.file].name
    flip(folder / name, piece.start + 5)

    def go(rank: int) -> str:
        x = to_fill(rows((6, 4), 3, dim=1), torch.float32, rank)
        with pytest.raises(CheckpointError) as caught:
            load({"x": x}, folder, verify=True)
        assert torch.equal(full(x), torch.ones(6, 4))
        load({"x": x}, folder)  # of what was not looked at nothing is known
        return str(caught.value)

    for text in simulate(go, 3).results:
        assert f"box [3:6, 0:4] of 'x' in file {name!r}" in text
        assert text.endswith("Nothing was loaded.")


def test_a_file_that_fails_half_way_is_heard_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(
        tmp_path, {"x": numbers((6, 4)), "y": numbers((8,))}, {"x": rows((6, 4), 3)}
    )
    files = load_index(folder).files
    gone = next(file for file in files if file.rank == 2)
    (folder / gone.name).write_bytes((folder / gone.name).read_bytes()[:-1])

    def go(rank: int) -> tuple[type[Exception], str]:
        state = {"x": to_fill(rows((6, 4), 3), torch.float32, rank), "y": torch.zeros(8)}
        with pytest.raises(CheckpointError) as caught:
            load(state, folder)
        return caught.type, str(caught.value)

    found = simulate(go, 3).results
    assert found[2][0] is DamagedError
    for _, text in found:
        assert f"file {gone.name!r}" in text
        assert "The state is partly loaded" in text
