"""Sizes and specs as callers pass them: what they say, once they are found right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.arguments import is_whole_number
from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Layout

__all__ = ["as_one", "checked_size", "home_device", "layout_by"]


def as_one(size: Sequence[Any]) -> Any:
    """`(4, 6)` of the arguments `4, 6` or `(4, 6)`, right or wrong."""
    return size[0] if len(size) == 1 and not is_whole_number(size[0]) else size


def checked_size(size: Sequence[Any]) -> tuple[int, ...]:
    """The size that the arguments `4, 6` or `(4, 6)` say."""
    listed = as_one(size)
    try:
        dims = list(listed)
    except TypeError:
        dims = [listed]
    if not all(is_whole_number(dim) for dim in dims):
        raise ArgumentTypeError(
            "size has to be a sequence of ints", expected="e.g. 4, 6 or (4, 6)", got=repr(dims)
        )
    if any(dim < 0 for dim in dims):
        raise ArgumentValueError("size", expected="numbers >= 0", got=repr(dims))
    return tuple(int(dim) for dim in dims)


def layout_by(spec: object, shape: tuple[int, ...], members: Communicator) -> Layout:
    """The layout that a spec gives, unless it is no spec or names ranks outside of the group."""
    if not isinstance(spec, ShardingSpec):
        raise ArgumentValueError(
            f"Expecting ShardingSpec but got: {type(spec)}",
            fix="E.g. shardwise.chunk(0), shardwise.grid([2, 2]) or a ChunkShardingSpec.",
        )
    layout = spec.layout(shape)
    members.ranks.check_members(layout.ranks, what=f"{type(spec).__name__}'s placements")
    return layout


def home_device(spec: ShardingSpec, shape: tuple[int, ...]) -> torch.device:
    """Where a rank that holds nothing of the tensor takes it to be: on such a device as others."""
    ranks = spec.layout(shape).ranks
    devices = spec.local_devices(shape, ranks[0]) if ranks else ()
    kind = devices[0].type if devices else "cpu"
    if kind == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("meta" if kind == "meta" else "cpu")
