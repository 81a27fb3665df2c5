"""Random numbers in sharded tensors: factories, in-place fills and `torch.nn.init`.

An element's number depends on the seed, the call and its global index, never on the layout, the
world size or the device. [Note: seeds] in `seeds.py`. Sizes such as fans are the global ones.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch

from shardwise import random
from shardwise._torch_compat import fan_of
from shardwise.comm.agreement import agree
from shardwise.comm.checks import is_debugging
from shardwise.comm.differentiable import carriers_of, count_writes
from shardwise.errors import OpError
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.factories import FactoryOptions, filled
from shardwise.sharded_tensor.like_factories import LikeOptions, empty_like
from shardwise.sharded_tensor.seeds import next_key
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharded_tensor.usable import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.geometry import Box
    from shardwise.random import Key
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["rand", "randn"]

_Tensor: Any = torch.Tensor
_init: Any = torch.nn.init


def rand(
    sharding_spec: ShardingSpec, *size: Any, **options: Unpack[FactoryOptions]
) -> ShardedTensor:
    """Sharded tensor of numbers uniform in [0, 1); options as in `FactoryOptions`.

    The same numbers for every spec, world size and group: see `shardwise.manual_seed`.
    """
    return filled(lambda st: _filled(st, random.fill_uniform_), sharding_spec, *size, **options)


def randn(
    sharding_spec: ShardingSpec, *size: Any, **options: Unpack[FactoryOptions]
) -> ShardedTensor:
    """Sharded tensor of standard normal numbers; options as in `FactoryOptions`.

    The same numbers for every spec, world size and group: see `shardwise.manual_seed`.
    """
    return filled(lambda st: _filled(st, random.fill_normal_), sharding_spec, *size, **options)


def _made(tensor: ShardedTensor, fill: Callable[..., Any]) -> ShardedTensor:
    with torch.no_grad():
        return _filled(tensor, fill)


def _filled(
    tensor: ShardedTensor, fill: Callable[..., Any], generator: torch.Generator | None = None
) -> ShardedTensor:
    """Fills every local box; of a pending reduction, so that the result is the random tensor."""
    check_writable(tensor, fill)
    state = tensor._state
    if torch.is_grad_enabled() and state.requires_grad and tensor.is_leaf:
        raise OpError(
            "a leaf Variable that requires grad is being used in an in-place operation.",
            rank=state.rank,
            fix="Use torch.no_grad() or torch.nn.init.",
        )
    if is_debugging():
        drawn, numbers = getattr(fill, "func", fill), getattr(fill, "keywords", {})
        values = {"layout": state.layout, "dtype": state.dtype, **numbers}
        agree(f"a call of {drawn.__name__.lstrip('_')}", values, group=state.comm, hot=True)
    key = next_key(state.comm, generator)
    layout = state.layout
    if layout.pending is None:
        for shard, box in zip(state.shards, state.boxes, strict=True):
            if shard.requires_grad and torch.is_grad_enabled():  # no gradient flows past it
                shard.copy_(fill(torch.empty_like(shard), box, layout.shape, key))
            else:
                fill(shard.data, box, layout.shape, key)  # of which no version is counted
                count_writes([shard])
        if not state.shards:  # what autograd has saved is refused on every rank
            count_writes(state.carriers)
        return tensor
    pieces = [
        fill(torch.empty(box.shape, dtype=state.dtype, device=state.device), box, layout.shape, key)
        for box in layout.bar.boxes_of(state.rank)
    ]
    carriers = carriers_of(pieces, dtype=state.dtype, device=state.device)
    tensor.copy_(wrap(state.with_carriers(carriers, layout=layout.bar, spec=None)))
    return tensor


# -- tensors like others ---------------------------------------------------------------------


@handles(torch.rand_like)
def _rand_like(tensor: ShardedTensor, **options: Unpack[LikeOptions]) -> ShardedTensor:
    return _made(empty_like(tensor, **options), random.fill_uniform_)


@handles(torch.randn_like)
def _randn_like(tensor: ShardedTensor, **options: Unpack[LikeOptions]) -> ShardedTensor:
    return _made(empty_like(tensor, **options), random.fill_normal_)


@handles(torch.randint_like)
def _randint_like(
    tensor: ShardedTensor, low: int, high: int | None = None, **options: Unpack[LikeOptions]
) -> ShardedTensor:
    first, last = (0, low) if high is None else (low, high)
    return _made(empty_like(tensor, **options), partial(_fill_integers, low=first, high=last))


def _fill_integers(
    tensor: torch.Tensor, box: Box, shape: tuple[int, ...], key: Key, *, low: int, high: int
) -> torch.Tensor:
    """Whole numbers of any dtype, floating-point ones included, as torch has it."""
    if not tensor.is_floating_point():
        return random.fill_integers_(tensor, box, shape, key, low, high)
    whole = torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device)
    return tensor.copy_(random.fill_integers_(whole, box, shape, key, low, high))


# -- in place --------------------------------------------------------------------------------


@handles(_Tensor.uniform_)
def _uniform(
    tensor: ShardedTensor,
    a: float = 0,
    b: float = 1,
    *,
    generator: torch.Generator | None = None,
    **names: float,
) -> ShardedTensor:
    low, high = names.get("from", a), names.get("to", b)
    if low == high:
        tensor.fill_(low)
        return tensor
    return _filled(tensor, partial(random.fill_uniform_, low=low, high=high), generator)


@handles(_Tensor.normal_)
def _normal(
    tensor: ShardedTensor,
    mean: float = 0,
    std: float = 1,
    *,
    generator: torch.Generator | None = None,
) -> ShardedTensor:
    return _filled(tensor, partial(random.fill_normal_, mean=mean, std=std), generator)


@handles(_Tensor.bernoulli_)
def _bernoulli(
    tensor: ShardedTensor, p: float | torch.Tensor = 0.5, *, generator: Any = None
) -> ShardedTensor:
    if isinstance(p, torch.Tensor):
        with torch.no_grad():  # a chance for each element, as `tensor` has them
            chances = torch.zeros_like(tensor, dtype=p.dtype) + p
            drawn = torch.bernoulli(chances, generator=generator)
        tensor.copy_(drawn)
        return tensor
    return _filled(tensor, partial(random.fill_bernoulli_, p=p), generator)


@handles(_Tensor.exponential_)
def _exponential(
    tensor: ShardedTensor, lambd: float = 1, *, generator: torch.Generator | None = None
) -> ShardedTensor:
    return _filled(tensor, partial(random.fill_exponential_, rate=lambd), generator)


@handles(_Tensor.geometric_)
def _geometric(
    tensor: ShardedTensor, p: float, *, generator: torch.Generator | None = None
) -> ShardedTensor:
    return _filled(tensor, partial(random.fill_geometric_, p=p), generator)


@handles(_Tensor.log_normal_)
def _log_normal(
    tensor: ShardedTensor,
    mean: float = 1,
    std: float = 2,
    *,
    generator: torch.Generator | None = None,
) -> ShardedTensor:
    return _filled(tensor, partial(random.fill_log_normal_, mean=mean, std=std), generator)


@handles(_Tensor.cauchy_)
def _cauchy(
    tensor: ShardedTensor,
    median: float = 0,
    sigma: float = 1,
    *,
    generator: torch.Generator | None = None,
) -> ShardedTensor:
    return _filled(tensor, partial(random.fill_cauchy_, median=median, sigma=sigma), generator)


@handles(_Tensor.random_)
def _random(
    tensor: ShardedTensor,
    *bounds: int | None,
    generator: torch.Generator | None = None,
    **names: int | None,
) -> ShardedTensor:
    low, high = _random_bounds(tensor, *bounds, **names)
    return _filled(tensor, partial(_fill_integers, low=low, high=high), generator)


def _random_bounds(
    tensor: ShardedTensor, *bounds: int | None, **names: int | None
) -> tuple[int, int]:
    """`random_()`, `random_(to)` and `random_(from, to)`, as torch reads them."""
    given = [*bounds, *(names[name] for name in ("from", "to") if name in names)]
    low = given[0] if len(given) == 2 and given[0] is not None else 0
    high = given[-1] if given else None
    if high is None:
        dtype = tensor.dtype
        bits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
        if dtype in bits:
            high = 2 ** bits[dtype] + 1
        else:
            high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return low, high


# -- torch.nn.init ---------------------------------------------------------------------------


@handles(_init.uniform_)
def _init_uniform(
    tensor: Any, a: float = 0.0, b: float = 1.0, generator: torch.Generator | None = None
) -> Any:
    with torch.no_grad():
        return tensor.uniform_(a, b, generator=generator)


@handles(_init.normal_)
def _init_normal(
    tensor: Any, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None
) -> Any:
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


@handles(_init.trunc_normal_)
def _init_trunc_normal(
    tensor: ShardedTensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: torch.Generator | None = None,
) -> ShardedTensor:
    fill = partial(random.fill_trunc_normal_, mean=mean, std=std, a=a, b=b)
    with torch.no_grad():
        return _filled(tensor, fill, generator)


@handles(_init.constant_)
def _init_constant(tensor: Any, val: float) -> Any:
    with torch.no_grad():
        return tensor.fill_(val)


@handles(_init.kaiming_uniform_)
def _init_kaiming_uniform(
    tensor: Any,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: torch.Generator | None = None,
) -> Any:
    if 0 in tensor.shape:
        return tensor
    gain = torch.nn.init.calculate_gain(nonlinearity, a)
    bound = math.sqrt(3.0) * gain / math.sqrt(fan_of(tensor, mode))
    with torch.no_grad():
        return tensor.uniform_(-bound, bound, generator=generator)
