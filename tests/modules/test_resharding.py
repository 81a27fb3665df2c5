"""`reshard_module`: a live model under another plan trains on as if nothing had happened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import ShardwiseError
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharder import Sharder
from shardwise.sharders import Columnwise, Rowwise
from shardwise.sharding_plan import ShardingPlan


class Tied(nn.Module):
    """Words to a loss; the table of words is also that of the logits, and a mask is a buffer."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.logits = nn.Linear(6, 7, bias=False)
        self.logits.weight = self.embedding.weight
        self.register_buffer("mask", torch.linspace(0.5, 1.5, 10))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        x = x + self.down(F.gelu(self.up(x)) * self.mask)
        return F.cross_entropy(self.logits(x).flatten(0, 1), words.roll(1).flatten())


def made() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


WORDS = torch.tensor([[1, 4, 2, 6, 0], [3, 5, 1, 1, 2]])


def plans(world_size: int) -> list[dict[str, Any]]:
    """Cut, uneven, empty, several shards on a rank, on one rank, replicated, named in part."""
    last = world_size - 1
    uneven = [*range(1, world_size), 10 - sum(range(1, world_size))]
    return [
        {},
        {"embedding.weight": "chunk(0)", "up.*": "chunk(0)", "down.weight": "chunk(1)"},
        {
            "embedding.weight": "block_cyclic(0, 1)",
            "up.*": f"chunk(0, sizes={uneven})",
            "mask": f"chunk(0, sizes={[10] + [0] * last})",
        },
        {"*": f"on_rank({last})"},
        {"up.weight": "flat()", "down.*": "replicate()"},
        {"*": "replicate()"},
        {"logits.weight": "chunk(1)", "up.weight": f"grid([{world_size}, 1])"},
    ]


def loss_of(model: nn.Module) -> Any:
    with shardwise.plain_inputs("replicated"), shardwise.implicit_comm("allow"):
        return model(WORDS)


def full(tensor: Any) -> torch.Tensor:
    plain: torch.Tensor = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
    return plain.detach().clone()


