"""A small GPT in plain torch, and plans by which it is sharded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "GPT",
    "MLP",
    "PLANS",
    "Attention",
    "Block",
    "Config",
    "Words",
    "column",
    "grid",
    "mixed",
    "one_rank",
    "plan_of",
    "row",
    "uneven",
]


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocabulary: int = 64
    length: int = 64  # positions that it can look at
    width: int = 128
    heads: int = 8
    layers: int = 2
    checkpointed: bool = False  # blocks run again in backward instead of keeping their values


class Words(nn.Module):
    """What stands at each position, and where it stands."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.length, config.width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Vectors of ids, with those of their positions."""
        places = torch.arange(ids.shape[1], device=ids.device)
        found: torch.Tensor = self.token(ids) + self.position(places)
        return found


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come out of one product."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What each position takes from those before it."""
        q, k, v = (
            part.unflatten(2, (-1, self.head)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found


class MLP(nn.Module):
    """Wide, bent, and narrow again."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same of every position."""
        found: torch.Tensor = self.down(F.gelu(self.up(x)))
        return found


class Block(nn.Module):
    """Attention and an MLP, each after a norm and added to what came in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What comes in, and what attention and the MLP add."""
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Ids of tokens to logits of the next ones; with targets, to the mean loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.words = Words(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.words.token.weight  # tied: one table says and reads words

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the next tokens, or the loss of `targets`."""
        x = self.words(ids)
        for block in self.blocks:
            again = self.config.checkpointed
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -- plans -----------------------------------------------------------------------------------------
#
# Every plan names every parameter, so that a model can go from any one to any other.

_NORMS = dict.fromkeys(("blocks.*.norm?.*", "norm.*"), "replicate()")
_BIASES = dict.fromkeys(("blocks.*.attention.out.bias", "blocks.*.mlp.down.bias"), "replicate()")
_SUMMED = ("blocks.*.attention", "blocks.*.mlp")  # modules that end with a pending sum


def column(config: Config, world_size: int) -> ShardingPlan:
    """Every weight is cut along its outputs, which are gathered after each product."""
    whole = ("words", "blocks.*.attention.*", "blocks.*.mlp.*", "head")
    return ShardingPlan(
        {
            "words.*.weight": "chunk(1)",
            "blocks.*.attention.*.*": "chunk(0)",
            "blocks.*.mlp.*.*": "chunk(0)",
            **_NORMS,
        },
        dict.fromkeys(whole, "replicate()"),
        input_plan={"": "replicated"},
    )


def row(config: Config, world_size: int) -> ShardingPlan:
    """Every weight is cut along its inputs; every product ends with a sum over ranks."""
    return ShardingPlan(
        {
            "words.*.weight": "chunk(0)",
            "blocks.*.attention.*.weight": "chunk(1)",
            "blocks.*.attention.qkv.bias": "replicate()",
            "blocks.*.mlp.*.weight": "chunk(1)",
            "blocks.*.mlp.up.bias": "replicate()",
            **_NORMS,
            **_BIASES,
        },
        dict.fromkeys(("words", "blocks.*.attention.*", "blocks.*.mlp.*"), "replicate()"),
        input_plan={"": "replicated"},
    )


def mixed(config: Config, world_size: int) -> ShardingPlan:
    """Tensor parallel: heads, hidden values and words are cut; two sums over ranks a block."""
    plan = _by_heads(_heads(config, [1] * world_size))
    # Both tables have their rows on all ranks: what is looked up is added before it is summed.
    return replace(plan, output_plan=dict.fromkeys(("words", *_SUMMED), "replicate()"))


def uneven(config: Config, world_size: int) -> ShardingPlan:
    """Tensor parallel with parts of different sizes; the third of every four ranks has none."""
    shares = list(islice(cycle((3, 1, 0, 2)), world_size))
    hidden, words = _shared(4 * config.width, shares), _shared(config.vocabulary, shares)
    return _by_heads(_heads(config, shares), f", sizes={hidden}", f", sizes={words}")


def grid(config: Config, world_size: int) -> ShardingPlan:
    """The batch is cut over pairs of ranks, and the model within a pair (for an even number)."""
    data = 2 if world_size % 2 == 0 else 1
    parts = world_size // data
    copies = [[part + parts * k for k in range(data)] for part in range(parts)]
    batches = [list(range(parts * k, parts * (k + 1))) for k in range(data)]
    heads = _heads(config, [1] * parts)
    return ShardingPlan(
        {
            "words.*.weight": f"grid([{parts}, 1], ranks={copies})",
            "blocks.*.attention.qkv.weight": f"grid([{3 * heads}, 1], ranks={3 * copies})",
            "blocks.*.attention.qkv.bias": f"grid([{3 * heads}], ranks={3 * copies})",
            "blocks.*.attention.out.weight": f"grid([1, {heads}], ranks={copies})",
            "blocks.*.mlp.up.weight": f"grid([{parts}, 1], ranks={copies})",
            "blocks.*.mlp.up.bias": f"grid([{parts}], ranks={copies})",
            "blocks.*.mlp.down.weight": f"grid([1, {parts}], ranks={copies})",
            **_NORMS,
            **_BIASES,
        },
        {
            "words.position": "replicate()",
            **dict.fromkeys(("words.token", *_SUMMED), f"grid([{data}, 1, 1], ranks={batches})"),
        },
        input_plan={"": f"grid([{data}, 1], ranks={batches})"},
    )


def one_rank(config: Config, world_size: int) -> ShardingPlan:
    """Everything on the last rank; the others have nothing, and the same loss."""
    return ShardingPlan({"*": f"on_rank({world_size - 1})"}, input_plan={"": "replicated"})


# The plans, by the names that the example knows them by.
PLANS: dict[str, Callable[[Config, int], ShardingPlan]] = {
    "column": column,
    "row": row,
    "mixed": mixed,
    "uneven": uneven,
    "grid": grid,
    "one-rank": one_rank,
}


def plan_of(name: str, config: Config, world_size: int) -> ShardingPlan:
    """The plan of that name, for a model of these sizes on so many ranks."""
    return PLANS[name](config, world_size)


def _by_heads(heads: list[int], hidden: str = "", words: str = "") -> ShardingPlan:
    """Tensor parallel by the sizes of all ranks; hidden values and words evenly by default."""
    sizes = "" if len(set(heads)) == 1 else f", sizes={heads}"
    section = heads if sizes else sum(heads)
    return ShardingPlan(
        {
            "words.token.weight": f"chunk(0{words})",
            "words.position.weight": "chunk(0)",
            "blocks.*.attention.qkv.*": f"fused(0, {[section] * 3})",
            "blocks.*.attention.out.weight": f"chunk(1{sizes})",
            "blocks.*.mlp.up.*": f"chunk(0{hidden})",
            "blocks.*.mlp.down.weight": f"chunk(1{hidden})",
            **_NORMS,
            **_BIASES,
        },
        dict.fromkeys(("words.*", *_SUMMED), "replicate()"),
        input_plan={"": "replicated"},
    )


def _heads(config: Config, shares: Sequence[int]) -> list[int]:
    """Values of each rank's whole heads."""
    return [config.width // config.heads * count for count in _shared(config.heads, shares)]


def _shared(total: int, shares: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `total`, as near to the shares as they can be."""
    ends = [round(total * sum(shares[: k + 1]) / sum(shares)) for k in range(len(shares))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
