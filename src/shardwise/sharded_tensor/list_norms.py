"""Functions of lists whose results depend on all ranks: norms, and whether gradients are finite.

However long the list is, ranks exchange one vector: `torch.nn.utils.clip_grad_norm_` and
`torch.amp.GradScaler` need one exchange for all parameters of a dtype.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.checks import should_check
from shardwise.comm.tracing import is_watched, recorded
from shardwise.ops.names import functions_named
from shardwise.ops.norms import MAXIMUM, counted_pieces, norm_reduction, power_sum_reduction
from shardwise.sharded_tensor.deciding import needs_grad
from shardwise.sharded_tensor.dispatch import function_name, handles
from shardwise.sharded_tensor.foreach import Column, states_of
from shardwise.sharded_tensor.implicit import settle
from shardwise.sharded_tensor.resharding import replicated
from shardwise.sharded_tensor.running import compare_calls
from shardwise.sharded_tensor.state import State
from shardwise.sharded_tensor.tensor import wrap
from shardwise.sharded_tensor.usable import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from shardwise.comm.communicator import Communicator
    from shardwise.ops.norms import Reduction

__all__: list[str] = []

_NARROW = (torch.float16, torch.bfloat16)  # of whose pieces norms are computed as of float32


@handles(torch._foreach_norm)
def _norms(
    tensors: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    if needs_grad(tensors):
        return tuple(torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors)

    def of_pieces(pieces: list[torch.Tensor], wider: torch.dtype | None) -> Sequence[torch.Tensor]:
        return torch._foreach_norm(pieces, ord, dtype=wider)

    order = float(ord)
    return _reduced(torch._foreach_norm, tensors, norm_reduction(order), of_pieces, dtype)


def _power_sums(
    tensors: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    if needs_grad(tensors):
        return tuple((tensor.abs() ** ord).sum(dtype=dtype) for tensor in tensors)
    list_function: Any = torch._foreach_powsum

    def of_pieces(pieces: list[torch.Tensor], wider: torch.dtype | None) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = list_function(pieces, ord, dtype=wider)
        return found

    order = float(ord)
    return _reduced(list_function, tensors, power_sum_reduction(order), of_pieces, dtype)


@handles(torch._foreach_max)
def _maxima(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if needs_grad(tensors) or not all(tensor.is_floating_point() for tensor in tensors):
        return tuple(tensor.max() for tensor in tensors)
    return _reduced(
        torch._foreach_max, tensors, MAXIMUM, lambda pieces, _: torch._foreach_max(pieces), None
    )


for _function in functions_named(["_foreach_powsum"]):  # torch 2.13 has it
    handles(_function)(_power_sums)


def _reduced(
    func: Any,
    tensors: Sequence[torch.Tensor],
    reduction: Reduction,
    of_pieces: Callable[[list[torch.Tensor], torch.dtype | None], Sequence[torch.Tensor]],
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:
    """A number per tensor: of plain ones plain, of sharded ones replicated on all ranks."""
    column = Column.of(tensors)
    states = states_of(func, [column])
    if should_check(hot=True):
        compare_calls(func, states)
    if reduction.needs_elements and not all(tensor.numel() for tensor in tensors):
        of_pieces([torch.empty(0)], dtype)  # which raises torch's own error
    first, rank = states[0], states[0].rank
    settled = [None if state is None else settle(func, state) for state in column.states]
    pieces: list[torch.Tensor] = []
    index: list[int] = []
    for k, state in enumerate(settled):
        if state is not None:
            counted = counted_pieces(state.layout, rank)
            pieces += [state.carriers[j] for j in counted]
            index += [k] * len(counted)
    values = _values(pieces, of_pieces, dtype, first.comm.wire_device)
    vector = reduction.vector(values, index, len(tensors), first.comm.wire_device)
    if len(first.comm.ranks) > 1:
        with _told(func, first.comm, vector):
            first.comm.all_reduce(vector, reduction.op)
    numbers = reduction.result(vector).unbind()
    scalar = replicated((), tuple(sorted(first.comm.ranks)))
    found: list[torch.Tensor] = []
    for tensor, state, number in zip(tensors, settled, numbers, strict=True):
        if state is None:
            found += of_pieces([tensor], dtype)
        else:
            kind = tensor.dtype.to_real() if dtype is None else dtype.to_real()
            held = number.to(state.device, kind, copy=True)
            made = State(scalar, (held,), rank, state.members, None, state.process_group)
            found.append(wrap(made))
    return tuple(found)


def _values(
    pieces: list[torch.Tensor],
    of_pieces: Callable[[list[torch.Tensor], torch.dtype | None], Sequence[torch.Tensor]],
    dtype: torch.dtype | None,
    device: torch.device,
) -> torch.Tensor:
    """The number of each piece; one call for all of a dtype and device."""
    if not pieces:
        return torch.empty(0, dtype=torch.float64, device=device)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for k, piece in enumerate(pieces):
        groups.setdefault((piece.dtype, piece.device), []).append(k)
    found: list[Any] = [None] * len(pieces)
    for (kind, _), places in groups.items():
        wider = torch.float32 if dtype is None and kind in _NARROW else dtype
        values = torch.stack(list(of_pieces([pieces[k] for k in places], wider)))
        if len(groups) == 1:
            return values.detach()
        for k, value in zip(places, values.detach().to(device, torch.float64), strict=True):
            found[k] = value
    return torch.stack(found)


def _told(func: Any, members: Communicator, sent: torch.Tensor) -> AbstractContextManager[None]:
    """What whoever looks sees of the exchange."""
    if not is_watched():
        return nullcontext()
    return recorded(function_name(func), members, sent.nbytes)


# -- gradients that were scaled --------------------------------------------------------------------


@handles(torch._amp_foreach_non_finite_check_and_unscale_)
def _unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Of `torch.amp.GradScaler`: if one rank finds what is not finite, all do."""
    func = torch._amp_foreach_non_finite_check_and_unscale_
    column = Column.of(grads)
    states = states_of(func, [column])
    if should_check(hot=True):
        compare_calls(func, states)
    for tensor in grads:
        check_writable(tensor, func)
    pieces = column.flat(None, [1 if s is None else len(s.carriers) for s in column.states])
    func(pieces, found_inf, inv_scale)
    # torch counts no versions here. [Note: lost views] in `state.py`
    torch.autograd.graph.increment_version([c for state in states for c in state.carriers])
    members = states[0].comm
    if len(members.ranks) > 1:
        sent = found_inf.to(members.wire_device).reshape(1)
        with _told(func, members, sent):
            members.all_reduce(sent, "max")
        found_inf.copy_(sent.reshape(found_inf.shape))
