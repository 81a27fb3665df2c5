"""Other devices for some tensors and some ranks: all ranks say the same device, and nobody waits.

The meta device stands for a GPU, which not every machine has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.sharded_tensor import empty
from shardwise.sharded_tensor.to_layouts import reshard_all_in_place

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = range(3)
FULL = torch.arange(12.0).view(4, 3)
HERE = shardwise.on_rank(0)  # the other ranks hold nothing
THERE = shardwise.on_rank(0, device="meta")
ELSEWHERE = shardwise.chunk(0, ranks=[1], device="meta")


def on_first(spec: Any = HERE) -> Any:
    return shardwise.distribute(FULL.clone(), spec)


def with_data(x: Any) -> Any:
    x.data = x.to("meta")
    return x


VERBS: dict[str, Callable[[], Any]] = {
    "distribute": lambda: on_first(THERE),
    "to": lambda: on_first().to("meta"),
    "data": lambda: with_data(on_first()),
    "reshard": lambda: shardwise.reshard(on_first(), THERE),
    "reshard to a tensor": lambda: shardwise.reshard(on_first(), empty(THERE, 4, 3)),
    "reshard and send": lambda: shardwise.reshard(on_first(), ELSEWHERE),
    "reshard later": lambda: shardwise.reshard(on_first(), THERE, async_op=True).wait(),
    "reshard in place": lambda: on_first().reshard(THERE),
    "reshard_all": lambda: shardwise.reshard_all([on_first()], THERE)[0],
    "reshard_all and send": lambda: shardwise.reshard_all([on_first()], ELSEWHERE)[0],
    "local_map": lambda: shardwise.local_map(lambda x: x * 2, THERE, THERE)(on_first()),
}


@pytest.mark.parametrize("check", ["always", "debug"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_rank_without_shards_takes_the_tensor_to_be_where_it_is(verb: str, check: Any) -> None:
    def run(_: int) -> None:
        with shardwise.set_check(check), shardwise.implicit_comm("allow"):
            x = VERBS[verb]()
            spec = ELSEWHERE if "send" in verb else THERE
            assert x.is_meta
            assert x.sharding_spec() == spec
            assert (x + empty(spec, 4, 3)).is_meta  # a kernel takes both

    simulate(run, len(RANKS))


def made(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors that stay on a rank, and those that are sent; half of them to another device."""
    names = [f"{kind}{k}" for k in range(number) for kind in ("stays", "moves", "is sent")]
    rows, columns = shardwise.chunk(0, ranks=RANKS), shardwise.chunk(1, ranks=RANKS)
    tensors, targets = {}, {}
    for k, name in enumerate(names):
        source = rows if name.startswith("is") else HERE
        tensors[name] = shardwise.distribute((FULL + k).requires_grad_(), source)
        targets[name] = {"s": HERE, "m": THERE, "i": columns}[name[0]]
    return tensors, targets


@pytest.mark.parametrize("free_source", [False, True])
def test_many_tensors_of_which_some_change_their_device_only(free_source: bool) -> None:
    def run(_: int) -> None:
        tensors, targets = made(40)
        done = shardwise.reshard_all(tensors, targets, free_source=free_source)
        for k, (name, x) in enumerate(done.items()):
            assert x.requires_grad
            assert x.is_meta == name.startswith("moves")
            assert (x is tensors[name]) == name.startswith("stays")
            if not x.is_meta:
                assert torch.equal(x.full_tensor(), FULL + k)

    simulate(run, len(RANKS))


def test_many_tensors_change_their_device_in_place_and_gradients_follow() -> None:
    def run(_: int) -> None:
        tensors, targets = made(3)
        for x in tensors.values():
            (x.full_tensor() ** 2).sum().backward()
        reshard_all_in_place(tensors, targets)
        for k, (name, x) in enumerate(tensors.items()):
            assert x.is_meta == x.grad.is_meta == name.startswith("moves")
            assert x.grad.shard_layout == x.shard_layout
            if not x.is_meta:
                assert torch.equal(x.grad.full_tensor(), 2 * (FULL + k))

    simulate(run, len(RANKS))
