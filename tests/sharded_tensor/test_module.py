"""What torch.nn.Module does with sharded parameters and buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.sharded_tensor import ShardedTensor
from shardwise.testing.local_run import run_local

TABLE = torch.arange(35.0).view(7, 5)


def _sharded(spec: Any, **options: Any) -> Any:
    return shardwise.from_callback(spec, (7, 5), lambda index: TABLE[index], **options)


def _tied(spec: Any, **options: Any) -> Any:
    """Two layers with one sharded weight, which has a gradient, and a sharded buffer."""
    module: Any = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(5, 7, bias=False))
    weight: Any = nn.Parameter(_sharded(spec, **options))
    module[0].weight = module[1].weight = weight
    module[0].register_buffer("mask", _sharded(spec, **options))
    weight.grad = weight.detach().clone() if spec.layout((7, 5)).pending is None else None
    weight.tag = ["kept"]
    return module


def _full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.detach().full_tensor()
    return whole.clone()  # it may be the tensor's own memory


def _kinds(value: Any) -> list[type]:
    """For a type checker, a Parameter has none of a ShardedTensor's attributes."""
    return [kind for kind in (nn.Parameter, ShardedTensor) if isinstance(value, kind)]


def _devices(tensor: Any) -> set[str]:
    return {shard.placement.device().type for shard in tensor.metadata().shards_metadata}


def _specs() -> list[Any]:
    last = dist.get_world_size() - 1
    return [
        shardwise.chunk(0),
        shardwise.chunk(1, sizes=[5] + [0] * last),
        shardwise.block_cyclic(0, 2, ranks=[last]),
        shardwise.replicate(),
        shardwise.partial(),
    ]


CONVERSIONS: list[tuple[Any, torch.dtype, str]] = [
    (lambda module: module.to(torch.float64), torch.float64, "cpu"),
    (lambda module: module.half(), torch.float16, "cpu"),
    (lambda module: module.float(), torch.float32, "cpu"),  # changes nothing
    (lambda module: module.cpu(), torch.float32, "cpu"),
    (lambda module: module.type(torch.bfloat16), torch.bfloat16, "cpu"),
    (lambda module: module.to("meta"), torch.float32, "meta"),
    (lambda module: module.share_memory(), torch.float32, "cpu"),
    (lambda module: module.to(torch.empty(0, dtype=torch.float64)), torch.float64, "cpu"),
]


def _conversions(rank: int) -> None:
    for spec in _specs():
        for convert, dtype, device in CONVERSIONS:
            module = _tied(spec)
            weight: Any = module[0].weight
            layout = weight.shard_layout
            has_grad = weight.grad is not None
            optimizer = torch.optim.Adam(module.parameters())
            calls: list[Any] = []
            weight.register_post_accumulate_grad_hook(calls.append)
            assert convert(module) is module
            assert module[0].weight is module[1].weight is weight
            assert optimizer.param_groups[0]["params"] == [weight]
            assert nn.Parameter in _kinds(weight)
            assert weight.requires_grad
            assert weight.is_leaf
            assert weight.tag == ["kept"]
            for found in (weight, module[0].mask, *([weight.grad] if has_grad else [])):
                assert type(found) is ShardedTensor
                assert (found.dtype, found.device.type) == (dtype, device)
                assert found.shard_layout == layout
                assert found.sharding_spec().layout((7, 5)) == layout
                assert _devices(found) == {device}
                if device == "cpu":
                    expected = TABLE if layout.pending is None else TABLE * len(layout.ranks)
                    assert torch.equal(_full(found), expected.to(dtype))
            if device == "cpu":
                before = None if not has_grad else _full(weight.grad)
                torch.autograd.backward([carrier.sum() for carrier in weight._state.carriers])
                assert [call is weight for call in calls] == [True]  # the hook came along
                assert before is None or torch.equal(_full(weight.grad), before + 1)
    assert all(c.is_shared() for c in _tied(_specs()[0]).share_memory()[0].weight._state.carriers)


