"""Blocks of a transformer: attention by heads, and the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from shardwise.arguments import items, whole_number
from shardwise.errors import ShardingPlanError
from shardwise.sharders.cuts import Columnwise, Fused, Rowwise
from shardwise.sharders.text import (
    balanced,
    check_output,
    checked_numbers,
    spec_words,
    tensor_of,
)
from shardwise.sharding_plan import PlanSharder, ShardingPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.sharder import Sharder

__all__ = ["MLP", "Attention"]

_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")


@dataclass(frozen=True)
class MLP(PlanSharder):
    """Layers into a wide hidden state, side by side, and one out of it.

    Each rank has its part of the hidden state; the one sum at the end goes where `output` says, as
    in `Rowwise`. `fused`: `up` names one layer that has so many packed in it (gate and up: 2).
    """

    up: Sequence[str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    fused: int = 1
    output: str | None = "replicate()"
    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        names = [self.up] if isinstance(self.up, str) else items(self.up, "MLP.up", of="names")
        object.__setattr__(self, "up", tuple(names))
        object.__setattr__(self, "fused", whole_number(self.fused, "MLP.fused", least=1))
        object.__setattr__(self, "ranks", checked_numbers(self.ranks, "MLP.ranks"))
        check_output(self.output, "MLP")

    def plan(self, module: nn.Module, ranks: Sequence[int]) -> ShardingPlan:
        into: Sharder = Columnwise(ranks=self.ranks)
        if self.fused > 1:
            into = Fused(self.fused, ranks=self.ranks)
        out = Rowwise(self.output, ranks=self.ranks)
        return ShardingPlan({**dict.fromkeys(self.up, into), self.down: out})


class _Heads(NamedTuple):
    """Who has which heads: a rank's heads of queries, and the heads of keys that they look at."""

    queries: tuple[int, ...]  # how many, per rank
    keys: tuple[int, ...]  # lengths of the cells that the heads of keys are cut into
    owners: tuple[tuple[int, ...], ...]  # per cell, those who have it


@dataclass(frozen=True)
class Attention(PlanSharder):
    """Attention cut between heads: each rank has some of them, and the sum over heads comes last.

    Heads need not divide by ranks: some have one more, and some may have none. Grouped queries stay
    with the keys and values that they share; where ranks outnumber heads of keys, several ranks
    have copies of one.

    `qkv` names one layer that has Q, K and V packed, instead of `q`, `k` and `v`; there is one copy
    of everything then, and ranks beyond the heads of keys have none. Of torch's
    nn.MultiheadAttention the names are known. `num_heads` is read from the module, if it has it;
    `num_kv_heads` follows from the weights, and for `qkv` has to be said if it is another.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    out: str = "o_proj"
    qkv: str | None = None
    output: str | None = "replicate()"
    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, whole_number(given, f"Attention.{name}", least=1))
        object.__setattr__(self, "ranks", checked_numbers(self.ranks, "Attention.ranks"))
        check_output(self.output, "Attention")

    def plan(self, module: nn.Module, ranks: Sequence[int]) -> ShardingPlan:
        over = tuple(ranks) if self.ranks is None else tuple(self.ranks)
        num_heads = self._num_heads(module)
        if isinstance(module, nn.MultiheadAttention):
            return self._torchs(module, _deal(num_heads, num_heads, over), over)
        entries: dict[str, str] = {}
        if self.qkv is not None:
            num_keys = self.num_kv_heads or num_heads
            over = over[:num_keys]  # products of a weight with copies of some rows only keep none
            heads = _deal(num_heads, num_keys, over)
            size = tensor_of(module, f"{self.qkv}.weight", "Attention").shape[0]
            width = width_of_value = _width(size, num_heads + 2 * num_keys, self.qkv)
            cut = _Cut([_queries(heads, width, over), *[_keys(heads, width)] * 2])
            entries |= _into(module, self.qkv, cut)
        else:
            sizes = [tensor_of(module, f"{one}.weight", "Attention").shape[0] for one in self._qkv]
            width = _width(sizes[0], num_heads, self.q)
            num_keys = self.num_kv_heads or _width(sizes[1], width, self.k)
            heads = _deal(num_heads, num_keys, over)
            width_of_value = _width(sizes[2], num_keys, self.v)
            entries |= _into(module, self.q, _Cut([_queries(heads, width, over)]))
            entries |= _into(module, self.k, _Cut([_keys(heads, width)]))
            entries |= _into(module, self.v, _Cut([_keys(heads, width_of_value)]))
        lengths = [count * width_of_value for count in heads.queries]
        out = Rowwise(self.output, lengths, ranks=over)
        return ShardingPlan({**entries, self.out: out})

    @property
    def _qkv(self) -> tuple[str, str, str]:
        return self.q, self.k, self.v

    def _num_heads(self, module: nn.Module) -> int:
        found = [getattr(module, name) for name in _NUM_HEADS if hasattr(module, name)]
        if self.num_heads is None and not found:
            raise ShardingPlanError(
                f"Attention for a {type(module).__name__}",
                expected=f"the number of heads in {', '.join(_NUM_HEADS)}",
                got="none of them",
                fix="Pass num_heads.",
            )
        given = found[0] if self.num_heads is None else self.num_heads
        return whole_number(given, "Attention.num_heads", least=1)

    def _torchs(
        self, module: nn.MultiheadAttention, heads: _Heads, over: tuple[int, ...]
    ) -> ShardingPlan:
        """The plan of torch's own module, which keeps its weights in a way of its own."""
        pieces = _queries(heads, module.head_dim, over)
        entries: dict[str, str] = {"out_proj.weight": _Cut([pieces]).spec(1, 2)}
        for name, tensor in module.named_parameters(recurse=False):
            cut = _Cut([pieces] * (3 if name.startswith("in_proj") else 1))
            entries[name] = cut.spec(
                tensor.ndim - 1 if name in ("bias_k", "bias_v") else 0, tensor.ndim
            )
        if module.out_proj.bias is not None:
            entries["out_proj.bias"] = spec_words("replicate", ranks=over)
        return ShardingPlan(entries, None if self.output is None else {"": self.output})


