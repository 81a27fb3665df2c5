"""`save`: a state on disk, whatever the layouts of its tensors.

[Note: a save] All ranks compare what they bring (one exchange), place the boxes alike without
another word, and write their files into a folder aside. They meet when all are written, the first
rank gets where data begins and the checksums, writes the index and makes the folder the checkpoint,
and all meet again to hear of it. A rank that fails says so at the next meeting, and all raise; one
that dies is missed there.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, overload

import xxhash

from shardwise.arguments import whole_number
from shardwise.checkpoint.background import Saved, background_of, checked_if_busy
from shardwise.checkpoint.collecting import Brought, all_alike, bring, merge
from shardwise.checkpoint.committing import Aside, Destination
from shardwise.checkpoint.finishing import commit_index, told_by_system
from shardwise.checkpoint.group import group_of_tensors
from shardwise.checkpoint.reporting import gather_reports, index_of, report_of
from shardwise.checkpoint.save_job import LEAST_STAGING, SaveJob, save_job, stage, writing
from shardwise.checkpoint.structure import Flat, flatten
from shardwise.comm.agreement import agreed_bytes
from shardwise.errors import (
    AgreementError,
    CheckpointError,
    NotInitializedError,
    ShardwiseError,
)
from shardwise.sharded_tensor.progress import progress_bar
from shardwise.transfer.units import format_bytes
from shardwise.words import plural

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

    from shardwise.checkpoint.background import AsyncSave, IfBusy
    from shardwise.checkpoint.collecting import Merged
    from shardwise.comm.communicator import Communicator
    from shardwise.geometry.box import Ints

__all__ = ["save"]

_LOGGER = logging.getLogger(__name__)
_WHAT = "checkpoint.save"


@overload
def save(
    state: object,
    path: str | os.PathLike[str],
    *,
    process_group: ProcessGroup | Communicator | None = ...,
    max_bytes: int | None = ...,
    async_op: Literal[False] = ...,
    if_busy: IfBusy = ...,
    progress: bool | None = ...,
) -> Saved: ...
@overload
def save(
    state: object,
    path: str | os.PathLike[str],
    *,
    process_group: ProcessGroup | Communicator | None = ...,
    max_bytes: int | None = ...,
    async_op: Literal[True],
    if_busy: IfBusy = ...,
    progress: bool | None = ...,
) -> AsyncSave: ...
def save(
    state: object,
    path: str | os.PathLike[str],
    *,
    process_group: ProcessGroup | Communicator | None = None,
    max_bytes: int | None = None,
    async_op: bool = False,
    if_busy: IfBusy = "wait",
    progress: bool | None = None,
) -> Saved | AsyncSave:
    """Saves a nested state of tensors and plain values as a checkpoint, the folder `path`.

    Modules, optimizers and other objects with a `state_dict` stand for it. All ranks of the group
    call it: of `process_group`, else of the one group of the state's sharded tensors, else of the
    default one; a process without any saves alone. Each rank writes what it holds, a replica by one
    of its ranks; a plain tensor is the same on all ranks that have it. Ranks may have different
    tensors and keys, as the stages of a pipeline have, which then need a group that has all of
    them. A checkpoint at the path is replaced, at once, when the new one is on disk.

    Tensors that are not contiguous on the CPU are copied there first, at most `max_bytes` (64 MiB)
    at a time. `async_op=True` returns an `AsyncSave` once this rank's part is copied, so that the
    tensors may change; a thread does the rest. The copies take as much memory as this rank writes,
    which is kept for the next save; with `max_bytes` no more than that, and what is beyond is
    written before the call returns. A save while another one is under way in the group waits for
    it, or with `if_busy="raise"` fails; what went wrong in the background is raised by the next
    save or load, or by the handle's `wait()`. `progress` shows a bar on the first rank: by default
    on a terminal, and not in the background.

    >>> import tempfile
    >>> import torch
    >>> folder = tempfile.mkdtemp()
    >>> saved = save({"weight": torch.ones(2, 3), "epoch": 4}, f"{folder}/step_1")
    >>> saved.num_tensors, saved.nbytes
    (1, 24)
    """
    began = time.monotonic()
    brought, members, problem = _brought(state, process_group)
    background = background_of(members)
    destination: Destination | None = None
    try:
        background.settle(checked_if_busy(if_busy))
        if max_bytes is not None:
            whole_number(max_bytes, "max_bytes of save", least=LEAST_STAGING)
        destination = _checked_destination(path, members)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = problem or error
    arguments = {
        "path": destination and str(destination.path),
        "max_bytes": max_bytes,
        "async_op": bool(async_op),
    }
    merged, token = _agreed(brought, members, arguments, problem)
    assert destination is not None
    job = save_job(brought, merged, Aside(destination, token), members, max_bytes)
    _LOGGER.info(
        "saving %s, %s, of which %s by rank %d, to %s (planned in %.3f s)",
        plural(len(job.placing.tensors), "tensor"),
        format_bytes(job.nbytes),
        format_bytes(job.rank_bytes),
        members.rank,
        destination.path,
        time.monotonic() - began,
    )
    if not async_op:
        return _finish(job, members, writing(job), progress)
    own = background.members()
    written = writing(job)
    try:
        stage(job, written, background, max_bytes)
    except Exception as error:  # which all ranks hear when they meet in the background
        job.problem = _told(error, job, members.rank)
    _LOGGER.info("staged in %.3f s; the tensors may change", time.monotonic() - began)
    return background.start(lambda: _finish(job, own, written, progress or False))


# -- before anything is written ----------------------------------------------------------------


def _checked_destination(path: str | os.PathLike[str], members: Communicator) -> Destination:
    destination = Destination.at(path)
    destination.check()
    if _is_first(members):
        destination.check_nobody_saves()
    return destination


def _brought(
    state: object, process_group: ProcessGroup | Communicator | None
) -> tuple[Brought, Communicator, Exception | None]:
    """What this rank brings, the group, and what is wrong with it."""
    problem: Exception | None = None
    flat, brought = Flat(), Brought(None)
    try:
        _check_is_state(state)
        flat = flatten(state)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    members = group_of_tensors(flat.tensors.values(), process_group)
    try:
        brought = bring(flat, members)
    except Exception as error:
        problem = problem or error
    return brought, members, problem


def _check_is_state(state: object) -> None:
    if not isinstance(state, Mapping | list | tuple) and not hasattr(state, "state_dict"):
        raise CheckpointError(
            "state of save",
            expected="a dict or list of tensors and values, or an object with state_dict()",
            got=type(state).__name__,
        )


def _agreed(
    brought: Brought,
    members: Communicator,
    arguments: Mapping[str, object],
    problem: Exception | None,
) -> tuple[Merged, str]:
    """What all ranks bring, and a token for this save; the same on all of them."""
    mine = brought.digest + brought.tied_digest + secrets.token_bytes(8)
    found = agreed_bytes(_WHAT, arguments, mine, group=members, problem=problem)
    token = xxhash.xxh3_64_hexdigest(b"".join(one[24:] for one in found))
    if all(one[:16] == mine[:16] for one in found):
        are_tied = all(one[16:24] == mine[16:24] for one in found)
        return all_alike(brought, tuple(members.ranks), are_tied=are_tied), token
    told = Brought(brought.structure, brought.tensors)
    heard = [one for one in members.gather_objects(told) if isinstance(one, Brought)]
    return merge(list(zip(members.ranks, heard, strict=True))), token


# -- together ----------------------------------------------------------------------------------


def _finish(
    job: SaveJob, members: Communicator, written: Iterator[int], progress: bool | None
) -> Saved:
    """Writes, and makes it the checkpoint. All ranks call it. [Note: a save]"""
    began = time.monotonic()
    try:
        try:
            _write(job, members, written, progress)
        except Exception as error:  # whatever it is, all ranks are to raise
            job.problem = job.problem or _told(error, job, members.rank)
        took = time.monotonic() - began
        _meet("writing", job, members)
        try:
            _report_and_commit(job, members)
        except Exception as error:  # also of an exchange, so that nobody waits for this rank
            job.problem = _told(error, job, members.rank)
        _meet("the last step", job, members)
        if _is_first(members):
            job.aside.destination.remove_remains()
    except (CheckpointError, AgreementError):
        job.aside.remove()  # all ranks are here, and nobody writes any more
        raise
    except (ShardwiseError, RuntimeError) as error:
        raise _left(job, error) from error
    finally:
        job.aside.close()
    rate = job.rank_bytes / max(took, 1e-9) / 1e9
    _LOGGER.info("wrote %s in %.3f s, %.2f GB/s", format_bytes(job.rank_bytes), took, rate)
    _LOGGER.info("committed %s after %.3f s", job.aside.destination.path, time.monotonic() - began)
    num_tensors = len(job.placing.tensors) + len(job.merged.same_as)
    return Saved(job.aside.destination.path, num_tensors, job.nbytes, job.rank_bytes)


def _write(
    job: SaveJob, members: Communicator, written: Iterator[int], progress: bool | None
) -> None:
    if job.problem is not None:
        return
    with progress_bar("saving", job.rank_bytes, members, show=progress) as advance:
        for nbytes in written:
            advance(nbytes)


def _meet(step: str, job: SaveJob, members: Communicator) -> None:
    """Returns once all ranks are here and well; else all raise."""
    what = f"{_WHAT} to {str(job.aside.destination.path)!r}, {step}"
    agreed_bytes(
        what, {}, b"", group=members, doing="save", problem=job.problem, timeout=job.patience
    )


def _report_and_commit(job: SaveJob, members: Communicator) -> None:
    report = report_of([len(file.header) for file in job.files], job.checksums)
    reports = gather_reports(report, job.placing, members)
    if _is_first(members):
        _commit(job, reports, len(members.ranks))


def _is_first(members: Communicator) -> bool:
    return members.rank == members.ranks.rank_at(0)


def _commit(job: SaveJob, reports: Mapping[int, Ints], world_size: int) -> None:
    """Writes the index and makes the folder the checkpoint. For the first rank."""
    aside, placing = job.aside, job.placing
    index = index_of(
        placing,
        reports,
        path=aside.destination.path,
        structure=job.merged.structure,
        same_as=job.merged.same_as,
        world_size=world_size,
    )
    commit_index(index, placing, aside)
    job.is_committed = True


def _told(error: Exception, job: SaveJob, rank: int) -> Exception:
    """What went wrong on this rank, in our words where the system said it."""
    if not isinstance(error, OSError):
        return error
    return told_by_system(error, f"save to {str(job.aside.destination.path)!r}", rank=rank)


def _left(job: SaveJob, error: Exception) -> CheckpointError:
    path = job.aside.destination.path
    if isinstance(error, NotInitializedError):
        why = "the process group was destroyed before it was over"
        fix = "Wait for saves in the background before that: handle.wait(). "
    else:
        why, fix = f"since ranks are missing: {error}", ""
    if job.is_committed:  # on the first rank, the only one that knows
        return CheckpointError(
            f"save to {str(path)!r} is done, but the others could not be told: {why}", fix=fix
        )
    return CheckpointError(
        f"save to {str(path)!r} was cut off, {why}",
        fix=f"{fix}What was at the path is as it was, unless the first rank was in its last step. "
        f"{str(job.aside.path)!r} is what was written so far; the next save to the same path "
        "removes it.",
    )
