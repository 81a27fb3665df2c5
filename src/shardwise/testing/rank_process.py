"""The rank's side of `run_local`: a process that works off one task after another.

The conversation, from the rank's view: say READY; then, per call, receive a `Task`, answer
`Returned` or `Raised`, receive CLOSE, leave the process group, say CLOSED. CLOSE comes only when
all ranks have returned: a rank that left earlier would break connections others still use. After
any failure there is no CLOSE; the ranks are killed and replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.testing.pickling import dumps_result

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

__all__ = ["STACKS_SIGNAL", "Raised", "Returned", "Step", "Task", "end_with_parent", "serve"]

STACKS_SIGNAL = signal.SIGUSR1

# Collectives wait longer than the caller does, so that a hang ends in its report of all stacks
# and not in one rank's "timed out". The cap keeps an endless timeout inside what torch accepts.
_COLLECTIVE_EXTRA = 60.0
_COLLECTIVE_CAP = 7 * 24 * 3600.0


class Step(Enum):
    """The messages without content."""

    READY = auto()
    CLOSE = auto()
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Task:
    """One call of `run_local`, as one rank receives it."""

    rank: int
    world_size: int
    call: bytes  # pickled (fn, args); loads only once `sys_path` is in place
    rendezvous: str  # the file at which the ranks of this call meet
    timeout: float
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    cwd: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A rank's result, pickled."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """A rank's exception: its story for people, and itself where it can be pickled."""

    story: str
    exception: bytes | None


def serve(connection: Connection[Any, Any], stacks: Connection[Any, Any]) -> None:
    """Work off tasks until the caller's process is gone.

    Stacks are written by faulthandler, from a signal handler: that works, too, when the main
    thread is deep in C code such as a collective, or has just crashed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole terminal; the caller acts
    faulthandler.enable(stacks.fileno())
    faulthandler.register(STACKS_SIGNAL, stacks.fileno(), all_threads=True)
    threading.Thread(target=end_with_parent, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a killed rank's last words are not lost
    with contextlib.suppress(EOFError):
        connection.send(Step.READY)
        while True:
            connection.send(_answer(connection.recv()))
            step = connection.recv()
            assert step is Step.CLOSE
            connection.send(_close())


def end_with_parent() -> None:
    """End this process, busy or not, as soon as the caller's process is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(task: Task) -> Returned | Raised:
    try:
        _enter(task)
        fn, args = pickle.loads(task.call)
        _join_group(task)
        result = fn(task.rank, *args)
    except BaseException as error:  # SystemExit, too, is an answer
        return _raised(error, f"raised {_headline(error)}")
    try:
        return Returned(dumps_result(result))
    except Exception as error:
        kind = type(result).__name__
        return _raised(error, f"returned a {kind} that cannot be pickled: {_headline(error)}")


def _enter(task: Task) -> None:
    """Make this process look like one that torchrun had started from the caller's, just now."""
    os.environ.clear()
    os.environ.update(task.environ)
    os.environ.update(
        RANK=str(task.rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_RANK=str(task.rank),
        LOCAL_WORLD_SIZE=str(task.world_size),
    )
    # Without a name gloo looks up the host's own, which need not resolve.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", min(loopback))
    os.chdir(task.cwd)
    sys.path[:] = task.sys_path
    torch.set_num_threads(1)  # the ranks share the cores


def _join_group(task: Task) -> None:
    seconds = min(task.timeout, _COLLECTIVE_CAP) + _COLLECTIVE_EXTRA
    dist.init_process_group(
        "gloo",
        # public in torch's documentation, but not marked as exported for type checkers
        store=dist.FileStore(task.rendezvous, task.world_size),  # type: ignore[attr-defined]
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=seconds),
    )


def _close() -> Step | Raised:
    try:
        if dist.is_initialized():  # fn may have left the group itself
            dist.destroy_process_group()
    except Exception as error:
        return _raised(error, f"could not leave its process group: {_headline(error)}")
    return Step.CLOSED


def _raised(error: BaseException, verdict: str) -> Raised:
    own_frame = error.__traceback__
    beyond = own_frame.tb_next if own_frame else None
    lines = traceback.format_exception(type(error), error, beyond or own_frame)
    try:
        pickled = dumps_result(error)
    except Exception:
        pickled = None
    return Raised(f"{verdict}\n{''.join(lines).rstrip()}", pickled)


def _headline(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
