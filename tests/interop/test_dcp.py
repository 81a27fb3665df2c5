"""Sharded tensors in torch.distributed.checkpoint: plans by simulation, files on real ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise
from shardwise import ShardingPlan, sharded_tensor
from shardwise.comm.simulate import simulate
from shardwise.errors import RankFailure
from shardwise.testing.local_run import run_local
from shardwise.testing.strategies import examples, layouts, shapes
from shardwise.testing.tensors import assemble, random_shards, random_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

    from shardwise.geometry import Layout

# -- plans ---------------------------------------------------------------------------------------


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Layouts of one shape, to save from and to load into."""
    shape = draw(shapes(max_size=5))
    source, target = (draw(layouts(shape=shape, addends=False)) for _ in range(2))
    return source, target


def _save_plan(layout: Layout) -> tuple[list[SavePlan], Any]:
    """The plans of all ranks and the metadata, as DCP's own planner makes them."""

    def local_plan(rank: int) -> SavePlan:
        planner = DefaultSavePlanner()
        planner.set_up_planner({"x": random_tensor(layout)}, is_coordinator=rank == 0)
        return planner.create_local_plan()

    planner = DefaultSavePlanner()
    return planner.create_global_plan(simulate(local_plan, 4).results)


@given(pairs())
def test_what_dcp_plans_to_save_fills_every_other_layout(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    plans, metadata = _save_plan(source)

    def saved(rank: int) -> list[tuple[WriteItem, torch.Tensor]]:
        tensor = random_tensor(source)
        return [(item, tensor.__get_tensor_shard__(item.index)) for item in plans[rank].items]

    pieces = [piece for found in simulate(saved, 4).results for piece in found]
    whole = sum(tensor.numel() for _, tensor in pieces)
    assert whole == torch.Size(source.shape).numel()  # replicas are written once
    files = {item.index: tensor for item, tensor in pieces}

    def loaded(_: int) -> list[torch.Tensor]:
        tensor = random_tensor(target, seed=1)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({"x": tensor}, metadata)
        for item in planner.create_local_plan().items:
            planner.resolve_tensor(item).copy_(_stored(files, item))
        return [shard.tensor for shard in tensor.local_shards()]

    found = dict(enumerate(simulate(loaded, 4).results))
    expected = assemble(source, random_shards(source))
    torch.testing.assert_close(assemble(target, found), expected, rtol=0, atol=0)


def _stored(files: dict[MetadataIndex, torch.Tensor], item: ReadItem) -> torch.Tensor:
    stored = files[item.storage_index]
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, start, length)
    return stored


def test_a_pending_sum_is_refused_by_name() -> None:
    def save(_: int) -> None:
        tensor = sharded_tensor.ones(shardwise.partial(ranks=[0, 1]), 4)
        tensor.__create_write_items__("model.weight", tensor)

    with pytest.raises(RankFailure, match=r"'model.weight' with a pending sum.*Reduce it first"):
        simulate(save, 2)


def test_a_chunk_that_is_not_here_is_refused() -> None:
    def get(_: int) -> None:
        tensor = sharded_tensor.ones(shardwise.chunk(0, ranks=[0, 1]), 4)
        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size([1])))

    with pytest.raises(RankFailure, match=r"'w' in torch.*expected a chunk of this rank"):
        simulate(get, 2)


# -- files ---------------------------------------------------------------------------------------

CASES = examples(pairs(), 24)
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


def _dtype(number: int) -> torch.dtype:
    return DTYPES[number % len(DTYPES)]


def _save_all(rank: int, folder: str, sources: tuple[Layout, ...]) -> None:
    """By each of DCP's ways to save, whose copies are made before the values change."""
    tensors = [random_tensor(layout, _dtype(n)) for n, layout in enumerate(sources)]
    dcp.save({"nested": {"list": tensors}, "step": 3}, checkpoint_id=f"{folder}/save")
    writer = FileSystemWriter(f"{folder}/writer")
    for name, storage_writer in (("async", None), ("writer", writer)):
        state: Any = {"nested": {"list": [tensor.clone() for tensor in tensors]}, "step": 3}
        saving: Any = dcp.async_save(
            state, checkpoint_id=f"{folder}/{name}", storage_writer=storage_writer
        )
        for tensor in state["nested"]["list"]:
            tensor.zero_()
        saving.result()


