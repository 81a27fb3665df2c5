"""How decisions are kept and carried out: looked up the second time, in the order of the docs."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import shardwise
from shardwise import sharded_tensor
from shardwise.comm import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import AgreementError, ArgumentValueError, OpError
from shardwise.ops import RULES
from shardwise.sharded_tensor import ShardedTensor, custom_sharded_op_impl
from shardwise.sharded_tensor.dispatch import CUSTOM, RUNNERS
from shardwise.sharded_tensor.running import _runner
from shardwise.sharded_tensor.tensor import wrap
from shardwise.sharding_spec import ChunkShardingSpec
from shardwise.sharding_spec.api import custom_sharding_spec_op

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.ops import Call, Decision

ROWS = shardwise.chunk(0, ranks=[0, 1], device="cpu")
COLUMNS = shardwise.chunk(1, ranks=[0, 1], device="cpu")


def test_the_second_call_asks_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, asked = RULES[torch.atan2], []

    def decide(call: Call) -> Decision | None:
        asked.append(call.rank)
        return rule.decide(call)

    watched = replace(rule, decide=decide)
    monkeypatch.setitem(RUNNERS, torch.atan2, _runner(watched, torch.atan2))

    def on_rank(_: int) -> None:
        x: Any = sharded_tensor.ones(ROWS, 4, 6)
        y: Any = sharded_tensor.ones(COLUMNS, 4, 6)
        for a, b in ((x, x), (x, x), (x, y), (x, y), (x, 2 * x)):
            torch.atan2(a, b)

    with shardwise.implicit_comm("allow"):
        simulate(on_rank, 2)
    assert sorted(asked) == [0, 0, 1, 1]  # once for (x, x) and once for (x, y)


def test_numbers_are_not_part_of_what_is_kept() -> None:
    def on_rank(_: int) -> int:
        x: Any = sharded_tensor.ones(ROWS, 4, 6)
        for k in range(5):
            y: Any = x * (k / 2) + k
            assert y.full_tensor()[0, 0] == k / 2 + k
        assert (x * 2).dtype == torch.float32
        assert (x.int() * 2).dtype == torch.int32
        assert (x.int() * 2.0).dtype == torch.float32
        for k in range(5):
            assert (x * np.float64(k)).full_tensor()[0, 0] == k
        return len(x._state.comm.decisions)

    # float and int beside each of two dtypes, and numpy's
    assert simulate(on_rank, 2).results == [6, 6]


def test_keywords_are_part_of_what_is_known() -> None:
    def on_rank(_: int) -> int:
        x: Any = shardwise.distribute(torch.arange(24.0).view(4, 6), ROWS)
        full = x.full_tensor()
        for k in range(3):
            for dim in (0, 1):
                assert torch.equal(x.sum(dim=dim).full_tensor(), full.sum(dim=dim))
            found: Any = torch.add(x, x, alpha=k)
            assert torch.equal(found.full_tensor(), full * (k + 1))
            assert torch.equal(x.add(x, alpha=k).full_tensor(), full * (k + 1))
        return len(x._state.comm.decisions)

    # both dims, torch.add and its method
    assert simulate(on_rank, 2).results == [4, 4]


def test_autocast_changes_what_a_known_call_gives() -> None:
    def on_rank(_: int) -> None:
        x: Any = sharded_tensor.ones(ROWS, 4, 6)
        weight: Any = shardwise.as_replicated(torch.ones(5, 6))
        for _again in range(2):
            for is_on, dtype in ((False, torch.float32), (True, torch.bfloat16)):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                    found: Any = F.linear(x, weight)
                assert found.dtype == found.local_tensor().dtype == dtype
                assert (found * 2).dtype == dtype

    simulate(on_rank, 2)


def test_equal_layouts_are_one_whatever_made_them() -> None:
    def on_rank(_: int) -> None:
        x: Any = sharded_tensor.ones(ROWS, 4, 6)
        weight: Any = shardwise.as_replicated(torch.ones(4, 6))
        sizes = []
        for _turn in range(3):
            columns = shardwise.reshard(x, shardwise.chunk(1, ranks=[0, 1], device="cpu"))
            (columns * 2).sum(0)
            rows: Any = F.linear(torch.ones(3, 6), weight)
            (rows * 2).sum(0)
            sizes.append(len(x._state.comm.decisions))
        assert sizes[0] == sizes[1] == sizes[2]

    simulate(on_rank, 2)


def test_a_view_in_another_layout_grows_old() -> None:
    def on_rank(_: int) -> None:
        x: Any = sharded_tensor.ones(ROWS, 4, 6)
        view: Any = x.view_as(sharded_tensor.ones(COLUMNS, 4, 6))
        assert (view + view).full_tensor().sum() == 48
        x.mul_(5)
        with pytest.raises(OpError, match="written since"):
            view + view
        with pytest.raises(OpError, match="written since"):
            view * 2

    with shardwise.implicit_comm("allow"):
        simulate(on_rank, 2)


class OwnSpec(ChunkShardingSpec):
    """For which this test has its own functions."""


def test_a_users_own_comes_first_then_the_specs_then_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(CUSTOM, torch.tanh, raising=False)

    def on_rank(_: int) -> list[Any]:
        x: Any = sharded_tensor.ones(OwnSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 6)
        y: Any = sharded_tensor.ones(ROWS, 4, 6)
        found: list[Any] = [torch.tanh(x), torch.tanh(y)]
        return [one if isinstance(one, str) else type(one).__name__ for one in found]

    assert simulate(on_rank, 2).results[0] == ["ShardedTensor"] * 2

    @custom_sharding_spec_op(OwnSpec, torch.tanh)
    def of_spec(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "the spec's"

    assert simulate(on_rank, 2).results[0] == ["the spec's", "ShardedTensor"]

    @custom_sharded_op_impl(torch.tanh)
    def of_user(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "the user's"

    assert simulate(on_rank, 2).results[0] == ["the user's", "the user's"]
    CUSTOM.pop(torch.tanh)


def test_tensors_in_lists_and_keywords_are_operands() -> None:
    def on_rank(_: int) -> None:
        x: Any = sharded_tensor.ones(ROWS, 4, 6, requires_grad=True)
        y: Any = torch.einsum("ij,ij->", [x, x])
        assert y.item() == 24
        z: Any = torch.clamp(x, min=shardwise.reshard(x * 2, COLUMNS))
        assert z.full_tensor().sum() == 48
        w: Any = F.linear(input=x, weight=shardwise.reshard(x, shardwise.replicate([0, 1], "cpu")))
        assert w.shape == (4, 4)

    with shardwise.implicit_comm("allow"):
        simulate(on_rank, 2)


def test_tensors_of_a_users_subclass() -> None:
    class Own(ShardedTensor):
        """What a user may add methods to."""

    def on_rank(_: int) -> None:
        x: Any = Own(ROWS, 4, 6).fill_(3.0)
        assert isinstance(x, Own)
        found: list[Any] = [x * 2, x + x, torch.mul(x, 2), F.relu(x) * 2, x.clone().mul_(2)]
        for y in found:
            assert y.full_tensor().sum() == 144

    simulate(on_rank, 2)


class Seen(TorchFunctionMode):
    """Notes the functions that torch asks it about."""

    def __init__(self) -> None:
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **kwargs or {})


def test_methods_that_are_known_still_ask_modes_and_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_user(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "the user's"

    def on_rank(_: int) -> Any:
        x: Any = sharded_tensor.ones(ROWS, 4, 6)
        calls: list[Callable[[], Any]] = [lambda: x.sum(1), lambda: x * x, lambda: x[:, 1]]
        for call in calls * 2:
            call()
        with Seen() as mode:
            for call in calls:
                call()
        for func in (torch.Tensor.sum, torch.Tensor.mul, torch.Tensor.__getitem__):
            assert func in mode.functions
        with pytest.raises(OpError, match="under torch"):
            torch.func.vmap(lambda one: (one, x.sum(1)))(torch.ones(3))
        with pytest.raises(TypeError):
            x.sum("no dim", 3, 4)
        return x.sum(1)

    assert isinstance(simulate(on_rank, 2).results[0], ShardedTensor)
    monkeypatch.setitem(CUSTOM, torch.Tensor.sum, of_user)
    assert simulate(lambda _: sharded_tensor.ones(ROWS, 4, 6).sum(1), 2).results[0] == "the user's"


def test_a_sum_has_no_spec_of_an_operand_that_has_another_layout() -> None:
    def on_rank(_: int) -> None:
        x: Any = sharded_tensor.ones(COLUMNS, 2, 4, 1)
        bias: Any = sharded_tensor.ones(ROWS, 4, 6)
        for _turn in range(2):
            y: Any = x + bias
            assert y.sharding_spec().layout(y.shape) == y.shard_layout

    simulate(on_rank, 2)


class Foreign:
    """What torch does not know, but knows how to stand beside a tensor."""

    def __eq__(self, other: object) -> Any:
        return "equal"

    def __rpow__(self, other: object) -> Any:
        return "power"

    def __hash__(self) -> int:
        return 0


def test_operators_leave_to_others_what_torch_does_not_know() -> None:
    def on_rank(rank: int) -> None:
        for spec in (ROWS, shardwise.on_rank(1, device="cpu")):
            x: Any = sharded_tensor.ones(spec, 4, 6)
            assert (x == None) is False  # noqa: E711  # the operator is tested
            assert (x != None) is True  # noqa: E711  # the operator is tested
            assert (x == "a") is False
            assert (x == Foreign()) == "equal"
            assert x ** Foreign() == "power"
            with pytest.raises(TypeError):
                x < None  # noqa: B015  # it raises

    simulate(on_rank, 2)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda x: torch.mm(x, x), torch.bool),
        (lambda x: torch.einsum("ij,jk->ik", x, x), torch.bool),
        (lambda x: torch.einsum("ii->i", x[:1]), torch.float32),
        (lambda x: torch.sigmoid_(x), torch.int64),
    ],
)
def test_what_torch_refuses_is_refused_on_ranks_without_pieces(
    call: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    def on_rank(rank: int) -> None:
        x: Any = sharded_tensor.ones(shardwise.on_rank(1, device="cpu"), 4, 4, dtype=dtype)
        with pytest.raises(RuntimeError):
            call(x)

    with shardwise.implicit_comm("allow"):
        simulate(on_rank, 3)


def test_results_of_rows_in_lists_are_results_of_rows() -> None:
    def on_rank(_: int) -> None:
        batch: Any = F.linear(torch.ones(2, 6), sharded_tensor.ones(ROWS, 4, 6))
        (doubled,) = torch._foreach_mul([batch], 2.0)
        for _again in range(2):  # the second time by the quick way
            total: Any = doubled + doubled
            with pytest.raises(OpError, match="one row for all or this rank's"):
                torch.add(total, torch.ones(1, 4))

    with shardwise.implicit_comm("allow"):
        simulate(on_rank, 2)


def _differ(rank: int) -> None:
    x: Any = sharded_tensor.ones(shardwise.chunk(0), 4, 6)
    y: Any = sharded_tensor.ones(shardwise.chunk(0), 4, 6, dtype=torch.float64)
    for known in (x, y):
        torch.mul(x, known)
    with (
        shardwise.set_check("debug", timeout=5),
        pytest.raises(AgreementError, match=r"torch.*mul.*dtypes"),
    ):
        torch.mul(x, y if rank else x)
    assert (x * x).shape == (4, 6)


def test_calls_that_differ_are_found_in_debug_mode() -> None:
    shardwise.run_local(_differ, 2, timeout=30)


def test_tensors_of_two_groups_do_not_mix_though_their_layouts_are_known() -> None:
    def on_rank(rank: int) -> None:
        world: Any = communicator()
        x: Any = sharded_tensor.ones(ROWS, 4, 6)
        assert (x * x).shape == (4, 6)
        if rank < 2:
            state = x._state.with_carriers(x._state.carriers, members=world.subgroup([0, 1]))
            for multiply in (torch.mul, operator.mul):
                with pytest.raises(ArgumentValueError, match="one process group"):
                    multiply(x, wrap(state))

    simulate(on_rank, 3)