def check_same(model: nn.Module, reference: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        same = reference.get_parameter(name)
        torch.testing.assert_close(full(parameter), same.detach(), rtol=0, atol=1e-12, msg=name)
        assert (parameter.grad is None) == (same.grad is None)
        if same.grad is not None:
            found = full(parameter.grad)
            torch.testing.assert_close(found, same.grad, rtol=0, atol=1e-12, msg=name)
    for name, buffer in model.named_buffers():
        assert torch.equal(full(buffer), reference.get_buffer(name))


def check_training(world_size: int, make_optimizer: Any, max_bytes: int | None = None) -> None:
    """A step, a reshard between backward and the next step, and so on; all ranks call it."""
    reference, model = made(), made()
    optimizers = [make_optimizer(one.parameters()) for one in (reference, model)]
    ids = {name: id(one) for name, one in model.named_parameters(remove_duplicate=False)}
    for plan in plans(world_size):
        losses = [loss_of(one) for one in (reference, model)]
        for loss in losses:
            loss.backward()
        assert abs(losses[0].item() - losses[1].item()) < 1e-12
        del losses, loss  # whose graphs would hold plain parameters
        shardwise.reshard_module(model, ShardingPlan(plan), optimizers[1], max_bytes)
        check_same(model, reference)  # gradients are there, too
        check_state_follows(model, optimizers[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_same(model, reference)
    assert model.logits.weight is model.embedding.weight
    assert isinstance(model.embedding.weight, ShardedTensor)
    found = {name: id(one) for name, one in model.named_parameters(remove_duplicate=False)}
    assert found == ids


def check_state_follows(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(parameter, ShardedTensor) and value.shape == parameter.shape:
                assert value.shard_layout == parameter.shard_layout
                assert value.sharding_spec() == parameter.sharding_spec()


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_goes_on_unchanged(world_size: int) -> None:
    simulate(lambda _: check_training(world_size, adamw), world_size)


def test_with_other_optimizers_and_bounded_memory() -> None:
    def on_rank(rank: int) -> None:
        check_training(3, lambda p: adamw(p, fused=True, amsgrad=True), max_bytes=256)
        check_training(3, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    simulate(on_rank, 3)


def _on_real_rank(rank: int) -> None:
    check_training(4, adamw)


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_real_rank, 4)


def test_nothing_is_sent_where_every_rank_has_what_it_needs() -> None:
    def on_rank(rank: int) -> None:
        model = made()
        with shardwise.trace(show=False) as trace:
            shardwise.reshard_module(model, ShardingPlan(plans(3)[1]))
        assert {event.op for event in trace.events} == {"compare arguments", "compare results"}

    simulate(on_rank, 3)


def test_hooks_and_attributes_come_along() -> None:
    def on_rank(rank: int) -> None:
        model = made()
        weight: Any = model.up.weight
        seen: list[Any] = []
        weight.tag = "kept"
        weight.register_hook(lambda grad: seen.append(type(grad)))
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))
        for spec in ("chunk(0)", "chunk(1)"):
            shardwise.reshard_module(model, ShardingPlan({"up.weight": spec}))
            loss_of(model).backward()
            assert seen == [ShardedTensor, True]
            assert weight.tag == "kept"
            assert isinstance(weight, nn.Parameter)
            seen.clear()

    simulate(on_rank, 2)


def test_state_that_was_loaded_in_another_layout_comes_to_its_parameter() -> None:
    """torch's own `load_state_dict` takes state as it is: of other layouts, or plain."""

    def on_rank(rank: int) -> None:
        reference, first, second = made(), made(), made()
        plain, one, two = (adamw(model.parameters()) for model in (reference, first, second))
        shardwise.reshard_module(first, ShardingPlan({"up.*": "chunk(0)"}))
        shardwise.reshard_module(second, ShardingPlan({"up.*": "replicate()"}))
        for model, optimizer in ((reference, plain), (first, one)):
            loss_of(model).backward()
            optimizer.step()
        for source in (plain, one):
            two.load_state_dict(copy.deepcopy(source.state_dict()))
            shardwise.reshard_module(second, ShardingPlan({"down.weight": "chunk(1)"}), two)
            check_state_follows(second, two)
            for mine, theirs in zip(second.parameters(), reference.parameters(), strict=True):
                for key in ("exp_avg", "exp_avg_sq"):
                    expected = plain.state[theirs][key]
                    torch.testing.assert_close(full(two.state[mine][key]), expected)

    simulate(on_rank, 2)


def test_what_the_old_plan_did_to_outputs_and_inputs_ends() -> None:
    def on_rank(rank: int) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
        x = torch.linspace(-1, 1, 10).double().view(2, 5)
        expected = model(x).detach()
        first = ShardingPlan(
            {"0.*": "chunk(0)"},
            output_plan={"": "chunk(1)"},
            return_local_tensor=["0"],
            input_plan={"": "replicated"},
        )
        shardwise.shard_module(model, first, src_rank=None)
        model = copy.deepcopy(model)  # with its hooks
        with pytest.raises(RuntimeError):
            model(x)  # the second layer does not fit a part of the first one's output
        second = ShardingPlan({"0.*": "replicate()"}, output_plan={"": "replicate()"})
        shardwise.reshard_module(model, second)
        with shardwise.plain_inputs("replicated"):
            for _ in range(2):
                found = model(x)
                assert found.shard_layout == shardwise.replicate(range(2)).layout((2, 3))
                torch.testing.assert_close(found.full_tensor().detach(), expected)
        shardwise.reshard_module(model, ShardingPlan({}, input_plan={"": "chunk(0)"}))
        with shardwise.implicit_comm("error"):
            found = model(x)
        assert found.shard_layout == shardwise.chunk(0, ranks=range(2)).layout((2, 3))
        torch.testing.assert_close(found.full_tensor().detach(), expected)

    simulate(on_rank, 2)


def test_sharders_that_are_made_of_specs_are_taken() -> None:
    def on_rank(rank: int) -> None:
        model = made()
        shardwise.reshard_module(model, ShardingPlan({"up": Columnwise(), "down": Rowwise()}))
        assert isinstance(model.up.bias, ShardedTensor)
        weight: Any = model.down.weight
        assert weight.shard_layout == shardwise.chunk(1, ranks=range(2)).layout((6, 10))
        torch.testing.assert_close(loss_of(model).full_tensor(), loss_of(made()))

    simulate(on_rank, 2)


class Other(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


def test_wrong_calls_change_nothing() -> None:
    def on_rank(rank: int) -> None:
        model = made()
        bad: list[tuple[Any, str]] = [
            ({"up": Other()}, r"'up'.*stay the same objects.*up.weight"),
            ({"up.weight": "chunk(0)", "up.bias": "chunk(3)"}, r"dim"),
            ({"up.weight": "chunk(0, ranks=[0, 5])"}, r"'up.weight'.*5"),
            ({"up.weight": f"chunk(0, sizes=[{rank}, {10 - rank}])"}, r"ranks differ.*up.weight"),
        ]
        for plan, message in bad:
            with pytest.raises(ShardwiseError, match=message):
                shardwise.reshard_module(model, ShardingPlan(plan))
        caps: list[Any] = [3, -1, 64 + rank, "64"]
        for cap in caps:
            with pytest.raises(ShardwiseError, match="max_bytes"):
                shardwise.reshard_module(model, ShardingPlan({"up.*": "chunk(0)"}), None, cap)
        kept = loss_of(model)
        with pytest.raises(ShardwiseError, match=r"'up.weight'.*`del loss`.*from the start"):
            shardwise.reshard_module(model, ShardingPlan({"up.weight": "chunk(0)"}))
        own = adamw(model.parameters())
        heard = ["optimizer of reshard_module", "failed on other ranks: rank 0.*optimizer of resha"]
        given: Any = own if rank else "adam"
        with pytest.raises(ShardwiseError, match=heard[rank]):
            shardwise.reshard_module(model, ShardingPlan({}), given)
        with pytest.raises(ShardwiseError, match="ranks differ in optimizers"):
            shardwise.reshard_module(model, ShardingPlan({}), own if rank else None)
        with pytest.raises(ShardwiseError, match="expected a ShardingPlan, got dict"):
            shardwise.reshard_module(model, {})  # type: ignore[arg-type]  # wrong on purpose
        assert not any(isinstance(one, ShardedTensor) for one in model.parameters())
        kept.backward()

    simulate(on_rank, 2)