def _load_all(rank: int, folder: str, targets: list[Layout]) -> list[list[torch.Tensor]]:
    """What is in the tensors after loading: a list for each folder."""
    found = []
    for name in ("save", "async", "writer"):
        tensors = [random_tensor(t, _dtype(n), seed=1) for n, t in enumerate(targets)]
        state: dict[str, Any] = {"nested": {"list": tensors}, "step": 0}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        assert state["step"] == 3
        found.append([tensor.full_tensor() for tensor in tensors])
    return found


def test_files_load_into_other_layouts_on_another_number_of_ranks(tmp_path: Path) -> None:
    sources, targets = zip(*CASES, strict=True)
    run_local(_save_all, 4, str(tmp_path), sources)
    on_two = [_on_two_ranks(target) for target in targets]
    shards = [random_shards(source, _dtype(n)) for n, source in enumerate(sources)]
    expected = [assemble(s, held) for s, held in zip(sources, shards, strict=True)]
    for found in run_local(_load_all, 2, str(tmp_path), on_two)[0]:
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.float(), other.float())


def _on_two_ranks(layout: Layout) -> Layout:
    """The boxes of all ranks dealt out to two."""
    kept = {(box, rank % 2) for box, rank, _ in layout}
    return shardwise.Layout(layout.shape, [box for box, _ in kept], [rank for _, rank in kept])


# -- DTensor and FSDP2 ---------------------------------------------------------------------------


def _net(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def _full(value: torch.Tensor) -> torch.Tensor:
    is_sharded = isinstance(value, DTensor | shardwise.ShardedTensor)
    return value.full_tensor() if is_sharded else value


def _save_fsdp(rank: int, folder: str) -> None:
    model = _net(0)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/fsdp")
    mesh = init_device_mesh("cpu", (3,))
    weight = distribute_tensor(_net(0)[0].weight.detach(), mesh, [Shard(1)])
    dcp.save({"0.weight": weight}, checkpoint_id=f"{folder}/dtensor")
    plan = ShardingPlan({"0.weight": "chunk(0, sizes=[4, 0, 3])", "2.*": "block_cyclic(0, 1)"})
    ours = shardwise.shard_module(_net(0), plan, src_rank=None)
    dcp.save(ours.state_dict(), checkpoint_id=f"{folder}/ours")


def _load_fsdp(rank: int, folder: str) -> None:
    expected = _net(0).state_dict()
    plan = ShardingPlan({"0.weight": "grid([1, 2])", "0.bias": "on_rank(1)", "2.*": "chunk(0)"})
    for name in ("fsdp", "dtensor", "ours"):
        ours = shardwise.shard_module(_net(1), plan, src_rank=None)
        state = ours.state_dict()
        wanted = state if name != "dtensor" else {"0.weight": state["0.weight"]}
        dcp.load(wanted, checkpoint_id=f"{folder}/{name}")
        for key in wanted:
            assert torch.equal(_full(ours.state_dict()[key]), expected[key]), (name, key)
    theirs = _net(1)
    fully_shard(theirs, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    loaded = theirs.state_dict()
    dcp.load(loaded, checkpoint_id=f"{folder}/ours")
    theirs.load_state_dict(loaded)
    for key, value in theirs.state_dict().items():
        assert torch.equal(_full(value), expected[key]), key
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.zeros(7, 5), mesh, [Replicate()])
    dcp.load({"0.weight": weight}, checkpoint_id=f"{folder}/ours")
    assert torch.equal(weight.full_tensor(), expected["0.weight"])


def test_what_dtensor_and_fsdp2_saved_loads_and_the_other_way_round(tmp_path: Path) -> None:
    run_local(_save_fsdp, 3, str(tmp_path))
    run_local(_load_fsdp, 2, str(tmp_path))


# -- Hugging Face files --------------------------------------------------------------------------


def _save_hugging_face(rank: int, folder: str) -> None:
    full = torch.arange(35.0).view(7, 5)
    state = {
        "a": shardwise.distribute(full, shardwise.chunk(0, sizes=[3, 0, 4])),
        "b": shardwise.distribute(full, shardwise.replicate()),
        "c": shardwise.distribute(full, shardwise.grid([1, 2], ranks=[2, 0])),
    }
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))


