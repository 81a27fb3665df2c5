"""Running backward: `backward` and `torch.autograd.grad` of sharded tensors, on local ones."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import has_functorch, has_modes, run_backward
from shardwise.comm.differentiable import Exchange, exchange
from shardwise.comm.term_gradients import scale_terms
from shardwise.errors import ArgumentValueError, OpError
from shardwise.geometry import Layout
from shardwise.sharded_tensor.autograd import gradient_state
from shardwise.sharded_tensor.carrying_out import as_one_graph
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.resharding import cut_state, reshard_state
from shardwise.sharded_tensor.telling import tell_others
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.sharded_tensor.usable import live_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.sharded_tensor.state import State

__all__: list[str] = []

_Tensor: Any = torch.Tensor


@handles(_Tensor.backward)
def _backward(
    tensor: ShardedTensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> None:
    state = live_state(tensor)
    if (
        gradient is not None
        or inputs is not None
        or has_functorch()
        or has_modes()
        or not _are_ones(state)
    ):
        _backward_of_all(tensor, gradient, retain_graph, create_graph, inputs=inputs)
        return
    carriers = state.carriers
    ones = [torch.ones_like(one) if one.requires_grad else None for one in carriers]
    if retain_graph is None:
        retain_graph = create_graph
    try:  # as `_heard`, without a context, which is seen in a small backward
        run_backward(
            carriers,
            tuple(ones),
            retain_graph,
            create_graph,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    except Exception as problem:
        tell_others(state, problem, "backward")
        raise


# As a method, since the way by which torch asks for it takes longer than many a backward.
ShardedTensor.backward = _backward  # type: ignore[assignment]  # of sharded tensors only


def _are_ones(state: State) -> bool:
    """Whether the gradients that backward starts with are those that torch would take itself."""
    if state.layout.pending == "avg" or not state.carriers[0].dtype.is_floating_point:
        return False
    return all([carrier.dim() == 0 for carrier in state.carriers])


@handles(torch.autograd.backward)
def _backward_of_all(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> None:
    sources = _listed(tensors)
    given = grad_variables if grad_tensors is None else grad_tensors
    outputs, grads = _flattened(sources, [None] * len(sources) if given is None else _listed(given))
    leaves = None if inputs is None else [c for t in _listed(inputs) for c in _expanded(t)]
    with _heard([*sources, *(() if inputs is None else _listed(inputs))]):
        torch.autograd.backward(
            outputs, grads, retain_graph=retain_graph, create_graph=create_graph, inputs=leaves
        )


@contextmanager
def _heard(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What raises in this block, perhaps on no other rank, is heard by those that wait for it."""
    try:
        yield
    except Exception as problem:
        found = [tensor._state for tensor in tensors if isinstance(tensor, ShardedTensor)]
        for first in found[:1]:
            tell_others(first, problem, "backward")
        raise


def _flattened(
    tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Local tensors in place of sharded ones, and the gradients that backward starts with."""
    outputs: list[torch.Tensor] = []
    grads: list[torch.Tensor | None] = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if isinstance(tensor, ShardedTensor):
            state = live_state(tensor)
            outputs += state.carriers
            grads += _incoming(state, gradient)
        else:
            outputs.append(tensor)
            grads.append(gradient)
    return outputs, grads


def _expanded(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that autograd knows in place of this one."""
    return live_state(tensor).carriers if isinstance(tensor, ShardedTensor) else [tensor]


def _incoming(state: State, gradient: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The gradient of each carrier that backward starts with."""
    shape = state.layout.shape
    if gradient is None:
        if torch.Size(shape).numel() != 1:
            raise OpError(
                "grad can be implicitly created only for scalar outputs",
                rank=state.rank,
                got=f"a ShardedTensor of shape {shape}",
                fix="Pass gradient=, or reduce it to one element.",
            )
        if not state.dtype.is_floating_point:
            raise OpError(
                "grad can be implicitly created only for real scalar outputs but got "
                f"{state.dtype}",
                rank=state.rank,
                fix="Pass gradient=, or take the real part or the absolute value.",
            )
        given = tuple(torch.ones_like(carrier) for carrier in state.carriers)
    else:
        if tuple(gradient.shape) != shape:
            raise ArgumentValueError(
                "gradient of backward", rank=state.rank, expected=shape, got=tuple(gradient.shape)
            )
        if isinstance(gradient, ShardedTensor):
            found = reshard_state(gradient._state, state.layout.bar, devices=state.devices)
        else:
            found = cut_state(gradient, state, layout=state.layout.bar)
        given = _entering(found, state.layout)
    return scale_terms(given, state.layout, state.rank, up=False)


def _entering(grad: State, layout: Layout) -> tuple[torch.Tensor, ...]:
    """One gradient per entry of `layout`, each term's a work of its own."""
    if layout.pending is None:
        return grad.carriers
    work = Layout(layout.shape, layout.boxes, layout.owners, terms=layout.terms, pending="sum")
    job = Exchange(grad.layout, grad.layout, grad.devices, grad.devices, grad.comm, work=work)
    return exchange(job, grad.carriers)


@handles(torch.autograd.grad)
def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    if is_grads_batched:
        raise OpError(
            "torch.autograd.grad of ShardedTensors with is_grads_batched=True",
            fix="Call it once for each gradient, with retain_graph=True.",
        )
    sources, targets = _listed(outputs), _listed(inputs)
    given = _listed(grad_outputs) if grad_outputs is not None else [None] * len(sources)
    flat_outputs, flat_grads = _flattened(sources, given)
    with _heard([*sources, *targets]):
        flat = torch.autograd.grad(
            flat_outputs,
            [leaf for target in targets for leaf in _expanded(target)],
            flat_grads,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,  # of several local shards some may be unused; see below
        )
    left: list[torch.Tensor | None] = list(flat)
    found: list[torch.Tensor | None] = []
    for target in targets:
        count = len(_expanded(target))
        grads, left = left[:count], left[count:]
        if materialize_grads and all(grad is None for grad in grads):
            # As torch makes them, but not of single shards: on no other rank would they require
            # grad where the rest of the tensor does not.
            grads = [torch.zeros_like(one, requires_grad=create_graph) for one in _expanded(target)]
        if not allow_unused and all(grad is None for grad in grads):
            raise OpError(
                f"The differentiated Tensor at index {len(found)} appears to not have been used "
                "in the graph",
                fix="Set allow_unused=True if this is the desired behavior.",
            )
        if isinstance(target, ShardedTensor):
            state = gradient_state(target._state, grads)
            if state is not None and create_graph:  # backward may have met some pieces only
                state = state.with_carriers(as_one_graph(state.carriers))
            found.append(None if state is None else wrap(state))
        else:
            found.append(grads[0])
    return tuple(found)


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)
