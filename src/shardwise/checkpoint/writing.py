"""Writing the bytes of tensors into a safetensors file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

import torch
import xxhash

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["FileWriter", "bytes_of"]

_STEP = 1 << 23  # bytes that are hashed and written while they are in the cache


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class FileWriter:
    """A new file: its header, then tensors one after the other. On disk when it is closed."""

    def __init__(self, path: Path, header: bytes) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.size = 0
        self._write(memoryview(header))

    def write(self, tensor: torch.Tensor) -> int:
        """Appends a contiguous tensor on the CPU; the checksum of its bytes."""
        checksum = xxhash.xxh3_64()
        data = bytes_of(tensor)
        for start in range(0, len(data), _STEP):
            part = data[start : start + _STEP]
            checksum.update(part)
            self._write(part)
        return checksum.intdigest()

    def _write(self, data: memoryview) -> None:
        while len(data):  # a write may end early
            written = os.write(self._file, data)
            data = data[written:]
            self.size += written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)
