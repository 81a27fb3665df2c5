"""Replicas that several functions use for work of the same ranks: their gradient is summed once.

[Note: entering once] Queries, keys and values are products of one tensor that all ranks hold, each
with the rank's own rows of a weight. Its gradient is a sum over ranks ([Note: gradients] in
`comm/differentiable.py`), and a sum of sums is the sum of all addends. So the tensor enters once,
and the functions share what has entered: autograd adds up what a rank has for all of them before
the ranks add up theirs.

That is the same on all ranks, as their graphs have to be: it depends on layouts and on what has
been written, and no rank is without shards, so that writing into all of them leaves none out. What
a leaf enters is not kept: it would be for as long as the model lives. Nor is it where saved tensors
go through hooks: what is checkpointed has to save the same when it runs again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise._torch_compat import has_saving_hooks
from shardwise.comm.differentiable import exchange

if TYPE_CHECKING:
    from shardwise.comm.differentiable import Carriers, Exchange
    from shardwise.sharded_tensor.state import State

__all__ = ["Entered", "enter_once"]


class Entered(NamedTuple):
    """What a tensor has entered, by which exchange, and what had made it by then."""

    job: Exchange
    grad_fns: tuple[Any, ...]  # of the tensor's carriers; writing into them makes others
    carriers: Carriers


def enter_once(state: State, job: Exchange) -> Carriers:
    """The carriers after the exchange; those that it gave before, if they are the same.

    [Note: entering once]
    """
    if not job.enters_in_place or not torch.is_grad_enabled() or has_saving_hooks():
        return exchange(job, state.carriers)
    grad_fns = tuple([carrier.grad_fn for carrier in state.carriers])
    known: Entered | None = state.entered
    if (
        known is not None
        and (known.job is job or known.job == job)
        and all([one is other for one, other in zip(known.grad_fns, grad_fns, strict=True)])
    ):
        return known.carriers
    found = exchange(job, state.carriers)
    if any([grad_fn is not None for grad_fn in grad_fns]):
        state.entered = Entered(job, grad_fns, found)
    return found
