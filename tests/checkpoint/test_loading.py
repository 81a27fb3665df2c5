"""Loading into any layout: values, bytes read, names, dtypes, what is wrong."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.saved import write_checkpoint

import shardwise
from shardwise.checkpoint import fuse, load, load_index, load_safetensors, part, reading, sharing
from shardwise.checkpoint.reading import Reader
from shardwise.comm.simulate import simulate
from shardwise.errors import CheckpointError, DamagedError, RankFailure
from shardwise.geometry import Layout
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.testing.strategies import layouts, shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from shardwise.checkpoint.index import Index

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.uint8,
)


def empty(layout: Layout, dtype: torch.dtype, rank: int) -> ShardedTensor:
    """A sharded tensor of wrong values."""
    shards = [torch.ones(box.shape).to(dtype) for box in layout.boxes_of(rank)]
    return wrap(make_state(layout, shards, group=None, dtype=dtype))


def full(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor()
    return found


def rows(shape: tuple[int, ...], world_size: int, dim: int = 0) -> Layout:
    return shardwise.chunk(dim, ranks=range(world_size)).layout(shape)


def same(shape: tuple[int, ...], world_size: int) -> Layout:
    return Layout.replicated(shape, range(world_size))


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


def equal(one: Any, other: torch.Tensor) -> bool:
    """Bit for bit, but for the sign of zero, which a sum of terms may lose."""
    return one.dtype == other.dtype and torch.equal(one.float(), other.float())


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_tensor_of_any_layout_loads_into_any_other(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = data.draw(shapes(max_ndim=3, max_size=6))
    saved = data.draw(layouts(shape=shape, addends=False))
    target = data.draw(layouts(shape=shape))
    dtype = data.draw(st.sampled_from(DTYPES))
    max_bytes = data.draw(st.sampled_from([None, 1, 40]))
    if target.pending is not None:
        dtype = torch.float64
    value = numbers(shape, dtype)
    folder = write_checkpoint(tmp_path_factory.mktemp("any"), {"x": value}, {"x": saved})

    def go(rank: int) -> torch.Tensor:
        state = {"x": empty(target, dtype, rank)}
        keys = load(state, folder, max_bytes=max_bytes, verify=True)
        assert keys == ([], [], [])
        return full(state["x"])

    world_size = data.draw(st.integers(max(target.ranks, default=0) + 1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_LEAST", 8)  # so that several ranks read of small boxes
        for loaded in simulate(go, world_size).results:
            if target.pending == "avg":
                torch.testing.assert_close(loaded, value)
            else:
                assert equal(loaded, value)


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is really asked of the files: bytes of preads, and of mapped memory that is copied."""
    counted = [0]
    pread, tensor_on = os.preadv, reading._tensor_on

    def counting(handle: int, buffers: Any, at: int) -> int:
        done: int = pread(handle, buffers, at)
        counted[0] += done
        return done

    def counting_map(*args: Any) -> torch.Tensor:
        return tensor_on(*args).as_subclass(_Counted)

    class _Counted(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            outer: Any = super()
            out = outer.__torch_function__(func, types, args, kwargs or {})
            if func is torch.Tensor.copy_:
                counted[0] += args[1].nbytes
            return out

    monkeypatch.setattr(os, "preadv", counting)
    monkeypatch.setattr(reading, "_tensor_on", counting_map)
    return counted


@pytest.mark.parametrize(
    "target",
    [
        rows((64, 96), 3),
        rows((64, 96), 4, dim=1),
        shardwise.grid([2, 2], ranks=[3, 1, 0, 2]).layout((64, 96)),
        same((64, 96), 4),
    ],
    ids=["rows", "columns", "grid", "replicas"],
)
def test_each_byte_is_read_once_over_all_ranks(
    target: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = numbers((64, 96))
    folder = write_checkpoint(tmp_path, {"x": value}, {"x": rows((64, 96), 2)})
    monkeypatch.setattr(sharing, "_LEAST", 1000)
    counted = count_bytes(monkeypatch)

    def go(rank: int) -> bool:
        state = {"x": empty(target, torch.float32, rank)}
        load(state, folder)
        return equal(full(state["x"]), value)

    assert all(simulate(go, 4).results)
    assert counted[0] == value.nbytes


def test_replicas_read_parts_and_pass_them_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"big": numbers((40, 10)), **{f"small{k}": numbers((5,)) for k in range(8)}}
    folder = write_checkpoint(tmp_path, state)
    monkeypatch.setattr(sharing, "_LEAST", 100)
    readers: list[Reader] = []
    make = Reader.__init__

    def noted(self: Reader, index: Index, **options: Any) -> None:
        readers.append(self)
        make(self, index, **options)

    monkeypatch.setattr(Reader, "__init__", noted)

    def go(rank: int) -> bool:
        mine = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        load(mine, folder)
        return all(torch.equal(mine[name], state[name]) for name in state)

    run = simulate(go, 4)
    assert all(run.results)
    total = sum(tensor.nbytes for tensor in state.values())
    assert [reader.bytes_read for reader in readers] == [total // 4] * 4
    assert run.traffic.total_bytes >= 3 * total


def test_non_contiguous_memory_is_filled_under_a_cap(tmp_path: Path) -> None:
    value = numbers((30, 7))
    folder = write_checkpoint(tmp_path, {"x": value, "y": value})

    def go(rank: int) -> bool:
        turned = torch.zeros(7, 30).t()
        own = torch.zeros(7, 30).t() if rank == 0 else torch.zeros(0)
        single = Layout((30, 7), same((30, 7), 1).boxes, [0])
        shards = [own] if rank == 0 else []
        y = wrap(make_state(single, shards, group=None, dtype=torch.float32))
        load({"x": turned, "y": y}, folder, max_bytes=64)
        return torch.equal(turned, value) and torch.equal(full(y), value)

    assert all(simulate(go, 3).results)


def test_views_of_other_values_are_filled(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"a": torch.tensor([1 + 2j]), "b": torch.tensor([3.0])})
    memory, other = (torch.zeros(1, dtype=torch.complex64) for _ in range(2))
    on_one(lambda: load({"a": memory.conj(), "b": other.conj().imag}, folder))
    assert memory.tolist() == [1 - 2j]
    assert other.tolist() == [-3j]


def test_a_tied_parameter_may_be_saved_by_one_of_its_names(tmp_path: Path) -> None:
    weight = numbers((6, 4))
    folder = write_checkpoint(tmp_path, {"embedding.weight": weight})

    def go(rank: int) -> None:
        model: Any = torch.nn.ModuleDict(
            {"embedding": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)}
        )
        tied = torch.nn.Parameter(empty(rows((6, 4), 1), torch.float32, rank))  # of rank 0 alone
        model["embedding"].weight = model["head"].weight = tied
        assert load(model, folder) == ([], [], [])
        assert torch.equal(full(model["head"].weight), weight)
        model["head"].weight = torch.nn.Parameter(torch.zeros(6, 4))
        assert load(model, folder, strict=False) == (["head.weight"], [], [])

    simulate(go, 2)


