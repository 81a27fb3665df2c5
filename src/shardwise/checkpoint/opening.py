"""`load_index`: what is in a checkpoint, without its data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise import arguments
from shardwise.checkpoint.committing import remains_text
from shardwise.checkpoint.dcp_folder import METADATA_NAME, dcp_index
from shardwise.checkpoint.index import INDEX_NAME, stamp_of
from shardwise.checkpoint.index_file import decode_index
from shardwise.checkpoint.safetensors_folder import SUFFIX, safetensors_index
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.checkpoint.index import Index

__all__ = ["load_index"]

_KINDS = (
    f"a checkpoint: a folder with {INDEX_NAME}, with .safetensors files or with DCP's "
    f"{METADATA_NAME}, or one .safetensors file"
)
_MOST_NAMES = 6  # of what is in a folder, in a message


def load_index(path: str | os.PathLike[str]) -> Index:
    """Everything about a checkpoint but its data; in one process, without any group.

    Of shardwise, of Hugging Face (a folder or one .safetensors file) or of
    torch.distributed.checkpoint. Runs nothing that a file says.
    """
    folder = arguments.path(path, "path of a checkpoint")
    try:
        if folder.is_file() and folder.suffix == SUFFIX:
            return safetensors_index(folder)
        if not folder.is_dir():
            raise _no_checkpoint(folder)
        names = {one.name for one in folder.iterdir()}
        if INDEX_NAME in names:
            return _read(
                folder / INDEX_NAME, lambda file: decode_index(file.read_bytes(), file.parent)
            )
        if METADATA_NAME in names:
            return _read(folder / METADATA_NAME, lambda file: dcp_index(file.parent))
        if any(name.endswith(SUFFIX) for name in names):
            return safetensors_index(folder)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint at {str(folder)!r} cannot be read", got=error.strerror
        ) from error
    raise _no_checkpoint(folder)


def _read(file: Path, read: Callable[[Path], Index]) -> Index:
    """The index that a file is, of one checkpoint although another may take its place."""
    stamp = stamp_of(file)
    index = replace(read(file), source=(file, stamp))
    index.check_is_current()
    return index


def _no_checkpoint(path: Path) -> CheckpointError:
    got, fix = _what_is_there(path)
    fix = remains_text(path) or fix
    return CheckpointError(f"no checkpoint at {str(path)!r}", expected=_KINDS, got=got, fix=fix)


def _what_is_there(path: Path) -> tuple[str, str | None]:
    """What stands at a path that is no checkpoint, and what to do."""
    if path.is_file():
        known = path.name in (INDEX_NAME, METADATA_NAME) or path.name.endswith(".index.json")
        fix = f"Give the folder: {str(path.parent)!r}." if known else None
        return f"a file of {path.stat().st_size} bytes", fix
    if not path.exists():
        if path.parent.is_dir():
            return "nothing", _neighbours(path)
        return "nothing; nor is there a folder above it", None
    names = sorted(one.name for one in path.iterdir())
    if not names:
        return "an empty folder", None
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    below = [one for one in names if (path / one / INDEX_NAME).exists()]
    if any(name.startswith("__") and name.endswith(METADATA_NAME) for name in names):
        fix = (
            "DCP wrote it with use_collectives=False, one metadata for each rank; load it with "
            "torch.distributed.checkpoint on as many ranks."
        )
    else:
        fix = f"Did you mean {str(path / below[-1])!r}?" if below else None
    return f"a folder with {', '.join(names[:_MOST_NAMES])}{more}", fix


def _neighbours(path: Path) -> str | None:
    names = sorted(one.name for one in path.parent.iterdir() if not one.name.startswith("."))
    if not names:
        return None
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"Beside it: {', '.join(names[:_MOST_NAMES])}{more}."
