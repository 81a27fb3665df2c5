"""Built-in sharders: sharded modules give what plain ones give, and send nothing unasked."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import ShardingPlanError
from shardwise.sharders import (
    MLP,
    Attention,
    Columnwise,
    EmbeddingTables,
    Fused,
    Replicated,
    Rowwise,
    SequenceNorm,
)
from shardwise.sharding_plan import ShardingPlan
from shardwise.sharding_plan.matching import match

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.sharder import Sharder


class Block(nn.Module):
    """Its modules, and what is done with them."""

    def __init__(self, modules: Mapping[str, nn.Module], fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.fn(self, *args)


def check(
    model: nn.Module,
    entries: Mapping[str, Sharder] | ShardingPlan,
    world_size: int,
    *given: torch.Tensor,
) -> None:
    """Values and gradients of all parameters, without implicit communication."""
    plan = entries if isinstance(entries, ShardingPlan) else ShardingPlan(entries)
    first, model = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    expected = _first(model(*given))
    expected.square().sum().backward()

    def on_rank(rank: int) -> None:
        sharded = copy.deepcopy(first)
        shardwise.shard_module(sharded, plan, src_rank=None)
        with shardwise.implicit_comm("error"), shardwise.plain_inputs("replicated"):
            found = _first(sharded(*given))
            assert isinstance(found, shardwise.ShardedTensor)
            found.square().sum().backward()
        torch.testing.assert_close(found.full_tensor(), expected)
        for name, parameter in sharded.named_parameters():
            grad: Any = parameter.grad
            full = grad.full_tensor() if isinstance(grad, shardwise.ShardedTensor) else grad
            torch.testing.assert_close(full, model.get_parameter(name).grad, msg=name)
        for name, buffer in sharded.named_buffers():
            full = buffer.full_tensor() if isinstance(buffer, shardwise.ShardedTensor) else buffer
            torch.testing.assert_close(full, model.get_buffer(name), msg=name)

    simulate(on_rank, world_size)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def data(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ids(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(4))


WORLDS = [1, 2, 3, 4]


# -- cuts ------------------------------------------------------------------------------------------


def pair(first: nn.Module, second: nn.Module) -> Block:
    return Block(
        {"first": first, "second": second}, lambda self, x: self.second(F.gelu(self.first(x)))
    )


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_columnwise_layer_and_a_rowwise_one(world_size: int) -> None:
    model = pair(nn.Linear(6, 10), nn.Linear(10, 5))
    check(model, {"first": Columnwise(), "second": Rowwise()}, world_size, data(2, 3, 6))


def test_uneven_sizes_an_empty_part_and_other_ranks() -> None:
    uneven: dict[str, Any] = {"sizes": [4, 0, 6], "ranks": [2, 0, 3]}
    entries = {"first": Columnwise(**uneven), "second": Rowwise(**uneven)}
    model = pair(nn.Linear(6, 10, bias=False), nn.Linear(10, 5))
    check(model, entries, 4, data(2, 3, 6))


def test_an_output_is_brought_where_it_is_asked_for() -> None:
    model = pair(nn.Linear(6, 10), nn.Linear(10, 5))
    check(
        model,
        {"first": Columnwise("replicate()"), "second": Replicated("chunk(0)")},
        3,
        data(4, 6),
    )


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_packed_layers(world_size: int) -> None:
    def gated(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        y: torch.Tensor = self.down(F.silu(gate) * up)
        return y

    model = Block({"both": nn.Linear(6, 14), "down": nn.Linear(7, 5)}, gated)
    check(model, {"both": Fused(), "down": Rowwise()}, world_size, data(2, 3, 6))
    nested = Block({"mlp": model}, lambda self, x: x + self.mlp(x).sum(-1, keepdim=True))
    check(nested, {"mlp": MLP("both", "down", 2)}, world_size, data(3, 6))


@pytest.mark.parametrize("world_size", [2, 4])
def test_embeddings(world_size: int) -> None:
    model = Block(
        {"words": nn.Embedding(11, 6, padding_idx=2), "places": nn.Embedding(5, 6)},
        lambda self, x: self.words(x) + self.places(torch.arange(5)),
    )
    entries = {"words": Rowwise(), "places": Columnwise("replicate()")}
    check(model, entries, world_size, ids(3, 5, below=11))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_norms_of_a_sequence_that_is_cut(world_size: int) -> None:
    def blocks(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.gelu(self.up(x)))
        y: torch.Tensor = self.head(self.norm(x))
        return y

    model = Block(
        {
            "up": nn.Linear(6, 8),
            "down": nn.Linear(8, 6),
            "norm": nn.LayerNorm(6),
            "head": nn.Linear(6, 4),
        },
        blocks,
    )
    entries = {
        "up": Columnwise(),
        "down": Rowwise("chunk(1)"),
        "norm": SequenceNorm(),
        "head": Columnwise(),
    }
    check(model, entries, world_size, data(2, 5, 6))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_convolutions_by_channels(world_size: int) -> None:
    def net(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.groups(self.depthwise(self.spread(x)))
        y: torch.Tensor = self.up(self.last(x))
        return y

    model = Block(
        {
            "first": nn.Conv2d(3, 6, 3, padding=1),
            "norm": nn.BatchNorm2d(6),
            "spread": nn.GroupNorm(3, 6),
            "depthwise": nn.Conv2d(6, 6, 3, groups=6),
            "groups": nn.Conv2d(6, 12, 1, groups=3),
            "last": nn.Conv2d(12, 4, 2),
            "up": nn.ConvTranspose2d(4, 5, 2),
        },
        net,
    )
    sizes = {2: [4, 2], 3: [2, 2, 2], 4: [2, 2, 2, 0]}[world_size]  # whole groups of all
    entries: dict[str, Sharder] = {
        **dict.fromkeys(["first", "norm", "spread", "depthwise"], Columnwise(sizes=sizes)),
        "groups": Columnwise(sizes=[2 * n for n in sizes]),
        "last": Rowwise(sizes=[2 * n for n in sizes]),
        "up": Columnwise("replicate()"),
    }
    check(model, entries, world_size, data(2, 3, 6, 6))
    alone = Block({"conv": nn.Conv1d(6, 12, 2, groups=3)}, lambda self, x: self.conv(x))
    check(alone, {"conv": Columnwise("replicate()")}, world_size, data(2, 6, 5))
    up = Block({"conv": nn.ConvTranspose1d(6, 4, 2)}, lambda self, x: self.conv(x))
    check(up, {"conv": Rowwise()}, world_size, data(2, 6, 5))


# -- blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_mlps(world_size: int) -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(6, 7), nn.Linear(6, 7, bias=False)
            self.down_proj = nn.Linear(7, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
            return y

    model = Block({"mlp": Mlp()}, lambda self, x: x + self.mlp(x))
    check(model, {"mlp": MLP()}, world_size, data(2, 3, 6))


class Heads(nn.Module):
    """Causal attention, with grouped queries, or with one packed layer."""

    def __init__(self, heads: int, keys: int, *, packed: bool = False, width: int = 4) -> None:
        super().__init__()
        self.num_heads, self.num_keys, self.width = heads, keys, width
        sizes = [heads * width, keys * width, keys * width]
        if packed:
            self.c_attn = nn.Linear(6, sum(sizes))
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, size) for size in sizes)
        self.sizes, self.packed = sizes, packed
        self.o_proj = nn.Linear(heads * width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            found = self.c_attn(x).split(self.sizes, dim=-1)
        else:
            found = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in found)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("heads", "keys", "world_size"),
    [(4, 4, 2), (5, 5, 4), (3, 3, 4), (6, 3, 2), (8, 2, 3), (4, 2, 4), (3, 1, 4), (2, 2, 1)],
)
def test_attention_by_heads(heads: int, keys: int, world_size: int, packed: bool) -> None:
    model = Block(
        {"attention": Heads(heads, keys, packed=packed)}, lambda self, x: self.attention(x)
    )
    how = Attention(num_kv_heads=keys, qkv="c_attn") if packed else Attention()
    check(model, {"attention": how}, world_size, data(2, 5, 6))


@pytest.mark.parametrize("world_size", [2, 4])
def test_torchs_own_attention(world_size: int) -> None:
    own = nn.MultiheadAttention(6, 3, batch_first=True, add_bias_kv=True)
    model = Block({"attention": own}, lambda self, x: self.attention(x, x, x, need_weights=False))
    check(model, {"attention": Attention()}, world_size, data(2, 5, 6))
    others = nn.MultiheadAttention(6, 3, batch_first=True, kdim=6, vdim=5)
    model = Block({"attention": others}, lambda self, x, y: self.attention(x, x, y))
    check(model, {"attention": Attention()}, world_size, data(2, 5, 6), data(2, 5, 5))


# -- tables ----------------------------------------------------------------------------------------


class Tables(nn.Module):
    """Bags of several tables side by side, and a layer above."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"users": 9, "goods": 5, "ads": 7, "places": 3, "days": 4}
        self.bags = nn.ModuleDict({k: nn.EmbeddingBag(n, 4, mode="mean") for k, n in sizes.items()})
        self.top = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [bag(x % len(bag.get_parameter("weight"))) for bag in self.bags.values()]
        y: torch.Tensor = self.top(torch.cat(found, dim=-1))
        return y


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_tables_by_row_by_column_and_whole(world_size: int) -> None:
    tables: dict[str, str | int] = {
        "users": "row",
        "goods": "column",
        "[ap]*": "table",
        "days": world_size - 1,
    }
    entries = {"bags": EmbeddingTables(tables), "top": Columnwise()}
    check(Tables(), entries, world_size, ids(6, 3, below=9))


