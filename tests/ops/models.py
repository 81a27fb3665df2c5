"""Models in plain torch, and plans to shard them by: what "models run without a fallback" means."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

import shardwise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.sharding_spec import ShardingSpec

__all__ = ["CONV_PLANS", "RANKS", "TRANSFORMER_PLANS", "ConvNet", "Plan", "Transformer", "shard_by"]


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several heads of queries share one of keys."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width // shared)
        self.v = nn.Linear(width, width // shared)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, -1, self.head).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = F.scaled_dot_product_attention(
            self.rotated(q), self.rotated(k), v, is_causal=True, enable_gqa=True
        )
        found: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Every pair of values turned by an angle that grows with the position."""
        half = self.head // 2
        speed = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * speed
        first, second = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """The usual block: attention and an MLP, each after a norm and added to what came in."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, shared)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Transformer(nn.Module):
    """Words to a loss: embedding, a block, and the logits of the next word."""

    def __init__(self, *, vocabulary: int = 11, width: int = 32, heads: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = Block(width, heads, shared=2)
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.logits(self.norm(self.block(self.embedding(words))))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)


class ConvNet(nn.Module):
    """Pictures to a loss: convolutions, the usual norms, pooling, a linear layer."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2)
        self.norm2 = nn.GroupNorm(4, 12)
        self.linear = nn.Linear(12, classes)

    def forward(self, pictures: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(pictures))), 2)
        x = F.silu(self.norm2(self.conv2(F.relu(self.depthwise(x)))))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.cross_entropy(self.linear(x), target)


# -- plans -----------------------------------------------------------------------------------------

RANKS = range(4)
Make: TypeAlias = "Callable[[int], ShardingSpec]"  # of a tensor with so many dims


@dataclass(frozen=True)
class Plan:
    """Where inputs, parameters and outputs of modules go; the first pattern that fits counts."""

    inputs: Make
    parameters: Mapping[str, Make] = field(default_factory=dict)
    outputs: Mapping[str, Make] = field(default_factory=dict)


def shard_by(model: nn.Module, plan: Plan) -> None:
    """Replaces every parameter and buffer by a sharded one, and brings outputs where they go."""
    for name, module in model.named_modules():
        if name in plan.outputs:
            make = plan.outputs[name]
            module.register_forward_hook(
                lambda _, __, y, make=make: shardwise.reshard(y, make(y.ndim))
            )
        for short, tensor in [*module.named_parameters(recurse=False)]:
            setattr(module, short, nn.Parameter(_placed(f"{name}.{short}", tensor, plan)))
        for short, tensor in [*module.named_buffers(recurse=False)]:
            setattr(module, short, _placed(f"{name}.{short}", tensor, plan))


def _placed(name: str, tensor: torch.Tensor, plan: Plan) -> Any:
    fitting = [make for pattern, make in plan.parameters.items() if fnmatch(name, pattern)]
    make = fitting[0] if fitting and tensor.ndim else everywhere
    return shardwise.distribute(tensor.detach(), make(tensor.ndim), src_rank=None)


def rows(_: int) -> ShardingSpec:
    return shardwise.chunk(0, ranks=RANKS)


def columns(_: int) -> ShardingSpec:
    return shardwise.chunk(1, ranks=RANKS)


def everywhere(_: int) -> ShardingSpec:
    return shardwise.replicate(ranks=RANKS)


def by_sizes(dim: int, *sizes: int) -> Make:
    return lambda _: shardwise.chunk(dim, sizes=sizes, ranks=RANKS)


def on_grid(dim: int, axis: int) -> Make:
    """Cut along `dim` over one axis of the ranks [[0, 1], [2, 3]], replicated over the other."""
    ranks = [[0, 1], [2, 3]] if axis == 0 else [[0, 2], [1, 3]]
    return lambda ndim: shardwise.grid([2 if d == dim else 1 for d in range(ndim)], ranks=ranks)


HEADS = {  # tensor parallel: heads, hidden values and words
    "embedding.weight": rows,
    "*attention.[qkv].*": rows,
    "*attention.out.weight": columns,
    "block.up.*": rows,
    "block.down.weight": columns,
    "logits.weight": rows,
}
SUMMED = ("embedding", "block.attention", "block.down")  # where a tensor-parallel sum ends
TRANSFORMER_PLANS = {
    "data parallel": Plan(rows),
    "tensor parallel": Plan(everywhere, HEADS, dict.fromkeys(SUMMED, everywhere)),
    "sequence parallel": Plan(
        everywhere,
        HEADS,
        {
            **dict.fromkeys(SUMMED, columns),  # dim 1 of (batch, length, width)
            **dict.fromkeys(("block.norm1", "block.norm2", "norm"), everywhere),
        },
    ),
    "data and tensor parallel": Plan(
        on_grid(0, axis=0),
        {
            "embedding.weight": on_grid(0, axis=1),
            "*attention.[qkv].*": on_grid(0, axis=1),
            "*attention.out.weight": on_grid(1, axis=1),
            "block.up.*": on_grid(0, axis=1),
            "block.down.weight": on_grid(1, axis=1),
            "logits.weight": on_grid(0, axis=1),
        },
        dict.fromkeys(SUMMED, on_grid(0, axis=0)),
    ),
    "uneven heads, a rank without": Plan(
        everywhere,
        {
            "embedding.weight": by_sizes(0, 0, 7, 3, 1),
            "*attention.q.*": by_sizes(0, 8, 0, 20, 4),
            "*attention.[kv].*": everywhere,
            "*attention.out.weight": by_sizes(1, 8, 0, 20, 4),
            "block.up.*": by_sizes(0, 50, 45, 0, 33),
            "block.down.weight": by_sizes(1, 50, 45, 0, 33),
            "logits.weight": by_sizes(0, 0, 0, 10, 1),
        },
        dict.fromkeys(SUMMED, everywhere),
    ),
}
CHANNELS = {
    "conv1.*": rows,
    "norm1.*": rows,
    "depthwise.*": rows,
    "conv2.weight": columns,
    "linear.weight": rows,
    "linear.bias": rows,
}
CONV_PLANS = {
    "data parallel": Plan(rows),
    "uneven batch, a rank without": Plan(by_sizes(0, 3, 0, 2, 1)),
    "channels": Plan(everywhere, CHANNELS, {"conv2": everywhere}),
    "groups of the norm": Plan(
        everywhere,
        {"conv2.*": rows, "norm2.*": rows, "linear.weight": columns},
        {"linear": everywhere},
    ),
    "batch and channels": Plan(
        on_grid(0, axis=0),
        {
            "conv1.*": on_grid(0, axis=1),
            "norm1.*": on_grid(0, axis=1),
            "depthwise.*": on_grid(0, axis=1),
            "conv2.weight": on_grid(1, axis=1),
        },
        {"conv2": on_grid(0, axis=0)},
    ),
}
