"""State dicts of modules: parameters by themselves, plain attributes by the hooks."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.sharded_tensor import pre_load_state_dict_hook, state_dict_hook, zeros
from shardwise.testing.local_run import run_local

TABLE = torch.arange(35.0).view(7, 5)


def _sharded(spec: Any, **options: Any) -> Any:
    return shardwise.from_callback(spec, (7, 5), lambda index: TABLE[index], **options)


def _linear(weight: Any) -> Any:
    module = nn.Linear(5, 7, bias=False)
    module.weight = nn.Parameter(weight)
    return module


def _saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def _layouts() -> list[Any]:
    last = dist.get_world_size() - 1
    return [
        shardwise.chunk(0),
        shardwise.chunk(1, ranks=[last, 0]),
        shardwise.block_cyclic(0, 1),
        shardwise.on_rank(last),
        shardwise.replicate(),
        shardwise.partial(),
    ]


# -- parameters and buffers ------------------------------------------------------------------------


def _parameters(rank: int) -> None:
    for source in _layouts()[:-1]:
        module = _linear(_sharded(source))
        module.register_buffer("mask", _sharded(source))
        state = module.state_dict()
        assert list(state) == ["weight", "mask"]
        assert not state["weight"].requires_grad
        assert module.state_dict(keep_vars=True)["weight"] is module.weight
        again = copy.deepcopy(state)
        assert torch.equal(again["weight"], state["weight"])
        for target in _layouts():
            other = _linear(zeros(target, 7, 5))
            other.register_buffer("mask", zeros(target, 7, 5))
            weight, layout = other.weight, other.weight.shard_layout
            other.load_state_dict(_saved_and_loaded(state))
            assert other.weight is weight
            assert weight.shard_layout == layout
            assert weight.requires_grad
            for found in (weight, other.mask):
                assert torch.equal(found.detach().full_tensor(), TABLE)


def _from_and_to_plain(rank: int) -> None:
    """A full checkpoint that every rank has goes into sharded parameters; not the other way."""
    module = _linear(zeros(shardwise.chunk(0), 7, 5))
    module.load_state_dict({"weight": TABLE})
    assert torch.equal(module.weight.detach().full_tensor(), TABLE)
    plain = nn.Linear(5, 7, bias=False)
    with pytest.raises(RuntimeError, match="copy_ of a ShardedTensor into a plain tensor"):
        plain.load_state_dict(module.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict({"weight": zeros(shardwise.chunk(0), 5, 7)})


def _strictness(rank: int) -> None:
    module = _linear(zeros(shardwise.chunk(0), 7, 5))
    with pytest.raises(RuntimeError, match=r"Missing key.*\"weight\"[\s\S]*Unexpected.*\"other\""):
        module.load_state_dict({"other": _sharded(shardwise.chunk(0))})
    found = module.load_state_dict({"other": _sharded(shardwise.chunk(0))}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["weight"], ["other"])


def _assigned(rank: int) -> None:
    module = _linear(zeros(shardwise.chunk(0), 7, 5))
    module.weight.requires_grad_(False)
    state = {"weight": _sharded(shardwise.chunk(1))}
    module.load_state_dict(state, assign=True)
    weight = module.weight
    assert not weight.requires_grad
    assert weight.shard_layout == state["weight"].shard_layout
    assert weight.local_tensor().data_ptr() == state["weight"].local_tensor().data_ptr()
    on_meta: Any = nn.Linear(5, 7, bias=False, device="meta")
    on_meta.load_state_dict(state, assign=True)
    assert torch.equal(on_meta.weight.detach().full_tensor(), TABLE)
    assert on_meta.weight.requires_grad


def _swapped(rank: int) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for assign in (False, True):
            module = _linear(zeros(shardwise.chunk(0), 7, 5))
            weight = module.weight
            module.load_state_dict({"weight": _sharded(shardwise.chunk(1))}, assign=assign)
            assert module.weight is weight
            expected = shardwise.chunk(int(assign)).layout((7, 5))
            assert module.weight.shard_layout == expected
            assert torch.equal(weight.detach().full_tensor(), TABLE)
            assert weight.requires_grad
            assert isinstance(weight, nn.Parameter)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_are_loaded_from_any_layout_into_any_other(world_size: int) -> None:
    run_local(_parameters, world_size)


def _rules(rank: int) -> None:
    _from_and_to_plain(rank)
    _strictness(rank)
    _assigned(rank)
    _swapped(rank)


def test_plain_strict_assigned_and_swapped_loads_do_what_they_do_in_torch() -> None:
    run_local(_rules, 2)


def _in_subgroup(rank: int) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        spec = shardwise.chunk(0, ranks=[3, 1])
        source = _linear(_sharded(spec, process_group=group))
        target = _linear(zeros(shardwise.chunk(1, ranks=[1, 3]), 7, 5, process_group=group))
        target.load_state_dict(source.state_dict())
        assert torch.equal(target.weight.detach().full_tensor(), TABLE)


def test_a_subgroups_state_dict_concerns_nobody_else() -> None:
    run_local(_in_subgroup, 4)


# -- hooks -----------------------------------------------------------------------------------------


class _Holder(nn.Module):
    """Sharded tensors as plain attributes, which torch leaves out of state dicts."""

    def __init__(self, spec: Any, depth: int = 1) -> None:
        super().__init__()
        self.first: Any = _sharded(spec)
        self.number = 3
        self.weight = nn.Parameter(_sharded(spec))
        if depth:
            self.inner = _Holder(spec, depth - 1)


def _hooked(spec: Any) -> Any:
    module: Any = _Holder(spec)
    module._register_state_dict_hook(state_dict_hook)
    module._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)
    return module


def _hooks(rank: int) -> None:
    module = _hooked(shardwise.chunk(0))
    assert set(_Holder(shardwise.chunk(0)).state_dict()) == {"weight", "inner.weight"}
    keys = {"first", "weight", "inner.first", "inner.weight"}
    state = module.state_dict()
    assert set(state) == keys
    assert state["first"] is module.first
    assert set(module.state_dict(prefix="model.")) == {f"model.{key}" for key in keys}
    wrapped = nn.Sequential(module)
    assert set(wrapped.state_dict()) == {f"0.{key}" for key in keys}
    loaded = _saved_and_loaded(state)
    for strict in (True, False):
        other = _hooked(shardwise.chunk(1))
        with torch.no_grad():
            for tensor in (other.first, other.inner.first, other.weight):
                tensor.zero_()
        other.load_state_dict(loaded, strict=strict)
        assert other.first is loaded["first"]  # the seed's way: set, not copied
        assert other.inner.first is loaded["inner.first"]
        assert torch.equal(other.weight.detach().full_tensor(), TABLE)
        assert other.weight.shard_layout == shardwise.chunk(1).layout((7, 5))
    assert set(loaded) == keys  # the caller's dict stays whole
    nested: Any = nn.Sequential(_hooked(shardwise.chunk(1)))
    nested.load_state_dict({f"0.{key}": value for key, value in loaded.items()})
    assert nested[0].inner.first is loaded["inner.first"]
    # A parameter that takes the place of an attribute, a plain value for one, an unknown name.
    for value, kind in ((nn.Parameter(loaded["first"]), nn.Parameter), (TABLE, type(module.first))):
        other = _hooked(shardwise.chunk(0))
        other.load_state_dict({**loaded, "first": value, "absent": value}, strict=False)
        assert isinstance(other.first, kind)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"absent"'):
        module.load_state_dict({**loaded, "absent": loaded["first"]})


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_hooks_add_and_set_plain_attributes_of_nested_modules(world_size: int) -> None:
    run_local(_hooks, world_size)