def test_whole_tables_are_dealt_out_by_size() -> None:
    found = match(ShardingPlan({"bags": EmbeddingTables()}), Tables(), range(3), "cpu").tensors
    owners = {t.names[0].split(".")[1]: t.spec.layout(t.tensor.shape).ranks for t in found}
    assert owners == {"users": (0,), "ads": (1,), "goods": (2,), "days": (2,), "places": (1,)}


# -- wrong calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "module", "message"),
    [
        (Columnwise, nn.LayerNorm(4), "Columnwise for a LayerNorm: expected a linear layer"),
        (Rowwise, nn.Conv1d(4, 4, 1, groups=2), "Rowwise for a convolution with groups: got 2"),
        (Columnwise, nn.ConvTranspose1d(4, 4, 1, groups=2), "ConvTranspose1d with groups"),
        (lambda: Fused(3), nn.Linear(4, 4), "expected a number that divides 4, or lengths, got 3"),
        (Rowwise, nn.ReLU(), "Rowwise needs the parameter 'weight' of a ReLU"),
        (Attention, nn.Linear(4, 4), "got none of them. Pass num_heads"),
        (lambda: Attention(3), Heads(4, 4), "output of 'q_proj': expected a multiple of 3 heads"),
        (lambda: Attention(4, 3), Heads(4, 4), "expected a divisor of 4 heads, got 3"),
        (MLP, nn.Linear(4, 4), "'gate_proj' of plan of the MLP at 'x': the model has no attribute"),
        (lambda: EmbeddingTables({"u*": "row"}), nn.Embedding(3, 3), "'u.' of .* matches nothing"),
        (lambda: EmbeddingTables({"*": "row", "users": 1}), Tables().bags, "'users' is claimed by"),
    ],
)  # fmt: skip
def test_a_module_that_does_not_fit_is_refused(
    make: Callable[[], Sharder], module: nn.Module, message: str
) -> None:
    model = nn.ModuleDict({"x": module})
    with pytest.raises(ShardingPlanError, match=message):
        match(ShardingPlan({"x": make()}), model, range(2), "cpu")


def test_wrong_arguments_are_refused_where_they_are_given() -> None:
    with pytest.raises(TypeError, match=r"Rowwise\.output: expected text of a spec"):
        Rowwise(output=3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=r"expected one of .*chunk.*, got rows"):
        Columnwise("rows(0)")
    with pytest.raises(ValueError, match=r"Attention\.num_kv_heads: expected a whole number >= 1"):
        Attention(num_kv_heads=0)
    with pytest.raises(ValueError, match=r"'a' of EmbeddingTables\.tables: expected one of row"):
        EmbeddingTables({"a": "rows"})


def test_a_sharder_shards_a_module_alone() -> None:
    def alone(rank: int) -> tuple[int, ...]:
        layer = nn.Linear(6, 5)
        assert Columnwise(sizes=[2, 3]).shard(layer) is layer
        weight: Any = layer.weight
        return tuple(weight.local_tensor().shape)

    assert simulate(alone, 2).results == [(2, 6), (3, 6)]
