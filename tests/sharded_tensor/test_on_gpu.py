"""Sharded tensors on a GPU: one rank of NCCL, and gloo ranks that share the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise
from shardwise import sharded_tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

FULL = torch.arange(12.0).view(4, 3)


def _on_gpu(rank: int) -> None:
    torch.cuda.set_device(0)
    here, there = shardwise.chunk(0, device="cpu"), shardwise.chunk(1, device="cuda:0")
    x: Any = shardwise.distribute(FULL.clone().requires_grad_(), here)
    y = shardwise.reshard(x, there)  # to other boxes and another device at once
    assert y.local_tensor().device == torch.device("cuda:0")
    assert y.device == torch.device("cuda:0")
    (y.full_tensor() ** 2).sum().backward()
    assert x.grad.local_tensor().device.type == "cpu"
    assert torch.equal(x.grad.full_tensor(), 2 * FULL)
    gpu: Any = x.detach().cuda()
    assert gpu.is_cuda
    assert [str(p.device()) for p in gpu.sharding_spec().placements] == ["cuda:0"] * 2
    assert torch.equal(gpu.cpu(), x.detach())
    assert torch.equal(gpu.full_tensor().cpu(), FULL)
    double = x.detach().type("torch.cuda.DoubleTensor")
    assert (double.is_cuda, double.dtype) == (True, torch.float64)
    only = shardwise.reshard(x.detach(), shardwise.on_rank(0, device="cuda:0"))
    assert (only + only).is_cuda  # on rank 1 too, which has nothing of it
    out = torch.empty(4, 3) if rank == 1 else None
    assert gpu.gather(1, out) is out  # from the GPU into memory of the CPU
    assert out is None or torch.equal(out, FULL)
    pinned = x.detach().pin_memory()
    assert pinned.is_pinned()
    assert pinned.metadata().tensor_properties.pin_memory
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(x.detach().clone())
    weight = module.w
    module.cuda()
    assert module.w is weight
    assert weight.is_cuda
    for make in (sharded_tensor.rand, sharded_tensor.randn):
        shardwise.manual_seed(5)
        on_cpu = make(here, 40, 30)
        shardwise.manual_seed(5)
        on_gpu = make(shardwise.chunk(1, device="cuda:0"), 40, 30)
        torch.testing.assert_close(on_gpu.full_tensor().cpu(), on_cpu.full_tensor())
    with shardwise.implicit_comm("allow"):
        assert torch.equal(torch.tanh(gpu).full_tensor().cpu(), torch.tanh(FULL.cuda()).cpu())


def test_boxes_go_between_ranks_and_devices_at_once() -> None:
    shardwise.run_local(_on_gpu, 2)


def _alone(_: int) -> None:
    torch.distributed.destroy_process_group()
    torch.cuda.set_device(0)
    shardwise.init_single()
    x: Any = sharded_tensor.ones(shardwise.chunk(0, device="cuda"), 4, 3, requires_grad=True)
    assert x.is_cuda
    (shardwise.reshard(x, shardwise.replicate(device="cuda")).full_tensor() * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor().cpu(), torch.full((4, 3), 2.0))


def test_one_rank_with_nccl_is_enough() -> None:
    shardwise.run_local(_alone, 1)
