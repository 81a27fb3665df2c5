"""Torch's modules on sharded parameters give what they give on plain ones, gradients too."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.sharding_spec import parse_spec

if TYPE_CHECKING:
    from collections.abc import Callable

Plan = dict[str, str]  # the spec of the parameters whose names end so; others are on all ranks

FUSED = "fused(0, [8, 8, 8])"
HEADS: Plan = {
    "in_proj_weight": FUSED,
    "in_proj_bias": FUSED,
    "out_proj.weight": "chunk(1)",
    "linear1.weight": "chunk(0)",
    "linear1.bias": "chunk(0)",
    "linear2.weight": "chunk(1)",
}
PLANS: dict[str, Plan] = {
    "on all ranks": {},
    "heads": HEADS,
    "chunk": dict.fromkeys(HEADS, "chunk(0)"),
    "on one rank": dict.fromkeys(HEADS, "on_rank(1)"),
}


def _sharded(module: nn.Module, plan: Plan) -> nn.Module:
    made = copy.deepcopy(module)
    for name, child in made.named_modules():
        for own, parameter in list(child.named_parameters(recurse=False)):
            full = f"{name}.{own}"
            text = next((spec for end, spec in plan.items() if full.endswith(end)), "replicate()")
            spec = parse_spec(text, ranks=range(2), device="cpu")
            tensor: Any = shardwise.distribute(parameter.detach(), spec)
            setattr(child, own, nn.Parameter(tensor))
    return made


def _compare(
    module: nn.Module, plan: Plan, call: Callable[..., Any], *inputs: torch.Tensor
) -> None:
    """On one rank of a group, all of which call it."""
    sharded = _sharded(module, plan)
    plain = [one.clone().requires_grad_() for one in inputs]
    given: Any = [shardwise.as_replicated(one.clone()).requires_grad_() for one in inputs]
    with shardwise.implicit_comm("allow"):
        expected, found = call(module, *plain), call(sharded, *given)
        torch.testing.assert_close(found.full_tensor(), expected)
        module.zero_grad()
        expected.square().sum().backward()
        found.square().sum().backward()
        for one, reference in zip(given, plain, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), reference.grad)
        listed = dict(sharded.named_parameters())
        for name, parameter in module.named_parameters():
            grad: Any = listed[name].grad
            torch.testing.assert_close(grad.full_tensor(), parameter.grad, msg=name)


def _inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 5, 8, dtype=torch.float64) for _ in range(count)]


def _on_ranks(module: nn.Module, plan: str, call: Callable[..., Any], count: int = 1) -> None:
    given = _inputs(count)
    simulate(lambda rank: _compare(copy.deepcopy(module), PLANS[plan], call, *given), 2)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


@pytest.mark.parametrize("plan", PLANS)
def test_multi_head_attention(plan: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)

    def call(one: Any, q: Any, k: Any) -> Any:
        found, weights = one(q, k, k, key_padding_mask=PADDING)
        return found + weights.sum(-1, keepdim=True)

    _on_ranks(module, plan, call, 2)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("is_training", [True, False])
def test_encoder_layers(plan: str, is_training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 4, 12, 0.0, batch_first=True, dtype=torch.float64)
    # With nested tensors, which it may not make.
    module = nn.TransformerEncoder(layer, 2).train(is_training)
    _on_ranks(module, plan, lambda one, x: one(x, src_key_padding_mask=PADDING))


@pytest.mark.parametrize("plan", ["heads", "chunk"])
def test_decoder_layers(plan: str) -> None:
    torch.manual_seed(0)
    module = nn.TransformerDecoderLayer(
        8, 2, 12, 0.0, batch_first=True, norm_first=True, dtype=torch.float64
    )
    _on_ranks(module, plan, lambda one, x, m: one(x, m, CAUSAL, tgt_is_causal=True), 2)


def test_encoder_layer_without_gradients() -> None:
    """Where torch would take its fast path."""
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 4, 12, batch_first=True, dtype=torch.float64).eval()
    (x,) = _inputs(1)

    def on_rank(rank: int) -> None:
        sharded = _sharded(module, HEADS)
        with torch.inference_mode(), shardwise.implicit_comm("allow"):
            # A plain input is the same on all ranks.
            torch.testing.assert_close(sharded(x).full_tensor(), module(x))

    simulate(on_rank, 2)


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 1, bias=False),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ConvTranspose2d(4, 3, 2),
        nn.AdaptiveAvgPool2d(1),
    ).double()


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {
            "0.weight": "chunk(0)",
            "0.bias": "chunk(0)",
            "2.weight": "chunk(0)",
            "4.weight": "chunk(1)",
        },
        {"0.weight": "chunk(1)", "4.weight": "chunk(0)", "6.weight": "chunk(0)"},
        {"2.weight": "chunk(0, sizes=[3, 5])", "6.weight": "chunk(1)", "6.bias": "chunk(0)"},
        dict.fromkeys(["0.weight", "2.weight"], "chunk(2)"),
    ],
)
def test_a_convolutional_net(plan: Plan) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    module = _convolutions()
    simulate(lambda rank: _compare(copy.deepcopy(module), plan, lambda one, x: one(x), x), 2)
