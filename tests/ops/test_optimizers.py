"""Stock optimizers on sharded parameters: step for step what they do to full tensors."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardwise
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError, RankFailure
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.testing.op_check import layout_kinds, shards_of_full

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Optimizer = torch.optim.Optimizer
SHAPES = ((5, 4), (6,), (2, 3, 2), ())
WORLD_SIZE = 4
STEPS = 3


def layouts(shape: tuple[int, ...], world_size: int) -> list[Layout]:
    """Of every kind that parameters may have: nothing is pending."""
    found = [one for one in layout_kinds(shape, world_size=world_size).values() if not one.pending]
    if shape and world_size > 2:  # replica sets that overlap
        middle = shape[0] // 2
        low = Box((0,) * len(shape), (middle, *shape[1:]))
        high = Box((middle, *[0] * (len(shape) - 1)), shape)
        found.append(Layout(shape, [low, low, high, high], [0, 1, 1, 2]))
    return found


def sharded(full: torch.Tensor, layout: Layout, requires_grad: bool = False) -> ShardedTensor:
    """This rank's part of a full tensor."""
    members = communicator()
    shards = shards_of_full(full.detach(), layout).get(members.rank, [])
    for shard in shards:
        shard.requires_grad_(requires_grad)
    return wrap(
        make_state(
            layout, shards, group=members, dtype=full.dtype, requires_grad=requires_grad
        )
    )


class Pair:
    """A parameter, plain or sharded, and the full tensor that is its oracle."""

    def __init__(self, number: int, shape: tuple[int, ...], layout: Layout | None) -> None:
        self.generator = torch.Generator().manual_seed(number)
        self.layout = layout
        self.full = self.numbers(shape).requires_grad_()
        self.given = self.like_given(self.full).requires_grad_()

    def numbers(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), dtype=torch.float64, generator=self.generator)

    def like_given(self, full: torch.Tensor) -> torch.Tensor:
        if self.layout is None:
            return full.detach().clone()
        return sharded(full, self.layout)

    def set_grads(self) -> None:
        self.full.grad = self.numbers(self.full.shape)
        self.given.grad = self.like_given(self.full.grad)

    def check(self, what: str) -> None:
        check_same(self.given, self.full, what)


def check_same(given: torch.Tensor, full: torch.Tensor, what: str) -> None:
    """Every local piece is that of the full tensor."""
    assert given.shape == full.shape, what
    assert given.dtype == full.dtype, what
    if not isinstance(given, ShardedTensor):
        torch.testing.assert_close(given.detach(), full.detach(), msg=lambda m: f"{what}: {m}")
        return
    state = given._state
    for box, shard in zip(state.boxes, state.shards, strict=True):
        torch.testing.assert_close(
            shard.detach(),
            full.detach()[box.slices()],
            msg=lambda m: f"{what}, {state.layout} on rank {state.rank}: {m}",
        )


def pairs(world_size: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Pair]:
    """Parameters of every layout, and plain ones among them."""
    found: list[Pair] = []
    for shape in shapes:
        for layout in [None, *layouts(shape, world_size)]:
            found.append(Pair(len(found), shape, layout))
    return found


def two_groups(params: Sequence[torch.Tensor], **options: Any) -> list[dict[str, Any]]:
    half = len(params) // 2
    return [{"params": params[:half]}, {"params": params[half:], **options}]


def check_steps(
    make: Callable[[Any], Optimizer],
    world_size: int = WORLD_SIZE,
    policy: Any = "error",
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> None:
    """Raises unless the optimizer does the same to sharded parameters and to full ones."""

    def on_rank(rank: int) -> None:
        check_steps_here(make, world_size, policy, shapes)

    simulate(on_rank, world_size)


def check_steps_here(
    make: Callable[[Any], Optimizer], world_size: int, policy: Any, shapes: Any
) -> None:
    every = pairs(world_size, shapes)
    plain = make(two_groups([pair.full for pair in every], lr=0.02))
    optimizer = make(two_groups([pair.given for pair in every], lr=0.02))
    for step in range(STEPS):
        for pair in every:
            pair.set_grads()
        plain.step()
        with shardwise.implicit_comm(policy):
            optimizer.step()
        for pair in every:
            pair.check(f"step {step}")
    check_same_state(optimizer, plain, every)


def check_same_state(optimizer: Optimizer, plain: Optimizer, every: Sequence[Pair]) -> None:
    for pair in every:
        expected, found = plain.state[pair.full], optimizer.state[pair.given]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                is_like_parameter = value.shape == pair.full.shape and name != "step"
                if pair.layout is not None and is_like_parameter and value.dim():
                    assert isinstance(found[name], ShardedTensor), name
                check_same(found[name], value, name)
            else:
                assert found[name] == value, name


optim = torch.optim
POINTWISE: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p, **o: optim.SGD(p, lr=0.1, **o),
    "SGD momentum": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **o),
    "SGD nesterov": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "SGD maximize": lambda p, **o: optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.1, maximize=True, **o
    ),
    "Adam": lambda p, **o: optim.Adam(p, lr=0.1, **o),
    "Adam amsgrad": lambda p, **o: optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1, **o),
    "Adam maximize": lambda p, **o: optim.Adam(p, lr=0.1, maximize=True, **o),
    "AdamW": lambda p, **o: optim.AdamW(p, lr=0.1, **o),
    "AdamW amsgrad maximize": lambda p, **o: optim.AdamW(
        p, lr=0.1, amsgrad=True, maximize=True, **o
    ),
    "Adagrad": lambda p, **o: optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, **o),
    "Adadelta": lambda p, **o: optim.Adadelta(p, weight_decay=0.1, maximize=True, **o),
    "Adamax": lambda p, **o: optim.Adamax(p, weight_decay=0.1, **o),
    "ASGD": lambda p, **o: optim.ASGD(p, weight_decay=0.1, t0=1, **o),
    "NAdam": lambda p, **o: optim.NAdam(p, weight_decay=0.1, **o),
    "NAdam decoupled": lambda p, **o: optim.NAdam(
        p, weight_decay=0.1, decoupled_weight_decay=True, maximize=True, **o
    ),
    "RAdam": lambda p, **o: optim.RAdam(p, weight_decay=0.1, **o),
    "RMSprop": lambda p, **o: optim.RMSprop(p, weight_decay=0.1, **o),
    "RMSprop centered": lambda p, **o: optim.RMSprop(p, centered=True, momentum=0.9, **o),
}
FUSED = [
    name for name in POINTWISE if name.split()[0] in ("SGD", "Adam", "AdamW", "Adagrad")
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_optimizers_work_on_local_pieces(name: str, foreach: bool) -> None:
    check_steps(lambda params: POINTWISE[name](params, foreach=foreach))


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_work_on_local_pieces(name: str) -> None:
    check_steps(lambda params: POINTWISE[name](params, fused=True))
