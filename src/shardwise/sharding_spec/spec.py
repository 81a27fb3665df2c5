"""What a spec is: a recipe from a shape to a Layout.

[Note: two ways to write a spec] A built-in spec says where its pieces are (`_pieces`); layout,
devices and the seed's metadata follow. A user's own subclass, written for the seed, says only
`build_metadata`; pieces, layout and devices follow from that. Either works wherever a spec does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np
import torch

from shardwise.arguments import is_whole_number, whole_number
from shardwise.errors import NamedDimError, ShardwiseError, SpecError
from shardwise.geometry.box import Boxes, Ints, as_shape
from shardwise.geometry.layout import Layout, ReduceOp
from shardwise.metadata import (
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    shard_boxes,
)
from shardwise.placement import Placement, parse_placement, rank_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.placement import PlacementLike
    from shardwise.sharded_tensor.tensor import ShardedTensor

__all__ = [
    "BuiltinSpec",
    "DevicePlacementSpec",
    "Pieces",
    "PlacementSpec",
    "ShardingSpec",
    "check_dim",
    "dim_of",
]


_Said = TypeVar("_Said", Layout, tuple[Placement, ...])


class PlacementSpec(ABC):  # noqa: B024  # the seed's base class has no methods
    """Base of objects that say where an entity is placed."""


@dataclass(frozen=True)
class DevicePlacementSpec(PlacementSpec):
    """An entity on one device."""

    device: Placement

    def __init__(self, device: PlacementLike) -> None:
        object.__setattr__(self, "device", parse_placement(device))


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The pieces of a tensor in the spec's own order: box, placement, and term if pending."""

    boxes: Boxes  # (n, ndim)
    owners: Ints  # (n,): index into placements
    placements: Sequence[Placement | None]
    terms: Ints | None = None  # (n,)
    pending: ReduceOp | None = None

    def ranks(self) -> Ints:
        """Rank of each piece, (n,)."""
        by_placement = np.array([rank_of(p) for p in self.placements], dtype=np.int64)
        return by_placement[self.owners]


