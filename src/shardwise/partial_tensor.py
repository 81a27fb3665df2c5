"""_PartialTensor: a tensor of which every rank has an addend, in the seed's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from shardwise._torch_compat import tree_leaves
from shardwise.comm.agreement import agree
from shardwise.comm.checks import should_check
from shardwise.comm.process_group import communicator
from shardwise.errors import OpError
from shardwise.placement import placement_at
from shardwise.sharded_tensor.plain_tensors import checked_plain
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, each_tensor, wrap
from shardwise.sharded_tensor.to_layout import reshard
from shardwise.sharding_spec.replicated import PartialShardingSpec, parse_reduce_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["_PartialTensor"]

_CAT = {getattr(torch, name) for name in ("cat", "concat", "concatenate")}


class _PartialTensor(ShardedTensor):
    """A ShardedTensor with a pending reduction: `local_shard` is this rank's addend of the whole.

    Every rank of the group makes one, of the same shape. Copies nothing, sends nothing; gradients
    of sums and means flow back to `local_shard`.
    """

    _reduce_op: Any

    def __new__(
        cls,
        local_shard: torch.Tensor,
        process_group: ProcessGroup | Communicator | None = None,
        reduce_op: Any = ReduceOp.SUM,
    ) -> _PartialTensor:
        members = communicator(process_group)
        checked_plain(local_shard, "local_shard of _PartialTensor", members.rank)
        name = parse_reduce_op(reduce_op, "_PartialTensor")
        if local_shard.requires_grad and name not in ("sum", "avg"):
            raise OpError(
                f"_PartialTensor with a pending {name} of a tensor that requires grad",
                rank=members.rank,
                expected="a sum or avg",
                fix="Pass local_shard.detach().",
            )
        if should_check(hot=True):
            values = {"size": tuple(local_shard.shape), "dtype": local_shard.dtype}
            phrases = {"reduce_op": "reduce_ops need to be the same"}
            agree(
                "_PartialTensor",
                values | {"reduce_op": name},
                group=members,
                hot=True,
                phrases=phrases,
            )
        placements = [placement_at(rank, local_shard.device.type) for rank in members.ranks]
        spec = PartialShardingSpec(placements, name)
        layout = spec.layout(local_shard.shape)
        made: Any = wrap(make_state(layout, [local_shard], group=members, spec=spec), cls)
        made._reduce_op = reduce_op
        return made  # type: ignore[no-any-return]  # of class `cls`

    @property
    def _local_shard(self) -> torch.Tensor:
        """This rank's addend."""
        return self._state.carriers[0]

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """The reduced tensor, cut by a spec: a new, settled tensor. All ranks call it.

        Differentiable; this tensor stays as it is.
        """
        found = reshard(self, resharding_spec)
        if found is not self:
            return found
        return wrap(self._state.with_carriers(self._state.carriers, spec=resharding_spec))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As of a ShardedTensor; what is still to be reduced by the same operation is one, too."""
        named = kwargs or {}
        if func in _CAT and named.get("out") is None:
            return _cat(func, *args, **named)
        result = super().__torch_function__(func, types, args, kwargs)
        first = next(arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, _PartialTensor))
        return each_tensor(lambda value: _partial(value, first), result)


def _partial(value: ShardedTensor, like: _PartialTensor) -> ShardedTensor:
    """A tensor of which every rank has an addend, under its old name."""
    state = value._state
    addends = PartialShardingSpec(
        [placement_at(rank, state.device.type) for rank in state.comm.ranks],
        parse_reduce_op(like._reduce_op, "_PartialTensor"),
    )
    if state.layout.pending is None or state.layout != addends.layout(state.layout.shape):
        return value
    made: Any = wrap(state, _PartialTensor)
    made._reduce_op = like._reduce_op
    return made  # type: ignore[no-any-return]  # of this class


def _cat(func: Any, tensors: Sequence[torch.Tensor], *dim: int, **named_dim: Any) -> _PartialTensor:
    """Addends are concatenated where they are: the reduction is the same for every part."""
    partials = [tensor for tensor in tensors if isinstance(tensor, _PartialTensor)]
    first = partials[0]._state
    if len(partials) != len(tensors):
        raise OpError(
            "torch.cat: All inputs need to be an instance of _PartialTensor",
            rank=first.rank,
            got=", ".join(type(tensor).__name__ for tensor in tensors),
            fix="Reduce the partial ones first: partial.reshard(spec).",
        )
    ops = [parse_reduce_op(partial._reduce_op, "_PartialTensor") for partial in partials]
    if len(set(ops)) > 1:
        raise OpError(
            "torch.cat: All _PartialTensor reduce_ops need to be the same",
            rank=first.rank,
            got=", ".join(ops),
            fix="Reduce them first: partial.reshard(spec).",
        )
    joined = func([partial._local_shard for partial in partials], *dim, **named_dim)
    return _PartialTensor(joined, first.members, partials[0]._reduce_op)
