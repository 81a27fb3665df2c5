"""A checkpoint is written aside and becomes the checkpoint by one rename.

[Note: aside] What is to be `run/step_100` is written into `run/.step_100.saving-<token>`. Once all
of it is on disk and the index is in it, it takes the place of `step_100`: by a rename, or by an
exchange of the two names if an older checkpoint stands there. So whenever a process is killed, the
older one or the new one is at the path, whole. Every rank holds a shared lock on the folder aside;
the system lets go of it when the process ends, however it ends. A folder aside that nobody holds
was left behind, and the next save to the same path removes it. Where the system cannot exchange
names, the older one is renamed to `.step_100.replaced-<token>` first, and only a process killed
right between the two renames leaves no checkpoint at the path; what to rename is told then.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise import arguments
from shardwise.checkpoint.index import INDEX_NAME
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["Aside", "Destination", "fsync_folder", "remains_text"]

_LOGGER = logging.getLogger(__name__)
_SAVING, _REPLACED = "saving", "replaced"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint is to be."""

    path: Path  # without symbolic links

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Destination:
        """The place that a path means, links followed."""
        return cls(Path(os.path.realpath(arguments.path(path, "path of a checkpoint"))))

    def check(self) -> None:
        """Raises unless a checkpoint may be put there."""
        if not self.path.parent.is_dir():
            raise CheckpointError(
                f"save to {str(self.path)!r}",
                expected=f"a folder {str(self.path.parent)!r} to put it in",
                got="none",
                fix="Make it first, on a filesystem that all ranks see: os.makedirs(...).",
            )
        if not os.path.lexists(self.path):
            return
        if not self.path.is_dir():
            got = "a file"
        elif (self.path / INDEX_NAME).exists() or not any(self.path.iterdir()):
            return
        else:
            got = f"a folder with other things in it, such as {next(self.path.iterdir()).name!r}"
        raise CheckpointError(
            f"save to {str(self.path)!r}",
            expected="nothing there, an empty folder or an older checkpoint to replace",
            got=got,
            fix="Save to another path, or remove it yourself.",
        )

    def check_nobody_saves(self, *, but: str = "") -> None:
        """Raises if a save to the same path, other than that of token `but`, is under way."""
        for folder in self._remains(_SAVING):
            if folder.name != self._name(_SAVING, but) and _is_held(folder) is True:
                raise CheckpointError(
                    f"save to {str(self.path)!r}",
                    expected="one save at a time",
                    got=f"another one under way, in {folder.name!r}",
                    fix="Was save() called in several groups of ranks? Pass the process_group "
                    "that has all of them, or a path of its own to each group.",
                )

    def aside(self, token: str) -> Path:
        """Where a save writes until it is complete."""
        return self.path.parent / self._name(_SAVING, token)

    def replaced(self, token: str) -> Path:
        """Where the older checkpoint goes until it is removed."""
        return self.path.parent / self._name(_REPLACED, token)

    def _name(self, what: str, token: str) -> str:
        return f".{self.path.name}.{what}-{token}"

    def _remains(self, *kinds: str) -> Iterator[Path]:
        prefixes = tuple(self._name(kind, "") for kind in kinds)
        with suppress(OSError):
            for entry in sorted(os.scandir(self.path.parent), key=lambda entry: entry.name):
                if entry.name.startswith(prefixes) and entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)

    def remove_remains(self) -> None:
        """Removes what was left behind. To be called when a checkpoint is at the path."""
        for folder in self._remains(_SAVING, _REPLACED):
            if _is_held(folder) is False:
                _LOGGER.info("removing %s, which is no checkpoint any more", folder)
                shutil.rmtree(folder, ignore_errors=True)


def remains_text(path: str | os.PathLike[str]) -> str | None:
    """What saves to a path that has no checkpoint left beside it, and what to do; None: nothing."""
    destination = Destination.at(path)
    older = next(destination._remains(_REPLACED), None)
    if older is not None:
        return (
            f"A save was cut off right before its last step: the older checkpoint is whole in "
            f"{str(older)!r}; rename it to {str(destination.path)!r}."
        )
    begun = next(destination._remains(_SAVING), None)
    if begun is not None:
        return (
            f"{str(begun)!r} is what a save that is under way, or was cut off, has written: it is "
            "no checkpoint, and the next save to this path removes it."
        )
    return None


class Aside:
    """The folder into which this rank, with others, writes what is to be the checkpoint."""

    def __init__(self, destination: Destination, token: str) -> None:
        self.destination, self.token = destination, token
        self.path = destination.aside(token)
        self._folder = -1

    def make(self) -> None:
        """Makes it, unless another rank has."""
        with suppress(FileExistsError):
            os.mkdir(self.path)
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a filesystem without locks: what is left behind stays there
            fcntl.flock(self._folder, fcntl.LOCK_SH)

    def check_sizes(self, sizes: dict[str, tuple[int, int]]) -> None:
        """Raises unless each file (name -> rank, bytes) is here as long as its rank wrote it."""
        for name, (rank, expected) in sizes.items():
            try:
                got = os.stat(self.path / name).st_size
            except FileNotFoundError:
                raise CheckpointError(
                    f"file {name!r}, which rank {rank} wrote, is not in {str(self.path)!r}",
                    fix="All ranks must see one filesystem at the path of a checkpoint.",
                ) from None
            if got != expected:
                raise CheckpointError(
                    f"file {name!r} of rank {rank} in {str(self.path)!r}",
                    expected=f"{expected} bytes, as written",
                    got=got,
                    fix="Is the disk full, or the filesystem damaged?",
                )

    def commit(self, old_files: Collection[str] | None) -> None:
        """Makes it the checkpoint. `old_files` are those of the older one, if there is one."""
        self.destination.check_nobody_saves(but=self.token)
        self.destination.check()
        if old_files is not None:
            self._carry_over(old_files)
        fsync_folder(self.path)
        if old_files is None:
            os.rename(self.path, self.destination.path)  # also onto an empty folder
        elif not _exchange(self.path, self.destination.path):
            os.rename(self.destination.path, self.destination.replaced(self.token))
            os.rename(self.path, self.destination.path)
        try:
            fsync_folder(self.destination.path.parent)
        except OSError as error:
            raise CheckpointError(
                f"{str(self.destination.path)!r} is the new checkpoint, but may not outlive a "
                "crash of the machine",
                got=error.strerror,
                fix="Save it again, to a disk that works.",
            ) from error

    def _carry_over(self, old_files: Collection[str]) -> None:
        """What others have put beside the older checkpoint, such as a model's config, stays."""
        for entry in os.scandir(self.destination.path):
            if entry.name in old_files or os.path.lexists(self.path / entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.copytree(entry.path, self.path / entry.name, symlinks=True)
            else:
                shutil.copy2(entry.path, self.path / entry.name, follow_symlinks=False)

    def close(self) -> None:
        """Lets go of the lock."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def remove(self) -> None:
        """Removes what was written. Nobody writes any more."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)


def fsync_folder(path: Path) -> None:
    """Has the names in a folder on disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a filesystem that has no such thing
            raise
    finally:
        os.close(folder)


def _is_held(folder: Path) -> bool | None:
    """Whether a process that lives holds a folder; None where that cannot be told."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False


def _exchange(one: Path, other: Path) -> bool:
    """Gives each folder the name of the other at once; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = [os.fsencode(path) for path in (one, other)]
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(other))