def test_files_of_a_checkpoint_that_was_replaced_are_not_read(tmp_path: Path) -> None:
    state = {"x": torch.zeros(4)}
    index = load_index(write_checkpoint(tmp_path, state))
    write_checkpoint(tmp_path, {"x": torch.ones(4)})  # of the same names and sizes
    with Reader(index) as reader, pytest.raises(CheckpointError, match="was replaced or removed"):
        reader.read("x", rows((4,), 1).boxes[0], state["x"])
    assert state["x"].tolist() == [0] * 4


def test_tied_names_take_the_last(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"a": torch.zeros(4), "b": torch.arange(4.0)})

    def go(rank: int) -> list[float]:
        memory = torch.ones(4)
        load({"a": memory, "b": memory.view(4)}, folder)
        lone = Layout((4,), same((4,), 1).boxes, [0])
        tied = empty(lone, torch.float32, rank)
        load({"a": tied, "b": tied.detach()}, folder)
        assert full(tied).tolist() == [0, 1, 2, 3]
        found: list[float] = memory.tolist()
        return found

    assert simulate(go, 2).results == [[0, 1, 2, 3]] * 2


def test_values_replace_those_of_the_state(tmp_path: Path) -> None:
    saved = {
        "x": torch.arange(3.0),
        "step": 7,
        "history": [1, 2, 3],
        "nested": {"name": "run", 5: (1, None, {"deep": True})},
        "mixed": [torch.tensor(2), "text", (torch.tensor(3), 4.5)],
    }
    folder = write_checkpoint(tmp_path, saved)

    def go(rank: int) -> None:
        history: list[int] = []
        nested: dict[Any, Any] = {"old": 1}
        state = {
            "x": torch.zeros(3),
            "step": 0,
            "history": history,
            "nested": nested,
            "mixed": [torch.tensor(0), "", (torch.tensor(0), 0.0)],
        }
        assert repr(load(state, folder)) == "<All keys loaded>"
        assert state["step"] == 7
        assert state["history"] is history
        assert history == [1, 2, 3]
        assert state["nested"] is nested
        assert nested == {"name": "run", 5: (1, None, {"deep": True})}
        assert str(state["mixed"]) == str(saved["mixed"])

    simulate(go, 2)


