"""Dropout of sharded tensors, by global index.

The mask is a function of the key and the global index ([Note: seeds] in `seeds.py`), so it is the
same for every layout and world size, on replicas, and on all addends of a pending sum: for a given
mask, dropout is linear, and the sum stays pending.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

from shardwise import random
from shardwise.call_site import user_level
from shardwise.comm.checks import is_debugging
from shardwise.errors import ArgumentValueError, OpError
from shardwise.geometry import Box
from shardwise.sharded_tensor.dispatch import function_name, handles
from shardwise.sharded_tensor.implicit import settle
from shardwise.sharded_tensor.running import compare_calls
from shardwise.sharded_tensor.seeds import next_key
from shardwise.sharded_tensor.tensor import ShardedTensor, show_written, wrap
from shardwise.sharded_tensor.usable import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.random import Key
    from shardwise.sharded_tensor.state import State

__all__: list[str] = []

_torch: Any = torch
_ALPHA = 1.7580993408473766  # -selu(-infinity)


class _Kind(NamedTuple):
    """What is dropped together, and what takes its place."""

    num_dims: int | None = None  # the mask has this many of the first dims; None: all
    is_alpha: bool = False  # the value of SELU far below 0, not 0


def _drop(
    func: Any, tensor: ShardedTensor, p: float, kind: _Kind, *, training: bool, in_place: bool
) -> ShardedTensor:
    """What all functions of this file do."""
    state = tensor._state
    if not 0.0 <= p <= 1.0:
        raise ArgumentValueError(
            f"{function_name(func)}: dropout probability has to be between 0 and 1", got=p
        )
    if p == 0 or not training or 0 in state.layout.shape:
        return tensor
    if not state.dtype.is_floating_point:
        raise OpError(
            f"{function_name(func)} of a ShardedTensor",
            rank=state.rank,
            expected="a floating-point dtype",
            got=state.dtype,
        )
    if is_debugging():
        compare_calls(func, [state])
    if in_place:
        check_writable(tensor, func)
    if p == 1:
        return tensor.mul_(0.0) if in_place else tensor * 0.0  # type: ignore[return-value]  # both are sharded
    has_terms = state.layout.pending is not None
    if has_terms and (kind.is_alpha or state.layout.pending not in ("sum", "avg")):
        made = _dropped(settle(func, state), p, kind)
        if not in_place:
            return made
        tensor.copy_(made)
        return tensor
    if not in_place:
        return _dropped(state, p, kind)
    _drop_in_place(state, p, kind)
    if torch.is_grad_enabled():
        show_written(tensor)
    return tensor


def _dropped(state: State, p: float, kind: _Kind) -> ShardedTensor:
    if not state.shards:
        next_key(state.comm)  # which all ranks ask for
        return wrap(state.map(lambda tie: tie * 1.0))

    def drop(shard: torch.Tensor, noise: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        if shift is not None:
            return torch.addcmul(shift, shard, noise)
        is_followed = shard.requires_grad and torch.is_grad_enabled()  # it keeps the noise
        is_full = noise.shape == shard.shape
        return torch.mul(shard, noise, out=None if is_followed or not is_full else noise)

    return wrap(state.with_carriers(_with_noise(state, p, kind, drop)))


def _drop_in_place(state: State, p: float, kind: _Kind) -> None:
    if not state.shards:
        next_key(state.comm)
        state.carriers[0].mul_(1.0)  # which counts a version, and raises what the others raise
        return

    def drop(shard: torch.Tensor, noise: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        shard.mul_(noise)
        return shard if shift is None else shard.add_(shift)

    _with_noise(state, p, kind, drop)


def _with_noise(
    state: State,
    p: float,
    kind: _Kind,
    drop: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
) -> list[torch.Tensor]:
    """`drop` of each local shard, its factors, and what is added to it, if anything is."""
    key = next_key(state.comm)
    scale = 1.0 / (1.0 - p)
    if kind.is_alpha:
        scale = 1.0 / math.sqrt((_ALPHA**2 * p + 1.0) * (1.0 - p))
    found = []
    for shard, box in zip(state.shards, state.boxes, strict=True):
        noise = _noise(shard, box, state.layout.shape, key, p, kind.num_dims, scale)
        shift = None
        if kind.is_alpha:  # 0 becomes -alpha scale, and all moves up so that the mean stays
            shift = noise.sub(scale).mul_(_ALPHA).add_(_ALPHA * scale * p)
        found.append(drop(shard, noise, shift))
    return found


def _noise(
    shard: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    key: Key,
    p: float,
    num_dims: int | None,
    scale: float,
) -> torch.Tensor:
    """`scale` where the shard is kept, else 0; with dims of size 1 where all is dropped alike."""
    if num_dims is None:
        noise = torch.empty_like(shard, requires_grad=False)
        return random.fill_bernoulli_(noise, box, shape, key, 1.0 - p, value=scale)
    part = Box(box.start[:num_dims], box.stop[:num_dims])
    noise = torch.empty(part.shape, dtype=shard.dtype, device=shard.device)
    random.fill_bernoulli_(noise, part, shape[:num_dims], key, 1.0 - p, value=scale)
    return noise.view(*part.shape, *[1] * (len(shape) - num_dims))


# -- the functions ---------------------------------------------------------------------------


def _register(function: Any, kind_of: Callable[[int], _Kind], *, is_on: bool) -> None:
    """A function of `torch.nn.functional`; `is_on`: its default for `training`."""

    @handles(function)
    def handler(
        input: ShardedTensor, p: float = 0.5, training: bool = is_on, inplace: bool = False
    ) -> ShardedTensor:
        kind = kind_of(input.dim())
        return _drop(function, input, p, kind, training=training, in_place=inplace)


def _register_torch(function: Any, kind_of: Callable[[int], _Kind], *, in_place: bool) -> None:
    """A function of `torch` itself, such as `torch.dropout_`."""

    @handles(function)
    def handler(input: ShardedTensor, p: float, train: bool) -> ShardedTensor:
        return _drop(function, input, p, kind_of(input.dim()), training=train, in_place=in_place)


def _features(ndim: int) -> _Kind:
    if ndim < 2:
        raise OpError("Feature dropout requires at least 2 dimensions in the input", got=ndim)
    return _Kind(num_dims=2)


def _of_dims(name: str, spatial: int, *, has_batch_always: bool) -> Callable[[int], _Kind]:
    """The kinds of `F.dropout1d` and so on, which drop channels, by the dims of their input."""

    def kind_of(ndim: int) -> _Kind:
        if ndim not in (spatial + 1, spatial + 2):
            message = f"{name}: expected a {spatial + 1}-D or {spatial + 2}-D input, got {ndim}-D"
            if spatial == 1:
                raise OpError(message)
            warnings.warn(message, stacklevel=user_level())
        # As in torch: without a batch dim the channels are the first one, but not of dropout2d.
        is_batched = has_batch_always or ndim == spatial + 2
        return _features(ndim) if is_batched else _Kind(num_dims=1)

    return kind_of


def _elements(_: int) -> _Kind:
    return _Kind()


def _alpha(_: int) -> _Kind:
    return _Kind(is_alpha=True)


def _alpha_features(ndim: int) -> _Kind:
    return _features(ndim)._replace(is_alpha=True)


_register(F.dropout, _elements, is_on=True)
_register(F.dropout1d, _of_dims("dropout1d", 1, has_batch_always=False), is_on=True)
_register(F.dropout2d, _of_dims("dropout2d", 2, has_batch_always=True), is_on=True)
_register(F.dropout3d, _of_dims("dropout3d", 3, has_batch_always=False), is_on=True)
_register(F.alpha_dropout, _alpha, is_on=False)
_register(F.feature_alpha_dropout, _alpha_features, is_on=False)
for _name, _kind_of in (
    ("dropout", _elements),
    ("feature_dropout", _features),
    ("alpha_dropout", _alpha),
    ("feature_alpha_dropout", _alpha_features),
):
    _register_torch(getattr(_torch, _name), _kind_of, in_place=False)
    _register_torch(getattr(_torch, f"{_name}_"), _kind_of, in_place=True)


@handles(torch.native_dropout)
def _native_dropout(
    input: ShardedTensor, p: float, train: bool | None
) -> tuple[ShardedTensor, ShardedTensor]:
    """The result, and where it was kept."""
    kept: Any = torch.ones_like(input).detach()
    kept = wrap(settle(torch.native_dropout, kept._state))
    training = train is not False
    factors: Any = _drop(torch.native_dropout, kept, p, _Kind(), training=training, in_place=False)
    return input * factors, factors != 0


@handles(F.rrelu, _torch.rrelu)
def _rrelu(
    input: ShardedTensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Any:
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace=inplace)
    with torch.no_grad():
        slope = torch.empty_like(wrap(settle(F.rrelu, input._state))).uniform_(
            lower, upper, generator=generator
        )
        slope = torch.where(input > 0, torch.ones_like(slope), slope)
    return input.mul_(slope) if inplace else input * slope


@handles(_torch.rrelu_)
def _rrelu_in_place(
    input: ShardedTensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Any:
    return _rrelu(input, lower, upper, training, True, generator=generator)