def _load_hugging_face(rank: int, folder: str) -> None:
    spec = {"a": shardwise.chunk(1), "b": shardwise.block_cyclic(0, 1), "c": shardwise.on_rank(1)}
    state = {name: sharded_tensor.zeros(spec[name], 7, 5) for name in spec}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    for tensor in state.values():
        assert torch.equal(tensor.full_tensor(), torch.arange(35.0).view(7, 5))


def test_hugging_face_files_are_written_and_read(tmp_path: Path) -> None:
    run_local(_save_hugging_face, 3, str(tmp_path))
    run_local(_load_hugging_face, 2, str(tmp_path))


def _save_two_pieces(rank: int, folder: str) -> None:
    state = {"w": sharded_tensor.ones(shardwise.block_cyclic(0, 1), 4)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))


def test_several_pieces_on_a_rank_which_hugging_face_files_would_lose_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankFailure, match=r"'w' by HuggingFaceStorageWriter.*one piece"):
        run_local(_save_two_pieces, 2, str(tmp_path))


# -- get_state_dict and set_state_dict -----------------------------------------------------------

ROWS = {"0.*": "chunk(0)", "2.weight": "chunk(1)"}
COPIES = {"*.weight": "replicate()", "*.bias": "on_rank(0)"}


def _sharded(plan: dict[str, Any], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shardwise.shard_module(_net(seed), ShardingPlan(plan), src_rank=None)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    with shardwise.plain_inputs("replicated"), shardwise.implicit_comm("allow"):
        loss = model(torch.linspace(-1, 1, 10).view(2, 5)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _save_training(rank: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains and saves by DCP, once as ours and once by FSDP2; what comes next, as ours."""
    model, optimizer = _sharded(ROWS, 0)
    theirs = _net(0)
    fully_shard(theirs, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    pairs = {"ours": (model, optimizer), "fsdp": (theirs, torch.optim.AdamW(theirs.parameters()))}
    for name, (trained, by) in pairs.items():
        by.param_groups[0]["lr"] = 0.01
        for _ in range(2):
            _step(trained, by)
        weights: Any
        weights, state = get_state_dict(trained, by)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{name}")
    weights, _ = get_state_dict(model, optimizer)
    offloaded: Any
    offloaded, _ = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    assert torch.equal(offloaded["0.weight"], weights["0.weight"])
    full = shardwise.full_state_dict(model, rank0_only=False)
    return [_step(model, optimizer) for _ in range(2)], full


def _resume_training(rank: int, folder: str, full: Any) -> list[list[float]]:
    return [_resumed(rank, f"{folder}/{name}", full) for name in ("ours", "fsdp")]


def _resumed(rank: int, folder: str, full: Any) -> list[float]:
    model, optimizer = _sharded(COPIES, 1)
    weights, state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    for is_sent in (False, True):
        other, _ = _sharded(ROWS, 2)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_sent)
        set_model_state_dict(other, full if rank == 0 or not is_sent else {}, options=options)
        torch.testing.assert_close(
            other.state_dict()["0.weight"].full_tensor(),
            model.state_dict()["0.weight"].full_tensor(),
        )
    return [_step(model, optimizer) for _ in range(2)]


def test_training_of_ours_or_fsdp2_resumes_in_other_layouts_on_fewer_ranks(tmp_path: Path) -> None:
    losses, full = run_local(_save_training, 3, str(tmp_path))[0]
    for resumed in run_local(_resume_training, 2, str(tmp_path), full)[0]:
        assert resumed == pytest.approx(losses, rel=1e-5)