def on_one(fn: Callable[[], Any]) -> Any:
    """The result of one rank; what it raises."""
    try:
        return simulate(lambda rank: fn(), 1).results[0]
    except RankFailure as failure:
        raise failure.__cause__ or failure from None


def test_names_without_partner_raise_and_are_returned(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"layers.0.weight": torch.ones(2), "step": 3})

    def state() -> dict[str, Any]:
        return {"layers.0.weigth": torch.zeros(2), "stop": 1}

    with pytest.raises(CheckpointError, match=r"Nearest: 'layers\.0\.weight'") as caught:
        on_one(lambda: load(state(), folder))
    assert "not in the state: 'step'" in str(caught.value)
    keys = on_one(lambda: load(state(), folder, strict=False))
    assert keys.missing == ["layers.0.weigth", "stop"]
    assert keys.unexpected == ["layers.0.weight", "step"]
    assert repr(keys).startswith("LoadedKeys(missing=['layers.0.weigth', 'stop'], unexpected=")


def test_a_state_dict_may_lack_tensors_that_are_made_later(tmp_path: Path) -> None:
    saved = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    folder = write_checkpoint(tmp_path, {"optimizer": saved})
    state: dict[str, Any] = {"optimizer": {"state": {}, "param_groups": [{"lr": 1, "params": [0]}]}}
    with pytest.raises(CheckpointError, match=r"not in the state: 'optimizer\.state\.0\.exp_avg'"):
        on_one(lambda: load(state, folder))
    keys = on_one(lambda: load(state, folder, strict=False))
    assert keys == ([], ["optimizer.state.0.exp_avg"], [])
    assert state["optimizer"]["param_groups"] == saved["param_groups"]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ({"x": torch.zeros(3, 2)}, r"'x': expected shape \(3, 2\).*got \(2, 3\)"),
        ({"x": torch.zeros(2, 3, dtype=torch.int64)}, "expected a dtype that torch.int64 can hold"),
        ({"x": 5}, "^'x': expected int, as in the state, got tensors"),
        ({"x": torch.zeros(2, 3, device="meta")}, "meta device"),
        (7, "state of load: expected a dict or list"),
    ],
)
def test_what_cannot_fit_raises_before_anything_changes(
    target: Any, text: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, {"x": torch.ones(2, 3), "y": torch.ones(2)})
    other = torch.zeros(2)
    state = {**target, "y": other} if isinstance(target, dict) else target
    with pytest.raises(shardwise.ShardwiseError, match=text):
        on_one(lambda: load(state, folder))
    assert other.tolist() == [0, 0]


