"""Checkpoints of tensors on a GPU: one rank of NCCL, and gloo ranks that share the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import ShardingPlan
from shardwise.checkpoint import background, fuse, load, load_safetensors, save, transpose
from shardwise.comm.alone import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.sharding_spec import ShardingSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

GPU = torch.device("cuda:0")
ROWS = {"0.*": "chunk(0, device='cuda:0')", "2.weight": "chunk(1, device='cuda:0')"}
UNEVEN = {
    "0.*": "chunk(0, sizes=[3, 5], device='cuda:0')",
    "2.weight": "chunk(0, sizes=[0, 4], device='cuda:0')",
}
KINDS = {
    "half": torch.arange(60.0).view(12, 5).to(torch.bfloat16),
    "eight": torch.arange(40.0).view(8, 5).to(torch.float8_e4m3fn),
    "mask": torch.arange(20).view(5, 4) % 3 == 0,
    "count": torch.arange(-8, 8).view(4, 4),
    "wave": torch.complex(torch.arange(12.0), -torch.arange(12.0)).view(3, 4),
    "turned": torch.arange(35.0).view(5, 7).t(),
    "step": torch.tensor(1001.0),
    "empty": torch.empty(0, 3),
}


def on_gpu(full: torch.Tensor, make_spec: Callable[..., ShardingSpec], *args: Any) -> Any:
    """A tensor cut so, on the GPU."""
    here = full.to(GPU).contiguous()
    return shardwise.distribute(here, make_spec(*args, device=str(GPU)), src_rank=None)


def same(found: torch.Tensor, full: torch.Tensor) -> bool:
    """Whether the bits are the same, wherever they are."""
    bits = [one.detach().cpu().contiguous().view(-1).view(torch.uint8) for one in (found, full)]
    return found.dtype == full.dtype and found.shape == full.shape and torch.equal(*bits)


# -- tensors ---------------------------------------------------------------------------------------


def _tensors(rank: int, folder: str) -> None:
    """Saved from the GPU, loaded into it and into the CPU, in other boxes."""
    torch.cuda.set_device(GPU)
    cut = {name: on_gpu(full, shardwise.chunk, 0) for name, full in KINDS.items() if full.ndim}
    plain = {name: full.to(GPU) for name, full in KINDS.items()}
    save({"cut": cut, "plain": plain, "device": GPU}, f"{folder}/ck", max_bytes=64)
    for device in (GPU, torch.device("cpu")):
        state: dict[str, Any] = {"device": None}
        state["plain"] = {k: torch.zeros_like(v, device=device) for k, v in plain.items()}
        state["cut"] = {
            name: shardwise.distribute(
                torch.zeros(full.shape, dtype=full.dtype, device=device),
                shardwise.chunk(full.ndim - 1, ranks=[1, 0], device=device.type),
                src_rank=None,
            )
            for name, full in KINDS.items()
            if full.ndim
        }
        kept = [tensor.data_ptr() for tensor in state["plain"].values()]
        load(state, f"{folder}/ck", max_bytes=100, verify=True)
        assert kept == [tensor.data_ptr() for tensor in state["plain"].values()]
        assert state["device"] == GPU
        for name, full in KINDS.items():
            assert state["plain"][name].device == device
            assert same(state["plain"][name], full), name
            if full.ndim:
                assert state["cut"][name].local_tensor().device.type == device.type
                assert same(state["cut"][name].full_tensor(), full), name


def test_gloo_ranks_that_share_a_gpu_save_from_it_and_load_into_it(tmp_path: Path) -> None:
    shardwise.run_local(_tensors, 2, str(tmp_path))


def _replicas(rank: int, folder: str) -> None:
    """Large enough for every replica to read a part; and terms of a sum that waits."""
    torch.cuda.set_device(GPU)
    full = torch.arange(300_000.0).view(600, 500)
    save(
        {"x": on_gpu(full, shardwise.replicate), "y": on_gpu(full, shardwise.chunk, 1)},
        f"{folder}/ck",
    )
    state = {"x": on_gpu(torch.zeros_like(full), shardwise.partial)}
    state["y"] = on_gpu(torch.zeros_like(full), shardwise.replicate)
    load(state, f"{folder}/ck")
    assert all(tensor.local_tensor().is_cuda for tensor in state.values())
    assert all(same(tensor.full_tensor(), full) for tensor in state.values())
    half: Any = torch.zeros(500, 600, dtype=torch.float64, device=GPU)
    load({"z": half}, f"{folder}/ck", map={"z": transpose("y")}, dtype=torch.bfloat16, strict=False)
    assert same(half, full.to(torch.bfloat16).t().double())


def test_replicas_and_terms_on_a_gpu_get_what_was_saved(tmp_path: Path) -> None:
    shardwise.run_local(_replicas, 2, str(tmp_path))


# -- in the background -----------------------------------------------------------------------------


def _in_background(rank: int, folder: str) -> None:
    torch.cuda.set_device(GPU)
    full = torch.arange(float(1 << 22)).view(1 << 11, 1 << 11)
    x, plain = on_gpu(full, shardwise.chunk, 0), full.to(GPU, copy=True)
    for max_bytes in (None, 1 << 20):  # the second writes most of it before it returns
        x.copy_(on_gpu(full, shardwise.chunk, 0))
        plain.copy_(full)
        # Work that is on its way: what is saved is what comes out of it.
        for _ in range(20):
            x.add_(1)
            plain.add_(1)
        handle = save(
            {"x": x, "plain": plain, "here": full},
            f"{folder}/ck",
            async_op=True,
            max_bytes=max_bytes,
        )
        x.zero_()
        plain.zero_()
        handle.wait()
        found = {
            "x": on_gpu(torch.zeros_like(full), shardwise.chunk, 1),
            "plain": torch.zeros_like(plain),
        }
        load(found, f"{folder}/ck", strict=False)
        assert same(found["x"].full_tensor(), full + 20)
        assert same(found["plain"], full + 20)
    members = shardwise.comm.communicator()
    assert background.background_of(members)._memory.is_pinned()


def test_tensors_on_a_gpu_may_change_once_a_save_is_staged(tmp_path: Path) -> None:
    shardwise.run_local(_in_background, 2, str(tmp_path))


def test_only_copies_of_a_gpu_need_pinned_memory(tmp_path: Path) -> None:
    memory = background.background_of(ALONE)
    save({"x": torch.ones(1000)}, tmp_path / "ck", async_op=True).wait()
    assert not memory._memory.is_pinned()
    save({"x": torch.ones(10, device=GPU)}, tmp_path / "ck", async_op=True).wait()
    assert memory._memory.is_pinned()


# -- models ----------------------------------------------------------------------------------------


def make(plan: dict[str, str], seed: int, **options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    """A sharded model on the GPU and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).to(GPU)
    shardwise.shard_module(model, ShardingPlan(plan), src_rank=None)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def train(model: nn.Module, optimizer: torch.optim.AdamW) -> float:
    with shardwise.plain_inputs("replicated"):
        loss = model(torch.linspace(-1, 1, 12, device=GPU).view(2, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def _resumed(rank: int, folder: str, plan: dict[str, str], options: dict[str, bool]) -> list[float]:
    """Losses after a save, then those of a fresh model that has loaded it."""
    torch.cuda.set_device(GPU)
    model, optimizer = make(ROWS, 0, **options)
    train(model, optimizer)
    save({"model": model, "optimizer": optimizer, "step": 1}, folder)
    losses = [train(model, optimizer) for _ in range(3)]
    model, optimizer = make(plan, 1, **options)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    load(state, folder)
    assert state["step"] == 1
    assert all(parameter.is_cuda for parameter in model.parameters())
    return losses + [train(model, optimizer) for _ in range(3)]


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_training_on_a_gpu_resumes_with_the_same_losses(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    for losses in shardwise.run_local(_resumed, 2, str(tmp_path / "ck"), UNEVEN, options):
        assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)


# -- one rank --------------------------------------------------------------------------------------


@pytest.fixture
def nccl(tmp_path: Path) -> Any:
    """A default process group of this one process, on NCCL."""
    torch.cuda.set_device(GPU)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_one_rank_of_nccl_saves_and_loads(tmp_path: Path) -> None:
    losses = _resumed(0, str(tmp_path / "ck"), {"0.*": "chunk(0)"}, {})
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)
    x: Any = on_gpu(KINDS["half"], shardwise.chunk, 0)
    handle = save({"x": x}, tmp_path / "async", async_op=True)
    x.zero_()
    handle.wait()
    load({"x": x}, tmp_path / "async", verify=True)
    assert same(x.full_tensor(), KINDS["half"])


@pytest.mark.usefixtures("nccl")
def test_a_hugging_face_file_goes_straight_into_a_gpu(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    parts = {name: torch.randn(4, 4) for name in "qkv"}
    save_file(parts, tmp_path / "model.safetensors")
    x = on_gpu(torch.zeros(12, 4), shardwise.fused, 0, [4, 4, 4])
    load_safetensors({"qkv": x}, tmp_path / "model.safetensors", map={"qkv": fuse("q", "k", "v")})
    assert same(x.full_tensor(), torch.cat(list(parts.values())))
