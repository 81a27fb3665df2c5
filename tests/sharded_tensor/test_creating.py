"""Sharded tensors from specs, callbacks and plain tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.simulate import simulate
from shardwise.errors import AgreementError, ArgumentTypeError
from shardwise.testing.strategies import examples, shapes, specs
from shardwise.testing.tensors import assemble

if TYPE_CHECKING:
    from shardwise.sharding_spec import ShardingSpec

Case = tuple[tuple[int, ...], "ShardingSpec"]


@st.composite
def cases(draw: st.DrawFn, world_size: int = 4) -> Case:
    shape = draw(shapes(max_size=5))
    return shape, draw(specs(shape, world_size=world_size))


def full_of(shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 3 % 101).double().view(shape)


def _made(rank: int, listed: list[Case]) -> list[Any]:
    found = []
    for shape, spec in listed:
        full = full_of(shape)
        other = full if rank == 2 else torch.empty(shape, dtype=full.dtype, device="meta")
        forms = [
            shardwise.distribute(other, spec, src_rank=2),
            shardwise.distribute(full, spec, src_rank=None),
            sharded_tensor.full(spec, shape, 7, dtype=torch.float64),
            spec.shard(full, src_rank=1),
        ]
        if spec.layout(shape).pending is None:
            forms.append(
                shardwise.from_callback(spec, shape, full.__getitem__, dtype=torch.float64)
            )
        for form in forms:
            assert form.sharding_spec() is spec
            assert form.shard_layout == spec.layout(shape)
            assert (
                form.metadata().shards_metadata
                == spec.build_metadata(
                    torch.Size(shape), form.metadata().tensor_properties
                ).shards_metadata
            )
        found.append([[shard.tensor for shard in form.local_shards()] for form in forms])
    return found


def test_every_spec_makes_the_tensor_in_every_form() -> None:
    listed = examples(cases(), 25)
    results = shardwise.run_local(_made, 4, listed)
    for number, (shape, spec) in enumerate(listed):
        layout, full = spec.layout(shape), full_of(shape)
        for form in range(len(results[0][number])):
            held = {rank: result[number][form] for rank, result in enumerate(results)}
            expected = torch.full_like(full, 7) if form == 2 else full
            torch.testing.assert_close(assemble(layout, held), expected)


@given(cases())
def test_only_what_owners_lack_is_sent(case: Case) -> None:
    shape, spec = case

    def run(_: int) -> None:
        shardwise.distribute(full_of(shape).double(), spec, src_rank=None)

    with shardwise.set_check("never"):
        assert simulate(run, 4).traffic.total_bytes == 0


def _options(rank: int) -> None:
    spec = shardwise.chunk(0)
    torch.set_default_dtype(torch.float64)
    assert sharded_tensor.empty(spec, 4, 2).dtype == torch.float64  # read at the call
    torch.set_default_dtype(torch.float32)
    st = sharded_tensor.zeros(spec, [5, 2], requires_grad=True)
    assert st.requires_grad
    assert st.is_leaf
    assert st.local_shards()[0].tensor.requires_grad
    assert sharded_tensor.ones(spec, 5, dtype=torch.bool).dtype == torch.bool
    assert sharded_tensor.full(spec, (2, 2), 1.5).full_tensor().tolist() == [[1.5] * 2] * 2
    assert sharded_tensor.ones(shardwise.replicate()).full_tensor().item() == 1.0  # 0-d
    only = sharded_tensor.ones(shardwise.on_rank(1), 3, requires_grad=True)
    assert only.requires_grad  # on rank 0 too, which holds nothing
    meta = sharded_tensor.empty(shardwise.chunk(0, device="meta"), 6, 2)
    assert meta.is_meta
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(meta)
    module.to_empty(device="cpu")
    assert module.w.device.type == "cpu"
    assert module.w.sharding_spec() == shardwise.chunk(0)
    with torch.no_grad():
        module.w.fill_(2.0)
    assert torch.equal(module.w.full_tensor(), torch.full((6, 2), 2.0))
    half = shardwise.from_callback(spec, (4, 2), lambda _: torch.ones(2, 2), dtype=torch.float16)
    assert half.dtype == torch.float16
    assert isinstance(sharded_tensor.ShardedTensor(spec, 4, 2), sharded_tensor.ShardedTensor)


def test_options_are_those_of_the_seed() -> None:
    shardwise.run_local(_options, 2)


def _wrapped(rank: int) -> None:
    x = torch.full((2, 3), 2.0, requires_grad=True)
    st = shardwise.as_replicated(x)
    assert st.local_tensor() is x
    (shardwise.reshard(st, shardwise.chunk(1)).full_tensor() ** 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 4.0))  # once, not once per rank
    mine = torch.full((rank, 2), float(rank), requires_grad=True)
    rows = shardwise.as_local_rows(mine)
    assert rows.shape == (3, 2)
    assert rows.local_tensor() is mine
    assert rows.full_tensor()[:, 0].tolist() == [1.0, 2.0, 2.0]
    known = shardwise.as_local_rows(mine, sizes=[0, 1, 2])
    (known.full_tensor() * torch.arange(3.0)[:, None]).sum().backward()
    assert mine.grad is not None
    assert mine.grad[:, 0].tolist() == [[], [0.0], [1.0, 2.0]][rank]
    with pytest.raises(ValueError, match=f"{rank + 1} rows, as sizes say"):
        shardwise.as_local_rows(mine, sizes=[1, 2, 3])
    with pytest.raises(ValueError, match="at least one dim"):
        shardwise.as_local_rows(torch.tensor(1.0))
    with pytest.raises(TypeError, match="a plain"):
        shardwise.as_replicated(st)
    with shardwise.set_check("debug"):
        shardwise.as_replicated(torch.ones(2))
        with pytest.raises(AgreementError, match="ranks differ in data"):
            shardwise.as_replicated(torch.full((2,), float(rank)))
        with pytest.raises(AgreementError, match="ranks differ in data"):
            shardwise.distribute(torch.full((2,), float(rank)), shardwise.chunk(0), src_rank=None)


def test_plain_tensors_are_wrapped_without_a_copy() -> None:
    shardwise.run_local(_wrapped, 3)


def _in_subgroup(rank: int) -> Any:
    group = dist.new_group([3, 1])  # in this order, a new group sorts its ranks
    if rank not in (1, 3):
        return None
    spec = shardwise.chunk(0, ranks=[3, 1])
    st = shardwise.distribute(torch.arange(5.0) + rank, spec, src_rank=1, process_group=group)
    assert st.full_tensor().tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]  # position 1 is rank 3
    gathered = st.gather(0)
    assert (gathered is not None) == (rank == 1)
    turned = shardwise.reshard(st, shardwise.chunk(0, ranks=[1, 3]))
    return turned.local_tensor()


def test_a_subgroup_counts_source_and_destination_by_position() -> None:
    _, first, _, second = shardwise.run_local(_in_subgroup, 4)
    assert torch.cat([first, second]).tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]


def _wrong(rank: int) -> None:
    rows = shardwise.chunk(0)
    one = rank == 1
    no_spec: Any = "rows"
    with shardwise.set_check("always", timeout=10):
        for expected, call in [
            (r"does not match with src_rank", lambda: shardwise.distribute(
                torch.ones(4), rows, src_rank=rank)),
            (r"does not match with sharding_spec", lambda: shardwise.distribute(
                torch.ones(4, 4), shardwise.chunk(rank))),
            (r"not a contiguous Tensor", lambda: shardwise.distribute(
                torch.ones(4, 3).t() if not rank else torch.ones(3, 4), rows)),
            (r"ranks differ in size", lambda: sharded_tensor.ones(rows, 4 + rank)),
            (r"ranks differ in dtype", lambda: sharded_tensor.ones(
                rows, 4, dtype=torch.float16 if one else None)),
            (r"Only torch.strided layout", lambda: sharded_tensor.ones(
                rows, 4, layout=torch.sparse_coo if one else torch.strided)),
            (r"Only torch.contiguous_format", lambda: sharded_tensor.ones(
                rows, 4, 4, memory_format=torch.channels_last)),
            (r"only ranks of its group", lambda: sharded_tensor.ones(
                shardwise.chunk(0, ranks=[0, 7]), 4)),
            (r"Expecting ShardingSpec", lambda: sharded_tensor.ones(no_spec if one else rows, 4)),
            (r"sequence of ints", lambda: sharded_tensor.ones(rows, 4, 2.5 if one else 2)),
            (r"piece.*expected a tensor of shape", lambda: shardwise.from_callback(
                rows, (4, 2), lambda _: torch.ones(1) if one else torch.ones(2, 2))),
            (r"ZeroDivisionError|division", lambda: shardwise.from_callback(
                rows, (4, 2), lambda _: torch.ones(2, 2) * (1 // (1 - rank)))),
        ]:  # fmt: skip
            with pytest.raises(Exception, match=expected):
                call()
        with pytest.raises(ArgumentTypeError, match=r"shardwise.reshard\(st, spec\)"):
            shardwise.distribute(sharded_tensor.ones(rows, 4), rows)
    assert sharded_tensor.ones(rows, 4).full_tensor().sum() == 4  # the group still works


def test_a_wrong_call_on_one_rank_raises_on_all() -> None:
    shardwise.run_local(_wrong, 2)


def test_a_rank_that_does_not_come_is_named() -> None:
    def run(rank: int) -> str:
        with shardwise.set_check("always", timeout=0.5):
            if rank == 1:
                return "elsewhere"
            with pytest.raises(RuntimeError, match=r"rank 1 did not come within 0\.5 s") as caught:
                sharded_tensor.ones(shardwise.chunk(0), 4)
            return str(caught.value)

    shardwise.run_local(run, 3)


def test_one_rank_is_enough_for_a_repl() -> None:
    def run(_: int) -> float:
        dist.destroy_process_group()
        shardwise.init_single()
        shardwise.init_single()
        st = sharded_tensor.ones(shardwise.chunk(0), 4, requires_grad=True)
        total = (shardwise.reshard(st, shardwise.replicate()).full_tensor() * 2).sum()
        total.backward()
        return float(st.grad.full_tensor().sum())

    assert shardwise.run_local(run, 1) == [8.0]
