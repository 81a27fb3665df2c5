"""`local_map`: any function on local pieces, with the values and gradients of the full tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError, RankFailure
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor.global_shapes import find_shape
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharding_spec import parse_spec
from shardwise.testing.op_check import layout_kinds, shards_of_full
from shardwise.testing.strategies import examples, specs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

X = torch.linspace(-2, 2, 40, dtype=torch.float64).reshape(8, 5)
W = torch.linspace(-1, 3, 15, dtype=torch.float64).reshape(5, 3).sin()


class _Cube(torch.autograd.Function):
    """A user's own kernel, differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ctx.saved_tensors[0]
        return 3 * x * x * grads[0]


def _cube(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _Cube.apply(x)
    return found


def _spec(text: str, world_size: int = 4) -> Any:
    return parse_spec(text, ranks=range(world_size), device="cpu")


def _sharded(full: torch.Tensor, layout: Layout) -> ShardedTensor:
    members = communicator()
    shards = [
        shard.requires_grad_() for shard in shards_of_full(full, layout).get(members.rank, [])
    ]
    return wrap(make_state(layout, shards, group=members, dtype=full.dtype, requires_grad=True))


def _weighed(value: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, value.numel() + 1, dtype=torch.float64).reshape(value.shape)
    return (value * weights.cos()).sum()


def _check(
    fn: Callable[..., Any],
    full: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    in_specs: Any,
    out_specs: Any,
    *,
    reference: Callable[..., Any] | None = None,
    world_size: int = 4,
    **options: Any,
) -> None:
    """Values and gradients, by two calls, are those of `reference` (or `fn`) on full tensors."""

    def run(_: int) -> None:
        mapped = shardwise.local_map(fn, in_specs, out_specs, **options)
        for _ in range(2):
            leaves = [one.clone().requires_grad_() for one in full]
            given = [_sharded(one, layout) for one, layout in zip(full, layouts, strict=True)]
            wanted = (reference or fn)(*leaves)
            with shardwise.implicit_comm("allow"):
                found = mapped(*given)
            pairs = list(
                zip(
                    found if isinstance(found, tuple) else [found],
                    wanted if isinstance(wanted, tuple) else [wanted],
                    strict=True,
                )
            )
            for one, value in pairs:
                torch.testing.assert_close(one.full_tensor(), value)
            sum(_weighed(value) for _, value in pairs).backward()
            sum(_weighed(one.full_tensor()) for one, _ in pairs).backward()
            for leaf, st in zip(leaves, given, strict=True):
                assert st.grad is not None
                assert st.grad.shard_layout == st.shard_layout.bar
                for box, shard in zip(st._state.boxes, st.grad._state.shards, strict=False):
                    assert leaf.grad is not None
                    torch.testing.assert_close(shard, leaf.grad[box.slices()])

    simulate(run, world_size)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _cube(x @ w)


@pytest.mark.parametrize("kind", layout_kinds((8, 5)))
@pytest.mark.parametrize("rows", ["chunk(0)", "chunk(0, sizes=[5, 0, 1, 2])", "replicate()"])
def test_rows_and_a_shared_weight(kind: str, rows: str) -> None:
    layout, whole = layout_kinds((8, 5))[kind], _spec("replicate()").layout((5, 3))
    _check(_product, [X, W], [layout, whole], (_spec(rows), _spec("replicate()")), _spec(rows))


def test_terms_of_a_sum_get_the_whole_gradient() -> None:
    layouts = [_spec("chunk(1)").layout((8, 5)), _spec("chunk(0)").layout((5, 3))]
    specs = (_spec("chunk(1)"), _spec("chunk(0)"))
    _check(torch.mm, [X, W], layouts, specs, _spec("partial()"))


def test_a_pending_input_stays_pending() -> None:
    layout = _spec("partial()").layout((8, 5))
    whole = _spec("replicate()").layout((5, 3))
    ins = (_spec("partial()"), _spec("replicate()"))
    _check(torch.mm, [X, W], [layout, whole], ins, _spec("partial()"))


def test_outputs_of_several_kinds_count_each_gradient_once() -> None:
    """A replicated output beside a cut one: ranks of different work share a piece."""

    def local(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _cube(x @ w), (w * w).sum(0)

    layouts = [_spec("chunk(0)").layout((8, 5)), _spec("replicate()").layout((5, 3))]
    ins = (_spec("chunk(0)"), _spec("replicate()"))
    outs = (_spec("chunk(0)"), _spec("replicate()"))
    _check(local, [X, W], layouts, ins, outs)
    # Replicated on two ranks of four, where the third and fourth have nothing.
    few = parse_spec("replicate()", ranks=[0, 1], device="cpu")
    half = parse_spec("chunk(0)", ranks=[0, 1], device="cpu")
    _check(local, [X, W], layouts, (half, few), (half, few))


def test_partly_overlapping_replicas() -> None:
    boxes = [Box((0, 0), (4, 5)), Box((4, 0), (8, 5))]
    layout = Layout((8, 5), [boxes[0], boxes[0], boxes[1], boxes[1], boxes[1]], [0, 1, 1, 2, 3])
    outs = [Box((0, 0), (4, 3)), Box((4, 0), (8, 3))]
    out = Layout((8, 3), [outs[0], outs[0], outs[1], outs[1], outs[1]], [0, 1, 1, 2, 3])
    whole = _spec("replicate()").layout((5, 3))
    _check(_product, [X, W], [layout, whole], (layout, whole), out)


def test_several_pieces_on_a_rank_are_several_calls() -> None:
    cyclic = _spec("block_cyclic(0, 1)", 2)
    whole = _spec("replicate()", 2)
    calls = []

    def counted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return _product(x, w)

    layouts = [cyclic.layout((8, 5)), whole.layout((5, 3))]
    _check(counted, [X, W], layouts, (cyclic, whole), cyclic, reference=_product, world_size=2)
    assert calls.count(torch.Size([1, 5])) == 16


def test_heads_of_attention() -> None:
    q, k, v = (torch.randn(2, 5, 3, 4, dtype=torch.float64) for _ in range(3))
    layouts = [layout_kinds((2, 5, 3, 4))[name] for name in ("replicated", "pending")]
    layouts.append(_spec("chunk(2)").layout((2, 5, 3, 4)))
    heads = _spec("chunk(1, sizes=[2, 1, 1, 1])")  # torch 2.11 dies of attention without heads

    def attention(q: Any, k: Any, v: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    _check(attention, [q, k, v], layouts, heads, heads)


def test_random_specs() -> None:
    listed = [
        spec
        for spec in examples(specs((8, 5), world_size=3), 30)
        if spec.layout((8, 5)).pending is None
    ]
    for spec, other in pairwise(listed):
        layout = spec.layout((8, 5))
        _check(_cube, [X], [other.layout((8, 5))], layout, layout, world_size=3)


def test_an_input_that_is_not_used_hangs_nobody() -> None:
    layouts = [_spec("chunk(0)").layout((8, 5)), _spec("chunk(1)").layout((5, 3))]
    half = parse_spec("chunk(0)", ranks=[1, 2], device="cpu")

    def run(_: int) -> None:
        mapped = shardwise.local_map(lambda x, w: _cube(x), (half, _spec("replicate()")), half)
        x, w = (_sharded(one, layout) for one, layout in zip((X, W), layouts, strict=True))
        with shardwise.implicit_comm("allow"):
            (mapped(x, w) * 2.0).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 6 * X * X)
        assert w.grad is None or not w.grad.full_tensor().any()

    simulate(run, 4)


def test_second_derivatives() -> None:
    rows, whole = _spec("chunk(0)", 3), _spec("replicate()", 3)

    def run(_: int) -> None:
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        (first,) = torch.autograd.grad(_weighed(_product(x, w)), w, create_graph=True)
        (first * first).sum().backward()
        mapped = shardwise.local_map(_product, (rows, whole), rows)
        sx, sw = _sharded(X, rows.layout((8, 5))), _sharded(W, whole.layout((5, 3)))
        y = mapped(sx, sw)
        loss = _weighed(y.full_tensor())
        (found,) = torch.autograd.grad(loss, sw, create_graph=True)
        torch.testing.assert_close(found.full_tensor(), first.detach())
        (found * found).sum().backward()
        torch.testing.assert_close(sx.grad.full_tensor(), x.grad)
        torch.testing.assert_close(sw.grad.full_tensor(), w.grad)

    simulate(run, 3)


def test_without_gradients_and_with_other_arguments() -> None:
    rows = _spec("chunk(0)", 2)

    def local(pair: list[torch.Tensor], scale: float, own: torch.Tensor, *, shift: float) -> Any:
        first, second = pair
        return {"sum": first * scale + second + shift, "rows": len(first), "own": own}

    def run(rank: int) -> None:
        outs = {"sum": rows, "rows": None, "own": rows}
        mapped = shardwise.local_map(local, ([rows, rows], None, None), outs)
        x = _sharded(X, rows.layout((8, 5)))
        with torch.no_grad():
            found = mapped([x, X], 2.0, torch.full((3, 1), float(rank)), shift=1.0)
        torch.testing.assert_close(found["sum"].full_tensor(), 3 * X + 1)
        assert not found["sum"].requires_grad
        assert found["rows"] == 4
        assert found["own"].full_tensor().flatten().tolist() == [0.0] * 3 + [1.0] * 3

    simulate(run, 2)


def test_ranks_without_pieces_do_not_run_the_function() -> None:
    few = parse_spec("chunk(0)", ranks=[2, 0], device="cpu")
    ran = []

    def local(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        ran.append(communicator().rank)
        return (x > 0).to(torch.int32), "said"

    def run(rank: int) -> None:
        found, said = shardwise.local_map(local, few, (few, None))(_sharded(X, few.layout((8, 5))))
        assert found.dtype == torch.int32
        assert said == ("said" if rank in (0, 2) else None)
        assert torch.equal(found.full_tensor(), (X > 0).to(torch.int32))

    simulate(run, 4)
    assert sorted(ran) == [0, 2]


def test_parameters_inside_of_the_function_get_gradients_where_it_runs() -> None:
    few = parse_spec("chunk(0)", ranks=[0, 2], device="cpu")

    def run(rank: int) -> None:
        own = torch.ones(5, dtype=torch.float64, requires_grad=True)
        x = _sharded(X, few.layout((8, 5))).detach()
        y = shardwise.local_map(lambda x: x * own, few, few)(x)
        assert y.requires_grad
        shardwise.reshard(y, _spec("replicate()", 3)).sum().backward()
        if rank != 1:
            torch.testing.assert_close(own.grad, X[:4].sum(0) if rank == 0 else X[4:].sum(0))

    simulate(run, 3)


def test_what_moves_is_announced_or_refused() -> None:
    rows, columns = _spec("chunk(0)", 2), _spec("chunk(1)", 2)

    def run(_: int) -> None:
        x = _sharded(X, columns.layout((8, 5)))
        with shardwise.implicit_comm("error"):
            with pytest.raises(OpError, match="moves its tensors"):
                shardwise.local_map(_cube, rows, rows)(x)
            there = shardwise.reshard(x, rows)
            assert shardwise.local_map(_cube, rows, rows, redistribute=False)(there).shape == (8, 5)
        with pytest.raises(OpError, match=r"redistribute=False.*shardwise.reshard"):
            shardwise.local_map(_cube, rows, rows, redistribute=False)(x)

    simulate(run, 2)


def test_shapes_are_told_once_unless_they_change() -> None:
    rows = _spec("chunk(0)", 2)

    def run(_: int) -> None:
        x = _sharded(X, rows.layout((8, 5)))
        mapped = shardwise.local_map(lambda x, n: x.repeat(1, n), (rows, None), rows)
        with shardwise.trace(show=False) as told:
            assert mapped(x, 2).shape == (8, 10)
            assert mapped(x, 2).shape == (8, 10)
        assert len(told.events) == 1
        with pytest.raises(OpError, match=r'out_shapes="exchange"'):
            mapped(x, 3)
        mapped = shardwise.local_map(
            lambda x, n: x.repeat(1, n), (rows, None), rows, out_shapes="exchange"
        )
        assert [mapped(x, n).shape[1] for n in (1, 3, 2)] == [5, 15, 10]

    simulate(run, 2)


def test_given_shapes_are_checked() -> None:
    rows = _spec("chunk(0)", 2)

    def run(_: int) -> None:
        x = _sharded(X, rows.layout((8, 5)))
        assert shardwise.local_map(_cube, rows, rows, out_shapes=[(8, 5)])(x).shape == (8, 5)
        with pytest.raises(OpError, match=r"expected pieces ranks 0, 1: \(5, 5\).*\(4, 5\)"):
            shardwise.local_map(_cube, rows, rows, out_shapes=[(10, 5)])(x)

    simulate(run, 2)


def test_wrong_declarations_raise_on_every_rank() -> None:
    rows, columns = _spec("chunk(0)", 2), _spec("chunk(1)", 2)
    cyclic = _spec("block_cyclic(0, 1)", 2)

    def run(rank: int) -> None:
        x = _sharded(X, rows.layout((8, 5)))
        with pytest.raises(OpError, match="no global shape gives these pieces"):
            shardwise.local_map(lambda x: x[rank:], rows, columns)(x)
        with pytest.raises(OpError, match="no global shape"):
            shardwise.local_map(lambda x: x, rows, cyclic)(x)
        with pytest.raises(OpError, match="different numbers of pieces"):
            shardwise.local_map(torch.add, (rows, cyclic), rows)(x, shardwise.reshard(x, cyclic))
        with pytest.raises(OpError, match="dtype or requires_grad"):
            shardwise.local_map(lambda x: x.float() if rank else x, rows, rows)(x)
        with pytest.raises(ValueError, match="2 of them"):
            shardwise.local_map(torch.add, (rows, rows), rows)(x)
        with pytest.raises(TypeError, match="a spec for it in in_specs"):
            shardwise.local_map(torch.add, (rows, None), rows)(x, x)
        with pytest.raises(TypeError, match="Pass it by position"):
            shardwise.local_map(torch.add, (rows,), rows)(x, other=x)
        with pytest.raises(TypeError, match=r"plain torch.Tensor, as out_specs say"):
            shardwise.local_map(lambda x: 3, rows, rows)(x)
        with pytest.raises(ValueError, match="2 of them"):
            shardwise.local_map(lambda x: x, rows, (rows, rows))(x)
        with pytest.raises(ValueError, match="out_shapes"):
            shardwise.local_map(_cube, rows, rows, out_shapes="never")  # type: ignore[arg-type]  # wrong on purpose

    simulate(run, 2)


def test_what_is_no_spec_raises_where_it_is_written() -> None:
    rows = shardwise.chunk(0, ranks=[0, 1])
    with pytest.raises(TypeError, match=r"in_specs of local_map: expected specs.*'chunk\(0\)'"):
        shardwise.local_map(torch.sin, ("chunk(0)",), rows)
    with pytest.raises(TypeError, match="out_specs of local_map"):
        shardwise.local_map(torch.sin, rows, {"a": 3})
    with pytest.raises(ValueError, match="expected 1, one per output with a spec, got 2 shapes"):
        shardwise.local_map(torch.sin, rows, (rows, None), out_shapes=[(4,), (4,)])


def test_an_error_on_one_rank_reaches_all() -> None:
    rows = _spec("chunk(0)", 2)

    def local(x: torch.Tensor) -> torch.Tensor:
        if communicator().rank:
            raise ZeroDivisionError("a kernel of rank 1")
        return x

    def run(rank: int) -> None:
        shardwise.local_map(local, rows, rows)(_sharded(X, rows.layout((8, 5))))

    with pytest.raises(RankFailure, match=r"failed on other ranks.*a kernel of rank 1"):
        simulate(run, 2)


def test_global_shapes_are_found_for_every_spec() -> None:
    for spec in examples(specs((8, 5), world_size=4), 60):
        layout = spec.layout((8, 5))
        pieces = {rank: tuple(b.shape for b in layout.boxes_of(rank)) for rank in range(4)}
        found = find_shape(spec, pieces)
        if found is not None:  # of irregular boxes it may not be, and is asked for
            assert spec.layout(found) == layout
    for spec in (
        *map(_spec, ("chunk(0)", "chunk(1)", "replicate()", "partial()", "block_cyclic(1, 2)")),
        shardwise.grid([2, 2], ranks=[3, 1, 0, 2], device="cpu"),
        shardwise.on_rank(2, device="cpu"),
    ):
        for shape in ((8, 5), (3, 2), (1, 1), (0, 4)):
            layout = spec.layout(shape)
            pieces = {rank: tuple(b.shape for b in layout.boxes_of(rank)) for rank in range(4)}
            found = find_shape(spec, pieces)
            assert found is not None
            assert [b.shape for b in spec.layout(found).boxes] == [b.shape for b in layout.boxes]


def _on_ranks(rank: int) -> None:
    rows, whole = shardwise.chunk(0), shardwise.replicate()
    mapped = shardwise.local_map(_product, (rows, whole), rows)
    x = shardwise.distribute(X, shardwise.chunk(1)).requires_grad_()
    w = shardwise.as_replicated(W.clone()).requires_grad_()
    full = [X.clone().requires_grad_(), W.clone().requires_grad_()]
    _product(*full).square().sum().backward()
    with shardwise.implicit_comm("allow"):
        for _ in range(2):
            x.grad = w.grad = None
            y = checkpoint(mapped, x, w, use_reentrant=False)
            assert isinstance(y, ShardedTensor)
            y.square().sum().backward()
            for st, one in zip((x, w), full, strict=True):
                torch.testing.assert_close(st.grad.full_tensor(), one.grad)
    pair = dist.new_group([0, 2])
    if rank != 1:  # in a subgroup, of plain tensors only
        spec = shardwise.chunk(0, ranks=[2, 0])
        both = shardwise.local_map(lambda x: x + 1, spec, spec, process_group=pair)
        found = both(X)
        assert found.shard_layout.ranks == (0, 2)
        torch.testing.assert_close(found.full_tensor(), X + 1)
        made = shardwise.local_map(
            lambda: torch.full((2,), float(rank)), (), spec, process_group=pair
        )()
        assert made.full_tensor().tolist() == [2.0, 2.0, 0.0, 0.0]
    dist.barrier()


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_ranks, 3)


class _Halves(NamedTuple):
    """What a user's function returns, by name."""

    low: Any
    high: Any


def test_results_in_a_namedtuple_come_back_in_one() -> None:
    def run(rank: int) -> None:
        rows = shardwise.chunk(0)
        halves = shardwise.local_map(
            lambda x: _Halves(x.clamp(max=0), x.clamp(min=0)), rows, _Halves(rows, rows)
        )
        found = halves(shardwise.distribute(X, rows))
        assert type(found) is _Halves
        assert torch.equal(found.high.full_tensor(), X.clamp(min=0))

    simulate(run, 2)
