"""Functions along a cut dim, beside hand-written communication and DTensor: a part of `ops.py`.

"cross_entropy" is a loss over many classes, the logits cut by class: by hand as loss-parallel code
does it (local maximum, all-reduce, sum of exponentials and the target's logit, all-reduce; the
gradient in place), by DTensor's loss_parallel, ours, and with the logits gathered first. Peak
memory is the growth of the largest rank's resident memory over one run, gradient included.
"layer_norm" is over a cut dim, by hand with one all-reduce each way for the statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from benchmarks.harness import Case, Result, measure
from benchmarks.ranks import clock, mesh, most_over_ranks
from benchmarks.tensor_parallel import loss_of_parts
from shardwise.testing.memory import peak_growth

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.harness import System
    from benchmarks.report import Options, Report

HAND, DTENSOR, GATHERED = "by hand", "DTensor", "gathered"
PEAK, EXCHANGES = "peak, % of gathered", "exchanges, forward"
CROSS_ENTROPY = (512, 128 * 1024)  # tokens, classes
LAYER_NORM = (2048, 4096)  # rows, of which the second dim is cut


def functions_along_cut_dims(rank: int, options: Options) -> list[Result]:
    """All cases on this rank's group."""
    return [cross_entropy(rank, options), layer_norm(rank, options)]


def bars_along_cut_dims(report: Report) -> None:
    group = group_of(4)
    report.check_ratio("cross_entropy, both ways", group=group, system=HAND, limit=1.2)
    report.check_count(PEAK, system="ours", limit=100 / 3, unit="%")
    report.check_count(EXCHANGES, system="ours", limit=2, unit="")


def group_of(world_size: int) -> str:
    return f"along a cut dim, {world_size} ranks"


def _measured(
    name: str,
    systems: Mapping[str, System | str | None],
    options: Options,
    counts: Mapping[str, Mapping[str, int]],
) -> Result:
    case = Case(name, systems, group=group_of(dist.get_world_size()), counts=counts)
    return measure(case, repeats=options.repeats, budget_s=options.budget_s * 2, clock=clock())


def _agree(
    systems: Mapping[str, Callable[[], Any]],
    expected: tuple[torch.Tensor, ...],
    rank: int,
    dim: int,
) -> None:
    """Every system gives these values, and on this rank this part of the gradient."""
    value, gradient = expected
    part = gradient.chunk(dist.get_world_size(), dim)[rank]
    for name, run in systems.items():
        found, grad = run()
        torch.testing.assert_close(found, value, atol=1e-4, rtol=1e-4, msg=name)
        torch.testing.assert_close(grad, part, atol=1e-5, rtol=1e-3, msg=name)


# -- cross_entropy ---------------------------------------------------------------------------------


def cross_entropy(rank: int, options: Options) -> Result:
    world_size = dist.get_world_size()
    tokens, classes = (64, 4096) if options.quick else CROSS_ENTROPY
    generator = torch.Generator().manual_seed(5)
    full = torch.randn(tokens, classes, generator=generator)
    target = torch.randint(classes, (tokens,), generator=generator)
    local = full.chunk(world_size, 1)[rank].contiguous()
    systems = {
        "ours": _ours_loss(local, target, full.shape),
        HAND: _hand_loss(local, target),
        DTENSOR: _dtensor_loss(local, target),
        GATHERED: _gathered_loss(local, target),
    }
    reference = full.requires_grad_()
    loss = F.cross_entropy(reference, target)
    loss.backward()
    assert reference.grad is not None
    _agree(systems, (loss.detach(), reference.grad), rank, 1)
    del reference, loss, full
    peaks = {name: _peak(run) for name, run in systems.items()}
    percent = {name: round(100 * peak / peaks[GATHERED]) for name, peak in peaks.items()}
    return _measured("cross_entropy, both ways", systems, options, {PEAK: percent})


def _peak(run: System) -> int:
    run()
    dist.barrier()
    return most_over_ranks(peak_growth(run))


def _columns(local: torch.Tensor, shape: torch.Size) -> Any:
    """The tensor of `shape` whose columns are cut, without copying this rank's."""
    spec = shardwise.chunk(1)
    return shardwise.sharded_tensor.ShardedTensor._init_from_local_tensor(local, spec, *shape)


def _ours_loss(local: torch.Tensor, target: torch.Tensor, shape: torch.Size) -> Callable[[], Any]:
    def run() -> Any:
        logits = _columns(local, shape).requires_grad_()
        loss: Any = F.cross_entropy(logits, target)
        loss.backward()
        return loss.full_tensor().detach(), logits.grad.local_tensor()

    return run


