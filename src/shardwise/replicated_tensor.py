"""ReplicatedTensor: a tensor that every rank of a group has whole, in the seed's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.flights import as_bytes
from shardwise.errors import AgreementError
from shardwise.sharded_tensor.distributing import as_replicated, digest
from shardwise.sharded_tensor.resharding import replicated_layout, replicated_state
from shardwise.sharded_tensor.tensor import ShardedTensor, each_tensor, wrap
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator

__all__ = ["ReplicatedTensor"]


class ReplicatedTensor(ShardedTensor):
    """`shardwise.as_replicated(data)` by its old name: a ShardedTensor like any other.

    Copies nothing; gradients flow back to `data`. Nothing is sent, and that the ranks have the same
    values is checked by `validate()` only.
    """

    def __new__(
        cls, data: torch.Tensor | None = None, process_group: ProcessGroup | None = None
    ) -> ReplicatedTensor:
        given = torch.empty(0) if data is None else data
        made: Any = wrap(as_replicated(given, process_group=process_group)._state, cls)
        return made  # type: ignore[no-any-return]  # of class `cls`

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As of a ShardedTensor; what comes of replicated tensors alone is one, too."""
        result = super().__torch_function__(func, types, args, kwargs)
        if not all(issubclass(kind, ReplicatedTensor) for kind in types):
            return result
        return each_tensor(_replicated, result)

    def validate(self) -> bool:
        """True if all ranks of the group have the same values, up to rounding. All ranks call it.

        Raises on all of them if not. Digests are compared first, and values only if those differ.
        """
        state = self._state
        with torch.no_grad():
            (mine,) = replicated_state(state).shards
            seen = state.comm.gather_objects((tuple(mine.shape), mine.dtype, digest(mine)))
            if all(found == seen[0] for found in seen):
                return True
            strangers = _strangers(mine, seen, state.comm)
        if strangers:
            raise AgreementError(
                f"ReplicatedTensor have different values: {ranks_text(strangers)} differ from "
                f"rank {state.comm.ranks.rank_at(0)}",
                fix="Make it from the same values on every rank.",
            )
        return True


def _replicated(value: ShardedTensor) -> ShardedTensor:
    """A tensor that every rank of its group has whole, under its old name."""
    state = value._state
    if state.members is None or state.layout != replicated_layout(state.layout.shape, state):
        return value
    return wrap(state, ReplicatedTensor)


def _strangers(mine: torch.Tensor, seen: list[Any], members: Communicator) -> list[int]:
    """Ranks whose tensor is not that of the group's first rank, known to all."""
    kinds = [(shape, dtype) for shape, dtype, _ in seen]
    if len(set(kinds)) > 1:
        pairs = zip(members.ranks, kinds, strict=True)
        return [rank for rank, kind in pairs if kind != kinds[0]]
    first = mine.to(members.wire_device, copy=True).contiguous()
    members.broadcast(as_bytes(first), members.ranks.rank_at(0))  # backends may not know the dtype
    told = members.gather_objects(_are_close(mine, first.to(mine.device)))
    return [rank for rank, close in zip(members.ranks, told, strict=True) if not close]


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point() and one.dtype.itemsize == 1:  # in which torch cannot subtract
        one, other = one.float(), other.float()
    return torch.allclose(one, other, equal_nan=True)
