"""Checkpoints saved by simulated ranks, in any layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.checkpoint import save
from shardwise.checkpoint.structure import flatten, unflatten
from shardwise.comm.simulate import simulate
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import wrap

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from shardwise.geometry import Layout

__all__ = ["write_checkpoint"]


def write_checkpoint(
    folder: Path, state: Any, layouts: Mapping[str, Layout] | None = None, world_size: int = 4
) -> Path:
    """Saves a state of full tensors in these layouts, by name; others as plain tensors."""
    flat = flatten(state)
    chosen = dict(layouts or {})

    def go(rank: int) -> None:
        def brought(name: str) -> torch.Tensor:
            tensor = flat.tensors[name]
            if name not in chosen:
                return tensor
            shards = [tensor[box.slices()].clone() for box in chosen[name].boxes_of(rank)]
            return wrap(make_state(chosen[name], shards, group=None, dtype=tensor.dtype))

        save(unflatten(flat.structure, brought), folder / "saved")

    folder.mkdir(exist_ok=True)
    simulate(go, world_size)
    return folder / "saved"
