"""What of a state gets what of a checkpoint: names, values, objects, and what does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.checkpoint.loaded import full, numbers, on_one, rows, same, to_fill
from tests.checkpoint.saved import write_checkpoint

import shardwise
from shardwise.checkpoint import fuse, load, load_safetensors, part
from shardwise.comm.simulate import simulate
from shardwise.errors import CheckpointError
from shardwise.geometry import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


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


def test_a_tied_parameter_may_be_saved_by_one_of_its_names(tmp_path: Path) -> None:
    weight = numbers((6, 4))
    folder = write_checkpoint(tmp_path, {"embedding.weight": weight})

    def go(rank: int) -> None:
        model: Any = torch.nn.ModuleDict(
            {"embedding": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)}
        )
        tied = torch.nn.Parameter(to_fill(rows((6, 4), 1), torch.float32, rank))  # of rank 0 alone
        model["embedding"].weight = model["head"].weight = tied
        assert load(model, folder) == ([], [], [])
        assert torch.equal(full(model["head"].weight), weight)
        model["head"].weight = torch.nn.Parameter(torch.zeros(6, 4))
        assert load(model, folder, strict=False) == (["head.weight"], [], [])

    simulate(go, 2)


def test_tied_names_take_the_last(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"a": torch.zeros(4), "b": torch.arange(4.0)})

    def go(rank: int) -> list[float]:
        memory = torch.ones(4)
        load({"a": memory, "b": memory.view(4)}, folder)
        lone = Layout((4,), same((4,), 1).boxes, [0])
        tied = to_fill(lone, torch.float32, rank)
        load({"a": tied, "b": tied.detach()}, folder)
        assert full(tied).tolist() == [0, 1, 2, 3]
        found: list[float] = memory.tolist()
        return found

    assert simulate(go, 2).results == [[0, 1, 2, 3]] * 2


def test_a_map_renames_fuses_and_cuts(tmp_path: Path) -> None:
    q, k, v = numbers((8, 3)), numbers((4, 3)) + 1, numbers((4, 3)) + 2
    qkv = torch.cat([q, k, v])
    saved = {"h.0.q.w": q, "h.0.k.w": k, "h.0.v.w": v, "h.0.qkv.w": qkv, "old.bias": q[0]}
    folder = write_checkpoint(tmp_path, saved, {"h.0.q.w": rows((8, 3), 3)})

    def go(rank: int) -> None:
        state = {
            "layers.0.qkv": to_fill(rows((16, 3), 2), torch.float32, rank),
            "layers.0.packed": to_fill(rows((16, 3), 2, dim=1), torch.float32, rank),
            "layers.0.k": to_fill(rows((4, 3), 2), torch.float32, rank),
            "layers.0.turned": to_fill(rows((3, 8), 2), torch.float32, rank),
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
        parameter = torch.nn.Parameter(to_fill(rows((6, 4), 3), torch.float32, rank))
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
            mine: dict[str, Any] = {"first": to_fill(rows((6, 4), 2), torch.float32, rank)}
        else:
            layout = Layout((6, 4), rows((6, 4), 2).boxes, [2, 3])
            mine = {"second": to_fill(layout, torch.float32, rank)}
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
        x = to_fill(rows((4, 4), 2), torch.float32, rank)
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
        model.weight = torch.nn.Parameter(to_fill(rows((6, 4), 2, dim=1), torch.float32, rank))
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
