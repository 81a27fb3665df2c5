"""Wrong calls: an error on every rank that says what to do, in time, and never a wrong result."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import AgreementError, OpError, ShardwiseError
from shardwise.partial_tensor import _PartialTensor

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = torch.arange(12.0).view(4, 3)


def rows(**options: Any) -> Any:
    return shardwise.distribute(FULL.clone(), shardwise.chunk(0, **options))


def _factories(rank: int) -> None:
    here = shardwise.on_rank(0)  # the other ranks have nothing to make, and nothing to fail at
    zeros: Any = sharded_tensor.zeros
    from_callback: Any = shardwise.from_callback
    wrong: dict[str, Callable[[], object]] = {
        r"got device.*The spec says the devices": lambda: zeros(here, 4, device="cpu"),
        r"one of dtype, .*got colour": lambda: zeros(here, 4, colour="red"),
        r"dtype: expected a torch.dtype, got 'float'": lambda: zeros(here, 4, dtype="float"),
        rf"\[rank {rank}\] .*only Tensors of floating point.*int64": lambda: zeros(
            here, 4, dtype=torch.int64, requires_grad=True
        ),
        r"with a pending max.*Reduce it first": lambda: zeros(
            shardwise.partial("max"), 4, requires_grad=True
        ),
        r"requires_grad of a ShardedTensor with a pending min": lambda: shardwise.distribute(
            FULL.clone().requires_grad_(), shardwise.partial("min")
        ),
        r"ranks differ in fill_value \(rank 0: 0; rank 1: 1": lambda: sharded_tensor.full(
            shardwise.replicate(), 4, rank
        ),
        r"got device|failed on other ranks.*got device": lambda: zeros(
            here, 4, **({"device": "cpu"} if rank else {})
        ),
        r"size has to be|failed on other ranks.*size has to be": lambda: from_callback(
            here, "ab" if rank else (4, 3), lambda index: FULL[index]
        ),
    }
    with shardwise.set_check("always", timeout=5):
        for text, call in wrong.items():
            with pytest.raises(ShardwiseError, match=text):
                call()
            assert zeros(here, 4).shape == (4,)  # the ranks are still together


def test_wrong_options_of_factories_raise_on_all_ranks() -> None:
    shardwise.run_local(_factories, 2, timeout=30)


def _local_rows(rank: int) -> None:
    def wrong(x: Any, text: str) -> None:
        with pytest.raises(ShardwiseError, match=text):
            shardwise.as_local_rows(x)

    with shardwise.set_check("always", timeout=5):
        wrong(torch.ones(2, 3 + rank), r"ranks differ in row \(rank 0: .3,.; rank 1: .4")
        wrong(torch.ones(2, 3).to(torch.float64 if rank else torch.float32), "differ in dtype")
        wrong(torch.ones(2, 3, requires_grad=rank == 0), "differ in requires_grad")
        wrong(torch.ones(()) if rank else torch.ones(2), r"at least one dim, got a 0-d tensor")
        wrong([1.0] if rank else torch.ones(2), r"plain torch.Tensor, got list")
        wrong(torch.eye(2).to_sparse() if rank else torch.eye(2), r"Only torch.strided")
        wrong(rows(), r"\[rank .\] x of as_local_rows.*got ShardedTensor")
        assert shardwise.as_local_rows(torch.ones(rank, 3)).shape == (1, 3)
    told = [2, 3] if rank else [2, 2]
    with (
        shardwise.set_check("debug", timeout=5),
        pytest.raises(ShardwiseError, match="expected 3 rows, as sizes say, got 2"),
    ):
        shardwise.as_local_rows(torch.ones(2, 3), sizes=told)
    with pytest.raises(ShardwiseError, match=rf"\[rank {rank}\] x of as_replicated.*Only"):
        shardwise.as_replicated(torch.eye(2).to_sparse())


def test_rows_of_different_kinds_raise_on_all_ranks() -> None:
    shardwise.run_local(_local_rows, 2, timeout=30)


def _no_rows(rank: int) -> None:
    if rank == 0:
        with (
            shardwise.set_check("always", timeout=0.5),
            # It may have left the group by then, which breaks the connection.
            pytest.raises(RuntimeError, match=r"rank 1 (did not come|missing)"),
        ):
            shardwise.as_local_rows(torch.ones(2))


def test_a_rank_without_rows_is_named() -> None:
    shardwise.run_local(_no_rows, 2, timeout=30)


def _compared(rank: int) -> None:
    """On rank 1 there is nothing to compare, so only rank 0 finds what is wrong."""
    x = rows(ranks=[0])
    with pytest.raises(RuntimeError, match=rf"\[rank {rank}\] .*float32 and torch.float64"):
        torch.allclose(x, x.double())
    with pytest.raises(ValueError, match=r"one shape, got \(4, 3\) and \(3,\)"):
        torch.allclose(x, FULL[0])
    with pytest.raises(RuntimeError, match="Float did not match Double"):
        torch.isclose(x, x.double())
    meta = shardwise.sharded_tensor.empty(shardwise.chunk(0, ranks=[0], device="meta"), 4, 3)
    with pytest.raises((NotImplementedError, ShardwiseError), match=r"[Mm]eta|other ranks"):
        torch.equal(meta, meta.clone())
    assert torch.equal(x, FULL)


def test_comparing_raises_on_all_ranks_or_on_none() -> None:
    shardwise.run_local(_compared, 2, timeout=30)


def _plain(rank: int) -> None:
    x, plain = rows(), torch.zeros(4, 3)
    number = shardwise.as_replicated(torch.tensor(2.0))
    with pytest.raises(RuntimeError, match=r"copy_ of a ShardedTensor into a plain.*full_tensor"):
        plain.copy_(x)
    with pytest.raises(RuntimeError, match=r"fill_ of a ShardedTensor into a plain.*item"):
        plain.fill_(number)
    with pytest.raises(ValueError, match=r"fill_ of a ShardedTensor.*0-d tensor.*copy_"):
        x.fill_(torch.ones(2))
    with pytest.raises(TypeError, match=rf"\[rank {rank}\] out of gather: expected a plain"):
        x.gather(rank, out=x)
    assert torch.equal(x.fill_(number), torch.full((4, 3), 2.0))
    assert x.type_as(torch.empty(0, dtype=torch.float64, device="meta")).is_meta


def test_plain_tensors_do_not_take_what_is_sharded() -> None:
    shardwise.run_local(_plain, 1)


def _pending(rank: int) -> None:
    """Sums are cast, not their addends."""
    half = _PartialTensor(torch.full((2,), 0.5))
    for dtype, value in ((torch.int16, 1), (torch.bool, True), (torch.float16, 1.0)):
        found: Any = half.gather(0, dtype=dtype)
        assert found is None if rank else torch.equal(found, torch.full((2,), value, dtype=dtype))
    big = _PartialTensor(torch.full((2,), 7e4 if rank else -6e4))
    found = big.gather(1, dtype=torch.float16)
    assert found is None or found.tolist() == [10000.0, 10000.0]


def test_a_pending_sum_is_cast_after_it_is_summed() -> None:
    shardwise.run_local(_pending, 2)


def _seeds(rank: int) -> None:
    spec = shardwise.replicate()
    with shardwise.set_check("always", timeout=5):
        shardwise.manual_seed(rank)
        with pytest.raises(ValueError, match=r"ranks differ in seed \(rank 0: 0; rank 1: 1\)"):
            sharded_tensor.rand(spec, 2)
        shardwise.manual_seed(5)
        sharded_tensor.rand(spec, 2)
        with pytest.raises(ValueError, match="ranks differ in seed"):
            shardwise.manual_seed(rank, process_group=dist.group.WORLD)
        number: Any = "5" if rank else 5
        text = "a whole number" if rank else "failed on other ranks.*a whole number"
        with pytest.raises(ShardwiseError, match=f"manual_seed.*{text}|seed: .*{text}"):
            shardwise.manual_seed(number, process_group=dist.group.WORLD)
        with pytest.raises(ShardwiseError, match=text):
            shardwise.set_rng_state({"seed": number, "calls": 0})


def test_seeds_that_differ_do_not_make_replicas_differ() -> None:
    shardwise.run_local(_seeds, 2, timeout=30)


def _debugged(rank: int) -> None:
    x = sharded_tensor.zeros(shardwise.chunk(0), 4, 3)
    calls: dict[str, Callable[[], Any]] = {
        r"fill_uniform_: ranks differ in high \(rank 0: 1; rank 1: 2": lambda: (
            torch.nn.init.uniform_(x, 0, rank + 1)
        ),
        r"fill_normal_: ranks differ in mean": lambda: x.normal_(rank),
        r"fill_: ranks differ in value": lambda: torch.nn.init.constant_(x, rank),
        r"copy_: ranks differ in plain tensors": lambda: x.copy_(torch.full((4, 3), rank)),
        r"as_replicated: ranks differ in .*size": lambda: shardwise.as_replicated(
            torch.zeros(rank + 1)
        ),
        r"as_replicated: ranks differ in .*dtype": lambda: shardwise.as_replicated(
            torch.zeros(2, dtype=torch.float64 if rank else torch.float32)
        ),
    }
    for text, call in calls.items():
        with shardwise.set_check("debug"), pytest.raises(AgreementError, match=text):
            call()
    with shardwise.set_check("debug"):
        torch.nn.init.uniform_(x, 0, 2)
        x.copy_(sharded_tensor.ones(shardwise.chunk(1), 4, 3))


def test_fills_copies_and_replicas_that_differ_are_found_in_debug_mode() -> None:
    simulate(_debugged, 2)


def _refused(rank: int) -> None:
    x = rows()
    for call in (torch.tensor, torch.Tensor):
        with pytest.raises(OpError, match=r"st.detach\(\).clone\(\), or .*st.full_tensor\(\)"):
            call(x)
    with pytest.raises(TypeError, match=r"format '.2f' of .*st.full_tensor"):
        f"{x:.2f}"
    assert f"{x}" == str(x)
    piece = r"piece \[.*from the callback.*expected data, for cpu.*a meta tensor"
    with pytest.raises(ShardwiseError, match=piece):
        shardwise.from_callback(shardwise.chunk(0), (4, 3), lambda index: FULL[index].to("meta"))


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_what_has_no_data_or_no_rule_is_named() -> None:
    simulate(_refused, 2)


IDS = torch.tensor([1, 2, 3, 9])  # of which the last, on rank 1, is too large
WRONG_ON_RANK_1: dict[str, Callable[[Any, Any], Any]] = {
    "smaller than num_classes": lambda ids, _: F.one_hot(ids, 4),
    "embedding: index out of range": lambda ids, table: F.embedding(ids, table),
    "embedding_bag: index out of range": lambda ids, table: F.embedding_bag(ids[:, None], table),
    "expected chances between 0 and 1": lambda ids, _: torch.bernoulli(ids / 3),
    "alloc": lambda ids, _: sharded_tensor.empty(shardwise.on_rank(1), 2**60),
}


@pytest.mark.parametrize("text", WRONG_ON_RANK_1)
def test_what_only_one_rank_can_find_is_told_to_those_who_wait(text: str) -> None:
    def run(rank: int) -> list[str]:
        shardwise.manual_seed(0)
        members: Any = communicator()
        told: list[Exception] = []
        members.tell = told.append
        ids = shardwise.distribute(IDS, shardwise.chunk(0, ranks=[0, 1]))
        table = shardwise.as_replicated(torch.zeros(4, 3))
        with pytest.raises(Exception, match=text) if rank else nullcontext():
            WRONG_ON_RANK_1[text](ids, table)
        return [str(problem) for problem in told]

    first, (second,) = simulate(run, 2).results
    assert first == []
    assert text in second


def _absent(rank: int) -> None:
    x = rows(ranks=[0, 1])
    layout = x.shard_layout
    with (
        shardwise.set_check("always", timeout=5),
        pytest.raises(ValueError, match=r"shardwise.absent\(...\): expected a layout without"),
    ):
        shardwise.reshard(
            shardwise.absent(layout, torch.float32) if rank == 1 else x,
            shardwise.chunk(1),
            process_group=dist.group.WORLD,
        )


def test_a_rank_that_has_the_tensor_is_not_absent() -> None:
    shardwise.run_local(_absent, 3, timeout=30)
