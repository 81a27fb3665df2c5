"""Local shards that make no tensor: every check of the seed, with one error on every rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.sharded_tensor.shards import row

import shardwise
from shardwise import run_local, set_check
from shardwise.errors import AbsentRanksError, AgreementError, MetadataError
from shardwise.metadata import ShardMetadata
from shardwise.sharded_tensor import Shard, init_from_local_shards

if TYPE_CHECKING:
    from collections.abc import Callable


class _Pinned(torch.Tensor):
    """A tensor that says that it is in pinned memory, for machines without a GPU."""

    def is_pinned(self, *_: Any) -> bool:
        return True


def _with_tensor(shard: Shard, tensor: torch.Tensor) -> Shard:
    shard.tensor = tensor  # which nobody checks
    return shard


def _placed(placement: str | None) -> Shard:
    return Shard(torch.zeros(2, 3), ShardMetadata([2, 0], [2, 3], placement))


def _small(rank: int, **options: Any) -> Shard:
    return row(rank, torch.zeros(1, 3, **options), at=2 * rank)


def _pair(rank: int, one: torch.Tensor, other: torch.Tensor) -> list[Shard]:
    return [row(rank, one, at=2 * rank), row(rank, other, at=2 * rank + 1)]


# Name -> (phrase in the message, what rank 1 passes, sizes that ranks pass). Rank 0 passes
# rows 0 and 1 of a (4, 3) tensor.
Case = tuple[str, "Callable[[], Any]", "Callable[[int], Any]"]
_SIZE: Callable[[int], Any] = lambda rank: (4, 3)  # noqa: E731  # like those of the cases
LOCAL: dict[str, Case] = {
    "layout": (
        "Only torch.strided layout is currently supported",
        lambda: [row(1, torch.zeros(2, 3).to_sparse())],
        _SIZE,
    ),
    "strides": (
        "Only torch.contiguous_format memory_format is currently supported",
        lambda: [row(1, torch.zeros(3, 2).t())],
        _SIZE,
    ),
    "other rank": (
        "Local shard metadata's rank does not match with the rank in its process group",
        lambda: [_placed("rank:0/cpu")],
        _SIZE,
    ),
    "no rank": (
        "Local shard metadata's rank does not match with the rank in its process group",
        lambda: [_placed("cpu")],
        _SIZE,
    ),
    "no placement": ("remote device is None", lambda: [_placed(None)], _SIZE),
    "stranger": (
        "Global rank 5 does not exist in input process group",
        lambda: [_placed("rank:5/cpu")],
        _SIZE,
    ),
    "worker": ("RPC Framework needs to be initialized", lambda: [_placed("me/cpu")], _SIZE),
    "device": (
        "Local shard tensor device does not match with local Shard's placement",
        lambda: [_with_tensor(row(1), torch.zeros(2, 3, device="meta"))],
        _SIZE,
    ),
    "size": (
        "Local shards' tensor size property need to be the same on rank:1",
        lambda: [_with_tensor(row(1), torch.zeros(2, 4))],
        _SIZE,
    ),
    "dtypes": (
        "Local shards' tensor dtype property need to be the same on rank:1",
        lambda: _pair(1, torch.zeros(1, 3), torch.zeros(1, 3).double()),
        _SIZE,
    ),
    "grads": (
        "Local shards' tensor requires_grad property need to be the same on rank:1",
        lambda: _pair(1, torch.zeros(1, 3), torch.zeros(1, 3, requires_grad=True)),
        _SIZE,
    ),
    "pins": (
        "Local shards' tensor pin_memory property need to be the same on rank:1",
        lambda: _pair(1, torch.zeros(1, 3), torch.zeros(1, 3).as_subclass(_Pinned)),
        _SIZE,
    ),
    "not a list": ("local_shards: expected a list of Shard", lambda: None, _SIZE),
    "not shards": ("local_shards[0]: expected a Shard", lambda: [torch.zeros(2, 3)], _SIZE),
    "not a size": (
        "size has to be a sequence of ints",
        lambda: [row(1)],
        lambda rank: (4, 3.5 if rank else 3),
    ),
}
GLOBAL: dict[str, Case] = {
    "global_size": (
        "ShardedTensor global_size property does not match from different ranks!",
        lambda: [row(1)],
        lambda rank: (4 + rank, 3),
    ),
    "global_size of a rank without shards": (
        "ShardedTensor global_size property does not match from different ranks!",
        lambda: [],
        lambda rank: (2 + rank, 3),
    ),
    "dtype": (
        "ShardedTensor dtype property does not match from different ranks! Found "
        "dtype=torch.float32 on rank 0, and dtype=torch.float64 on rank 1",
        lambda: [row(1, torch.zeros(2, 3).double())],
        _SIZE,
    ),
    "requires_grad": (
        "ShardedTensor requires_grad property does not match from different ranks!",
        lambda: [row(1, torch.zeros(2, 3, requires_grad=True))],
        _SIZE,
    ),
    "pin_memory": (
        "ShardedTensor pin_memory property does not match from different ranks!",
        lambda: [row(1, torch.zeros(2, 3).as_subclass(_Pinned))],
        _SIZE,
    ),
    "overlap": ("overlap", lambda: [row(1, at=1)], lambda rank: (3, 3)),
    "the same box": ("overlap", lambda: [row(1, at=0)], lambda rank: (2, 3)),
    "volume": ("does not match tensor volume", lambda: [_small(1)], _SIZE),
    "cover": ("do not cover the entire tensor", lambda: [], _SIZE),
    "beyond": ("exceeds tensor dim", lambda: [row(1, at=3)], _SIZE),
    "dims": ("Rank of tensor is 3, but shards rank is 2", lambda: [row(1)], lambda r: (4, 3, 1)),
}


def _refusals(rank: int, mode: Any) -> dict[str, tuple[str, bool, float]]:
    found = {}
    for name, (_, make, size) in (LOCAL | GLOBAL).items():
        shards = make() if rank == 1 else [row(rank)]
        start = time.monotonic()
        with set_check(mode, timeout=5):
            try:
                init_from_local_shards(shards, *size(rank))
            except (ValueError, TypeError, RuntimeError) as error:
                is_ours = isinstance(error, shardwise.ShardwiseError)
                found[name] = (str(error), is_ours, time.monotonic() - start)
    return found


@pytest.mark.parametrize("mode", ["always", "never"])
def test_what_is_wrong_on_one_rank_raises_on_all_and_says_what(mode: str) -> None:
    zero, one = run_local(_refusals, 2, mode)
    for name, (phrase, _, _) in (LOCAL | GLOBAL).items():
        for found in (zero, one):
            message, is_ours, seconds = found[name]
            assert phrase in message, (name, message)
            assert is_ours
            assert seconds < 5, name  # nobody waited for anybody
        if name in LOCAL:
            assert "init_from_local_shards failed on other ranks: rank 1: " in zero[name][0]
        else:
            assert zero[name][0] == one[name][0]


def _nobody_and_absent(rank: int) -> tuple[str, ...]:
    with pytest.raises(ValueError, match="have no local shards on all ranks") as nothing:
        init_from_local_shards([], 4, 3)
    if rank == 1:
        with pytest.raises(MetadataError, match="Shard tensor size does not match"):
            Shard(torch.zeros(2, 2), ShardMetadata([2, 0], [2, 3], "rank:1/cpu"))
        return (str(nothing.value),)
    with set_check("always", timeout=1), pytest.raises(AbsentRanksError) as absent:
        init_from_local_shards([row(0)], 4, 3)
    assert absent.value.ranks == (1,)
    return str(nothing.value), *absent.value.__notes__


def test_no_shards_anywhere_and_a_rank_that_does_not_come() -> None:
    (nothing, note), (same,) = run_local(_nobody_and_absent, 2)
    assert nothing == same
    assert note == "Compared were the arguments of init_from_local_shards."


def test_errors_that_ranks_share_are_agreement_errors() -> None:
    def call(rank: int) -> str:
        with pytest.raises(AgreementError) as caught:
            init_from_local_shards([row(rank)], 4 + rank, 3)
        return str(caught.value)

    one, other = run_local(call, 2)
    assert one == other
    assert "global_size=(4, 3) on rank 0, and global_size=(5, 3) on rank 1" in one
