"""From a spec back to the text that `parse_spec` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.errors import ShardwiseError
from shardwise.placement import parse_placement, rank_of
from shardwise.sharding_spec.calls import call_text
from shardwise.sharding_spec.plain import plain_spec
from shardwise.sharding_spec.short import parse_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["spec_text"]

_WORDS = {  # class -> the short word, and how many arguments stand without their names
    "BlockCyclicShardingSpec": ("block_cyclic", 2),
    "ChunkShardingSpec": ("chunk", 1),
    "FlatShardingSpec": ("flat", 0),
    "FusedShardingSpec": ("fused", 2),
    "GridShardingSpec": ("grid", 1),
    "PartialShardingSpec": ("partial", 1),
    "ReplicatedShardingSpec": ("replicate", 0),
}


def spec_text(
    spec: ShardingSpec, *, ranks: Sequence[int] | None = None, device: str | None = None
) -> str | None:
    """The shortest text from which `parse_spec` makes `spec`; None if there is none.

    Ranks and device are left out where they are the given ones.

    >>> from shardwise.sharding_spec import ChunkShardingSpec
    >>> spec_text(ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"], [5, 3]), device="cpu")
    'chunk(0, sizes=[5, 3], ranks=[1, 0])'
    """
    for text in _candidates(spec, ranks, device):
        try:
            if parse_spec(text, ranks=ranks, device=device) == spec:
                return text
        except ShardwiseError:  # such as a grid of other ranks than it has cells
            continue
    return None


def _candidates(
    spec: ShardingSpec, ranks: Sequence[int] | None, device: str | None
) -> Iterator[str]:
    """Texts that may do, the shortest first."""
    name, arguments = plain_spec(spec) or ("", {})
    if name not in _WORDS:
        return  # a user's own spec, boxes one by one, or a mesh
    placements = arguments.pop("placements")
    try:
        own_ranks: Any = _ranks(placements)
    except ShardwiseError:  # a placement without a rank, or a worker's name
        return
    first = placements[0][0] if isinstance(placements[0], list) else placements[0]
    own_device = {"device": str(parse_placement(first).device())}
    word, num_first = _WORDS[name]
    args = list(arguments.values())[:num_first]
    kwargs = {k: v for k, v in list(arguments.items())[num_first:] if v is not None}
    if word == "replicate" and len(own_ranks) == 1:
        word, args, own_ranks = "on_rank", own_ranks, None
    chosen: list[dict[str, Any]] = [{}]
    if own_ranks is not None:
        chosen = [{"ranks": own_ranks}] if ranks is None else [{}, {"ranks": own_ranks}]
    for some in chosen:
        if device is not None:
            yield call_text(word, *args, **kwargs, **some)
        yield call_text(word, *args, **kwargs, **some, **own_device)


def _ranks(placements: Sequence[Any]) -> list[Any]:
    """Rank of each placement; those of a cell with replicas as a list."""
    return [
        _ranks(one) if isinstance(one, list) else rank_of(parse_placement(one))
        for one in placements
    ]