def _frozen_and_cleared(rank: int) -> None:
    module = _tied(shardwise.chunk(0))
    weight = module[0].weight
    module.requires_grad_(False)
    assert not weight.requires_grad
    assert not any(carrier.requires_grad for carrier in weight._state.carriers)
    module.double()
    assert not weight.requires_grad
    module.requires_grad_()
    assert weight.requires_grad
    module.zero_grad(set_to_none=False)
    assert torch.equal(_full(weight.grad), torch.zeros(7, 5, dtype=torch.float64))
    module.zero_grad()
    assert weight.grad is None
    assert module.eval().train() is module


def _emptied(rank: int) -> None:
    """A model planned on the meta device gets memory, and then values."""
    last = dist.get_world_size() - 1
    module = _tied(shardwise.chunk(0, ranks=[last], device="meta"))
    weight = module[0].weight
    assert weight.is_meta
    module.to_empty(device="cpu")
    assert module[0].weight is module[1].weight is weight
    assert weight.tag == ["kept"]
    assert str(weight.sharding_spec().placements[0]) == f"rank:{last}/cpu"
    module.load_state_dict(_tied(shardwise.chunk(1)).state_dict())
    assert torch.equal(_full(weight), TABLE)
    like = torch.empty_like(weight, dtype=torch.int16, requires_grad=False)
    assert (like.dtype, like.shape) == (torch.int16, weight.shape)


def _copied(rank: int) -> None:
    module = _tied(shardwise.chunk(0))
    made = copy.deepcopy(module)
    weight, other = module[0].weight, made[0].weight
    assert other is made[1].weight
    assert other is not weight
    assert nn.Parameter in _kinds(other)
    assert other.tag == ["kept"]
    assert other.tag is not weight.tag
    assert torch.equal(_full(other.grad), TABLE)
    with torch.no_grad():
        other.zero_()
    assert torch.equal(_full(weight), TABLE)


def _listed(rank: int) -> None:
    module = _tied(shardwise.chunk(0))
    weight = module[0].weight
    assert [name for name, _ in module.named_parameters()] == ["0.weight"]
    assert len(list(module.named_parameters(remove_duplicate=False))) == 2
    assert sum(parameter.numel() for parameter in module.parameters()) == 35
    assert "Linear(in_features=5" in repr(module)
    assert nn.ParameterList([weight])[0] is weight
    assert nn.ParameterDict({"w": weight})["w"] is weight
    del module[0].weight
    assert module[1].weight is weight
    module[0].register_parameter("weight", weight)
    module[0].weight = None
    module[0].weight = weight
    with pytest.raises(TypeError, match="cannot assign"):
        module[0].weight = weight.detach()
    with shardwise.implicit_comm("allow"):
        flat = nn.utils.parameters_to_vector(module.parameters())
        assert torch.equal(flat.full_tensor(), weight.full_tensor().flatten())
        layout = weight.shard_layout
        nn.utils.vector_to_parameters(flat.full_tensor() * 2, module.parameters())
        assert torch.equal(weight.full_tensor(), flat.full_tensor().view(weight.shape) * 2)
        assert weight.shard_layout == layout
    with pytest.raises(TypeError, match=r"data of a ShardedTensor.*st.copy_"):
        weight.data = torch.zeros(weight.shape)


def _subgroup(rank: int) -> None:
    group = dist.new_group([1, 3]) if dist.get_world_size() == 4 else None
    if group is not None and rank in (1, 3):
        module = _tied(shardwise.chunk(0, ranks=[3, 1]), process_group=group)
        module.double()
        assert module[0].weight._state.process_group is group
        assert torch.equal(_full(module[0].weight), TABLE.double())


def _everything(rank: int) -> None:
    _conversions(rank)
    _frozen_and_cleared(rank)
    _emptied(rank)
    _copied(rank)
    _listed(rank)
    _subgroup(rank)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_modules_treat_sharded_parameters_as_plain_ones(world_size: int) -> None:
    run_local(_everything, world_size)
