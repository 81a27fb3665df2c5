"""Writing the bytes of tensors into a safetensors file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

__all__ = ["FileWriter", "Staging", "bytes_of", "is_plain_memory", "write_new_file"]

_STEP = 1 << 23  # bytes that are hashed and written while they are in the cache
_STAGED = 1 << 26  # bytes of staging where nothing is said


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are its elements in order, where this process can read them."""
    is_stored = tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_stored and not tensor.is_conj() and not tensor.is_neg()


class Staging:
    """Memory on the CPU through which tensors go that cannot be written as they are."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """For at most `max_bytes` at a time, which is at least one element."""
        self._max_bytes = _STAGED if max_bytes is None else max_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)

    def parts(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor in row-major order; each part is there until the next is asked."""
        if is_plain_memory(tensor):
            yield bytes_of(tensor)
            return
        for part in _parts(tensor.detach(), max(1, self._max_bytes // tensor.dtype.itemsize)):
            if len(self._memory) < part.nbytes:
                self._memory = torch.empty(part.nbytes, dtype=torch.uint8)
            staged = self._memory[: part.nbytes]
            staged.view(part.dtype).view(part.shape).copy_(part)
            yield bytes_of(staged)


def _parts(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """The tensor in parts of at most `most` elements, in row-major order."""
    if tensor.numel() <= most:
        yield tensor
    elif (row := tensor.numel() // len(tensor)) <= most:
        yield from tensor.split(most // row)
    else:
        for one in tensor:
            yield from _parts(one, most)


class FileWriter:
    """A new file: its header, then tensors one after the other. On disk when it is closed."""

    def __init__(self, path: Path, header: bytes, staging: Staging | None = None) -> None:
        self._staging = Staging() if staging is None else staging
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.size = 0
        try:
            self._write(memoryview(header))
        except OSError:
            os.close(self._file)
            raise

    def write(self, tensor: torch.Tensor) -> int:
        """Appends a tensor; the checksum of its bytes."""
        return self.write_all((tensor,))

    def write_all(self, tensors: Iterable[torch.Tensor]) -> int:
        """Appends tensors one after the other; the checksum of the bytes of all."""
        checksum = xxhash.xxh3_64()
        for tensor in tensors:
            for data in self._staging.parts(tensor):
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


def write_new_file(path: Path, data: bytes) -> None:
    """A file of these bytes, on disk."""
    with FileWriter(path, data):
        pass
