from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from shardwise import errors
from shardwise.errors import LayoutError, RankFailure, ShardwiseError


def test_the_message_has_rank_object_expected_got_and_fix() -> None:
    error = LayoutError(
        "'fc1.weight' local shard",
        rank=3,
        expected=(128, 64),
        got=(127, 64),
        fix="Pass the sizes per rank: shardwise.chunk(0, sizes=[128, 128, 128, 127]).",
    )
    assert str(error) == (
        "[rank 3] 'fc1.weight' local shard: expected (128, 64), got (127, 64). "
        "Pass the sizes per rank: shardwise.chunk(0, sizes=[128, 128, 128, 127])."
    )
    assert error.rank == 3
    assert str(LayoutError("plain")) == "plain"
    assert str(LayoutError("x", got=None)) == "x: got None"


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_a_pickle_and_is_in_the_drawn_tree(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("what", rank=1, expected=2, got=3)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == "[rank 1] what: expected 2, got 3"
        assert again.rank == 1
    assert issubclass(kind, ShardwiseError)
    assert errors.__doc__ is not None
    assert name in errors.__doc__


def test_every_error_but_the_base_is_one_of_the_seeds_kinds() -> None:
    classes = inspect.getmembers(errors, inspect.isclass)
    public = {name: kind for name, kind in classes if issubclass(kind, ShardwiseError)}
    assert sorted(public) == sorted(errors.__all__)
    for name, kind in public.items():
        if name != "ShardwiseError":
            kinds = (
                ValueError | TypeError | RuntimeError | IndexError | AttributeError | ImportError
            )
            assert issubclass(kind, kinds), name
    assert issubclass(RankFailure, RuntimeError)