def test_dtypes_are_converted_and_named(tmp_path: Path) -> None:
    value = torch.tensor([1.0, 1 + 2**-12, 300])
    saved = {"x": value, "n": torch.tensor([3, 4], dtype=torch.int32), "same": value}
    saved["state.0.step"] = torch.tensor(1001.0)  # which bfloat16 cannot hold
    folder = write_checkpoint(tmp_path, saved)

    def go(rank: int) -> None:
        state = {
            "x": torch.zeros(3, dtype=torch.bfloat16),
            "n": torch.zeros(2, dtype=torch.float64),
            "same": torch.zeros(3),
            "state.0.step": torch.tensor(0.0),
        }
        assert load(state, folder).converted == ["x", "n"]
        assert torch.equal(state["x"], value.bfloat16())
        assert state["n"].tolist() == [3, 4]
        assert torch.equal(state["same"], value)
        load(state, folder, dtype=torch.bfloat16)
        assert torch.equal(state["same"], value.bfloat16().float())
        assert state["n"].tolist() == [3, 4]
        assert state["state.0.step"].item() == 1001

    simulate(go, 2)


def test_a_map_renames_fuses_and_cuts(tmp_path: Path) -> None:
    q, k, v = numbers((8, 3)), numbers((4, 3)) + 1, numbers((4, 3)) + 2
    qkv = torch.cat([q, k, v])
    saved = {"h.0.q.w": q, "h.0.k.w": k, "h.0.v.w": v, "h.0.qkv.w": qkv, "old.bias": q[0]}
    folder = write_checkpoint(tmp_path, saved, {"h.0.q.w": rows((8, 3), 3)})

    def go(rank: int) -> None:
        state = {
            "layers.0.qkv": empty(rows((16, 3), 2), torch.float32, rank),
            "layers.0.packed": empty(rows((16, 3), 2, dim=1), torch.float32, rank),
            "layers.0.k": empty(rows((4, 3), 2), torch.float32, rank),
            "layers.0.turned": empty(rows((3, 8), 2), torch.float32, rank),
            "bias": torch.zeros(3),
            "left": torch.full((2,), 9.0),
        }
        names = ("h.*.q.w", "h.*.k.w", "h.*.v.w")
        rules: dict[str, Any] = {
            "layers.*.qkv": fuse(*names),
            "layers.*.packed": fuse(*names, groups=2),
            "layers.*.k": part("h.*.qkv.w", 1, [8, 4, 4]),
            "layers.*.turned": shardwise.checkpoint.transpose("h.*.q.w"),
            "bias": "old.bias",
            "left": None,
        }
        assert load(state, folder, map=rules) == ([], [], [])
        assert torch.equal(full(state["layers.0.qkv"]), qkv)
        packed = torch.cat([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]])
        assert torch.equal(full(state["layers.0.packed"]), packed)
        assert torch.equal(full(state["layers.0.k"]), k)
        assert torch.equal(full(state["layers.0.turned"]), q.t())
        assert torch.equal(state["bias"], q[0])
        assert state["left"].tolist() == [9, 9]

    simulate(go, 2)


def test_a_hugging_face_folder_goes_straight_into_a_sharded_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {"model.a.weight": numbers((6, 4)), "model.b.weight": numbers((4, 6))}
    save_file({"model.a.weight": weights["model.a.weight"]}, tmp_path / "one.safetensors")
    (tmp_path / "more").mkdir()
    save_file({"model.b.weight": weights["model.b.weight"]}, tmp_path / "more/two.safetensors")
    files = [tmp_path / "one.safetensors", tmp_path / "more/two.safetensors"]

    def go(rank: int) -> None:
        model: Any = torch.nn.ModuleDict(
            {
                "a": torch.nn.Linear(4, 6, bias=False),
                "b": torch.nn.Linear(6, 4, bias=False),
            }
        )
        parameter = torch.nn.Parameter(empty(rows((6, 4), 3), torch.float32, rank))
        model["a"].weight = parameter
        assert load_safetensors(model, files, map={"*": "model.*"}) == ([], [], [])
        assert model["a"].weight is parameter
        assert torch.equal(full(parameter), weights["model.a.weight"])
        assert torch.equal(model["b"].weight, weights["model.b.weight"])
        keys = load_safetensors(model, files[0], map=lambda name: f"model.{name}", strict=False)
        assert keys == (["b.weight"], [], [])

    simulate(go, 3)


