"""Tensors to other layouts: alone, many at once, into others, across groups."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise import sharded_tensor
from shardwise.comm import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import AgreementError, ArgumentTypeError, ArgumentValueError, OpError
from shardwise.geometry import Layout
from shardwise.sharded_tensor import ShardedTensor, to_layouts
from shardwise.sharded_tensor.progress import progress_bar
from shardwise.sharded_tensor.tensor import wrap
from shardwise.testing.memory import peak_growth
from shardwise.testing.strategies import examples, layouts, shapes
from shardwise.testing.tensors import assemble, random_shards, random_tensor
from shardwise.transfer import plan_reshard


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    shape = draw(shapes(max_size=5))
    source, target = (draw(layouts(shape=shape)) for _ in range(2))
    return source, target


def held(tensor: Any) -> list[torch.Tensor]:
    return [shard.tensor for shard in tensor.local_shards()]


@given(pairs())
def test_the_values_and_the_bytes_are_those_of_the_plan(pair: tuple[Layout, Layout]) -> None:
    source, target = pair

    def run(_: int) -> tuple[Layout, list[torch.Tensor], torch.Tensor]:
        moved = shardwise.reshard(random_tensor(source), target)
        return moved.shard_layout, held(moved), random_tensor(source).full_tensor()

    simulation = simulate(run, 4)
    whole = Layout.replicated(source.shape, range(4))
    plans = [plan_reshard(source, to, 4) for to in (target, whole)]
    assert simulation.traffic.total_bytes == sum(plan.total_bytes for plan in plans)
    expected = assemble(source, random_shards(source))
    after = {rank: result[1] for rank, result in enumerate(simulation.results)}
    assert all(layout == target for layout, _, _ in simulation.results)
    torch.testing.assert_close(assemble(target, after), expected, rtol=0, atol=0)
    for _, _, full in simulation.results:
        torch.testing.assert_close(full, expected, rtol=0, atol=0)


def _gathered(rank: int, listed: list[tuple[Layout, Layout]]) -> list[Any]:
    """Real ranks: pure, in place, into `out`, all at once, and gathered in several ways."""
    found = []
    for source, target in listed:
        x = random_tensor(source)
        pure = shardwise.reshard(x, target)
        out = wrap(pure._state.map(torch.empty_like))
        shardwise.reshard(x, target, out=out)
        full = torch.full(source.shape, -1.0) if rank == 2 else None
        same = x.gather(2, full)
        assert same is full
        small = x.gather(1, dtype=torch.float16)
        capped = x.gather(2, max_bytes=1 << 10)
        found.append((held(pure), held(out), full, small, capped, x.full_tensor()))
    return found


def test_real_ranks_agree_with_the_oracle_in_every_form() -> None:
    listed = examples(pairs(), 20)
    results = shardwise.run_local(_gathered, 4, listed)
    for number, (source, target) in enumerate(listed):
        expected = assemble(source, random_shards(source))
        for form in (0, 1):
            after = {rank: result[number][form] for rank, result in enumerate(results)}
            torch.testing.assert_close(assemble(target, after), expected, rtol=0, atol=0)
        for rank, result in enumerate(results):
            _, _, full, small, capped, everywhere = result[number]
            assert (full is None) == (rank != 2)
            assert (small is None) == (rank != 1)
            torch.testing.assert_close(everywhere, expected, rtol=0, atol=0)
            if rank == 2:
                torch.testing.assert_close(full, expected, rtol=0, atol=0)
                torch.testing.assert_close(capped, expected, rtol=0, atol=0)
            if rank == 1:
                torch.testing.assert_close(small, expected.half(), rtol=0, atol=0)


def _async(rank: int, listed: list[tuple[Layout, Layout]]) -> list[list[torch.Tensor]]:
    """All under way at once, waited for in order, with another exchange in between."""
    started = [
        shardwise.reshard(random_tensor(source, seed=k), target, async_op=True)
        for k, (source, target) in enumerate(listed)
    ]
    between = sharded_tensor.ones(shardwise.chunk(0), 5).full_tensor()
    assert between.sum() == 5
    found = [work.wait() for work in started]
    assert all(work.wait() is tensor for work, tensor in zip(started, found, strict=True))
    leaf = sharded_tensor.ones(shardwise.chunk(0), 5, requires_grad=True)
    with pytest.raises(OpError, match="async_op= is for values only"):
        shardwise.reshard(leaf, shardwise.replicate(), async_op=True)
    return [held(tensor) for tensor in found]


def test_many_reshards_can_be_under_way_at_once() -> None:
    listed = examples(pairs(), 20)
    results = shardwise.run_local(_async, 4, listed)
    for k, (source, target) in enumerate(listed):
        after = {rank: result[k] for rank, result in enumerate(results)}
        expected = assemble(source, random_shards(source, seed=k))
        torch.testing.assert_close(assemble(target, after), expected, rtol=0, atol=0)


def _many(rank: int, listed: list[tuple[Layout, Layout]]) -> Any:
    tensors = {f"t{k}": random_tensor(source, seed=k) for k, (source, _) in enumerate(listed)}
    specs = {f"t{k}": target for k, (_, target) in enumerate(listed)}
    kept = shardwise.reshard_all({**tensors, "step": 7}, specs)
    assert kept["step"] == 7
    freed = shardwise.reshard_all(tensors, specs, free_source=True)
    gone = [t for t in tensors.values() if t._state.is_freed]
    assert len(gone) == sum(source != target for source, target in listed)
    for tensor in gone:
        with pytest.raises(OpError, match="given up"):
            tensor.full_tensor()
    return [held(kept[name]) for name in tensors], [held(freed[name]) for name in tensors]


def test_many_tensors_move_in_one_exchange_or_in_steps_that_free_their_sources() -> None:
    listed = examples(pairs(), 40)
    results = shardwise.run_local(_many, 4, listed)
    for k, (source, target) in enumerate(listed):
        expected = assemble(source, random_shards(source, seed=k))
        for form in (0, 1):
            after = {rank: result[form][k] for rank, result in enumerate(results)}
            torch.testing.assert_close(assemble(target, after), expected, rtol=0, atol=0)


def _sources_alive(_: int, free_source: bool) -> list[int]:
    """How many sources still have their memory at the start of each step."""
    tensors = [sharded_tensor.ones(shardwise.chunk(0), 8, 8) for _ in range(6)]
    memory = [weakref.ref(tensor.local_tensor()) for tensor in tensors]
    module: Any = to_layouts
    alive, run = [], module.carry_out

    def counted(*args: Any) -> Any:
        alive.append(sum(held() is not None for held in memory))
        return run(*args)

    module.carry_out = counted
    try:
        shardwise.reshard_all(tensors, shardwise.chunk(1), free_source=free_source)
    finally:
        module.carry_out = run
    return alive


def test_freed_sources_make_room_for_what_comes() -> None:
    assert shardwise.run_local(_sources_alive, 2, True) == [[6, 5, 4, 3, 2, 1]] * 2
    assert shardwise.run_local(_sources_alive, 2, False) == [[6]] * 2


def _growth(_: int) -> int:
    """MiB by which a process that holds 256 grows when it moves all of it."""

    def move() -> int:
        tensors = [sharded_tensor.ones(shardwise.chunk(0), 2048, 2048) for _ in range(32)]
        results: list[Any] = []

        def run() -> None:
            results.append(shardwise.reshard_all(tensors, shardwise.chunk(1), free_source=True))

        return peak_growth(run) >> 20

    return [move() for _ in range(2)][-1]  # the C library has memory of the first


def test_what_is_freed_goes_back_to_the_system() -> None:
    """It keeps 64 MiB at most; moved at once, the tensors need 256 and some."""
    assert max(shardwise.run_local(_growth, 2)) < 128


def _agreements(_: int) -> int:
    """How often ranks compare their arguments in one call."""
    members: Any = communicator()
    compare, calls = members.compare, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return compare(*args, **kwargs)

    tensors = [sharded_tensor.ones(shardwise.chunk(0), 4, 4) for _ in range(20)]
    members.compare = counted
    try:
        moved = shardwise.reshard_all([*tensors, tensors[3]], shardwise.chunk(1))
    finally:
        del members.compare  # ranks are lent to other tests
    assert moved[20] is moved[3]  # tied weights stay tied
    assert len(set(moved)) == 20
    return len(calls)


def test_many_tensors_agree_once() -> None:
    assert shardwise.run_local(_agreements, 2) == [1, 1]


def test_a_bar_shows_how_far_it_is_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class First:
        rank, ranks = 0, (0, 1)

    members: Any = First()
    for show, is_seen in ((True, True), (False, False), (None, False)):  # no terminal here
        with progress_bar("resharding", 100, members, show=show) as advance:
            advance(60)
            advance(40)
        assert ("resharding" in capsys.readouterr().err) == is_seen
    members.rank = 1
    with progress_bar("resharding", 100, members, show=True) as advance:
        advance(100)
    assert capsys.readouterr().err == ""


def _local_changes(_: int) -> None:
    """Nothing is sent, so one rank may do it alone."""
    rows = shardwise.chunk(0)
    x = shardwise.sharded_tensor.ones(rows, 6, 4)
    assert shardwise.reshard(x, rows) is x
    assert shardwise.reshard(x, shardwise.chunk(0)) is x
    assert shardwise.reshard(x, x) is x
    assert shardwise.reshard(x, x.shard_layout) is x
    replicated = shardwise.as_replicated(torch.arange(6.0))
    if dist.get_rank() == 1:
        part = shardwise.reshard(replicated, shardwise.chunk(0, sizes=[1, 2, 3]))
        assert part.local_tensor().tolist() == [1.0, 2.0]
        split = shardwise.reshard(x, shardwise.grid([[1, 1, 2, 2], 1], ranks=[0, 0, 1, 2]))
        assert [shard.tensor.shape for shard in split.local_shards()] == [(2, 4)]


def test_what_is_local_needs_no_other_rank() -> None:
    shardwise.run_local(_local_changes, 3)


def test_what_is_local_sends_nothing() -> None:
    def run(_: int) -> None:
        x = shardwise.as_replicated(torch.arange(12.0).view(4, 3))
        shardwise.reshard(shardwise.reshard(x, shardwise.chunk(0, ranks=[2, 1, 0])), x)

    simulation = simulate(
        lambda _: (
            shardwise.reshard(
                shardwise.as_replicated(torch.arange(12.0).view(4, 3)),
                shardwise.chunk(0, ranks=[2, 1, 0]),
            )
            .local_tensor()
            .shape
        ),
        3,
    )
    assert simulation.traffic.total_bytes == 0
    assert simulation.results == [(0, 3), (2, 3), (2, 3)]
    assert simulate(run, 3).traffic.total_bytes == 96


def _in_place(rank: int) -> None:
    full = torch.arange(20.0).view(5, 4)
    p: Any = torch.nn.Parameter(shardwise.distribute(full, shardwise.chunk(0)))
    calls: list[Any] = []
    p.register_hook(lambda grad: calls.append(grad.shard_layout))
    after: list[Any] = []
    p.register_post_accumulate_grad_hook(after.append)
    (p.full_tensor() ** 2).sum().backward()
    held_before = p.metadata()
    columns = shardwise.chunk(1, ranks=[2, 0, 1])
    assert p.reshard(columns) is p
    assert held_before == shardwise.distribute(full.requires_grad_(), shardwise.chunk(0)).metadata()
    assert p.shard_layout == columns.layout((5, 4))
    assert p.sharding_spec() is columns
    assert p._is_param
    assert p.is_leaf
    assert p.requires_grad
    assert isinstance(p.grad, ShardedTensor)
    assert torch.equal(p.grad.full_tensor(), 2 * full)
    (p.full_tensor() ** 2).sum().backward()
    assert torch.equal(p.grad.full_tensor(), 4 * full)
    assert calls == [shardwise.chunk(0).layout((5, 4)), columns.layout((5, 4))]
    assert len(after) == 2
    assert all(tensor is p for tensor in after)
    computed = shardwise.reshard(p, shardwise.replicate())
    with pytest.raises(OpError, match="that autograd computed"):
        computed.reshard(columns)


def test_reshard_in_place_keeps_the_parameter_its_gradient_and_its_hooks() -> None:
    shardwise.run_local(_in_place, 3)


def _across_groups(rank: int) -> Any:
    world = dist.group.WORLD
    left, right = dist.new_group([0, 1]), dist.new_group([2, 3])
    full = torch.arange(12.0).view(4, 3)
    source = shardwise.chunk(0, ranks=[0, 1]).layout((4, 3))
    target = shardwise.chunk(1, ranks=[2, 3])
    x: Any = shardwise.absent(source, torch.float32, requires_grad=True)
    leaf = None
    if rank in (0, 1):
        leaf = shardwise.distribute(
            full.clone().requires_grad_(),
            shardwise.chunk(0, ranks=[0, 1]),
            process_group=left,
        )
        x = leaf
    there = shardwise.reshard(x, target, process_group=world)
    assert there.shard_layout.ranks == (2, 3)
    back = shardwise.reshard(there, shardwise.chunk(0, ranks=[1, 0]))
    (back.full_tensor() ** 2).sum().backward()
    if leaf is not None:
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.full_tensor(), 2 * full)
    with (
        pytest.raises(ValueError, match="requires_grad"),
        shardwise.set_check("always", timeout=10),
    ):
        shardwise.reshard(
            shardwise.absent(source, torch.float32) if rank > 1 else x, target, process_group=world
        )
    del left, right
    return there.local_shards()[0].tensor.detach() if rank > 1 else None


def test_from_one_group_to_another_and_back_with_gradient() -> None:
    _, _, a, b = shardwise.run_local(_across_groups, 4)
    torch.testing.assert_close(torch.cat([a, b], 1), torch.arange(12.0).view(4, 3))


def _wrong_calls(rank: int) -> None:
    x = shardwise.sharded_tensor.ones(shardwise.chunk(0), 6, 4)
    with pytest.raises(ArgumentTypeError, match=r"distribute\(x, spec\)"):
        shardwise.reshard(torch.ones(3), shardwise.chunk(0))
    with pytest.raises(ArgumentTypeError, match="a spec, a Layout or a ShardedTensor"):
        shardwise.reshard(x, "rows")  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(ArgumentValueError, match=r"shape \(6, 4\).*shape \(5, 4\)"):
        shardwise.reshard(x, shardwise.chunk(0).layout((5, 4)))
    needs_grad = x.clone().requires_grad_()
    with pytest.raises(OpError, match="values only"):
        shardwise.reshard(needs_grad, x, out=x.clone())
    with pytest.raises(ArgumentValueError, match="out of reshard"):
        shardwise.reshard(x, shardwise.chunk(1), out=x.clone())
    with shardwise.implicit_comm("allow"):
        view: Any = x.as_strided((6, 4), (4, 1))  # which shows a copy
    with pytest.raises(OpError, match=r"reshard into a view.*would not change"):
        shardwise.reshard(x, view, out=view)
    gone = shardwise.reshard(x, shardwise.chunk(1))
    shardwise.reshard_all([gone], shardwise.chunk(0), free_source=True)
    with pytest.raises(OpError, match="whose data was given up"):
        shardwise.reshard(x, shardwise.chunk(1), out=gone)
    with shardwise.set_check("always", timeout=10):
        with pytest.raises(ValueError, match="NOT be specified on non-destination ranks"):
            x.gather(0, torch.empty(6, 4) if rank == 1 else None)
        with pytest.raises(AgreementError, match=r"ranks differ in dst"):
            x.gather(rank)
        with pytest.raises(ValueError, match="but should be"):
            x.gather(0, torch.empty(4, 6) if rank == 0 else None)
        with pytest.raises(AgreementError, match="'w' target layout"):
            shardwise.reshard_all({"w": x}, {"w": shardwise.chunk(rank)})
        with pytest.raises(ValueError, match="names of the tensors"):
            shardwise.reshard_all({"w": x}, {"v": shardwise.chunk(1)} if rank else {})
    assert torch.equal(x.full_tensor(), torch.ones(6, 4))  # the group still works


def test_wrong_calls_say_what_is_wrong_on_every_rank() -> None:
    shardwise.run_local(_wrong_calls, 2)


def _keys(_: int) -> None:
    x = sharded_tensor.ones(shardwise.chunk(0), 4, 6)
    many: Any = {0: x, "0": x.clone(), None: 7}
    found = shardwise.reshard_all(many, {0: shardwise.chunk(1)})
    assert list(found) == [0, "0", None]
    assert found[0].local_tensor().shape == (4, 3)
    assert found["0"].local_tensor().shape == (2, 6)
    assert found[None] == 7


def test_names_of_many_tensors_may_be_anything() -> None:
    shardwise.run_local(_keys, 2)