class ShardingSpec(ABC):
    """A recipe: shape -> Layout. Subclasses define `build_metadata`, as in the seed.

    [Note: two ways to write a spec]
    """

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """Metadata of every shard of a tensor of this size, in the spec's own order."""

    def _pieces(self, shape: Sequence[int]) -> Pieces:
        """The pieces of a tensor of `shape`, in the spec's own order."""
        metadata = self.build_metadata(torch.Size(shape), TensorProperties())
        shards = metadata.shards_metadata
        if not shards:
            return Pieces(Boxes.of([], len(shape)), np.empty(0, np.int64), [])
        boxes, placements = shard_boxes(shards), [shard.placement for shard in shards]
        if boxes.ndim == len(shape):
            # The seed's own arithmetic puts a chunk without elements past the end of its dim.
            end = np.where(boxes.is_full[:, None], boxes.stops, np.array(shape, dtype=np.int64))
            boxes = Boxes(np.minimum(boxes.starts, end), np.minimum(boxes.stops, end))
        return Pieces(boxes, np.arange(len(shards)), placements)

    def layout(self, shape: Sequence[int]) -> Layout:
        """Who holds which box of a tensor of `shape`. Communicates nothing.

        >>> from shardwise.sharding_spec import ChunkShardingSpec
        >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> spec.layout((5, 3)).describe().splitlines()[1:]
        ['  rank 0: [0:3, 0:3] (9 elements)', '  rank 1: [3:5, 0:3] (6 elements)']
        """
        sizes = as_shape(shape)
        try:
            pieces = self._pieces(sizes)
            return Layout(
                sizes, pieces.boxes, pieces.ranks(), terms=pieces.terms, pending=pieces.pending
            )
        except ShardwiseError as error:
            error.add_note(f"while laying out a tensor of shape {sizes} by {self!s:.200}")
            raise

    def shard(
        self,
        tensor: torch.Tensor,
        src_rank: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> ShardedTensor:
        """The full `tensor` of one rank of the group, cut by this spec. All ranks call it.

        As `shardwise.distribute`, which also takes a tensor that every rank has.
        """
        from shardwise.sharded_tensor.distributing import distribute

        return distribute(tensor, self, src_rank=src_rank, process_group=process_group)

    def local_devices(self, shape: Sequence[int], rank: int) -> tuple[torch.device, ...]:
        """Device of each local shard of `rank`, in the order of `layout(shape).boxes_of(rank)`."""
        return tuple(place.device() for place in self._local_placements(as_shape(shape), rank))

    def _local_placements(self, shape: tuple[int, ...], rank: int) -> tuple[Placement, ...]:
        pieces = self._pieces(shape)
        rows = np.flatnonzero(pieces.ranks() == rank)
        terms = np.zeros(len(rows), np.int64) if pieces.terms is None else pieces.terms[rows]
        table = np.column_stack([pieces.boxes.starts[rows], pieces.boxes.stops[rows], terms])
        placements = [pieces.placements[k] for k in pieces.owners[rows[np.lexsort(table.T[::-1])]]]
        return tuple(p for p in placements if p is not None)


_MOST_LAYOUTS = 64  # kept per spec: one per shape, so that asking again costs a look-up
_MOST_SHARED = 256  # of all specs together
_FEW = 1024  # boxes of a layout that is shared
# What equal specs of our own classes say of a shape, because `reshard(x, chunk(1))` makes a spec at
# every call: layouts, and placements of a rank. Only of those whose placements name ranks: what a
# worker's name or a mesh stands for is asked anew.
_shared: dict[tuple[Any, ...], Any] = {}


class BuiltinSpec(ShardingSpec):
    """A frozen spec that says `_pieces`; layouts are kept per shape. [Note: two ways ...]"""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "build_metadata" in vars(cls) and "_pieces" not in vars(cls):
            # A user's subclass that says its metadata: that is the truth, and may change.
            cls._pieces = ShardingSpec._pieces  # type: ignore[method-assign]  # on this class only
            cls.layout = ShardingSpec.layout  # type: ignore[method-assign]  # same
            cls.local_devices = ShardingSpec.local_devices  # type: ignore[method-assign]  # same

    @abstractmethod
    def _pieces(self, shape: Sequence[int]) -> Pieces: ...

    def layout(self, shape: Sequence[int]) -> Layout:
        kept: dict[tuple[int, ...], Layout] = self.__dict__.setdefault("_layouts", {})
        if _is_plain(shape) and (known := kept.get(shape)) is not None:
            return known
        key = as_shape(shape)
        if (layout := kept.get(key)) is None:
            if len(kept) >= _MOST_LAYOUTS:
                kept.clear()
            layout = kept[key] = self._shared_layout(key)
        return layout

    layout.__doc__ = ShardingSpec.layout.__doc__

    def local_devices(self, shape: Sequence[int], rank: int) -> tuple[torch.device, ...]:
        kept: dict[Any, tuple[torch.device, ...]] = self.__dict__.setdefault("_devices", {})
        if _is_plain(shape) and (known := kept.get((shape, rank))) is not None:
            return known
        key = (as_shape(shape), rank)
        if (devices := kept.get(key)) is None:
            if len(kept) >= _MOST_LAYOUTS:
                kept.clear()
            devices = kept[key] = super().local_devices(*key)
        return devices

    local_devices.__doc__ = ShardingSpec.local_devices.__doc__

    def _shared_layout(self, shape: tuple[int, ...]) -> Layout:
        return self._said_once((shape,), lambda: super(BuiltinSpec, self).layout(shape))

    def _local_placements(self, shape: tuple[int, ...], rank: int) -> tuple[Placement, ...]:
        make = super()._local_placements
        return self._said_once((shape, rank), lambda: make(shape, rank))

    def _said_once(self, about: tuple[Any, ...], make: Callable[[], _Said]) -> _Said:
        """What `make` gives, or gave to an equal spec; not of a user's class, which may differ."""
        is_own = type(self).__module__.startswith(f"{__package__}.")
        placements = self.__dict__.get("placements", (None,))
        if not is_own or not all(map(_names_rank, placements)):
            return make()
        found: _Said | None = _shared.get((self, *about))
        if found is None:
            found = make()
            if len(found) <= _FEW:
                if len(_shared) >= _MOST_SHARED:
                    _shared.clear()
                _shared[copy(self), *about] = found  # of a copy, which keeps nothing itself
        return found

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        pieces = self._pieces(as_shape(tensor_sizes))
        owners = pieces.owners.tolist()
        offsets, sizes = pieces.boxes.starts.tolist(), pieces.boxes.shapes.tolist()
        shards = [
            ShardMetadata(offset, size, pieces.placements[owner])
            for offset, size, owner in zip(offsets, sizes, owners, strict=True)
        ]
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_layouts", "_devices")
        return {name: value for name, value in self.__dict__.items() if name not in kept}


def _names_rank(placement: object) -> bool:
    return isinstance(placement, Placement) and placement.rank() is not None


def _is_plain(shape: Sequence[int]) -> TypeGuard[tuple[int, ...]]:
    """Whether a layout may be looked up by it as it is: 4.0, which equals 4, is no size."""
    return isinstance(shape, tuple) and set(map(type, shape)) <= {int}


def check_dim(dim: object, spec: str) -> int:
    """`dim` if it is an integer; named dims and other types raise."""
    if isinstance(dim, str):
        raise NamedDimError(
            f"{spec} does not support named dimension",
            expected="an integer",
            got=repr(dim),
            fix="Pass the dim's position; -1 is the last.",
        )
    if not is_whole_number(dim):
        raise SpecError(f"{spec}: Sharding dim needs to be an integer", got=repr(dim))
    return whole_number(dim, "dim", least=None)


def dim_of(dim: int, shape: tuple[int, ...], spec: str) -> int:
    """`dim` counted from the front; raises if a tensor of `shape` has no such dim."""
    if not -len(shape) <= dim < len(shape):
        raise SpecError(
            f"{spec}: Invalid sharding dim",
            expected=f"-{len(shape)} to {len(shape) - 1} for a tensor of shape {shape}"
            if shape
            else "a tensor with at least one dim",
            got=dim if shape else f"dim {dim} of a 0-d tensor",
        )
    return dim % len(shape)
