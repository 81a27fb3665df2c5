"""What a step of training would send: the model runs on simulated ranks, on the meta device.

No data is there, so a model of any size is rehearsed in the time that its Python takes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import shardwise
from shardwise._torch_compat import tree_leaves
from shardwise.call_site import NOWHERE
from shardwise.comm.simulate import simulate
from shardwise.errors import RankFailure
from shardwise.words import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from shardwise.comm.tracing import Event
    from shardwise.sharding_plan import ShardingPlan

__all__ = ["InputShape", "Line", "Rehearsal", "rehearse"]


@dataclass(frozen=True, slots=True)
class InputShape:
    """A tensor that the model is called with."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        """The tensor, without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Line:
    """What is sent for one kind of op, in one step."""

    op: str
    at: str  # the line of the model's code; "" if it is not a user's
    times: int
    sent: dict[int, int]  # rank -> bytes


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a step sends, by op; or why that is not known."""

    lines: tuple[Line, ...] = ()
    problem: str | None = None

    @property
    def sent(self) -> dict[int, int]:
        """Rank -> bytes of the whole step."""
        found: dict[int, int] = defaultdict(int)
        for line in self.lines:
            for rank, sent in line.sent.items():
                found[rank] += sent
        return dict(sorted(found.items()))


def rehearse(
    make: Callable[[], nn.Module],
    plan: ShardingPlan,
    world_size: int,
    inputs: Sequence[InputShape],
    *,
    names_lines: bool,
) -> Rehearsal:
    """One forward and backward pass of the model under the plan, on so many simulated ranks.

    The loss is what the model returns, if that is one number, or the sum of its tensors. Code that
    looks at values cannot run without data; what it raises is the `problem`.
    """

    def step(rank: int) -> list[Event]:
        with torch.device("meta"):
            model = make()
        shardwise.shard_module(model, plan, src_rank=None)
        with shardwise.implicit_comm("allow"), shardwise.trace(show=False) as sent:
            loss = _loss(model(*[one.make() for one in inputs]))
            if loss is not None and loss.requires_grad:
                loss.backward()
        return sent.events

    try:
        events = simulate(step, world_size, device="meta").results
    except RankFailure as failure:
        return Rehearsal(problem=headline(failure.__cause__ or failure))
    return Rehearsal(_lines(events, names_lines=names_lines))


def _loss(output: Any) -> torch.Tensor | None:
    tensors = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
    parts = [one.sum() for one in tensors if one.is_floating_point() and one.requires_grad]
    return sum(parts[1:], start=parts[0]) if parts else None


def _lines(events: Sequence[Sequence[Event]], *, names_lines: bool) -> tuple[Line, ...]:
    """Events of all ranks by op and line of code, in the order of the first rank that has them."""
    sent: dict[tuple[str, str], dict[int, int]] = {}
    times: dict[tuple[str, str], int] = {}
    for rank, own in enumerate(events):
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for event in own:
            is_backward = event.op.startswith("backward of ")
            has_line = names_lines and not is_backward and event.site != NOWHERE
            key = (event.op, event.site if has_line else "")
            held = sent.setdefault(key, dict.fromkeys(range(len(events)), 0))
            held[rank] += event.sent
            counts[key] += 1
        for key, count in counts.items():
            times[key] = max(times.get(key, 0), count)
    return tuple(Line(op, at, times[op, at], held) for (op, at), held in sent.items())
