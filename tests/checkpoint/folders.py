"""Tensors to save, by other writers too, and what is read of them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint import load_index
from shardwise.checkpoint.reading import Reader
from shardwise.checkpoint.structure import unflatten
from shardwise.geometry import Box

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.checkpoint.index import Index

__all__ = ["assert_same", "flip", "model", "read_all", "read_state", "save_dcp"]


def read_all(index: Index) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    found = {}
    with Reader(index) as reader:
        for name, tensor in index.tensors.items():
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            reader.read(name, Box.whole(tensor.shape), found[name])
    return found


def read_state(path: Path) -> Any:
    """The state of a checkpoint, with full tensors."""
    index = load_index(path)
    return unflatten(index.structure, read_all(index).__getitem__)


def flip(file: Path, at: int) -> None:
    """Changes one bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, equal_nan=True)


def model() -> dict[str, torch.Tensor]:
    """Tensors of many dtypes and shapes."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(6, 5, generator=generator)
    return {
        "up.weight": numbers,
        "up.bias": numbers[0].to(torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "mask": numbers > 0,
        "small": numbers.to(torch.float8_e4m3fn).contiguous(),
        "wide": torch.arange(8).to(torch.uint16),
        "wave": torch.complex(numbers, numbers),
    }


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    """Saves with torch.distributed.checkpoint in this process alone, of which it warns."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder, no_dist=True)
