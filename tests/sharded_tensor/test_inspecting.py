"""What only looks at a tensor asks no other rank: debuggers and tab completion do that on one."""

from __future__ import annotations

import inspect
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import get_overridable_functions

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.sharded_tensor.dispatch import function_name

if TYPE_CHECKING:
    from collections.abc import Callable

# Those that look at data, and those that change the tensor, or torch.
NO_LOOKS = [
    "equal",
    "allclose",
    "__contains__",
    "__init__",
    "__new__",
    "__init_subclass__",
    "backward",
    "share_memory_",
    "set_",
    "map_",
    "apply_",
    "__reduce_ex__",
    "_reduce_ex_internal",
]
# Which torch does not list as functions that others may override.
UNLISTED = [
    "get_device",
    "is_distributed",
    "is_same_size",
    "is_storage",
    "is_tensor",
    "result_type",
]
LIKE_PLAIN = ["imag", "__cuda_array_interface__"]  # which raise of plain tensors, too


def _properties() -> dict[str, Callable[[Any], Any]]:
    """Everything that is read of a tensor without calling it."""
    return {
        name: attrgetter(name)
        for name in dir(torch.Tensor)
        if isinstance(found := inspect.getattr_static(torch.Tensor, name), property)
        or inspect.isgetsetdescriptor(found)
        or inspect.ismemberdescriptor(found)
    }


def _calls() -> dict[str, Callable[[Any], Any]]:
    """Every method, and every function that others may override."""
    listed: list[Any] = [f for fs in get_overridable_functions().values() for f in fs]
    listed += [getattr(torch.Tensor, name) for name in dir(torch.Tensor)]
    listed += [getattr(torch, name) for name in UNLISTED]
    functions = {function_name(f): f for f in listed if inspect.isroutine(f)}
    found: dict[str, Callable[[Any], Any]] = {}
    for name, f in functions.items():
        if name.rpartition(".")[2] not in NO_LOOKS:
            found[f"{name}(x)"] = f
            found[f"{name}(x, 1)"] = partial(_with_one, f)
            found[f"{name}(x, x)"] = partial(_with_itself, f)
    return found


def _with_one(f: Callable[..., Any], x: Any) -> Any:
    return f(x, 1)


def _with_itself(f: Callable[..., Any], x: Any) -> Any:
    return f(x, x)


def _is_look(call: Callable[[Any], Any]) -> bool:
    """Whether it gives, of a plain tensor, something that has no tensors in it."""
    try:
        given = call(torch.ones(4, 4))
    except Exception:
        return False
    parts = given if isinstance(given, tuple) else (given,)
    return all(isinstance(part, bool | int | float | str | torch.dtype) for part in parts)


def _alone(rank: int) -> list[str]:
    """What a rank alone can see of a tensor; returns what it did, and what needed another rank."""
    x = sharded_tensor.ones(shardwise.chunk(0), 4, 4)
    looks = {name: call for name, call in _calls().items() if _is_look(call)}
    if rank:
        return []
    refused = []
    for name, call in (_properties() | looks).items():
        try:
            with shardwise.implicit_comm("error"):
                call(x)
        except Exception as error:
            is_whole = "not the whole tensor. Take st.full_tensor()" in str(error)
            if not is_whole and name not in LIKE_PLAIN:
                refused.append(f"{name}: {error}")
    return [*looks, *refused]


@pytest.mark.filterwarnings("ignore")  # torch's, of names that it has given up
def test_what_only_looks_at_a_tensor_asks_no_other_rank() -> None:
    found = simulate(_alone, 2)
    assert [line for line in found.results[0] if ": " in line] == []
    assert "torch.Tensor.is_contiguous(x)" in found.results[0]  # it did look
    assert found.traffic.total_bytes == 0


def _answers(rank: int) -> None:
    x: Any = sharded_tensor.zeros(shardwise.chunk(0), 4, 3, dtype=torch.float16)
    other = sharded_tensor.zeros(shardwise.chunk(1), 4, 3)
    if rank:
        return
    assert {"shard_layout", "full_tensor", "shape"} < set(dir(x))
    assert torch.result_type(x, 1) == torch.float16
    assert torch.result_type(x, 1j) == torch.complex32
    assert torch.result_type(x, other) == torch.result_type(torch.ones(2), x) == torch.float32
    assert x.is_same_size(other)
    assert not torch.is_same_size(x, torch.ones(4))
    assert x.is_set_to(x)
    assert x.is_set_to(x.detach())
    assert not x.is_set_to(x.clone())
    assert not x.is_set_to(torch.zeros(4, 3))
    assert not torch.zeros(4, 3).is_set_to(x)
    assert (x.sparse_dim(), x.dense_dim()) == (0, 2)
    with pytest.raises(RuntimeError, match="sparse coordinate tensor layout but got Strided"):
        x.is_coalesced()
    made = x.new_tensor([1, 2])
    assert isinstance(made, sharded_tensor.ShardedTensor)
    assert (made.dtype, made.local_tensor().tolist()) == (torch.float16, [1, 2])
    if hasattr(x, "grad_dtype"):
        assert x.grad_dtype == torch.float16
        x.grad_dtype = torch.float32
        assert x.grad_dtype == x.local_tensor().grad_dtype == torch.float32


def test_a_rank_alone_gets_the_answers_of_the_full_tensor() -> None:
    assert simulate(_answers, 2).traffic.total_bytes == 0


def _addresses(_: int) -> None:
    x = sharded_tensor.ones(shardwise.chunk(0), 4, 3)
    for one in (x, x + 1, (x.requires_grad_() * 2).detach(), torch.nn.Parameter(x.detach())):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(one)
        with pytest.raises(OpError, match=r"__dlpack_device__.*full_tensor"):
            torch.from_dlpack(one)


def test_a_capsule_without_memory_is_never_made() -> None:
    simulate(_addresses, 2)
