"""Numbers drawn from the distributions that sharded tensors describe, by global index.

An element of the result depends on the key, its global index and what the arguments are there:
never on the layout or the world size. [Note: seeds] in `seeds.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from shardwise import random
from shardwise.arguments import whole_number
from shardwise.comm.agreement import heard_by_all
from shardwise.comm.differentiable import carriers_of
from shardwise.errors import ArgumentValueError
from shardwise.geometry import Box, Layout
from shardwise.geometry.splits import even_cuts
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.implicit import announce_move, settle
from shardwise.sharded_tensor.resharding import replicated_layout, reshard_state
from shardwise.sharded_tensor.seeds import next_key
from shardwise.sharded_tensor.state import only_layout
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from shardwise.sharded_tensor.state import State

__all__: list[str] = []

_Tensor: Any = torch.Tensor


@handles(torch.bernoulli, _Tensor.bernoulli)
def _bernoulli(
    input: ShardedTensor, p: float | None = None, *, generator: torch.Generator | None = None
) -> Any:
    """1 with the chance that each element says, or `p`, else 0."""
    if p is not None:
        with torch.no_grad():
            return torch.empty_like(input).bernoulli_(p, generator=generator)
    state = settle(torch.bernoulli, input._state)
    _check_shards(
        "torch.bernoulli", state, lambda x: (x >= 0) & (x <= 1), "chances between 0 and 1"
    )
    key = next_key(state.comm, generator)
    kind = torch.float64 if state.dtype == torch.float64 else torch.float32
    found = []
    with torch.no_grad():
        for shard, box in zip(state.shards, state.boxes, strict=True):
            number = torch.empty(box.shape, dtype=kind, device=shard.device)
            random.fill_uniform_(number, box, state.layout.shape, key)
            found.append((number < shard).to(state.dtype))
    carriers = carriers_of(found, dtype=state.dtype, device=state.device)
    return _with_zero_slope(wrap(state.with_carriers(carriers)), input)


@handles(torch.normal)
def _normal(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Any:
    """Normal numbers, each of its own mean and std."""
    given = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    if isinstance(std, ShardedTensor):
        settled = settle(torch.normal, std._state)
        _check_shards("torch.normal", settled, lambda x: x >= 0, "std >= 0")
    with torch.no_grad():
        zeros = [torch.zeros_like(value) for value in given]
        made = torch.empty_like(zeros[0] if len(zeros) == 1 else zeros[0] + zeros[1])
        made = made.normal_(generator=generator) * std + mean
    return _with_zero_slope(made, *given)


def _with_zero_slope(made: Any, *given: torch.Tensor) -> Any:
    """`made`, with the gradients that torch has for what was drawn: zeros."""
    if torch.is_grad_enabled():
        for tensor in given:
            if tensor.requires_grad:
                made = made + tensor.sign() * 0  # and not `tensor * 0`, which may be NaN
    return made


def _check_shards(what: str, state: State, is_right: Any, expected: str) -> None:
    """Raises if an element is wrong, on the CPU, where that does not stop other work."""
    with heard_by_all(what, state.comm):
        for shard, box in zip(state.shards, state.boxes, strict=True):
            if shard.device.type == "cpu" and not bool(is_right(shard.detach()).all()):
                raise ArgumentValueError(
                    f"{what} of a ShardedTensor",
                    rank=state.rank,
                    expected=expected,
                    got=f"others in {box}",
                )


@handles(F.gumbel_softmax)
def _gumbel_softmax(
    logits: ShardedTensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Any:
    """As torch has it; `eps` counts for nothing there either."""
    with torch.no_grad():
        drawn = torch.empty_like(wrap(settle(F.gumbel_softmax, logits._state)))
        gumbels = -drawn.exponential_().log()
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    sizes = [1] * soft.dim()
    sizes[dim] = soft.shape[dim]
    places = torch.arange(soft.shape[dim], device=soft.device).view(sizes)
    chosen = (soft.detach().argmax(dim, keepdim=True) == places).to(soft.dtype)
    return chosen - soft.detach() + soft


# -- multinomial -----------------------------------------------------------------------------


@handles(torch.multinomial, _Tensor.multinomial)
def _multinomial(
    input: ShardedTensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> ShardedTensor:
    """Indices drawn from each row. A rank needs rows whole; others are brought together first."""
    count = _checked_samples(input, num_samples, replacement)
    state = _in_rows(input)
    _check_shards(
        "torch.multinomial",
        state,
        lambda x: (x >= 0).all(-1) & (x.sum(-1) > 0) & x.sum(-1).isfinite(),
        "rows of numbers >= 0 with a finite sum > 0",
    )
    key = next_key(state.comm, generator)
    shape = (*state.layout.shape[:-1], count)
    boxes = {box: box.with_range(box.ndim - 1, 0, count) for box in state.layout.boxes}
    layout = Layout(shape, [boxes[box] for box in state.layout.boxes], state.layout.owners)
    found = []
    with torch.no_grad():
        for shard, box in zip(state.shards, state.boxes, strict=True):
            if replacement:
                found.append(_drawn_back(shard, boxes[box], shape, key))
            else:
                found.append(_drawn_once(shard, box, state.layout.shape, key, count))
    carriers = carriers_of(found, dtype=torch.int64, device=state.device)
    return wrap(state.with_carriers(carriers, layout=only_layout(layout), spec=None))


def _checked_samples(input: ShardedTensor, num_samples: int, replacement: bool) -> int:
    shape, rank = input._state.layout.shape, input._state.rank
    if len(shape) not in (1, 2) or not input.dtype.is_floating_point:
        raise ArgumentValueError(
            "torch.multinomial of a ShardedTensor",
            rank=rank,
            expected="a floating-point tensor of 1 or 2 dims",
            got=f"{input.dtype} of shape {shape}",
        )
    count = whole_number(num_samples, "num_samples", least=1)
    if not replacement and count > shape[-1]:
        raise ArgumentValueError(
            "num_samples of torch.multinomial without replacement",
            rank=rank,
            expected=f"at most {shape[-1]}, of which there are to choose",
            got=count,
        )
    return count


def _in_rows(tensor: ShardedTensor) -> State:
    """The tensor with whole rows: where it is, if they are whole, else cut evenly by rows."""
    state = tensor._state
    shape, layout = state.layout.shape, state.layout.bar
    if any(box.start[-1] != 0 or box.stop[-1] != shape[-1] for box in layout.boxes):
        layout = replicated_layout(shape, state)
        if len(shape) == 2:
            ranks = sorted(state.comm.ranks)
            cuts = even_cuts(shape[0], len(ranks)).tolist()
            rows = pairwise(cuts)
            layout = Layout(shape, [Box((a, 0), (b, shape[1])) for a, b in rows], ranks)
    announce_move(torch.multinomial, state, layout)
    return reshard_state(state.map(torch.detach), only_layout(layout))


def _drawn_once(
    shard: torch.Tensor, box: Box, shape: tuple[int, ...], key: random.Key, count: int
) -> torch.Tensor:
    """Without replacement: who comes first, of waiting times that are the shorter the likelier."""
    waiting = torch.empty(box.shape, dtype=torch.float64, device=shard.device)
    random.fill_exponential_(waiting, box, shape, key)
    return (shard.double() / waiting).topk(count, dim=-1).indices


def _drawn_back(
    shard: torch.Tensor, box: Box, shape: tuple[int, ...], key: random.Key
) -> torch.Tensor:
    """With replacement: where a uniform number falls among the sums of the chances."""
    number = torch.empty(box.shape, dtype=torch.float64, device=shard.device)
    random.fill_uniform_(number, box, shape, key)
    sums = shard.double().cumsum(-1)
    found = torch.searchsorted(sums, number * sums[..., -1:], right=True)
    # A number that is rounded up to the whole sum belongs to the last that has a chance.
    last = (sums < sums[..., -1:]).sum(-1, keepdim=True)
    return torch.minimum(found, last)
