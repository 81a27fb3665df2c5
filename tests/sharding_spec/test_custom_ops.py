from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.errors import OpError
from shardwise.sharding_spec import ChunkShardingSpec, ReplicatedShardingSpec
from shardwise.sharding_spec.api import (
    _dispatch_custom_op,
    _has_custom_op,
    custom_sharding_spec_op,
)


class MySpec(ChunkShardingSpec):
    """A spec with an op of its own; a subclass, so that the op stays in this test."""


class Narrower(MySpec):
    """Inherits the op."""


@custom_sharding_spec_op(MySpec, torch.asin)
def _asin(types: Any, args: Any, kwargs: Any, process_group: Any) -> tuple[Any, ...]:
    return types, args, kwargs, process_group


@pytest.mark.parametrize("kind", [MySpec, Narrower])
def test_a_custom_op_is_found_and_called(kind: type[MySpec]) -> None:
    spec = kind(0, ["rank:0/cpu"])
    assert _has_custom_op(spec, torch.asin)
    assert _dispatch_custom_op(spec, torch.asin, (int,), (1,), {"a": 2}, None) == (
        (int,),
        (1,),
        {"a": 2},
        None,
    )


def test_other_specs_and_ops_do_not_have_it() -> None:
    assert not _has_custom_op(MySpec(0, ["rank:0/cpu"]), torch.acos)
    plain = ReplicatedShardingSpec(["rank:0/cpu"])
    assert not _has_custom_op(plain, torch.asin)
    assert not _has_custom_op(ChunkShardingSpec(0, ["rank:0/cpu"]), torch.asin)
    with pytest.raises(OpError, match="Custom op: asin not registered for ReplicatedShardingSpec"):
        _dispatch_custom_op(plain, torch.asin, (), (), {}, None)


def test_an_op_of_a_subclass_is_not_the_parents() -> None:
    def acos(types: Any, args: Any, kwargs: Any, process_group: Any) -> None: ...

    custom_sharding_spec_op(Narrower, torch.cosh)(acos)
    assert _has_custom_op(Narrower(0, ["rank:0/cpu"]), torch.cosh)
    assert not _has_custom_op(MySpec(0, ["rank:0/cpu"]), torch.cosh)


def test_two_classes_of_one_name_do_not_collide() -> None:
    other = type("MySpec", (ChunkShardingSpec,), {"__qualname__": MySpec.__qualname__})
    assert not _has_custom_op(other(0, ["rank:0/cpu"]), torch.asin)


def test_a_function_of_another_signature_is_refused() -> None:
    wrong: Any = lambda x: x  # noqa: E731  # any function of one parameter
    with pytest.raises(TypeError, match=r"expects signature.*types, args, kwargs, process_group"):
        custom_sharding_spec_op(MySpec, torch.acos)(wrong)
