"""What goes past the sharded functions is refused on every rank, or right: never silently wrong."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import shardwise

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = torch.arange(1.0, 13.0).view(4, 3)
_checkpoint: Any = checkpoint


def leaf(spec: Any = None) -> Any:
    return shardwise.distribute(FULL.clone(), spec or shardwise.chunk(0)).requires_grad_()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


class _Unwrapped(torch.autograd.Function):
    """From a sharded tensor to a plain one."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.full_tensor() * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


Doubled: Any = _Doubled
Unwrapped: Any = _Unwrapped


class Scaled(torch.nn.Module):
    """A module whose parameter is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(leaf())

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # types, since torch.jit reads them
        return x * self.weight


def _hooked(pre: bool) -> Any:
    module = Scaled()
    if pre:
        module.register_full_backward_pre_hook(lambda *_: None)
    else:
        module.register_full_backward_hook(lambda *_: None)
    return module(leaf())


def _dual() -> Any:
    x = leaf().detach()
    with forward_ad.dual_level():
        return forward_ad.make_dual(x, x)


def _dual_beside() -> Any:
    x = leaf().detach()
    with forward_ad.dual_level():
        return forward_ad.make_dual(FULL, FULL) * x


def _vmap_beside() -> Any:
    x = leaf().detach()
    return torch.func.vmap(lambda row: x + row)(FULL)


def _grad_beside() -> Any:
    x = leaf().detach()
    return torch.func.grad(lambda plain: (plain * x).full_tensor().sum())(FULL)


# Each of them as a thing that raises, with what the message says.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "autograd.Function, used": (lambda: Doubled.apply(leaf()) + 1, "autograd.Function"),
    "autograd.Function, gathered": (lambda: Doubled.apply(leaf()).full_tensor(), "gradients"),
    "autograd.Function, backward": (
        lambda: Doubled.apply(leaf()).backward(FULL),
        "code that its gradients cannot follow",
    ),
    "autograd.Function, plain result": (
        lambda: Unwrapped.apply(leaf()).sum().backward(),
        "past its local tensors, and would be lost",
    ),
    "autograd.Function, of a result": (
        lambda: Unwrapped.apply(leaf() * 2).sum().backward(),
        "past its local tensors, and would be lost",
    ),
    "full backward hook": (lambda: _hooked(pre=False).full_tensor(), "full backward hook"),
    "full backward pre-hook": (lambda: _hooked(pre=True).full_tensor(), "full backward hook"),
    "reentrant checkpointing": (
        lambda: _checkpoint(lambda x: x * 2, leaf(), use_reentrant=True).full_tensor(),
        "use_reentrant=False",
    ),
    "reentrant checkpointing, plain result": (
        lambda: (
            _checkpoint(lambda x: (x * 2).full_tensor(), leaf(), use_reentrant=True)
            .sum()
            .backward()
        ),
        "past its local tensors",
    ),
    "torch.func.grad": (
        lambda: torch.func.grad(lambda x: (x * x).sum())(leaf()),
        "torch.func",
    ),
    "torch.func.grad, beside": (_grad_beside, "under torch.func"),
    "torch.func.vjp": (lambda: torch.func.vjp(lambda x: x * x, leaf()), "torch.func"),
    "torch.func.jvp": (
        lambda: torch.func.jvp(lambda x: x * 2, (leaf(),), (leaf(),)),
        "under torch.func",
    ),
    "torch.func.jacrev": (lambda: torch.func.jacrev(lambda x: x * 2)(leaf()), "torch.func"),
    "torch.func.vmap": (lambda: torch.func.vmap(lambda x: x * 2)(leaf()), "vmap"),
    "torch.func.vmap, beside": (_vmap_beside, "under torch.func"),
    "forward-mode AD": (_dual, "under forward-mode AD"),
    "forward-mode AD, beside": (_dual_beside, "under forward-mode AD"),
    "batched gradients": (
        lambda: torch.autograd.grad(leaf() * 2, leaf(), FULL[None], is_grads_batched=True),
        "is_grads_batched",
    ),
    "torch.jit.trace": (
        lambda: torch.jit.trace(lambda x: x * 2, (leaf().detach(),), check_trace=False),
        "under torch.jit.trace",
    ),
    "torch.jit.trace, with gradient": (
        lambda: torch.jit.trace(lambda x: x * 2, (leaf(),), check_trace=False),
        "under torch.jit.trace",
    ),
    "torch.jit.script of a module": (
        lambda: torch.jit.script(Scaled())(FULL),
        "failed in the TorchScript interpreter",  # which does not hand on why
    ),
    "torch.compile of a module": (
        lambda: torch.compile(Scaled(), backend="aot_eager")(FULL),
        r"torch.compile of a function of ShardedTensors.*torch.compiler.disable",
    ),
    "torch.compile of a function": (
        lambda: torch.compile(lambda x: x * 2, backend="eager")(leaf()),
        r"torch.compile of a function of ShardedTensors",
    ),
    "torch.compile, replicated": (
        lambda: torch.compile(lambda x: x * 2, backend="aot_eager")(leaf(shardwise.replicate())),
        r"torch.compile of a function of ShardedTensors",
    ),
}


def _refused(_: int) -> None:
    shardwise.implicit_comm("allow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its parts that are to go
        for name, (call, text) in REFUSED.items():
            with pytest.raises(RuntimeError) as raised:
                call()
            assert re.search(text, str(raised.value)), f"{name}: {raised.value}"


def test_what_bypasses_the_sharded_functions_is_refused_on_every_rank() -> None:
    shardwise.run_local(_refused, 2, timeout=240)


def _right(_: int) -> None:
    """What looks alike, but goes through the sharded functions."""
    shardwise.implicit_comm("allow")
    x, weight = leaf(), leaf(shardwise.chunk(1))
    y: Any = torch.func.functional_call(Scaled(), {"weight": weight}, (x,))
    y.full_tensor().sum().backward()
    assert torch.equal(x.grad, FULL)
    assert torch.equal(weight.grad, FULL)

    # A hook of a module that takes and gives plain tensors sees those.
    class Inner(Scaled):
        def forward(self, x: Any) -> Any:
            return (x * self.weight).full_tensor()

    seen: list[int] = []
    module: Any = Inner()
    module.register_full_backward_hook(lambda *_: seen.append(1))
    module(FULL.clone().requires_grad_()).sum().backward()
    assert seen == [1]
    assert torch.equal(module.weight.grad, FULL)

    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        y = (x * x).full_tensor()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * FULL)

    grads: list[Any] = []
    x = leaf()
    torch.autograd.graph.register_multi_grad_hook([x], grads.extend)
    (x * 3).full_tensor().sum().backward()
    assert [torch.equal(grad, torch.full((4, 3), 3.0)) for grad in grads] == [True]

    function = torch.autograd.functional
    jacobian: Any = function.jacobian(lambda x: (x * x).full_tensor().sum(), leaf())
    assert torch.equal(jacobian, 2 * FULL)
    found: Any = function.jvp(lambda x: x * x, leaf(), leaf().detach())
    assert torch.equal(found[1], 2 * FULL * FULL)

    disabled = torch.compiler.disable(lambda x: x * 2)
    x = leaf()
    disabled(x).full_tensor().sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))


def test_what_goes_through_the_sharded_functions_is_right() -> None:
    shardwise.run_local(_right, 2, timeout=120)
