"""The last step of what writes a checkpoint: the index, and the folder becomes the checkpoint."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from shardwise.checkpoint.dcp_folder import METADATA_NAME
from shardwise.checkpoint.index import INDEX_NAME
from shardwise.checkpoint.index_file import encode_index
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.reporting import hugging_face_index
from shardwise.checkpoint.writing import write_new_file
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.checkpoint.committing import Aside
    from shardwise.checkpoint.index import Index
    from shardwise.checkpoint.placing import Placing

__all__ = ["commit", "commit_index", "told_by_system"]

_HUGGING_FACE_INDEX = "model.safetensors.index.json"
_ADVICE = {
    errno.ENOSPC: "Make room on the disk.",
    errno.EDQUOT: "Make room: the quota is used up.",
    errno.EFBIG: "The system allows no file of this size: see `ulimit -f`.",
    errno.EROFS: "The filesystem is read-only: save to another path.",
    errno.EACCES: "This user may not write there: save to another path.",
    errno.EPERM: "This user may not write there: save to another path.",
}


def commit_index(index: Index, placing: Placing, aside: Aside) -> None:
    """Writes the index of files that are written, and makes the folder the checkpoint."""
    aside.check_sizes({file.name: (file.rank, file.size) for file in index.files})
    if placing.is_unsharded and len(placing.files) > 1:
        write_new_file(aside.path / _HUGGING_FACE_INDEX, hugging_face_index(placing))
    write_new_file(aside.path / INDEX_NAME, encode_index(index))
    commit(aside)


def commit(aside: Aside) -> None:
    """Makes the folder, in which all is written, the checkpoint."""
    aside.commit(_old_files(aside.destination.path))


def _old_files(path: Path) -> set[str] | None:
    """The files of the checkpoint at the path; None if there is none."""
    if not (path / INDEX_NAME).exists():
        return None
    names = {INDEX_NAME, METADATA_NAME, _HUGGING_FACE_INDEX}
    try:
        names.update(file.name for file in load_index(path).files)
    except CheckpointError:  # it is damaged: what looks like its files is taken for them
        names.update(one.name for one in path.glob("*.safetensors"))
    return names


def told_by_system(error: OSError, what: str, *, rank: int | None = None) -> CheckpointError:
    """What the system said when something was written, in our words."""
    told = CheckpointError(
        f"{what} failed: {error.strerror or error}"
        + (f" ({error.filename!r})" if error.filename else ""),
        rank=rank,
        fix="Nothing was changed at the path. " + _ADVICE.get(error.errno or 0, ""),
    )
    told.__cause__ = error
    return told
