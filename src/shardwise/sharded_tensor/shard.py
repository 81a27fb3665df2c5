"""Shard: a local tensor and where it belongs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ArgumentTypeError, MetadataError
from shardwise.metadata import ShardMetadata
from shardwise.placement import placement_at

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Shard"]


@dataclass(slots=True, eq=False)
class Shard:
    """A local tensor with the metadata of its box.

    >>> Shard.from_tensor_and_offsets(torch.zeros(2, 3), shard_offsets=[4, 0], rank=1).metadata
    ShardMetadata(shard_offsets=[4, 0], shard_sizes=[2, 3], placement=rank:1/cpu)
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        given: tuple[object, object] = (self.tensor, self.metadata)
        if not (isinstance(given[0], torch.Tensor) and isinstance(given[1], ShardMetadata)):
            raise ArgumentTypeError(
                "Shard(tensor, metadata)",
                expected="a torch.Tensor and a ShardMetadata",
                got=f"{type(self.tensor).__name__} and {type(self.metadata).__name__}",
            )
        if list(self.tensor.shape) != list(self.metadata.shard_sizes):
            raise MetadataError(
                "Shard tensor size does not match with metadata.shard_lengths!",
                expected=f"the metadata's sizes {list(self.metadata.shard_sizes)}",
                got=f"a tensor of size {list(self.tensor.shape)}",
            )
        placement = self.metadata.placement
        if placement is not None and placement.device() != self.tensor.device:
            raise MetadataError(
                "Local shard tensor device does not match with local Shard's placement!",
                expected=f"the placement's device {placement.device()}",
                got=f"a tensor on {self.tensor.device}",
                fix="Move the tensor, or name its device in the placement.",
            )

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """The shard of `rank` that starts at `shard_offsets`."""
        placement = placement_at(rank, tensor.device)
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.shape), placement))
