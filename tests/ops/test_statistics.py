"""What softmax, norms and losses exchange over cut dims; gradients of gradients; modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.ops.parameters import sharded
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise.comm import communicator
from shardwise.comm.simulate import simulate
from shardwise.sharding_spec import parse_spec
from shardwise.testing import Sample, check_op
from shardwise.testing.op_check import layout_kinds

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = torch.tensor([3, 0, -100, 5, 2])
WEIGHT = torch.tensor([0.5, 1.0, 1.5, 2.0, 0.7, 1.2], dtype=torch.float64)
FULL = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
# To a number; by "rows" (dim 0) or "columns" (dim 1) of which a cut is no matter of statistics.
LOSSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "softmax": (lambda x: (x.softmax(1) ** 2).sum(), "rows"),
    "log_softmax": (lambda x: (x.log_softmax(1) ** 2).sum(), "rows"),
    "layer_norm": (lambda x: (F.layer_norm(x, (6,)) ** 3).sum(), "rows"),
    "rms_norm": (lambda x: (F.rms_norm(x, (6,), WEIGHT) ** 3).sum(), "rows"),
    "group_norm": (lambda x: (F.group_norm(x, 2) ** 3).sum(), "rows"),
    "batch_norm": (
        lambda x: (F.batch_norm(x, None, None, WEIGHT, training=True) ** 3).sum(),
        "columns",
    ),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, TARGET, WEIGHT, label_smoothing=0.1),
        "rows",
    ),
}
SPECS = {"rows": "chunk(0)", "columns": "chunk(1)", "grid": "grid([2, 2])", "one": "on_rank(1)"}


def _given(full: torch.Tensor, spec: str, *, has_grad: bool = True) -> Any:
    ranks = sorted(communicator().ranks)
    layout = parse_spec(spec, ranks=ranks, device="cpu").layout(tuple(full.shape))
    return sharded(full, layout, requires_grad=has_grad)


@pytest.mark.parametrize("cut", SPECS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_gradients_are_right(name: str, cut: str) -> None:
    loss, _ = LOSSES[name]

    def on_rank(rank: int) -> None:
        x, full = _given(FULL, SPECS[cut]), FULL.clone().requires_grad_()
        for one in (x, full):
            (grad,) = torch.autograd.grad(loss(one), one, create_graph=True)
            (grad**2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad)

    simulate(on_rank, 4)


@pytest.mark.parametrize("name", LOSSES)
def test_a_graph_that_is_kept_gives_the_same_gradient_again(name: str) -> None:
    loss, _ = LOSSES[name]

    def on_rank(rank: int) -> None:
        x = _given(FULL, "chunk(1)")
        value = loss(x)
        value.backward(retain_graph=True)
        once = x.grad.full_tensor().clone()
        value.backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * once)

    simulate(on_rank, 4)


@pytest.mark.parametrize("name", LOSSES)
def test_statistics_travel_once_each_way(name: str) -> None:
    loss, free = LOSSES[name]

    def counts(spec: str) -> tuple[int, int]:
        x = _given(FULL, spec)
        with shardwise.implicit_comm("error"), shardwise.trace(show=False) as there:
            value = loss(x)
        with shardwise.trace(show=False) as back:
            value.backward()
        own = [event for event in there.events if name in event.op]
        return len(own), len(back.events)

    def on_rank(rank: int) -> None:
        cut = {"rows": "columns", "columns": "rows"}[free]
        if name == "cross_entropy":
            # Then its sums: of losses and of weights, to the rank that has no part of them.
            assert counts(SPECS[cut]) == (3, 0)
        else:
            assert counts(SPECS[free]) == (0, 0)
            assert counts(SPECS[cut]) == (1, 1)

    simulate(on_rank, 4)


def test_no_logits_travel_for_a_loss_of_many_classes() -> None:
    logits = torch.randn(4, 4096, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([0, 4095, 2048, 7])

    def on_rank(rank: int) -> None:
        x = _given(logits, "chunk(1)")
        with shardwise.implicit_comm("error"), shardwise.trace(show=False) as sent:
            loss: Any = F.cross_entropy(x, target)
            loss.backward()
        assert len(sent.events) == 1
        assert sent.total_bytes == 12 * 3 * 4 * 4  # messages, numbers per row, rows, bytes
        torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(logits, target))

    simulate(on_rank, 4)


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("cut", ["chunk(1)", "chunk(1, sizes=[2, 1, 1, 2], ranks=[0, 1, 1, 0])"])
def test_rows_of_minus_infinity_are_as_in_torch(function: Callable[..., Any], cut: str) -> None:
    full = FULL.clone()
    full[0] = -torch.inf  # all of a row
    full[1, 2:4] = -torch.inf  # all of what one rank has of it
    full[2, 0] = -torch.inf
    full[3, [0, 1, 4, 5]] = -torch.inf  # all of two pieces of a rank

    def on_rank(rank: int) -> None:
        x, reference = _given(full, cut), full.clone().requires_grad_()
        found, expected = function(x, 1), function(reference, 1)
        torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True)
        keep = expected.detach().isfinite()
        weights = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
        torch.where(keep, found.full_tensor() * weights, 0).sum().backward()
        torch.where(keep, expected * weights, 0).sum().backward()
        assert reference.grad is not None
        torch.testing.assert_close(x.grad.full_tensor()[1:], reference.grad[1:])
        target = torch.tensor([0, 1, 2, 3, 4])
        logits, reference = _given(full, cut), full.clone().requires_grad_()
        F.cross_entropy(logits[1:], target[1:]).backward()
        F.cross_entropy(reference[1:], target[1:]).backward()
        assert reference.grad is not None
        torch.testing.assert_close(logits.grad.full_tensor(), reference.grad)

    simulate(on_rank, 4)


def test_a_target_that_is_no_class_raises_as_in_torch() -> None:
    def on_rank(rank: int) -> None:
        x = _given(FULL, "chunk(1, sizes=[2, 2, 1, 1])")  # a rank without any would wait
        with pytest.raises(IndexError, match="Target 6 is out of bounds"):
            F.cross_entropy(x, torch.tensor([0, 1, 6, 2, 3]))

    simulate(on_rank, 4)


@pytest.mark.parametrize("spec", ["chunk(0)", "chunk(1)", "grid([2, 2, 1])"])
def test_modules_with_plain_parameters_are_those_of_the_whole_batch(spec: str) -> None:
    full = torch.randn(6, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    modules: list[Callable[[], nn.Module]] = [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, momentum=None),
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.LayerNorm((4, 3)),
        lambda: nn.RMSNorm(3),
    ]

    def on_rank(rank: int) -> None:
        for make in modules:
            found, expected = make().double(), make().double()
            for _ in range(2):
                result = found(_given(full, spec, has_grad=False))
                reference = expected(full)
                (result**3).sum().backward()
                (reference**3).sum().backward()
                torch.testing.assert_close(result.full_tensor(), reference)
            for one, other in zip(found.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
            for buffer, known in zip(found.buffers(), expected.buffers(), strict=True):
                assert type(buffer) is torch.Tensor
                torch.testing.assert_close(buffer, known)
            found.eval()
            expected.eval()
            result = found(_given(full, spec, has_grad=False))
            torch.testing.assert_close(result.full_tensor(), expected(full))

    simulate(on_rank, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_rms_norm_adds_by_itself_is_what_torch_adds(dtype: torch.dtype) -> None:
    full = (FULL * 1e-3).to(dtype)  # of which a larger addend would leave little

    def on_rank(rank: int) -> None:
        found: Any = F.rms_norm(_given(full, "chunk(1)", has_grad=False), (6,))
        torch.testing.assert_close(found.full_tensor(), F.rms_norm(full, (6,)))

    simulate(on_rank, 4)


def test_rms_norm_of_complex_numbers() -> None:
    shapes = ((5, 6), (6,))
    for spec in SPECS.values():
        layout = parse_spec(spec, ranks=range(4), device="cpu").layout(shapes[0])
        weight = layout_kinds(shapes[1])["replicated"]
        check_op(Sample(lambda x, w: F.rms_norm(x, (6,), w), shapes, "complex"), [layout, weight])


@pytest.mark.parametrize("spec", SPECS.values())
def test_instance_norm_of_channels_that_are_one_element(spec: str) -> None:
    """Which torch itself takes, though not by way of `torch.nn`."""

    def call(x: Any, bias: Any) -> Any:
        return torch.instance_norm(x, None, bias, None, None, True, 0.1, 1e-5, False)

    layout = parse_spec(spec, ranks=range(4), device="cpu").layout((5, 6))
    check_op(Sample(call, ((5, 6), (6,))), [layout, layout_kinds((6,))["replicated"]])


@pytest.mark.parametrize("kind", ["dim 0", "dim 2"])
@pytest.mark.parametrize("where", ["uneven, permuted, one empty", "on one rank, in pieces"])
def test_weights_beside_dims_of_size_one_are_used_once(kind: str, where: str) -> None:
    shape = (1, 5, 1, 2)
    layout = layout_kinds(shape)[f"{kind} {where}"]  # all boxes but one have no elements
    check_op(
        Sample(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (shape, (5,), (5,))),
        [layout, *[layout_kinds((5,))["replicated"]] * 2],
    )


@pytest.mark.parametrize("spec", ["chunk(0)", "chunk(1)"])
def test_gradients_in_evaluation_are_by_the_statistics_of_that_time(spec: str) -> None:
    full = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def on_rank(rank: int) -> None:
        module = nn.BatchNorm1d(4).double().eval()
        x = _given(full, spec)
        loss: Any = (module(x) ** 2).sum()
        module.train()(x.detach())  # which moves the running statistics
        loss.backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * full / (1 + module.eps))

    simulate(on_rank, 4)


def test_norms_of_what_cannot_be_raise_on_all_ranks() -> None:
    def on_rank(rank: int) -> None:
        x, short = _given(FULL, "chunk(1)"), _given(FULL[0, :4], "chunk(0)", has_grad=False)
        one = _given(FULL[:1], "chunk(1)")
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            F.batch_norm(one, None, None, training=True)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            F.group_norm(one, 6)
        with pytest.raises(ValueError, match="both or none"):
            F.batch_norm(x, torch.zeros(6).double(), None, training=True)
        with pytest.raises(RuntimeError, match=r"weight of batch_norm: expected shape \(6,\)"):
            F.batch_norm(x, None, None, short, training=True)
        with pytest.raises(IndexError, match="Dimension out of range"):
            torch.softmax(x, 2)

    simulate(on_rank, 4)


def test_targets_of_other_dtypes_are_as_in_torch() -> None:
    target = torch.tensor([3, 0, 1, 5, 2])

    def on_rank(rank: int) -> None:
        x = _given(FULL, "chunk(1)")
        found: Any = F.cross_entropy(x, target.to(torch.uint8))
        torch.testing.assert_close(found.full_tensor(), F.cross_entropy(FULL, target))
        with pytest.raises(RuntimeError, match="target of a loss"):
            F.cross_entropy(x, target.to(torch.int32))

    simulate(on_rank, 4)


def test_torchs_own_batch_norm_that_is_gathered_writes_no_weights() -> None:
    def on_rank(rank: int) -> None:
        x, weight = _given(FULL, "chunk(0)"), _given(FULL[0], "chunk(0)")
        mean = _given(FULL[1], "replicate()", has_grad=False)
        var = _given(FULL[2] ** 2, "replicate()", has_grad=False)
        with shardwise.implicit_comm("allow"):
            result: Any = torch.native_batch_norm(x, weight, None, mean, var, True, 0.1, 1e-5)[0]
        expected = F.batch_norm(FULL, None, None, FULL[0], training=True)
        torch.testing.assert_close(result.full_tensor(), expected)

    simulate(on_rank, 4)
