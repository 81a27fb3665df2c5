"""The tensors of a state, whatever kind they are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardwise.interop.dtensor import from_dtensor

if TYPE_CHECKING:
    import torch

    from shardwise.comm.communicator import Communicator

__all__ = ["is_dtensor", "sharded_leaf"]


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor, which is not imported for the question."""
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(tensor, home.DTensor)


def sharded_leaf(tensor: torch.Tensor, members: Communicator) -> torch.Tensor:
    """A DTensor as a sharded tensor on the same memory; any other tensor as it is."""
    if is_dtensor(tensor):
        return from_dtensor(tensor.detach(), process_group=members)  # type: ignore[arg-type]  # as just found
    return tensor
