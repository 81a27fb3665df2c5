"""The seed's path of its ops, in its calling convention: `(types, args, kwargs, pg)`.

Each calls the torch function of its name, which finds the sharded implementation by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardwise.sharded_tensor.dispatch import _sharded_op_impl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "_sharded_op_impl",
    "allclose",
    "constant_",
    "equal",
    "kaiming_uniform_",
    "normal_",
    "sharded_embedding",
    "sharded_embedding_bag",
    "uniform_",
]


class _SeedOp(Protocol):
    def __call__(
        self,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        pg: Any = None,
    ) -> Any: ...


class _SeedComparison(Protocol):
    def __call__(
        self,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        process_group: Any = None,  # as the seed has it for these two
    ) -> Any: ...


def _seed_comparison(function: Callable[..., Any]) -> _SeedComparison:
    def op(
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        process_group: Any = None,
    ) -> Any:
        return function(*args, **(kwargs or {}))

    op.__name__ = op.__qualname__ = function.__name__
    return op


def _seed_op(function: Callable[..., Any]) -> _SeedOp:
    def op(
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        pg: Any = None,
    ) -> Any:
        return function(*args, **(kwargs or {}))

    op.__name__ = op.__qualname__ = function.__name__
    return op


# The torch function of that name, called as the seed calls its ops: types, args, kwargs, group.
allclose = _seed_comparison(torch.allclose)
equal = _seed_comparison(torch.equal)
constant_ = _seed_op(torch.nn.init.constant_)
kaiming_uniform_ = _seed_op(torch.nn.init.kaiming_uniform_)
normal_ = _seed_op(torch.nn.init.normal_)
uniform_ = _seed_op(torch.nn.init.uniform_)
sharded_embedding = _seed_op(torch.nn.functional.embedding)
sharded_embedding_bag = _seed_op(torch.nn.functional.embedding_bag)
