"""The GPT of the examples, tensor parallel: by hand with raw collectives, and by DTensor.

Both compute what the plain model computes. By hand: heads, hidden values and words are cut; every
half of a block and the embeddings have one sum over ranks, the loss a maximum and a sum, as people
write it for the one case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.ranks import mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.demo.gpt import GPT

__all__ = ["Enter", "Leave", "by_dtensor", "by_hand", "loss_of_parts"]


class Enter(torch.autograd.Function):
    """Replicated input of work that is split: its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        summed = grad.clone()
        dist.all_reduce(summed)
        return summed


class Leave(torch.autograd.Function):
    """The parts of a sum, added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        summed = x.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _LossOfParts(torch.autograd.Function):
    """Mean cross entropy of logits whose classes are cut over ranks, evenly."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        local = targets - dist.get_rank() * logits.shape[1]
        is_here = (local >= 0) & (local < logits.shape[1])
        local = local.where(is_here, 0).unsqueeze(1)
        most = logits.amax(1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        shifted = logits - most.unsqueeze(1)
        own = shifted.gather(1, local).squeeze(1).where(is_here, 0)
        exp = shifted.exp_()
        sums = torch.stack([exp.sum(1), own])
        dist.all_reduce(sums)
        ctx.save_for_backward(exp.div_(sums[0].unsqueeze(1)), local, is_here)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        softmax, local, is_here = ctx.saved_tensors
        softmax.scatter_add_(1, local, -is_here.to(softmax.dtype).unsqueeze(1))
        return softmax.mul_(grad / len(local)), None


# -- by hand ---------------------------------------------------------------------------------------


def _cut(full: torch.Tensor, dim: int = 0) -> nn.Parameter:
    part = full.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return nn.Parameter(part.clone())


def _cut_fused(full: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.cat([_cut(part).data for part in full.chunk(3)]))


class _CutBlock(nn.Module):
    """One rank's heads and hidden values of a block; the norms are everybody's."""

    def __init__(self, block: Any) -> None:  # a Block of the examples
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.norm1, self.norm2, self.head = block.norm1, block.norm2, attention.head
        self.qkv, self.qkv_bias = _cut_fused(attention.qkv.weight), _cut_fused(attention.qkv.bias)
        self.out, self.out_bias = _cut(attention.out.weight, 1), attention.out.bias
        self.up, self.up_bias = _cut(mlp.up.weight), _cut(mlp.up.bias)
        self.down, self.down_bias = _cut(mlp.down.weight, 1), mlp.down.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + _leave(self.attention(_enter(self.norm1(x)))) + self.out_bias
        hidden = F.gelu(F.linear(_enter(self.norm2(x)), self.up, self.up_bias))
        x = x + _leave(F.linear(hidden, self.down)) + self.down_bias
        return x

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (-1, self.head)).transpose(1, 2)
            for part in F.linear(x, self.qkv, self.qkv_bias).chunk(3, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).flatten(2), self.out)


class _CutGPT(nn.Module):
    """One rank's part of a GPT; the number of ranks divides everything that is cut."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = (
            _cut(model.words.token.weight),
            _cut(model.words.position.weight),
        )
        self.blocks = nn.ModuleList(_CutBlock(block) for block in model.blocks)
        self.norm = model.norm

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        x = _leave(_look_up(ids, self.token) + _look_up(places, self.position))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(_enter(self.norm(x)), self.token)
        return loss_of_parts(logits.flatten(0, 1), targets.flatten())


def _look_up(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows that are here, and zeros for others."""
    local = ids - dist.get_rank() * len(table)
    is_here = (local >= 0) & (local < len(table))
    return F.embedding(local.where(is_here, 0), table) * is_here.unsqueeze(-1)


def _enter(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Enter.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return found


def _leave(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Leave.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return found


def loss_of_parts(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss over classes that are cut: a maximum and a sum over ranks."""
    found: torch.Tensor = _LossOfParts.apply(logits, targets)  # type: ignore[no-untyped-call]  # torch's
    return found


def by_hand(model: GPT) -> tuple[Callable[..., torch.Tensor], list[nn.Parameter]]:
    """The loss of the model, which is taken apart, and its parameters on this rank."""
    cut = _CutGPT(model)
    return cut, list(cut.parameters())


# -- by DTensor ------------------------------------------------------------------------------------


def by_dtensor(model: GPT) -> tuple[Callable[..., torch.Tensor], list[nn.Parameter]]:
    """The same by parallelize_module, as its tutorials say: words, heads and hidden values."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    size = dist.get_world_size()
    plan: dict[str, Any] = {
        "words.token": RowwiseParallel(input_layouts=Replicate()),
        "words.position": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for number, block in enumerate(model.blocks):
        _interleave(block.attention, size)
        plan |= {
            f"blocks.{number}.attention.qkv": ColwiseParallel(),
            f"blocks.{number}.attention.out": RowwiseParallel(),
            f"blocks.{number}.mlp.up": ColwiseParallel(),
            f"blocks.{number}.mlp.down": RowwiseParallel(),
        }
    parallelize_module(model, mesh(), plan)
    model.head.weight = model.words.token.weight  # which it has made two of

    def run(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            value: Any = model(ids, targets)
            value.backward()
        loss: torch.Tensor = value.detach().full_tensor()
        return loss

    return run, list(model.parameters())


def _interleave(attention: Any, size: int) -> None:
    """Rows of q, k and v in the order in which ranks hold them: DTensor cuts a dim evenly."""
    for name in ("weight", "bias"):
        full = getattr(attention.qkv, name)
        parts = [part.chunk(size) for part in full.data.chunk(3)]
        full.data = torch.cat([part[rank] for rank in range(size) for part in parts])
