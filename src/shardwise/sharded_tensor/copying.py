"""Copies of sharded tensors, and values written into them.

[Note: Module.to] torch converts a parameter, asks whether `param.data = converted` would do, makes
a Parameter of the converted tensor (`converted.detach().requires_grad_()`), and swaps the two
objects with all that is on them. A plain parameter keeps its attributes and hooks, since of that
one the data are set. So that a sharded one keeps them too, the question notes on the converted
tensor where it comes from, `detach` hands the attributes on, and `requires_grad_` the hooks. Where
nothing was converted, the local tensors stay the very same, to which a graph that has begun leads.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import is_staged_by_dcp
from shardwise.comm.agreement import agree
from shardwise.comm.checks import is_debugging
from shardwise.errors import ArgumentTypeError, ArgumentValueError, OpError
from shardwise.sharded_tensor.dispatch import handles
from shardwise.sharded_tensor.resharding import check_one_group, cut_state, reshard_state
from shardwise.sharded_tensor.running import compare_calls
from shardwise.sharded_tensor.tensor import (
    ShardedTensor,
    adopt,
    refuse_late_gradients,
    show_requires_grad,
    show_written,
    user_attributes,
    wrap,
)
from shardwise.sharded_tensor.usable import check_writable, state_or_none

if TYPE_CHECKING:
    from shardwise.sharded_tensor.state import State

__all__ = ["fill"]

_Tensor: Any = torch.Tensor


@handles(_Tensor.clone, torch.clone)
def _clone(
    tensor: ShardedTensor, *, memory_format: torch.memory_format = torch.preserve_format
) -> ShardedTensor:
    state = tensor._state
    return wrap(
        state.map(
            lambda local: local.clone(memory_format=memory_format), init_rrefs=state.init_rrefs
        )
    )


@handles(_Tensor.detach, torch.detach)
def _detach(tensor: ShardedTensor) -> ShardedTensor:
    state = tensor._state
    parameter, state.converted_from = state.converted_from, None
    is_same = parameter is tensor  # nothing was converted
    made = wrap(state.alias((lambda local: local) if is_same else torch.detach))
    if parameter is not None:  # [Note: Module.to]
        _copy_attributes(parameter, made)
        made._state.converted_from = parameter
    return made


def _copy_attributes(source: ShardedTensor, target: ShardedTensor) -> None:
    for name, value in user_attributes(source).items():
        setattr(target, name, value)


@handles(_Tensor.detach_, torch.detach_)
def _detach_in_place(tensor: ShardedTensor) -> ShardedTensor:
    for carrier in tensor._state.carriers:
        carrier.detach_()
    show_requires_grad(tensor)
    return tensor


@handles(_Tensor.contiguous)
def _contiguous(
    tensor: ShardedTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> ShardedTensor:
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return wrap(tensor._state.map(lambda local: local.contiguous(memory_format=memory_format)))


@handles(_Tensor.data.__get__)
def _data(tensor: ShardedTensor) -> ShardedTensor:
    return wrap(tensor._state.alias(lambda local: local.data))


@handles(_Tensor.data.__set__)
def _set_data(tensor: ShardedTensor, value: torch.Tensor) -> None:
    state = tensor._state
    if not isinstance(value, ShardedTensor):
        raise ArgumentTypeError(
            "data of a ShardedTensor",
            expected="a ShardedTensor",
            got=type(value).__name__,
            fix="Write st.copy_(value), or shard it: shardwise.distribute(value, spec).",
        )
    new = value._state
    # Of ties, too: a rank without shards goes the way of the others.
    devices = [[carrier.device for carrier in one.carriers] for one in (new, state)]
    if (new.layout, new.dtype) == (state.layout, state.dtype) and devices[0] == devices[1]:
        for carrier, data in zip(state.carriers, new.carriers, strict=True):
            carrier.data = data.data
        # References lead to the memory that it had, and so does what has entered.
        state.remote = state.entered = None
        return
    if not tensor.is_leaf:
        raise OpError(
            "data = ... of a ShardedTensor that autograd computed, in another layout",
            rank=state.rank,
            fix="Set the data of leaf tensors only.",
        )
    requires_grad = state.requires_grad
    grads = [carrier.grad for carrier in state.carriers]
    is_same = new.layout == state.layout
    if not is_same and any(grad is not None for grad in grads):
        raise OpError(
            "data = ... of a ShardedTensor that has a gradient, in another layout",
            rank=state.rank,
            expected=str(state.layout),
            got=str(new.layout),
            fix="Call st.reshard(spec) first, which moves the gradient too, or set st.grad = None.",
        )
    made = new.map(
        lambda local: local.detach().requires_grad_(requires_grad), init_rrefs=state.init_rrefs
    )
    if is_same:
        for carrier, grad in zip(made.carriers, grads, strict=True):
            carrier.grad = None if grad is None else grad.to(carrier)
    refuse_late_gradients(state, made)
    adopt(tensor, made)
    for hook in state.hooks:
        hook.attach(tensor._state)


def _copied(state: State, memo: dict[int, Any]) -> State:
    """A deep copy that shares the group and the spec, which are not data."""
    if any(not carrier.is_leaf for carrier in state.carriers):
        raise OpError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment",
            rank=state.rank,
            fix="Copy st.detach().",
        )
    # Gradients too.
    return state.map(lambda local: copy.deepcopy(local, memo), init_rrefs=state.init_rrefs)


@handles(_Tensor.__deepcopy__)
def _deepcopy(tensor: ShardedTensor, memo: dict[int, Any]) -> ShardedTensor:
    if id(tensor) in memo:
        found: ShardedTensor = memo[id(tensor)]
        return found
    made = memo[id(tensor)] = wrap(_copied(tensor._state, memo), type(tensor))
    for name, value in user_attributes(tensor).items():
        setattr(made, name, copy.deepcopy(value, memo))
    return made


@handles(_Tensor.copy_)
def _copy(tensor: ShardedTensor, source: torch.Tensor, non_blocking: bool = False) -> ShardedTensor:
    if _stage(tensor, source):
        return tensor
    _check_sharded(
        tensor, "copy_", fix="Use st.gather(dst, out), or plain.copy_(st.full_tensor())."
    )
    state = tensor._state
    if state.reshaped_from is not None:
        state.reshaped_from.copy_(source.expand(tensor.shape).reshape(state.reshaped_from.shape))
        return tensor
    check_writable(tensor, _Tensor.copy_)
    if isinstance(source, ShardedTensor):
        check_one_group("copy_", [state, source._state])
    if is_debugging() and not source.is_meta:
        compare_calls(_Tensor.copy_, [state, state_or_none(source) or source])
    values = _in_layout_of(state, source)
    for local, value in zip(state.carriers, values.carriers, strict=True):
        local.copy_(value, non_blocking)
    show_written(tensor)  # which may require grad by this copy
    return tensor


def _stage(plain: object, source: object) -> bool:
    """Whether DCP is staging a 0-d tensor, for which it has made a plain one; fills that, then."""
    if isinstance(plain, ShardedTensor) or not isinstance(plain, torch.Tensor):
        return False
    if not isinstance(source, ShardedTensor) or not is_staged_by_dcp():
        return False
    plain.copy_(source.full_tensor())
    return True


def _check_sharded(tensor: object, what: str, *, fix: str) -> None:
    """Raises if a plain tensor is to take what belongs to a sharded one."""
    if not isinstance(tensor, ShardedTensor):
        raise OpError(f"{what} of a ShardedTensor into a plain tensor", fix=fix)


def _in_layout_of(state: State, source: torch.Tensor) -> State:
    """The source cut as `state` is; of another shape, it is broadcast as torch does."""
    shape = state.layout.shape
    if isinstance(source, ShardedTensor) and tuple(source.shape) == shape:
        return reshard_state(source._state, state.layout)
    given = tuple(source.shape)
    pairs = zip(given[::-1], shape[::-1], strict=False)
    if len(given) > len(shape) or any(n not in (1, size) for n, size in pairs):
        raise ArgumentValueError(
            "copy_ into a ShardedTensor",
            rank=state.rank,
            expected=f"a source that broadcasts to {shape}",
            got=given,
        )
    wide = source.expand(shape)
    if isinstance(wide, ShardedTensor):
        return reshard_state(wide._state, state.layout)
    full = cut_state(wide, state, layout=state.layout.bar)
    return reshard_state(full, state.layout)


@handles(_Tensor.zero_, torch.zero_)
def _zero(tensor: ShardedTensor) -> ShardedTensor:
    check_writable(tensor, _Tensor.zero_)
    for carrier in tensor._state.carriers:
        carrier.zero_()
    return tensor


@handles(_Tensor.fill_, torch.fill_)
def fill(tensor: ShardedTensor, value: Any) -> ShardedTensor:
    """`Tensor.fill_`; of a pending sum, so that the sum is the value."""
    _check_sharded(tensor, "fill_", fix="Write plain.fill_(st.full_tensor().item()).")
    check_writable(tensor, _Tensor.fill_)
    state = tensor._state
    if isinstance(value, torch.Tensor) and value.dim() != 0:
        raise ArgumentValueError(
            "fill_ of a ShardedTensor",
            rank=state.rank,
            expected="a number or a 0-d tensor",
            got=f"a tensor of shape {tuple(value.shape)}",
            fix="Write st.copy_(value), which broadcasts.",
        )
    if isinstance(value, torch.Tensor) or state.layout.pending is not None:
        is_tensor = isinstance(value, torch.Tensor)  # whose gradient is that of all elements
        return _copy(tensor, value if is_tensor else torch.as_tensor(value, dtype=state.dtype))
    if is_debugging():
        values = {"layout": state.layout, "dtype": state.dtype, "value": value}
        agree("fill_", values, group=state.comm, hot=True)
    for carrier in state.carriers:
        carrier.fill_(value)
    return tensor


@handles(torch._has_compatible_shallow_copy_type)
def _may_set_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """No: `Module.to` then swaps the parameters, whatever their layouts and dtypes are."""
    if isinstance(tensor, torch.nn.Parameter) and isinstance(other, ShardedTensor):
        other._state.converted_from = tensor  # [Note: Module.to]
    return False


@handles(_Tensor.module_load)
def _module_load(tensor: torch.Tensor, other: torch.Tensor, assign: bool = False) -> torch.Tensor:
    return other.detach() if assign else tensor.copy_(other).detach()