def test_ranks_may_load_different_parts(tmp_path: Path) -> None:
    value = numbers((6, 4))
    saved: dict[str, Any] = {"first": value, "second": value + 1, "both": value + 2, "step": 5}
    folder = write_checkpoint(tmp_path, saved)

    def go(rank: int) -> None:
        if rank < 2:
            mine: dict[str, Any] = {"first": empty(rows((6, 4), 2), torch.float32, rank)}
        else:
            layout = Layout((6, 4), rows((6, 4), 2).boxes, [2, 3])
            mine = {"second": empty(layout, torch.float32, rank)}
        mine |= {"both": torch.zeros(6, 4), "step": 0}
        assert load(mine, folder) == ([], [], [])
        name = "first" if rank < 2 else "second"
        for box, shard in zip(
            mine[name].shard_layout.boxes_of(rank), mine[name].local_shards(), strict=True
        ):
            assert torch.equal(shard.tensor, saved[name][box.slices()])
        assert torch.equal(mine["both"], saved["both"])
        wrong = {**mine, "both": torch.zeros(6, 4).double() if rank else torch.zeros(6, 4)}
        with pytest.raises(shardwise.ShardwiseError, match="load: ranks differ in 'both'"):
            load(wrong, folder)
        with pytest.raises(CheckpointError, match="not in the state: 'second'"):
            load({"first": torch.zeros(6, 4)} if rank < 2 else {"both": torch.zeros(6, 4)}, folder)

    simulate(go, 4)


def test_all_ranks_raise_where_one_means_something_else(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"x": torch.ones(4, 4)})
    other = write_checkpoint(tmp_path / "other", {"x": torch.zeros(4, 4)})
    both = write_checkpoint(tmp_path / "both", dict.fromkeys("xy", torch.zeros(4, 4)))

    def raised(rank: int, go: Callable[[], Any]) -> str:
        with pytest.raises(shardwise.ShardwiseError) as caught:
            go()
        return str(caught.value)

    def go(rank: int) -> list[str]:
        x = empty(rows((4, 4), 2), torch.float32, rank)
        found = [
            raised(rank, lambda: load({"x": x}, other if rank else folder)),
            raised(rank, lambda: load({"x": x}, tmp_path / "absent" if rank else folder)),
            raised(rank, lambda: load({"x": x}, folder, strict=bool(rank))),
            raised(rank, lambda: load({"x": x}, both, map={"x": "xy"[rank]}, strict=False)),
        ]
        assert full(x).tolist() == torch.ones(4, 4).tolist()
        return found

    first, second = simulate(go, 2).results
    assert "ranks differ in checkpoint" in first[0]
    assert f"here it is {str(folder)!r}" in first[0]
    assert "of float32 from x; rank 1: " in first[3]
    assert "load failed on other ranks" in first[1]
    assert "no checkpoint at" in first[1]
    assert "no checkpoint at" in second[1]
    assert "ranks differ in strict" in second[2]


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_flipped_byte_is_found_before_anything_changes(tmp_path: Path) -> None:
    layout = rows((6, 4), 2)
    folder = write_checkpoint(tmp_path, {"x": numbers((6, 4))}, {"x": layout})
    piece = load_index(folder).tensors["x"].piece(1)
    name = load_index(folder).files[piece.file].name
    flip(folder / name, piece.start + 5)

    def go(rank: int) -> str:
        x = empty(rows((6, 4), 3, dim=1), torch.float32, rank)
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
        state = {"x": empty(rows((6, 4), 3), torch.float32, rank), "y": torch.zeros(8)}
        with pytest.raises(CheckpointError) as caught:
            load(state, folder)
        return caught.type, str(caught.value)

    found = simulate(go, 3).results
    assert found[2][0] is DamagedError
    for _, text in found:
        assert f"file {gone.name!r}" in text
        assert "The state is partly loaded" in text


