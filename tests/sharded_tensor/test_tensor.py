"""What a person expects of a tensor object: it works, without communication, or says why not."""

from __future__ import annotations

import copy
import operator
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.simulate import simulate
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor import ShardedTensor, implicit
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.implicit import ImplicitCommWarning, announce

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = torch.arange(15.0).view(5, 3)


def rows(**options: Any) -> Any:
    return shardwise.distribute(FULL.clone(), shardwise.chunk(0, **options))


def _says(rank: int) -> str:
    """All of it on one rank alone: a communication would hang."""
    x = rows()
    uneven = rows(sizes=[4, 0, 1])
    everywhere = shardwise.as_replicated(torch.tensor([7.5]))
    number = shardwise.as_replicated(torch.tensor(7.5))
    elsewhere = shardwise.distribute(torch.tensor(7), shardwise.on_rank(1))
    nothing = sharded_tensor.zeros(shardwise.chunk(0), 0)
    dist.barrier()
    if rank != 1:
        dist.barrier()
        return ""
    assert x.shape == torch.Size([5, 3])
    assert (x.size(0), x.size(), x.dim(), x.ndim, x.numel(), len(x)) == (5, x.shape, 2, 2, 15, 5)
    assert (x.dtype, x.device, x.layout) == (torch.float32, torch.device("cpu"), torch.strided)
    assert (x.itemsize, x.element_size(), x.nbytes) == (4, 4, 60)
    assert x.is_floating_point()
    assert torch.is_floating_point(x)
    assert not x.is_complex()
    assert x.is_contiguous()
    assert not x.is_meta
    assert not x.is_cuda
    assert not x.is_sparse
    assert not x.is_pinned()
    assert x.stride() == (3, 1)
    assert x.type() == "torch.FloatTensor"
    assert not x.requires_grad
    assert x.is_leaf
    assert x.grad is None
    assert x.grad_fn is None
    assert hash(x) == id(x)
    assert {x: 1}[x] == 1
    assert uneven.local_tensor().shape == (0, 3)
    assert x.contiguous() is x
    assert x.to(torch.float32) is x
    assert x.cpu() is x
    assert bool(everywhere)
    assert (everywhere.item(), float(everywhere), int(everywhere)) == (7.5, 7.5, 7)
    assert everywhere.tolist() == [7.5]
    assert everywhere.numpy()[0] == 7.5
    assert everywhere.data_ptr() == everywhere.local_tensor().data_ptr()
    for name in ("numpy", "tolist", "data_ptr", "storage", "untyped_storage", "__array__"):
        with pytest.raises(OpError, match=rf"\[rank 1\] .*{name}.*full_tensor"):
            getattr(x, name)()
    assert not hasattr(x, "__cuda_array_interface__")  # as of any tensor on the CPU
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        bool(x)
    with pytest.raises(RuntimeError, match="no values is ambiguous"):
        bool(nothing)
    assert f"{number:.2f}" == "7.50"
    with pytest.raises(OpError, match=r"the number, as '.2f', .*not on every rank.*st.full_tensor"):
        f"{elsewhere:.2f}"
    asks: list[Callable[[Any], Any]] = [
        bool,
        int,
        float,
        complex,
        operator.index,
        torch.is_nonzero,
        torch.Tensor.item,
    ]
    for ask in asks:  # also on the rank that has the number
        with pytest.raises(OpError, match=r"\[rank 1\] .*every rank.*st.full_tensor\(\).item\(\)"):
            ask(elsewhere)
    assert elsewhere.numpy() == 7
    with pytest.raises(RuntimeError, match="a Tensor with 15 elements cannot be converted"):
        x.item()
    strict = shardwise.implicit_comm("error")
    with strict, pytest.raises(OpError, match=r"renorm gathers.*120 B.*custom_sharded_op_impl"):
        torch.renorm(x, 2, 0, 1.0)
    with pytest.raises(OpError, match="each rank would draw its own numbers"):
        torch.poisson(x)
    clone, data, detached = x.clone(), x.data, x.detach()
    assert clone.local_tensor().data_ptr() != x.local_tensor().data_ptr()
    assert data.local_tensor().data_ptr() == x.local_tensor().data_ptr()
    assert detached.local_tensor().data_ptr() == x.local_tensor().data_ptr()
    x.zero_()
    assert data.local_tensor().sum() == 0
    x.fill_(3)
    assert x.data.local_tensor().sum() == 18
    version = x._version
    x.fill_(4)
    assert x._version == version + 1
    dist.barrier()
    return repr(x)


