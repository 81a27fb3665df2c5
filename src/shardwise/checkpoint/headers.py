"""The header of a safetensors file: eight bytes of length, then JSON; the data comes behind it.

A file that holds boxes of larger tensors says where they are by the keys of DCP's Hugging Face
writer, so that its reader finds them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.dtypes import code_of, dtype_of
from shardwise.errors import DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import BinaryIO

    import torch

    from shardwise.checkpoint.placing import PlacedPiece

__all__ = ["Header", "HeaderEntry", "header_of", "read_header"]

_ALIGNED = 64  # bytes, to which the data begins
_LONGEST = 100_000_000  # bytes of a header, as the safetensors library has it
_SHARDING = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor, or a box of one, in a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int
    offset: tuple[int, ...] | None  # where the box is in its tensor; None: it is the tensor


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    entries: tuple[HeaderEntry, ...]  # in the order of their bytes
    metadata: dict[str, str]
    data_start: int


def header_of(pieces: Iterable[PlacedPiece], *, is_unsharded: bool) -> bytes:
    """The first bytes of a file of these pieces, which must be in the order of their starts."""
    listed = list(pieces)
    metadata = {"format": "pt"}
    if not is_unsharded:
        offsets = {piece.key: {"saved_offsets": list(piece.box.start)} for piece in listed}
        metadata["DCP_VERSION"] = "1.0"
        metadata[_SHARDING] = json.dumps(offsets, separators=(",", ":"))
    entries: dict[str, Any] = {"__metadata__": metadata}
    for piece in listed:
        entries[piece.key] = {
            "dtype": code_of(piece.tensor.dtype, piece.tensor.name),
            "shape": list(piece.box.shape),
            "data_offsets": [piece.start, piece.start + piece.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO, name: str, size: int) -> Header:
    """The header of an open file of `size` bytes; raises if the file cannot be what it says."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST):
        raise DamagedError(
            f"file {name!r}",
            expected="a safetensors file",
            got=f"{size} bytes that say they begin with a header of {length}",
            fix="It is cut off or no safetensors file; take it from where it came from again.",
        )
    try:
        found = json.loads(file.read(length))
        return _checked(found, name, size, 8 + length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(
            f"header of file {name!r}",
            expected="that of a safetensors file",
            got=f"{type(error).__name__}: {error}",
            fix="Take the file from where it came from again.",
        ) from error


def _checked(found: dict[str, Any], name: str, size: int, data_start: int) -> Header:
    metadata = found.pop("__metadata__", {})
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise TypeError("metadata that is not of strings")
    offsets = json.loads(metadata[_SHARDING]) if _SHARDING in metadata else {}
    entries = []
    for key, entry in found.items():
        dtype = dtype_of(entry["dtype"], key)
        start, stop = (data_start + _whole(number) for number in entry["data_offsets"])
        shape = tuple(map(_whole, entry["shape"]))
        offset = tuple(map(_whole, offsets[key]["saved_offsets"])) if offsets else None
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        if stop - start != nbytes or stop > size or (offset and len(offset) != len(shape)):
            raise DamagedError(
                f"{key!r} in file {name!r}",
                expected=f"{nbytes} bytes of {tuple(shape)} within {size}",
                got=f"bytes {start} to {stop}",
                fix="The file is cut off or damaged; take it from where it came from again.",
            )
        entries.append(HeaderEntry(key, dtype, shape, start, stop, offset))
    entries.sort(key=lambda entry: entry.start)
    return Header(tuple(entries), metadata, data_start)


def _whole(number: object) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{number!r} is no size")
    return number
