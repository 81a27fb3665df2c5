"""Functions that write: in place and into `out=`. Right, or an error on every rank, as torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import wrap
from shardwise.testing.op_check import layout_kinds, shards_of_full
from shardwise.testing.tensors import assemble

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = torch.arange(12.0).view(4, 3) - 6
OTHER = torch.arange(12.0, 0.0, -1.0).view(4, 3) / 2
SHAPE = (4, 3)
WORLD_SIZE = 3
KINDS = layout_kinds(SHAPE, world_size=WORLD_SIZE)
SETTLED = {name: layout for name, layout in KINDS.items() if layout.pending is None}


def at(layout: Any, full: torch.Tensor = FULL) -> Any:
    return shardwise.reshard(shardwise.as_replicated(full.clone()), layout)


def on_ranks(fn: Callable[[], Any]) -> list[Any]:
    def run(_: int) -> Any:
        with shardwise.implicit_comm("allow"):
            return fn()

    return list(simulate(run, WORLD_SIZE).results)


# -- versions and what autograd saves --------------------------------------------------------------


@pytest.mark.parametrize("name", SETTLED)
def test_versions_grow_on_every_rank_as_those_of_a_plain_tensor(name: str) -> None:
    def run() -> list[tuple[int, int]]:
        x, plain, seen = at(KINDS[name]).clone(), FULL.clone(), []
        for step in (
            lambda t: t.add_(1),
            lambda t: t.mul_(OTHER),
            lambda t: F.relu(t, inplace=True),
            lambda t: torch.sin(t, out=t),
            lambda t: t.sin(),
        ):
            before = x._version, plain._version
            step(x)
            step(plain)
            seen.append((x._version - before[0], plain._version - before[1]))
        return seen

    count = max(len(KINDS[name].boxes_of(rank)) for rank in range(WORLD_SIZE))
    for seen in on_ranks(run):
        for grown, expected in seen:
            assert (grown == expected) if count == 1 else (bool(grown) == bool(expected))


@pytest.mark.parametrize("name", SETTLED)
def test_what_autograd_saved_may_not_be_written_on_any_rank(name: str) -> None:
    def run() -> str:
        leaf = at(KINDS[name]).requires_grad_()
        x = leaf * 1
        y = x * x
        x.add_(1)
        with pytest.raises(RuntimeError) as raised:
            torch.autograd.backward(y, torch.ones(SHAPE))
        return str(raised.value)

    for message in on_ranks(run):
        assert "modified by an inplace operation" in message


@pytest.mark.parametrize("name", SETTLED)
def test_a_leaf_that_requires_grad_may_not_be_written_on_any_rank(name: str) -> None:
    def run() -> None:
        x = at(KINDS[name]).requires_grad_()
        writes: list[Callable[[], Any]] = [
            lambda: x.add_(1),
            lambda: x.mul_(at(KINDS["replicated"], OTHER)),
        ]
        for write in writes:
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                write()
        with torch.no_grad():
            x.add_(1)

    on_ranks(run)


@pytest.mark.parametrize("name", SETTLED)
def test_a_result_that_cannot_be_cast_raises_on_every_rank(name: str) -> None:
    def run() -> None:
        x = at(KINDS[name], FULL.long())
        for write in (
            lambda: x.add_(0.5),
            lambda: x.mul_(at(KINDS["replicated"], OTHER)),
            lambda: x.div_(2),
            lambda: x.sin_(),
            lambda: torch.sin(at(KINDS[name]), out=x),
        ):
            with pytest.raises(RuntimeError, match="can't be cast"):
                write()

    on_ranks(run)


# -- in place --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_other_layouts_are_brought_to_the_one_that_is_written(name: str) -> None:
    def run() -> tuple[Any, list[torch.Tensor]]:
        x = at(KINDS[name])
        before = x
        for layout in KINDS.values():
            x += at(layout, OTHER)
        assert x is before
        return x.shard_layout, [shard.clone() for shard in x._state.shards]

    results = on_ranks(run)
    assert all(layout == KINDS[name] for layout, _ in results)
    full = assemble(KINDS[name], {rank: held for rank, (_, held) in enumerate(results)})
    torch.testing.assert_close(full, FULL + len(KINDS) * OTHER)


TERMS = Layout(
    SHAPE,
    [Box.whole(SHAPE)] * 4,
    [0, 0, 1, 2],
    terms=[0, 1, 2, 3],
    pending="sum",
)
# Linear ones, which need no sum to be formed. R stands for a replicated tensor.
LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "number": lambda x, r: x.mul_(3),
    "division": lambda x, r: x.div_(4),
    "negative": lambda x, r: x.neg_(),
    "sum": lambda x, r: x.add_(x.clone(), alpha=2),
    "replicated addend": lambda x, r: x.sub_(r),
    "plain addend": lambda x, r: x.add_(OTHER),
    "replicated factor": lambda x, r: x.mul_(r),
    "plain factor": lambda x, r: x.mul_(OTHER[0]),
}
NOT_LINEAR: dict[str, Callable[[Any], Any]] = {
    "number added": lambda x: x.add_(1),
    "sine": lambda x: x.sin_(),
    "relu": lambda x: F.relu(x, inplace=True),
    "product": lambda x: x.mul_(x.clone()),
    "rounded": lambda x: x.div_(2, rounding_mode="floor"),
}


def pending() -> Any:
    """FULL as a sum of four terms, two of them on one rank."""
    shards = shards_of_full(FULL, TERMS)[communicator().rank]
    return wrap(make_state(TERMS, shards, group=None))


@pytest.mark.parametrize("name", LINEAR)
def test_a_pending_sum_stays_pending_in_linear_functions(name: str) -> None:
    def run() -> torch.Tensor:
        x, r = pending(), at(KINDS["replicated"], OTHER)
        with shardwise.implicit_comm("error"):
            assert LINEAR[name](x, r) is x
        assert x.shard_layout == TERMS
        found: torch.Tensor = x.full_tensor()
        return found

    for found in on_ranks(run):
        torch.testing.assert_close(found, LINEAR[name](FULL.clone(), OTHER))


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_pending_sum_is_formed_in_others_which_is_told(name: str) -> None:
    def run() -> torch.Tensor:
        x = pending()
        with (
            shardwise.implicit_comm("error"),
            pytest.raises(OpError, match=r"gathers its tensors.*pending sum"),
        ):
            NOT_LINEAR[name](x)
        assert NOT_LINEAR[name](x) is x
        assert x.shard_layout == TERMS
        found: torch.Tensor = x.full_tensor()
        return found

    for found in on_ranks(run):
        torch.testing.assert_close(found, NOT_LINEAR[name](FULL.clone()))


def test_what_is_written_into_a_gathered_view_is_refused() -> None:
    def run() -> None:
        view = at(KINDS["dim 0 uneven, permuted, one empty"]).unfold(0, 2, 1)
        writes: list[Callable[[], Any]] = [
            lambda: view.add_(1),
            lambda: F.relu(view, inplace=True),
            lambda: torch.sin(view, out=view),
        ]
        for write in writes:
            with pytest.raises(OpError, match="the tensor itself would not change"):
                write()

    on_ranks(run)


def test_a_result_that_does_not_fit_into_the_target_is_refused() -> None:
    def run() -> None:
        row = at(Layout((3,), [Box((0,), (3,))], [1]), FULL[0])
        with pytest.raises(OpError, match=r"add_ in place.*\(4, 3\) to change.*got \(3,\)"):
            row.add_(at(KINDS["replicated"]))
        with pytest.raises(OpError, match="shapes do not fit together"):
            row.add_(torch.ones(2))

    on_ranks(run)


def _on_one_rank(_: int) -> None:
    """Ranks 0 and 2 hold nothing of what is written, and are in the graph of what is read."""
    shardwise.implicit_comm("allow")
    for layout in SETTLED.values():
        for other in SETTLED.values():
            x, y = at(layout).requires_grad_(), at(other, OTHER).requires_grad_()
            z = at(shardwise.on_rank(1), torch.zeros(SHAPE))
            z += x
            z.mul_(y)
            z.clamp_(min=-3)
            z.full_tensor().sum().backward()
            full, plain = FULL.clone().requires_grad_(), OTHER.clone().requires_grad_()
            (full * plain).clamp(min=-3).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), full.grad)
            torch.testing.assert_close(y.grad.full_tensor(), plain.grad)


def test_ranks_without_the_target_answer_in_backward() -> None:
    shardwise.run_local(_on_one_rank, WORLD_SIZE, timeout=120)


# -- out= ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_results_arrive_in_the_layout_of_out(name: str) -> None:
    def run() -> list[torch.Tensor]:
        x = at(shardwise.chunk(1, ranks=range(WORLD_SIZE)))
        out: Any = at(KINDS[name], OTHER)
        double: Any = at(KINDS[name], OTHER.double())
        assert id(torch.add(x, OTHER, out=out)) == id(out)
        assert id(torch.mul(x, out, out=out)) == id(out)  # which reads what it writes
        assert id(torch.sin(x, out=double)) == id(double)
        found = [one.full_tensor() for one in (out, double)]
        assert all(one.shard_layout == KINDS[name] for one in (out, double))
        values, where = at(KINDS[name])[0].clone(), at(KINDS[name], FULL.long())[0].clone()
        result: Any = torch.max(x, 0, out=(values, where))
        assert result.values is values
        assert result.indices is where
        assert id(torch.linspace(0, 1, 3, out=values)) == id(values)  # of plain numbers only
        return [*found, where.full_tensor(), values.full_tensor()]

    expected = [
        FULL * (FULL + OTHER),
        torch.sin(FULL).double(),
        FULL.max(0).indices,
        torch.linspace(0, 1, 3),
    ]
    for found in on_ranks(run):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_functions_that_torch_asks_for_a_device_or_that_return_nothing_write_into_out() -> None:
    def run() -> list[torch.Tensor]:
        x: Any = at(shardwise.chunk(1, ranks=range(WORLD_SIZE)))
        out: Any = at(shardwise.on_rank(1))
        torch.linspace(x[0, 0], x[-1, -1], 3, device="cpu", out=(line := out[0].clone()))
        rows = [row.clone() for row in out]
        write: Any = torch.unbind_copy
        assert write(x, out=rows) is None, "as of torch"
        return [line.full_tensor(), *[row.full_tensor() for row in rows]]

    for found in on_ranks(run):
        expected = [torch.linspace(FULL[0, 0], FULL[-1, -1], 3), *FULL]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_what_torch_refuses_of_out_is_refused_on_every_rank() -> None:
    def run() -> None:
        x = at(shardwise.on_rank(1))
        out = at(shardwise.on_rank(0))
        wide: Any = sharded_tensor.zeros(shardwise.on_rank(0), 5, 4, 3)
        graded: Any = at(shardwise.on_rank(1)).requires_grad_()
        wrong: dict[str, Callable[[], Any]] = {
            r"don't support automatic differentiation": lambda: torch.sin(graded, out=out),
            r"support automatic differentiation,": lambda: torch.add(x, x, out=graded),
            r"not resized: expected one of shape \(4, 3\), got \(5, 4, 3\)": lambda: torch.sin(
                x, out=wide
            ),
            r"expected a ShardedTensor, got Tensor.*full_tensor": lambda: torch.sin(
                x, out=torch.empty(SHAPE)
            ),
            r"dtype": lambda: torch.mm(x, at(shardwise.on_rank(1), OTHER.T), out=wide[0].long()),
            r"draw its own numbers": lambda: torch.rand(4, 3, out=out),
            r"out=": lambda: torch.max(x, 0, out=(out, torch.empty(3))),
        }
        for text, call in wrong.items():
            with pytest.raises(RuntimeError, match=text):
                call()
        assert torch.equal(out.full_tensor(), FULL)
        with torch.no_grad():
            torch.sin(graded, out=out)
        assert torch.equal(out.full_tensor(), FULL.sin())
        assert not out.requires_grad

    on_ranks(run)