class _Kept:
    """An object with a state dict of its own."""

    def __init__(self) -> None:
        self.table, self.count = torch.zeros(3), 0

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table.clone(), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table, self.count = state["table"], state["count"]


class _WithExtra(torch.nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_objects_get_their_state(tmp_path: Path) -> None:
    kept, model = _Kept(), _WithExtra(2, 2)
    kept.table, kept.count = torch.arange(3.0), 4
    model.extra = {"seen": 5, "mask": torch.ones(2)}
    folder = write_checkpoint(tmp_path, {"kept": kept, "model": model})

    def go(rank: int) -> None:
        other, fresh = _Kept(), _WithExtra(2, 2)
        load({"kept": other, "model": fresh}, folder)
        assert (other.table.tolist(), other.count) == ([0, 1, 2], 4)
        assert fresh.extra["seen"] == 5
        assert fresh.extra["mask"].tolist() == [1, 1]
        assert torch.equal(fresh.weight, model.weight)

    simulate(go, 2)


def test_an_optimizer_without_state_gets_it_in_its_layouts(tmp_path: Path) -> None:
    plain = torch.nn.Linear(4, 6)
    unused = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([*plain.parameters(), unused], lr=0.125)
    plain(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saved = {"model": plain, "optimizer": optimizer, "step": 11}
    folder = write_checkpoint(tmp_path, saved, {"model.weight": rows((6, 4), 3)})
    moments = optimizer.state[plain.weight]

    def go(rank: int) -> None:
        model: Any = torch.nn.Linear(4, 6)
        model.weight = torch.nn.Parameter(empty(rows((6, 4), 2, dim=1), torch.float32, rank))
        fresh = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(3))])
        state = {"model": model, "optimizer": fresh, "step": 0}
        for _ in range(2):  # into no state, and into the state that is there
            assert load(state, folder) == ([], [], [])
            found = fresh.state[model.weight]
            assert found["exp_avg"].shard_layout == model.weight.shard_layout
            assert torch.equal(full(found["exp_avg"]), moments["exp_avg"])
            assert found["step"] == 1
            assert fresh.param_groups[0]["lr"] == 0.125
            assert state["step"] == 11
        extra = fresh.param_groups[0]["params"][-1]
        fresh.state[extra] = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), 5.0)}
        with pytest.raises(CheckpointError, match=r"optimizer\.state\.2\.exp_avg"):
            load(state, folder)
        keys = load(state, folder, strict=False)
        assert keys.missing == ["optimizer.state.2.step", "optimizer.state.2.exp_avg"]
        assert fresh.state[extra]["exp_avg"].tolist() == [5, 5, 5]

    simulate(go, 2)


def _load_on_real_ranks(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    value = numbers((301, 200))
    x = shardwise.distribute(torch.zeros(301, 200), shardwise.chunk(1))
    y = torch.zeros(301, 200)
    mesh = init_device_mesh("cpu", (3,))
    state = {
        "x": x,
        "y": y,
        "z": distribute_tensor(torch.zeros(301, 200), mesh, [Shard(0)]),
        "w": distribute_tensor(torch.zeros(301, 200), mesh, [Replicate()]),
    }
    load(state, folder, verify=True, max_bytes=1 << 16)
    assert torch.equal(x.full_tensor(), value)
    assert torch.equal(y, value)
    assert torch.equal(state["z"].full_tensor(), value)  # type: ignore[attr-defined]  # a DTensor
    assert torch.equal(state["w"].to_local(), value)  # type: ignore[attr-defined]  # a DTensor


def test_real_ranks_load(tmp_path: Path) -> None:
    value = numbers((301, 200))
    state = dict.fromkeys("xyzw", value)
    folder = write_checkpoint(tmp_path, state, {"x": rows((301, 200), 4)})
    shardwise.run_local(_load_on_real_ranks, 3, str(folder))


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    folder = write_checkpoint(tmp_path, model)
    other = torch.nn.Linear(3, 2)
    load(other, folder)
    assert torch.equal(other.weight, model.weight)
