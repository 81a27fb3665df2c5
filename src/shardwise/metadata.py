"""The seed's metadata objects: views for callers, made from the Layout, never read back into it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import ArgumentTypeError, MetadataError, PickleError
from shardwise.frozen_list import FrozenList
from shardwise.geometry.box import Box, Boxes, rows_of_ints
from shardwise.placement import Placement, PlacementLike, parse_placement

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MEM_FORMAT_ENCODING",
    "ShardMetadata",
    "ShardedTensorMetadata",
    "TensorProperties",
    "shard_boxes",
]


@dataclass(init=False, eq=True)
class ShardMetadata:
    """Offsets, sizes and placement of one shard.

    Hashable by its offsets and sizes, which cannot change; `placement` may be assigned.

    >>> ShardMetadata([0, 4], [2, 4], "rank:1/cpu")
    ShardMetadata(shard_offsets=[0, 4], shard_sizes=[2, 4], placement=rank:1/cpu)
    """

    __slots__ = ("placement", "shard_offsets", "shard_sizes")

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: Placement | None

    def __init__(
        self,
        shard_offsets: Sequence[int],
        shard_sizes: Sequence[int],
        placement: PlacementLike | None = None,
    ) -> None:
        offsets, sizes = _ints(shard_offsets, "shard_offsets"), _ints(shard_sizes, "shard_sizes")
        if len(offsets) != len(sizes):
            raise MetadataError(
                "shard_offsets and shard_sizes should have the same number of elements",
                got=f"{len(offsets)} offsets and {len(sizes)} sizes",
            )
        if min(offsets, default=0) < 0:
            raise MetadataError("shard_offsets should be >=0", got=offsets)
        if min(sizes, default=0) < 0:
            raise MetadataError("shard_sizes should be >= 0", got=sizes)
        self.shard_offsets, self.shard_sizes = offsets, sizes
        if any(a + n >= 2**63 for a, n in zip(offsets, sizes, strict=True)):
            raise MetadataError(
                "shard", expected="ends below 2**63", got=f"offsets {offsets}, sizes {sizes}"
            )
        object.__setattr__(
            self, "placement", None if placement is None else parse_placement(placement)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "placement":
            value = None if value is None else parse_placement(value)
        elif hasattr(self, name):
            raise ArgumentTypeError(
                f"ShardMetadata.{name} cannot be set", fix="Make a new ShardMetadata."
            )
        object.__setattr__(self, name, value)

    @property
    def box(self) -> Box:
        """The shard's box in the global tensor."""
        return Box.at(self.shard_offsets, self.shard_sizes)

    def __hash__(self) -> int:
        return hash((*self.shard_offsets, *self.shard_sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardMetadata, (list(self.shard_offsets), list(self.shard_sizes), self.placement)


def _ints(values: Sequence[int], what: str) -> FrozenList[int]:
    try:
        return FrozenList(map(operator.index, values))
    except TypeError:
        raise MetadataError(what, expected="a list of whole numbers", got=repr(values)) from None


def shard_boxes(shards: Sequence[ShardMetadata]) -> Boxes:
    """The boxes of `shards`, at least one, which must have one number of dims."""
    ndim = len(shards[0].shard_offsets)
    for shard in shards:
        if len(shard.shard_offsets) != ndim:
            raise MetadataError("shards", expected=f"{ndim} dims each", got=shard)
    starts = rows_of_ints((shard.shard_offsets for shard in shards), len(shards), ndim)
    sizes = rows_of_ints((shard.shard_sizes for shard in shards), len(shards), ndim)
    return Boxes(starts, starts + sizes)


class MEM_FORMAT_ENCODING(Enum):
    """How a memory format is written in a pickle."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_MEMORY_FORMATS = {
    torch.contiguous_format: MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
    torch.channels_last: MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST,
    torch.preserve_format: MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT,
}


@dataclass
class TensorProperties:
    """What every shard of a tensor has in common."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Properties of an existing tensor."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            pin_memory=tensor.is_pinned(),
        )

    def __getstate__(self) -> tuple[Any, ...]:
        if self.memory_format not in _MEMORY_FORMATS:  # torch cannot pickle a memory format itself
            raise PickleError(
                f"Invalid torch.memory_format: {self.memory_format}", expected=list(_MEMORY_FORMATS)
            )
        encoding = _MEMORY_FORMATS[self.memory_format]
        return (self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory = state
        by_code = {code: memory_format for memory_format, code in _MEMORY_FORMATS.items()}
        if encoding not in by_code:
            raise PickleError(f"Invalid torch.memory_format encoding: {encoding}")
        self.memory_format = by_code[encoding]


@dataclass
class ShardedTensorMetadata:
    """All shards of a tensor, its size and its properties."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=torch.Size)
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)