def _hand_loss(local: torch.Tensor, target: torch.Tensor) -> Callable[[], Any]:
    def run() -> Any:
        logits = local.detach().requires_grad_()
        loss = loss_of_parts(logits, target)
        loss.backward()
        return loss.detach(), logits.grad

    return run


def _dtensor_loss(local: torch.Tensor, target: torch.Tensor) -> Callable[[], Any]:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    devices = mesh()

    def run() -> Any:
        logits = local.detach().requires_grad_()
        whole = DTensor.from_local(logits, devices, [Shard(1)])
        with loss_parallel():
            loss: Any = F.cross_entropy(whole, target)
            loss.backward()
        return loss.full_tensor().detach(), logits.grad

    return run


def _gathered_loss(local: torch.Tensor, target: torch.Tensor) -> Callable[[], Any]:
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def run() -> Any:
        parts = [torch.empty_like(local) for _ in range(world_size)]
        dist.all_gather(parts, local)
        logits = torch.cat(parts, 1).requires_grad_()
        del parts
        loss = F.cross_entropy(logits, target)
        loss.backward()
        assert logits.grad is not None
        return loss.detach(), logits.grad.chunk(world_size, 1)[rank]

    return run


# -- layer_norm ------------------------------------------------------------------------------------


class _LayerNormByHand(torch.autograd.Function):
    """One all-reduce each way: sums and sums of squares there, two sums of the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int) -> torch.Tensor:
        sums = torch.stack([x.sum(1), x.square().sum(1)])
        dist.all_reduce(sums)
        mean = sums[0] / width
        rstd = (sums[1] / width - mean * mean + 1e-5).rsqrt()
        ctx.width = width
        ctx.save_for_backward(x, mean, rstd)
        return (x - mean[:, None]) * rstd[:, None]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, mean, rstd = ctx.saved_tensors
        normal = (x - mean[:, None]) * rstd[:, None]
        sums = torch.stack([grad.sum(1), (grad * normal).sum(1)])
        dist.all_reduce(sums)
        mean_grad, mean_product = sums / ctx.width
        return (grad - mean_grad[:, None] - normal * mean_product[:, None]) * rstd[:, None], None


def layer_norm(rank: int, options: Options) -> Result:
    world_size = dist.get_world_size()
    rows, width = (64, 256) if options.quick else LAYER_NORM
    generator = torch.Generator().manual_seed(6)
    full = torch.randn(rows, width, generator=generator)
    slope = torch.randn(rows, width, generator=generator)
    x, upstream = (one.chunk(world_size, 1)[rank].contiguous() for one in (full, slope))
    systems = {
        "ours": _ours_norm(x, upstream, full.shape),
        HAND: _hand_norm(x, upstream, width),
        DTENSOR: _dtensor_norm(x, upstream, width),
    }
    reference = full.requires_grad_()
    y = F.layer_norm(reference, (width,))
    (y * slope).sum().backward()
    assert reference.grad is not None
    _agree(systems, (y.detach().chunk(world_size, 1)[rank], reference.grad), rank, 1)
    given = _columns(x, full.shape)
    with shardwise.trace(show=False) as sent:
        F.layer_norm(given, (width,))
    counts = {EXCHANGES: {"ours": len(sent.events)}}
    return _measured("layer_norm, both ways", systems, options, counts)


def _ours_norm(x: torch.Tensor, slope: torch.Tensor, shape: torch.Size) -> Callable[[], Any]:
    upstream = _columns(slope, shape)

    def run() -> Any:
        given = _columns(x, shape).requires_grad_()
        y: Any = F.layer_norm(given, (shape[1],))
        y.backward(upstream)
        return y.local_tensor().detach(), given.grad.local_tensor()

    return run


def _hand_norm(x: torch.Tensor, slope: torch.Tensor, width: int) -> Callable[[], Any]:
    def run() -> Any:
        given = x.detach().requires_grad_()
        y = _LayerNormByHand.apply(given, width)  # type: ignore[no-untyped-call]  # torch's
        y.backward(slope)
        return y.detach(), given.grad

    return run


def _dtensor_norm(x: torch.Tensor, slope: torch.Tensor, width: int) -> Callable[[], Any]:
    from torch.distributed.tensor import DTensor, Shard

    devices = mesh()
    upstream = DTensor.from_local(slope, devices, [Shard(1)])

    def run() -> Any:
        given = x.detach().requires_grad_()
        y: Any = F.layer_norm(DTensor.from_local(given, devices, [Shard(1)]), (width,))
        y = y.redistribute(devices, [Shard(1)])  # it has gathered its input
        y.backward(upstream)
        return y.to_local().detach(), given.grad

    return run