def test_a_tensor_speaks_for_itself_without_asking_other_ranks() -> None:
    _, text, _ = shardwise.run_local(_says, 3)
    assert text == (
        "ShardedTensor((5, 3), torch.float32, ChunkShardingSpec: Layout((5, 3): grid 3x1, "
        "ranks 0-2), "
        "rank 1 holds [2:4, 0:3] on cpu)"
    )


def _autograd(rank: int) -> None:
    x = rows(sizes=[4, 0, 1])
    x = shardwise.reshard(x, shardwise.chunk(0, sizes=[4, 1], ranks=[2, 0]))  # rank 1 has none
    p: Any = torch.nn.Parameter(x)
    assert isinstance(p, torch.nn.Parameter)
    assert p.requires_grad
    assert p.is_leaf
    assert not x.requires_grad
    p.full_tensor().sum().backward()
    assert isinstance(p.grad, ShardedTensor)  # on rank 1 too, which holds nothing
    assert torch.equal(p.grad.full_tensor(), torch.ones(5, 3))
    p.grad = p.grad.clone().fill_(2)
    assert torch.equal(p.grad.full_tensor(), 2 * torch.ones(5, 3))
    with pytest.raises(ArgumentTypeError, match="a ShardedTensor or None"):
        p.grad = torch.ones(5, 3)
    other = shardwise.reshard(p.grad, shardwise.chunk(1))
    with pytest.raises(ArgumentValueError, match=r"shardwise.reshard\(grad, st\)"):
        p.grad = other
    p.grad = None
    assert p.grad is None
    p.requires_grad = False
    assert not p.requires_grad
    p.requires_grad_()
    y = shardwise.reshard(p, shardwise.replicate())
    assert (y.is_leaf, y.requires_grad) == (False, True)
    assert y.grad_fn is not None
    y.retain_grad()
    (y.full_tensor() ** 2).sum().backward(retain_graph=True)
    assert torch.equal(y.grad.full_tensor(), 2 * FULL)
    p.grad = None
    y.backward(gradient=other)  # in another layout
    assert torch.equal(p.grad.full_tensor(), 2 * torch.ones(5, 3))
    (grad,) = torch.autograd.grad(shardwise.reshard(p, y), p, torch.ones(5, 3))
    assert torch.equal(grad.full_tensor(), torch.ones(5, 3))
    loss = shardwise.distribute(torch.tensor(2.0).requires_grad_(), shardwise.on_rank(1))
    torch.autograd.backward(shardwise.reshard(loss, shardwise.replicate()))
    assert loss.grad.full_tensor() == 1
    with pytest.raises(RuntimeError, match="implicitly created only for scalar outputs"):
        y.backward()
    with torch.no_grad():
        p.copy_(shardwise.reshard(x, shardwise.chunk(1)))
        p.copy_(torch.tensor([1.0, 2.0, 3.0]))  # as torch broadcasts
    assert torch.equal(p.full_tensor(), torch.tensor([1.0, 2.0, 3.0]).expand(5, 3))
    with pytest.raises(ArgumentValueError, match=r"broadcasts to \(5, 3\).*\(2, 3\)"):
        x.copy_(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        p.fill_(1)
    p.grad = None
    p.data = shardwise.distribute(FULL.double(), shardwise.chunk(1))  # another layout and dtype
    assert (p.dtype, p.requires_grad, p.is_leaf) == (torch.float64, True, True)
    assert torch.equal(p.full_tensor(), FULL.double())
    assert copy.deepcopy(p).requires_grad
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(y)


def test_autograd_attributes_speak_for_the_local_tensors() -> None:
    shardwise.run_local(_autograd, 3)


def _bypassed(_: int) -> list[str]:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    x = rows().requires_grad_()
    found = []
    lost: Any = Double.apply(x)
    for use in (torch.clone, lambda t: shardwise.reshard(t, shardwise.chunk(1))):
        with pytest.raises(OpError, match=r"autograd.Function.*local tensors") as caught:
            use(lost)
        found.append(str(caught.value))
    with pytest.raises(OpError, match="past the sharded functions"):
        torch.vmap(lambda row: row.clone())(x.detach())
    with pytest.raises(Exception, match=r"full_tensor|sharded"):
        torch.func.grad(lambda t: t.full_tensor().sum())(x)
    return found


def test_what_bypasses_torch_functions_is_refused() -> None:
    shardwise.run_local(_bypassed, 2)


def _compared(_: int) -> None:
    x = rows()
    columns = shardwise.reshard(x, shardwise.chunk(1))
    summed = shardwise.reshard(x, shardwise.partial())
    for other in (x, x.clone(), columns, summed, FULL):
        assert torch.equal(x, other)
        assert torch.allclose(x, other)
        if isinstance(other, ShardedTensor):
            torch.testing.assert_close(x, other)
    assert torch.equal(summed, summed)
    off = FULL.clone()
    off[4, 2] += 1  # on the last rank only
    other = shardwise.distribute(off, shardwise.chunk(1))
    assert not torch.equal(x, other)
    assert not torch.allclose(x, other)
    assert torch.allclose(x, other, atol=2)
    assert not torch.equal(x, shardwise.distribute(FULL[:4].clone(), shardwise.chunk(0)))
    assert torch.isclose(x, other).full_tensor().sum() == 14
    allowed = shardwise.implicit_comm("allow")
    with allowed, pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 15"):
        torch.testing.assert_close(x, other)
    one = shardwise.distribute(torch.tensor([4.0]), shardwise.on_rank(1))
    assert one.full_tensor().item() == 4.0
    with pytest.raises(OpError, match=r"st.full_tensor\(\).item\(\)"):
        bool(one)


def test_tensors_of_any_two_layouts_are_compared() -> None:
    shardwise.run_local(_compared, 3)


def _moved(_: int) -> None:
    x = rows().requires_grad_()
    for name, dtype in (("half", torch.float16), ("double", torch.float64), ("long", torch.int64)):
        y: Any = getattr(x, name)()
        assert y.dtype == dtype
        assert y.metadata().tensor_properties.dtype == dtype
        assert torch.equal(y.full_tensor().float(), FULL)
    y = x.to("cpu", torch.float64)
    assert y.dtype == torch.float64
    y.full_tensor().sum().backward()
    assert x.grad.dtype == torch.float32
    assert x.to(torch.float32, copy=True) is not x
    assert x.to(y).dtype == torch.float64
    assert x.type_as(y).dtype == torch.float64
    assert x.to(dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16
    assert torch.ones(2).to(y).dtype == torch.float64
    meta = x.to("meta")
    assert meta.is_meta
    assert meta.sharding_spec() == shardwise.chunk(0, device="meta")
    back = torch.empty_like(meta, device="cpu")
    assert back.sharding_spec() == shardwise.chunk(0)
    assert back.local_tensor().device.type == "cpu"
    for like, value in ((torch.zeros_like, 0), (torch.ones_like, 1)):
        made = like(x, dtype=torch.int32)
        assert made.dtype == torch.int32
        assert made._state.process_group is x._state.process_group
        assert torch.equal(made.full_tensor(), torch.full((5, 3), value, dtype=torch.int32))
    assert torch.equal(torch.full_like(x, 2.5).full_tensor(), torch.full((5, 3), 2.5))
    summed = torch.ones_like(shardwise.reshard(x.detach(), shardwise.partial()))
    assert torch.equal(summed.full_tensor(), torch.ones(5, 3))
    with pytest.raises(TypeError, match=r"ShardedTensor.to\(\) have wrong arguments"):
        x.to("nonsense")
    with pytest.raises(RuntimeError, match=r"Only `torch.contiguous_format`"):
        x.to("cpu", memory_format=torch.channels_last)


def test_tensors_change_dtype_and_device_in_place_of_their_ranks() -> None:
    shardwise.run_local(_moved, 2)


def _without_rules(rank: int) -> None:
    x = rows().requires_grad_()
    with shardwise.implicit_comm("allow"):  # what torch imports now may forget who was warned
        torch.renorm(x, 2, 0, 1.0) + x.new_ones(3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            y = torch.renorm(x, 2, 0, 1.0)
            y = y + x.new_ones(3)  # rules are asked in between
    # Once for a line of code, and one rank tells it for all.
    assert [str(one.message)[:20] for one in told] == ["torch.renorm gathers"] * (rank == 0)
    assert all("120 B between ranks" in str(one.message) for one in told)
    y = y - 1
    with shardwise.implicit_comm("allow"):
        (y * x + 1).sum().backward()
        full = FULL.clone().requires_grad_()
        (torch.renorm(full, 2, 0, 1.0) * full + 1).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad)
        z = x.detach().clone()
        z[1] = 5
        z += 1
        z.mul_(2)
        expected = FULL.clone()
        expected[1] = 5
        assert torch.equal(z.full_tensor(), (expected + 1) * 2)
        assert z.shard_layout == x.shard_layout
        values, indices = torch.sort(x, dim=0, descending=True)
        assert torch.equal(values.full_tensor(), FULL.flip(0))
        assert indices.dtype == torch.int64
        assert torch.add(x.detach(), 1, out=z) is z
        assert torch.equal(z.full_tensor(), FULL + 1)


def test_what_moves_unasked_is_told_once_per_function_and_line() -> None:
    def run(rank: int) -> int:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            for n in range(4, 7):  # other sizes make other words
                x, y = (sharded_tensor.ones(shardwise.chunk(dim), n, n) for dim in (0, 1))
                with warnings.catch_warnings():  # after which Python forgets what it has shown
                    pass
                (x + y) * y  # two functions
        return len(told)

    assert shardwise.run_local(run, 2) == [2, 0]


def test_filters_that_show_every_warning_or_raise_it_do_so_at_each_call() -> None:
    rows = Layout((2, 2), [Box((0, 0), (2, 2))], [0])

    def told_under(action: Any) -> int:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter(action)
            for n in range(3):
                announce(torch.add, [rows], n, 0)
        return len(told)

    assert told_under("ignore") == 0  # which is not to have shown it
    for _ in range(2):
        with pytest.raises(ImplicitCommWarning):
            told_under("error")
    assert [told_under("default"), told_under("default"), told_under("always")] == [1, 0, 3]
    with pytest.raises(ImplicitCommWarning):
        told_under("error")


def test_lines_that_were_told_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implicit, "_MOST_KEPT", 3)
    rows = Layout((2, 2), [Box((0, 0), (2, 2))], [0])
    names = {"announce": announce, "add": torch.add, "rows": rows, "__name__": "cells"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for k in range(10):
            exec(compile("announce(add, [rows], 8, 0)", f"<cell {k}>", "exec"), dict(names))
    assert len(told) == 10
    assert len(implicit._TOLD.get()) <= 3


def test_functions_without_a_rule_compute_on_the_full_tensor() -> None:
    shardwise.run_local(_without_rules, 3)


def test_a_function_is_called_by_the_name_that_people_write() -> None:
    assert function_name(torch.mm) == "torch.mm"  # of the same C code as torch.spmm
    assert function_name(torch.Tensor.add) == "torch.Tensor.add"
    of_python: Any = torch.Tensor.__cuda_array_interface__
    of_c: Any = torch.Tensor.shape
    assert function_name(of_python.__get__) == "torch.Tensor.__cuda_array_interface__"
    assert function_name(of_c.__get__) == "torch.Tensor.shape"
    assert function_name(torch._foreach_add) == "torch._foreach_add"
    assert function_name(torch.Tensor.split) == "torch.Tensor.split"
    assert function_name(torch.ops.aten.add) == "aten.add"
    assert function_name([].append) == "list.append"


def test_without_a_process_group_a_creating_call_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"torchrun.*run_local.*init_single\(\)"):
        sharded_tensor.ones(shardwise.chunk(0, ranks=[0]), 4)


def test_simulated_ranks_have_sharded_tensors_too() -> None:
    def run(_: int) -> torch.Tensor:
        x = shardwise.distribute(FULL, shardwise.chunk(0, ranks=range(8)))
        return shardwise.reshard(x, shardwise.chunk(1, ranks=range(8))).full_tensor()

    simulation = simulate(run, 8)
    assert all(torch.equal(full, FULL) for full in simulation.results)


def test_nothing_warns_when_a_tensor_is_made_and_printed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardwise.run_local(lambda _: str(rows()), 2)
