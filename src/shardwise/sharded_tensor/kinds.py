"""Tensors that are alike, by one object: what ops look decisions up by.

[Note: kinds] All tensors of a group with one layout, dtype and device have one Kind, which their
states hold. So a key has one object for each operand, and is compared by addresses. It holds the
layout, so that nothing else gets the layout's id while the kind is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Layout

__all__ = ["Kind", "kind_of"]

_MOST_KEPT = 4096  # of a group


class Kind:
    """A layout, dtype and device of a group. [Note: kinds]"""

    __slots__ = ("decisions", "device", "dtype", "layout", "shape")

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, members: Communicator
    ) -> None:
        self.layout = layout
        self.shape = layout.shape
        self.dtype = dtype
        self.device = device
        self.decisions: dict[tuple[Any, ...], Any] = members.decisions


def kind_of(layout: Layout, piece: torch.Tensor, members: Communicator) -> Kind:
    """The kind of the tensors that are like this one, of which `piece` is a carrier."""
    key = id(layout), piece.dtype, piece.device
    known: Kind | None = members.kinds.get(key)
    if known is None:
        if len(members.kinds) >= _MOST_KEPT:
            members.kinds.clear()
        known = members.kinds[key] = Kind(layout, piece.dtype, piece.device, members)
    return known
