"""`load_index`: what is in a checkpoint, without its data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.index import INDEX_NAME, decode_index
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    import os

    from shardwise.checkpoint.index import Index

__all__ = ["load_index"]


def load_index(path: str | os.PathLike[str]) -> Index:
    """Everything about a checkpoint but its data; in one process, without any group."""
    folder = Path(path)
    index = folder / INDEX_NAME
    try:
        data = index.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint at {str(folder)!r}",
            expected=f"a folder with {INDEX_NAME}",
            got=error.strerror,
        ) from error
    return decode_index(data, folder)