_Pieces = list[tuple[int, tuple[int, ...]]]  # length, and the ranks that have it


@dataclass(frozen=True, slots=True)
class _Cut:
    """Sections of a dim, each a list of pieces."""

    sections: list[_Pieces]

    def spec(self, dim: int, ndim: int) -> str:
        """Text of the spec that cuts `dim` so."""
        pieces = [piece for section in self.sections for piece in section]
        if all(len(ranks) == 1 for _, ranks in pieces):
            lengths = [[length for length, _ in section] for section in self.sections]
            over = [ranks[0] for _, ranks in self.sections[0]]
            if len(lengths) == 1:
                return spec_words("chunk", dim, sizes=lengths[0], ranks=over)
            return spec_words("fused", dim, lengths, ranks=over)
        splits: list[int | list[int]] = [1] * ndim
        splits[dim] = [length for length, _ in pieces]
        return spec_words("grid", splits, ranks=[list(ranks) for _, ranks in pieces])


def _into(module: nn.Module, name: str, cut: _Cut) -> dict[str, str]:
    """Entries of a layer whose output is cut so."""
    layer = module.get_submodule(name)
    entries = {f"{name}.weight": cut.spec(0, 2)}
    if getattr(layer, "bias", None) is not None:
        entries[f"{name}.bias"] = cut.spec(0, 1)
    return entries


def _queries(heads: _Heads, width: int, over: tuple[int, ...]) -> _Pieces:
    counts = zip(heads.queries, over, strict=True)
    return [(count * width, (rank,)) for count, rank in counts]


def _keys(heads: _Heads, width: int) -> _Pieces:
    return [(n * width, owners) for n, owners in zip(heads.keys, heads.owners, strict=True)]


def _deal(num_heads: int, num_keys: int, over: tuple[int, ...]) -> _Heads:
    """Heads dealt out to ranks, queries with the keys that they look at.

    >>> _deal(8, 2, (0, 1, 2))
    _Heads(queries=(2, 2, 4), keys=(1, 1), owners=((0, 1), (2,)))
    """
    if num_keys < 1 or num_heads % num_keys:
        raise ShardingPlanError(
            "Attention.num_kv_heads", expected=f"a divisor of {num_heads} heads", got=num_keys
        )
    share = num_heads // num_keys
    if num_keys >= len(over):
        keys = balanced(num_keys, len(over))
        return _Heads(tuple(n * share for n in keys), keys, tuple((rank,) for rank in over))
    queries: list[int] = []
    owners: list[tuple[int, ...]] = []
    for count in balanced(len(over), num_keys):  # of ranks for each head of keys
        owners.append(over[len(queries) : len(queries) + count])
        queries += balanced(share, count)
    return _Heads(tuple(queries), (1,) * num_keys, tuple(owners))


def _width(size: int, count: int, name: str) -> int:
    """Features of each of `count` parts of a layer's output."""
    if count < 1 or size % count:
        raise ShardingPlanError(
            f"Attention: output of {name!r}", expected=f"a multiple of {count} heads", got=size
        )
    return size // count
