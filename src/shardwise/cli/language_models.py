"""Models of Hugging Face configurations, as far as a plan has to know them: names and shapes.

Their forward has every product and every look-up, so that what ranks send can be told; positions
are not turned into rotations, which have no parameters and send nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.arguments import whole_number
from shardwise.cli.words import find_dtype
from shardwise.errors import ArgumentValueError
from shardwise.sharders import MLP, Attention, Columnwise, Rowwise
from shardwise.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "CausalModel", "length_of_text", "tensor_parallel_plan"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # values of `model_type` that are known
_LENGTH = 2048  # of a text, if nothing is said


class _Config:
    """What is read of a config.json, with the defaults that these families have."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        kind = given.get("model_type")
        if kind not in FAMILIES:
            raise ArgumentValueError(
                "model_type of the config.json",
                expected=f"one of {', '.join(FAMILIES)}",
                got=repr(kind),
                fix="For another, write a file with a function that makes the model, and pass "
                "model.py:function.",
            )
        self._given = given
        self.width = self._number("hidden_size")
        self.hidden_width = self._number("intermediate_size")
        self.num_layers = self._number("num_hidden_layers")
        self.num_words = self._number("vocab_size")
        self.num_heads = self._number("num_attention_heads")
        self.num_kv_heads = self._number("num_key_value_heads", self.num_heads)
        self.head_width = self._number("head_dim", self.width // self.num_heads)
        self.most_words = self._number("max_position_embeddings", _LENGTH)  # of a text
        self.is_tied = bool(given.get("tie_word_embeddings", False))
        self.has_qkv_bias = kind == "qwen2" or bool(given.get("attention_bias", False))
        self.has_out_bias = bool(given.get("attention_bias", False))
        self.has_mlp_bias = bool(given.get("mlp_bias", False))
        self.has_head_norms = kind == "qwen3"
        self.dtype = self._dtype(given.get("dtype") or given.get("torch_dtype") or "float32")

    def _number(self, name: str, default: int | None = None) -> int:
        found = self._given.get(name)
        if found is None and default is not None:
            return default
        return whole_number(found, f"{name} of the config.json", least=1)

    @staticmethod
    def _dtype(name: object) -> torch.dtype:
        found = find_dtype(str(name))
        if found is None:
            raise ArgumentValueError(
                "dtype of the config.json", expected="a torch dtype", got=repr(name)
            )
        return found


class CausalModel(nn.Module):
    """Ids of words to a loss, through all parameters, by the names that checkpoints have."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        sizes = _Config(config)
        self.model = _Decoder(sizes)
        self.lm_head = nn.Linear(sizes.width, sizes.num_words, bias=False)
        if sizes.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.to(sizes.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean loss of saying the words again: a number that costs what training costs."""
        logits = self.lm_head(self.model(ids))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class _Decoder(nn.Module):
    def __init__(self, sizes: _Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.num_words, sizes.width)
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.norm(x)
        return found


class _Layer(nn.Module):
    def __init__(self, sizes: _Config) -> None:
        super().__init__()
        self.self_attn = _Attention(sizes)
        self.mlp = _GatedMLP(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.width)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class _Attention(nn.Module):
    def __init__(self, sizes: _Config) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads  # which the Attention sharder asks for
        self.head_width = sizes.head_width
        into, shared = sizes.num_heads * sizes.head_width, sizes.num_kv_heads * sizes.head_width
        self.q_proj = nn.Linear(sizes.width, into, bias=sizes.has_qkv_bias)
        self.k_proj = nn.Linear(sizes.width, shared, bias=sizes.has_qkv_bias)
        self.v_proj = nn.Linear(sizes.width, shared, bias=sizes.has_qkv_bias)
        self.o_proj = nn.Linear(into, sizes.width, bias=sizes.has_out_bias)
        if sizes.has_head_norms:
            self.q_norm, self.k_norm = nn.RMSNorm(sizes.head_width), nn.RMSNorm(sizes.head_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        found: torch.Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return found


class _GatedMLP(nn.Module):
    def __init__(self, sizes: _Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.hidden_width, bias=sizes.has_mlp_bias)
        self.up_proj = nn.Linear(sizes.width, sizes.hidden_width, bias=sizes.has_mlp_bias)
        self.down_proj = nn.Linear(sizes.hidden_width, sizes.width, bias=sizes.has_mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


def tensor_parallel_plan(config: Mapping[str, Any]) -> ShardingPlan:
    """Heads, hidden features and words are cut; two sums over ranks a layer."""
    plan: dict[str, Any] = {
        "model.embed_tokens": Rowwise(),
        "model.layers.*.self_attn": Attention(),
        "model.layers.*.mlp": MLP(),
    }
    if not _Config(config).is_tied:  # else it is the table of words, which is cut the same way
        plan["lm_head"] = Columnwise()
    return ShardingPlan(plan, input_plan={"": "replicated"})


def length_of_text(config: Mapping[str, Any]) -> int:
    """Words of a text that such a model can be called with, of usual length."""
    return min(_LENGTH, _Config(config).most_words)
