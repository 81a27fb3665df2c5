"""Plans carried out, simulated and on real ranks, against the full tensor."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.plans import small_sums_cut

import shardwise
from shardwise.comm import Transfer, communicator, execute, execute_all
from shardwise.comm.simulate import SimulatedCommunicator, simulate
from shardwise.errors import AgreementError, ArgumentTypeError, LayoutError, OpError, PlanError
from shardwise.geometry import Box, Layout
from shardwise.testing.strategies import examples, layouts, shapes
from shardwise.testing.tensors import assemble, random_shards
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import ReduceOp

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)

Pair = tuple[Layout, Layout, torch.dtype]


def _is_defined(layout: Layout, dtype: torch.dtype) -> bool:
    if layout.pending == "avg":  # of which float8 would round some
        return dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
    return not (layout.pending in ("max", "min") and dtype.is_complex)


@st.composite
def pairs(draw: st.DrawFn, *, world_size: int = 4) -> Pair:
    shape = draw(shapes(max_size=5))
    source, target = (draw(layouts(shape=shape, world_size=world_size)) for _ in range(2))
    dtype = draw(st.sampled_from(DTYPES))
    if not (_is_defined(source, dtype) and _is_defined(target, dtype)):
        dtype = torch.float32
    return source, target, dtype


def _transfer(pair: Pair, rank: int, *, seed: int = 0) -> Transfer:
    source, target, dtype = pair
    shards = random_shards(source, dtype, seed=seed).get(rank, [])
    return Transfer(plan_reshard(source, target, dtype.itemsize), shards, dtype=dtype)


def _moved(
    rank: int, listed: Sequence[Pair], max_bytes: int | None = None
) -> list[list[torch.Tensor]]:
    """Every pair on its own; under a cap too if one is given."""
    found = []
    for seed, pair in enumerate(listed):
        transfer = _transfer(pair, rank, seed=seed)
        needed = transfer.plan.itemsize * 16
        cap = None if max_bytes is None else max(max_bytes, needed)
        found.append(execute(transfer.plan, transfer.shards, dtype=transfer.dtype, max_bytes=cap))
    return found


def _moved_in_parts(rank: int, listed: Sequence[Pair]) -> list[list[torch.Tensor]]:
    with small_sums_cut():
        return _moved(rank, listed)


def _moved_together(rank: int, listed: Sequence[Pair], max_bytes: int | None) -> Any:
    transfers = [_transfer(pair, rank, seed=seed) for seed, pair in enumerate(listed)]
    return execute_all(transfers, max_bytes=max_bytes)


def _check(listed: Sequence[Pair], results: Sequence[Sequence[Sequence[torch.Tensor]]]) -> None:
    """`results[rank][k]` are the shards of pair k; both sides stand for the same tensor."""
    for seed, (source, target, dtype) in enumerate(listed):
        before = random_shards(source, dtype, seed=seed)
        after = {rank: held[seed] for rank, held in enumerate(results)}
        if not before:
            continue
        expected = assemble(source, before)
        found = assemble(target, after)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- simulated ---------------------------------------------------------------------------------


@given(pairs(), st.booleans())
def test_any_layout_becomes_any_other(pair: Pair, is_cut: bool) -> None:
    source, target, dtype = pair
    with small_sums_cut() if is_cut else nullcontext():
        simulation = simulate(_moved, 4, [pair])
        plan = plan_reshard(source, target, dtype.itemsize)
    _check([pair], simulation.results)
    assert simulation.traffic.total_bytes == plan.total_bytes
    for rank in range(4):
        sent = sum(n for (src, _), n in simulation.traffic.bytes.items() if src == rank)
        assert sent == plan.bytes_sent(rank)


@given(pairs(), st.integers(1, 200))
def test_a_cap_changes_nothing_but_the_rounds(pair: Pair, max_bytes: int) -> None:
    simulation = simulate(_moved, 4, [pair], max_bytes)
    _check([pair], simulation.results)
    source, target, dtype = pair
    assert (
        simulation.traffic.total_bytes == plan_reshard(source, target, dtype.itemsize).total_bytes
    )


@given(st.lists(pairs(), min_size=2, max_size=5), st.none() | st.integers(256, 1000))
def test_many_tensors_of_many_dtypes_share_one_exchange(
    listed: list[Pair], max_bytes: int | None
) -> None:
    simulation = simulate(_moved_together, 4, listed, max_bytes)
    _check(listed, simulation.results)
    plans = [plan_reshard(a, b, dtype.itemsize) for a, b, dtype in listed]
    assert simulation.traffic.total_bytes == sum(plan.total_bytes for plan in plans)
    if max_bytes is None:  # one message per link and step
        assert max(simulation.traffic.messages.values(), default=0) <= 2


# -- on ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_real_ranks_do_what_the_simulation_does(world_size: int) -> None:
    listed = examples(pairs(world_size=world_size), 50)
    assert len(listed) >= 25
    _check(listed, shardwise.run_local(_moved_in_parts, world_size, listed))
    real = shardwise.run_local(_moved, world_size, listed)
    _check(listed, real)
    simulated = simulate(_moved, world_size, listed).results
    for ours, theirs in zip(real, simulated, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_real_ranks_keep_a_cap_and_share_an_exchange() -> None:
    listed = examples(pairs(), 40)
    _check(listed, shardwise.run_local(_moved, 4, listed, 64))
    _check(listed, shardwise.run_local(_moved_together, 4, listed, None))
    _check(listed, shardwise.run_local(_moved_together, 4, listed, 2000))


def _moved_in_a_subgroup(rank: int, pair: Pair) -> list[torch.Tensor] | None:
    group = dist.new_group([1, 3])
    transfer = _transfer(pair, rank)
    if rank in (1, 3):
        return execute(transfer.plan, transfer.shards, dtype=transfer.dtype, group=group)
    return None


def test_a_proper_subgroup_moves_its_own_tensor() -> None:
    rows = shardwise.chunk(0, [3, 2], ranks=[1, 3]).layout((5, 4))
    columns = shardwise.chunk(1, [1, 3], ranks=[3, 1]).layout((5, 4))
    pair = (rows, columns, torch.float32)
    results = shardwise.run_local(_moved_in_a_subgroup, 4, pair)
    assert results[0] is results[2] is None
    _check([pair], [[held or []] for held in results])


def test_a_rotation_of_ranks_works() -> None:
    before = shardwise.chunk(0, ranks=[0, 1, 2]).layout((7, 3))
    after = shardwise.chunk(0, ranks=[1, 2, 0]).layout((7, 3))
    pair = (before, after, torch.float32)
    _check([pair], shardwise.run_local(_moved, 3, [pair]))


# -- sums --------------------------------------------------------------------------------------


def _summed(rank: int, shape: tuple[int, ...], op: ReduceOp) -> torch.Tensor:
    source = shardwise.partial(op, ranks=range(4)).layout(shape)
    target = shardwise.replicate(ranks=range(4)).layout(shape)
    mine = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return execute(plan_reshard(source, target, 4), [mine])[0]


@pytest.mark.parametrize("shape", [(33, 5), (330, 51)])  # not cut, and cut
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_replicas_of_a_reduction_are_equal_bit_for_bit(
    op: ReduceOp, shape: tuple[int, ...]
) -> None:
    """Terms are added in their order, so the result is also that of a plain loop."""
    results = simulate(_summed, 4, shape, op).results
    terms = [torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    expected = terms[0].clone()
    for term in terms[1:]:
        if op in ("sum", "avg"):
            expected += term
        elif op == "product":
            expected *= term
        else:
            expected = (torch.maximum if op == "max" else torch.minimum)(expected, term)
    if op == "avg":
        expected /= 4
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_replicated_to_pending_keeps_the_value_in_the_lowest_term() -> None:
    source = shardwise.replicate(ranks=[0, 1]).layout((3,))
    target = shardwise.partial(ranks=[0, 1]).layout((3,))
    pair = (source, target, torch.float32)
    (first,), (second,) = (r[0] for r in simulate(_moved, 2, [pair]).results)
    torch.testing.assert_close(first, random_shards(source)[0][0])
    assert not second.any()


# -- outputs and memory ------------------------------------------------------------------------


def _into_outputs(rank: int) -> tuple[bool, torch.Tensor]:
    source = shardwise.chunk(0, ranks=[0, 1]).layout((4, 6))
    target = shardwise.chunk(1, ranks=[1, 0]).layout((4, 6))
    shards = random_shards(source)[rank]
    plan = plan_reshard(source, target, 4)
    (box,) = target.boxes_of(rank)
    strided = torch.zeros(2 * box.shape[1], 2 * box.shape[0])[::2, ::2].t()
    usual = torch.zeros(box.shape)
    with_gradient = torch.zeros(box.shape, requires_grad=True)
    outputs = [usual, usual, strided, with_gradient, usual]  # the second goes the short way
    versions = []
    for out in outputs:
        with torch.no_grad():
            out.zero_()
        versions.append(out._version)
        (result,) = execute(plan, shards, out=[out])
        assert result.data_ptr() == out.data_ptr()
        assert not result.requires_grad
        versions.append(out._version)
    assert versions[1] - versions[0] == versions[3] - versions[2]
    torch.testing.assert_close(strided, usual)
    torch.testing.assert_close(with_gradient.detach(), usual)
    return result.data_ptr() == usual.data_ptr(), usual


def test_given_outputs_are_filled_in_place_whatever_their_strides() -> None:
    source = shardwise.chunk(0, ranks=[0, 1]).layout((4, 6))
    target = shardwise.chunk(1, ranks=[1, 0]).layout((4, 6))
    results = simulate(_into_outputs, 2).results
    assert all(same for same, _ in results)
    found = assemble(target, {rank: [held] for rank, (_, held) in enumerate(results)})
    torch.testing.assert_close(found, assemble(source, random_shards(source)))


def _transposed(rank: int) -> list[torch.Tensor]:
    source = shardwise.chunk(0, ranks=[0, 1]).layout((4, 6))
    target = shardwise.chunk(1, ranks=[1, 0]).layout((4, 6))
    (shard,) = random_shards(source, torch.complex64)[rank]
    strided = shard.conj().resolve_conj().t().contiguous().t().conj()
    return execute(plan_reshard(source, target, 8), [strided])


def test_shards_may_be_strided_or_conjugate_views() -> None:
    source = shardwise.chunk(0, ranks=[0, 1]).layout((4, 6))
    target = shardwise.chunk(1, ranks=[1, 0]).layout((4, 6))
    results = simulate(_transposed, 2).results
    found = assemble(target, dict(enumerate(results)))
    expected = assemble(source, random_shards(source, torch.complex64)).conj().resolve_conj()
    torch.testing.assert_close(found, expected)


def _negative(rank: int) -> list[torch.Tensor]:
    source = shardwise.chunk(0, ranks=[0, 1]).layout((4, 6))
    target = shardwise.chunk(1, ranks=[1, 0]).layout((4, 6))
    (shard,) = random_shards(source, torch.complex64)[rank]
    shard.imag.fill_(7)
    return execute(plan_reshard(source, target, 4), [shard.conj().imag])


def test_shards_may_be_negative_views() -> None:
    target = shardwise.chunk(1, ranks=[1, 0]).layout((4, 6))
    found = assemble(target, dict(enumerate(simulate(_negative, 2).results)))
    torch.testing.assert_close(found, torch.full((4, 6), -7.0))


def _as_it_is(shard: torch.Tensor) -> torch.Tensor:
    return shard


def _as_columns(shard: torch.Tensor) -> torch.Tensor:
    return shard.t().contiguous().t()


def _with_gradient(shard: torch.Tensor) -> torch.Tensor:
    return shard.clone().requires_grad_()


def _as_negative(shard: torch.Tensor) -> torch.Tensor:
    return torch.complex(shard, -shard).conj().imag


def _as_integers(shard: torch.Tensor) -> torch.Tensor:
    return shard.view(torch.int32)


def _again(rank: int, shape: tuple[int, ...], kinds: Sequence[Any]) -> list[torch.Tensor]:
    """One plan, many times: what is kept from one call must not mislead the next."""
    source = shardwise.chunk(0, ranks=[0, 1]).layout(shape)
    target = shardwise.chunk(1, ranks=[1, 0]).layout(shape)
    plan, found = plan_reshard(source, target, 4), []
    for kind in kinds:
        (moved,) = execute(plan, [kind(shard) for shard in random_shards(source)[rank]])
        assert not moved.requires_grad
        assert moved.is_contiguous()
        found.append(moved.view(torch.float32))
    return found


@pytest.mark.parametrize("shape", [(4, 6), (2, 2)])  # messages of one element are sent as they are
def test_one_plan_moves_one_kind_of_tensor_after_another(shape: tuple[int, ...]) -> None:
    kinds = [_as_it_is, _as_columns, _with_gradient, _as_negative, _as_integers]
    kinds = [*kinds, *kinds[::-1]]
    source = shardwise.chunk(0, ranks=[0, 1]).layout(shape)
    target = shardwise.chunk(1, ranks=[1, 0]).layout(shape)
    expected = assemble(source, random_shards(source))
    simulated = simulate(_again, 2, shape, kinds).results
    for results in (simulated, shardwise.run_local(_again, 2, shape, kinds)):
        for k in range(len(kinds)):
            found = assemble(target, {rank: [held[k]] for rank, held in enumerate(results)})
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_rank_without_shards_says_the_dtype_at_every_call() -> None:
    source, target = (shardwise.on_rank(k).layout((4,)) for k in (0, 1))
    plan = plan_reshard(source, target, 4)

    def move(rank: int) -> None:
        shards = [torch.ones(4)] if rank == 0 else []
        for _ in range(2):
            execute(plan, shards, dtype=torch.float32)
        if rank == 1:
            execute(plan, shards)

    with pytest.raises(shardwise.errors.RankFailure, match="no shards, no out and no dtype"):
        simulate(move, 2)


def _capped_and_not(rank: int) -> tuple[int, int]:
    """Messages without and with a cap, for one plan."""
    source, target = (shardwise.on_rank(k).layout((64,)) for k in (0, 1))
    plan = plan_reshard(source, target, 4)
    shards = random_shards(source).get(rank, [])
    world = communicator()
    assert isinstance(world, SimulatedCommunicator)
    counts = []
    for cap in (None, 64):
        before = world.traffic.messages[0, 1]
        world.gather_objects(rank)
        execute(plan, shards, dtype=torch.float32, max_bytes=cap)
        world.gather_objects(rank)
        counts.append(world.traffic.messages[0, 1] - before)
    return counts[0], counts[1]


def test_a_plan_is_carried_out_with_and_without_a_cap() -> None:
    assert simulate(_capped_and_not, 2).results == [(1, 4), (1, 4)]


def _sources_afterwards(rank: int) -> bool:
    source = shardwise.partial(ranks=[0, 1]).layout((4, 6))
    target = shardwise.replicate(ranks=[0, 1]).layout((4, 6))
    shards = random_shards(source)[rank]
    before = [shard.clone() for shard in shards]
    execute(plan_reshard(source, target, 4), shards)
    return all(map(torch.equal, shards, before))


def test_sources_are_not_changed() -> None:
    assert simulate(_sources_afterwards, 2).results == [True, True]


def _gradient_state(rank: int) -> tuple[bool, bool]:
    source = shardwise.chunk(0, ranks=[0, 1]).layout((4,))
    target = shardwise.chunk(0, ranks=[1, 0]).layout((4,))
    shard = torch.ones(2, requires_grad=True)
    (moved,) = execute(plan_reshard(source, target, 4), [shard])
    return moved.requires_grad, torch.is_grad_enabled()


def test_values_move_without_gradients() -> None:
    assert simulate(_gradient_state, 2).results == [(False, True)] * 2


# -- wrong calls -------------------------------------------------------------------------------

ROWS = shardwise.chunk(0, ranks=[0, 1]).layout((4, 6))
COLUMNS = shardwise.chunk(1, ranks=[0, 1]).layout((4, 6))
PLAN = plan_reshard(ROWS, COLUMNS, 4)


def _alone(*args: Any, is_first: bool = True, **options: Any) -> None:
    """The call as rank 0 of two; it must fail before it waits for anybody.

    The first call of a plan takes another way than those after it.
    """

    def call(rank: int) -> None:
        if not is_first:
            execute(PLAN, random_shards(ROWS)[rank])
        if rank == 0:
            execute(*args, **options)

    simulate(call, 2)


@pytest.mark.parametrize(
    ("shards", "options", "kind", "message"),
    [
        (
            [],
            {},
            LayoutError,
            r"\[rank 0\] 'tensor' shards: expected shapes \[\(2, 6\)\].* got \[\]",
        ),
        ([torch.zeros(2, 5)], {}, LayoutError, r"expected shapes \[\(2, 6\)\].*got \[\(2, 5\)\]"),
        (torch.zeros(2, 6), {}, ArgumentTypeError, "expected a list of tensors, got Tensor"),
        (
            [torch.zeros(2, 6).double()],
            {},
            LayoutError,
            "elements of 4 bytes.*got torch.float64 of 8",
        ),
        ([torch.zeros(2, 6)], {"out": [torch.zeros(4, 2)]}, LayoutError, r"out: .*\(4, 3\)"),
        (
            [torch.zeros(2, 6)],
            {"out": [torch.zeros(4, 3).int()]},
            ArgumentTypeError,
            r"one for all shards and out, got \['torch.float32', 'torch.int32'\]",
        ),
        ([torch.zeros(2, 6).to_sparse()], {}, LayoutError, "dense tensors"),
        ([torch.zeros(2, 6, device="meta")], {}, LayoutError, "tensors with data"),
        ([[0.0] * 6] * 2, {}, ArgumentTypeError, "a list of tensors, got list with a list"),
        (
            [torch.zeros(2, 6)],
            {"dtype": torch.int32},
            ArgumentTypeError,
            r"one for all shards and out, got \['torch.float32', 'torch.int32'\]",
        ),
        ([torch.zeros(2, 6)], {"max_bytes": 3}, PlanError, "max_bytes: expected at least 4"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_wrong_call_says_what_is_wrong(
    shards: Any, options: dict[str, Any], kind: type[Exception], message: str, is_first: bool
) -> None:
    with pytest.raises(shardwise.errors.RankFailure, match=message) as failure:
        _alone(PLAN, shards, is_first=is_first, **options)
    assert isinstance(failure.value.__cause__, kind)


@pytest.mark.parametrize("is_first", [True, False])
def test_outputs_that_share_memory_with_shards_are_refused(is_first: bool) -> None:
    memory = torch.zeros(24)
    shards, out = [memory[:12].view(2, 6)], [memory[11:23].view(4, 3)]
    with pytest.raises(shardwise.errors.RankFailure, match="shares memory with 'tensor' shards"):
        _alone(PLAN, shards, out=out, is_first=is_first)


@pytest.mark.parametrize("is_first", [True, False])
def test_outputs_that_may_not_be_written_are_refused(is_first: bool) -> None:
    with torch.inference_mode():
        out = [torch.zeros(4, 3)]
    shards = random_shards(ROWS)[0]
    with pytest.raises(shardwise.errors.RankFailure, match="expected tensors that may be written"):
        _alone(PLAN, shards, out=out, is_first=is_first)


def test_an_average_of_whole_numbers_is_refused() -> None:
    source = shardwise.partial("avg", ranks=[0, 1]).layout((4,))
    plan = plan_reshard(source, shardwise.replicate(ranks=[0, 1]).layout((4,)), 8)
    with pytest.raises(shardwise.errors.RankFailure, match="pending avg: expected a floating") as f:
        _alone(plan, [torch.zeros(4, dtype=torch.int64)])
    assert isinstance(f.value.__cause__, OpError)


def _with_unknown_ranks(rank: int) -> tuple[str, bool]:
    target = shardwise.chunk(1, ranks=[0, 7]).layout((4, 6))
    (shard,) = random_shards(ROWS)[rank]
    before = shard.clone()
    try:
        execute(plan_reshard(ROWS, target, 4), [shard])
    except LayoutError as error:
        return str(error), torch.equal(shard, before)
    return "", False


def test_unknown_ranks_raise_on_all_ranks_and_leave_the_sources_alone() -> None:
    results = shardwise.run_local(_with_unknown_ranks, 2)
    for rank, (message, _) in enumerate(results):
        assert message.startswith(f"[rank {rank}] 'tensor': the plan's target: Global rank 7 does")
    assert all(same for _, same in results)


@pytest.mark.parametrize("end", ["source", "target"])
def test_the_layout_with_unknown_ranks_is_named(end: str) -> None:
    other = shardwise.chunk(1, ranks=[0, 7]).layout((4, 6))
    plan = plan_reshard(*((other, ROWS) if end == "source" else (ROWS, other)), 4)
    with pytest.raises(shardwise.errors.RankFailure, match=rf"the plan's {end}: Global rank 7 doe"):
        simulate(lambda rank: execute(plan, random_shards(ROWS)[rank]), 2)


def _with_one_wrong_shard(rank: int) -> str:
    shape = (2, 6) if rank == 0 else (2, 5)
    with shardwise.set_check("debug"):
        try:
            execute(PLAN, [torch.zeros(shape)])
        except (AgreementError, LayoutError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_shard_that_is_wrong_on_one_rank_raises_on_all_in_debug_mode() -> None:
    first, second = shardwise.run_local(_with_one_wrong_shard, 2)
    assert first.startswith("AgreementError")
    assert "(2, 5)" in first
    assert second.startswith("LayoutError: [rank 1]")


def _with_other_targets(rank: int) -> str:
    target = COLUMNS if rank == 0 else shardwise.chunk(1, ranks=[1, 0]).layout((4, 6))
    with shardwise.set_check("debug"):
        try:
            execute(plan_reshard(ROWS, target, 4), random_shards(ROWS)[rank])
        except AgreementError as error:
            return str(error)
    return "nothing was raised"


def test_targets_that_differ_between_ranks_raise_on_all_in_debug_mode() -> None:
    first, second = shardwise.run_local(_with_other_targets, 2)
    assert first == second
    assert "'tensor' target layout (rank 0: Layout: [0:4, 0:3] on 0, [0:4, 3:6] on 1; " in first


@pytest.mark.parametrize("what", ["max_bytes", "number of tensors", "source layout"])
def test_everything_that_must_be_alike_is_compared_in_debug_mode(what: str) -> None:
    def differ(rank: int) -> str:
        other = shardwise.chunk(0, [1, 3], ranks=[0, 1]).layout((4, 6))
        source = other if rank == 1 and what == "source layout" else ROWS
        transfer = Transfer(plan_reshard(source, COLUMNS, 4), random_shards(source)[rank])
        count = 2 if rank == 1 and what == "number of tensors" else 1
        cap = 64 if rank == 1 and what == "max_bytes" else None
        with shardwise.set_check("debug"), pytest.raises(AgreementError) as error:
            execute_all([transfer] * count, max_bytes=cap)
        return str(error.value)

    first, second = simulate(differ, 2).results
    assert first == second
    assert what in first


def test_outputs_of_two_tensors_may_not_share_memory() -> None:
    shared = torch.zeros(4, 3)
    shards = [torch.zeros(2, 6)]
    message = r"'tensor' \(transfers\[1\]\) out: .*memory with 'tensor' \(transfers\[0\]\) out"
    with pytest.raises(shardwise.errors.RankFailure, match=message):
        simulate(lambda rank: execute_all([Transfer(PLAN, shards, [shared])] * 2), 2)
    named = [Transfer(PLAN, shards, [shared], name=name) for name in ("a", "b")]
    with pytest.raises(shardwise.errors.RankFailure, match=r"'b' out: .*memory with 'a' out"):
        simulate(lambda rank: execute_all(named), 2)


@pytest.mark.parametrize("max_bytes", [None, 64])
def test_of_many_transfers_the_wrong_one_is_named(max_bytes: int | None) -> None:
    def message(transfers: list[Transfer]) -> str:
        with pytest.raises(shardwise.errors.RankFailure) as failure:
            simulate(lambda rank: execute_all(transfers, max_bytes=max_bytes), 2)
        return str(failure.value.__cause__)

    good, wrong = (Transfer(PLAN, [torch.zeros(2, width)]) for width in (6, 5))
    many = [good] * 57 + [wrong] + [good] * 42
    assert "'tensor' (transfers[57]) shards: expected shapes" in message(many)
    named = [good._replace(name="a"), wrong._replace(name="b")]
    assert "'b' shards: expected shapes" in message(named)
    device = [good, good._replace(device="gpuu")]
    assert "'tensor' (transfers[1]) device: expected one" in message(device)
    none: Any = [good, good, None]
    assert "transfers[2]: expected a Transfer with a TransferPlan, got NoneType" in message(none)
    stranger = plan_reshard(ROWS, shardwise.on_rank(7).layout((4, 6)), 4)
    strange = [good._replace(name="a"), Transfer(stranger, good.shards, name="b")]
    assert "[rank 0] 'b': the plan's target: Global rank 7 does not exist" in message(strange)


def test_outputs_on_the_meta_device_share_no_memory() -> None:
    def rehearse(rank: int) -> None:
        out = torch.empty(4, 3, device="meta")
        (found,) = execute(PLAN, [torch.empty(2, 6, device="meta")], out=[out])
        assert found.is_meta

    assert simulate(rehearse, 2, device="meta").traffic.total_bytes == PLAN.total_bytes


def test_outputs_may_not_be_conjugate_views() -> None:
    plan = plan_reshard(ROWS, COLUMNS, 8)
    out = torch.zeros(4, 3, dtype=torch.complex64).conj()
    with pytest.raises(shardwise.errors.RankFailure, match="got a conjugate or negative view"):
        _alone(plan, [torch.zeros(2, 6, dtype=torch.complex64)], out=[out])


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("strides", [(3, 0), (0, 1), (1, 1), (2, 1)])
def test_outputs_whose_elements_share_memory_are_refused(
    strides: tuple[int, int], is_first: bool
) -> None:
    out = [torch.zeros(24).as_strided((4, 3), strides)]
    shards = random_shards(ROWS)[0]
    with pytest.raises(
        shardwise.errors.RankFailure, match=r"got one of shape \(4, 3\) and strides"
    ):
        _alone(PLAN, shards, out=out, is_first=is_first)


def test_outputs_may_have_gaps_and_any_order_of_dims() -> None:
    for out in (torch.zeros(3, 4).T, torch.zeros(8, 5)[::2, 1:4], torch.zeros(4, 1, 3)[:, 0]):

        def fill(rank: int, out: torch.Tensor = out) -> list[torch.Tensor]:
            given = out.clone() if rank else out
            return execute(PLAN, random_shards(ROWS)[rank], out=[given])

        (found,), (other,) = simulate(fill, 2).results
        assert found.data_ptr() == out.data_ptr()
        expected = simulate(lambda rank: execute(PLAN, random_shards(ROWS)[rank]), 2).results
        assert torch.equal(found, expected[0][0])
        assert torch.equal(other, expected[1][0])


def _with_another_dtype(rank: int) -> str:
    dtype = torch.float16 if rank else torch.bfloat16
    with shardwise.set_check("debug"):
        try:
            execute(plan_reshard(ROWS, COLUMNS, 2), random_shards(ROWS, dtype)[rank])
        except AgreementError as error:
            return str(error)
    return "nothing was raised"


def test_dtypes_of_one_size_that_differ_between_ranks_raise_on_all_in_debug_mode() -> None:
    first, second = shardwise.run_local(_with_another_dtype, 2)
    assert first == second
    assert "'tensor' dtype (rank 0: torch.bfloat16; rank 1: torch.float16)" in first


def _wrong_on_rank_1(rank: int, kind: str) -> str:
    shards: Any = random_shards(ROWS)[rank]
    plan: Any = PLAN
    options: dict[str, Any] = {}
    if rank == 1 and kind == "meta":
        shards = [shard.to("meta") for shard in shards]
    elif rank == 1 and kind == "no plan":
        plan = None
    elif rank == 1 and kind == "numpy":
        shards = [shard.numpy() for shard in shards]
    elif rank == 1 and kind == "device":
        options["device"] = "gpuu"
    with shardwise.set_check("debug"):
        try:
            execute(plan, shards, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("meta", "LayoutError: [rank 1] 'tensor' shards: expected tensors with data, got one on"),
        (
            "no plan",
            "transfer: expected a Transfer with a TransferPlan, got NoneType",
        ),
        ("numpy", "expected a list of tensors, got list with a ndarray"),
        ("device", "DeviceError: [rank 1] 'tensor' device: expected one that this process has"),
    ],
)
def test_whatever_is_wrong_on_one_rank_raises_on_all_in_debug_mode(kind: str, message: str) -> None:
    first, second = shardwise.run_local(_wrong_on_rank_1, 2, kind)
    assert message in second
    assert first.startswith("AgreementError: reshard failed on other ranks: rank 1:")
    assert message in first


@pytest.mark.parametrize("transfers", [None, Transfer(PLAN, []), [(PLAN, [])], [None]])
def test_many_tensors_are_a_list_of_transfers(transfers: Any) -> None:
    with pytest.raises(shardwise.errors.RankFailure, match=r"pass a list of .*Transfer") as failure:
        simulate(lambda rank: execute_all(transfers), 1)
    assert isinstance(failure.value.__cause__, ArgumentTypeError)


def test_a_plan_that_starts_from_a_box_gets_it_everywhere() -> None:
    layout = Layout((0, 3), [Box((0, 0), (0, 3))], [0])
    pair = (layout, shardwise.replicate(ranks=[0, 1]).layout((0, 3)), torch.float32)
    results = simulate(_moved, 2, [pair]).results
    assert [tuple(held[0][0].shape) for held in results] == [(0, 3), (0, 3)]


def test_the_simulated_rank_is_the_default_communicator() -> None:
    assert simulate(lambda rank: communicator().rank == rank, 3).results == [True] * 3
