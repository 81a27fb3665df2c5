"""The rank's side of `run_local`: a process that works off one task after another.

The conversation, from the rank's view: say READY; then, per call, receive a `Task`, answer
`Returned` or `Raised`, receive CLOSE, leave the process group, say `Closed`. CLOSE comes only when
all ranks have returned: a rank that left earlier would break connections others still use. After
any failure there is no CLOSE; the ranks are killed and replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import sysconfig
import threading
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise._torch_compat import has_run_rpc
from shardwise.settings import forget_settings
from shardwise.testing.pickling import dumps_result
from shardwise.words import headline

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

__all__ = [
    "STACKS_SIGNAL",
    "Closed",
    "Raised",
    "Returned",
    "SourceFile",
    "Step",
    "Task",
    "end_with_parent",
    "prefer_loopback",
    "serve",
]

STACKS_SIGNAL = signal.SIGUSR1  # at which a rank prints its stacks

# Collectives wait longer than the caller does, so that a hang ends in its report of all stacks
# and not in one rank's "timed out". The cap keeps an endless timeout inside what torch accepts.
_COLLECTIVE_EXTRA = 60.0
_COLLECTIVE_CAP = 7 * 24 * 3600.0

# Code that nobody edits between two calls, and shardwise's own, which the fork server holds.
_FOREIGN_FOLDERS = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
    str(Path(__file__).parents[1]),
)
_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}


class Step(Enum):
    """The messages without content."""

    READY = auto()
    CLOSE = auto()


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
    cwd: str | None  # None: the caller's is gone
    start_method: str  # of multiprocessing


@dataclass(frozen=True, slots=True)
class Returned:
    """A rank's result, pickled."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """A rank's exception: its story for people, and itself where it can be pickled."""

    story: str
    exception: bytes | None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One version of a source file."""

    path: str
    mtime_ns: int
    size: int

    @staticmethod
    def now(path: str) -> SourceFile | None:
        """The version that lies at this path, if any."""
        try:
            found = os.stat(path)
        except OSError:
            return None
        return SourceFile(path, found.st_mtime_ns, found.st_size)


@dataclass(frozen=True, slots=True)
class Closed:
    """A rank that has left the call's process group."""

    imported: tuple[SourceFile, ...]  # the user's modules it has, in this call and earlier ones
    is_spent: bool  # cannot do what a new process can


def serve(connection: Connection[Any, Any], stacks: Connection[Any, Any]) -> None:
    """Work off tasks until the caller's process is gone.

    Stacks are written by faulthandler, from a signal handler: that works, too, when the main
    thread is deep in C code such as a collective, or has just crashed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever is interrupted, the caller acts
    os.setsid()  # whatever fn starts can be ended with this process
    faulthandler.enable(stacks.fileno())
    faulthandler.register(STACKS_SIGNAL, stacks.fileno(), all_threads=True)
    threading.Thread(target=end_with_parent, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a killed rank's last words are not lost
    with contextlib.suppress(EOFError):
        connection.send(Step.READY)
        kept = _Kept()
        gc.freeze()  # of what is here for good, so that a collection after each call is quick
        while True:
            connection.send(_answer(connection.recv(), kept))
            step = connection.recv()
            assert step is Step.CLOSE
            connection.send(_close(kept))


def end_with_parent() -> None:
    """End this process and its children, busy or not, once the caller's process is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    with contextlib.suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


class _Kept:
    """What a rank remembers from one call to the next."""

    def __init__(self) -> None:
        self.settings = _TorchSettings.now()
        self._judged = set(sys.modules)  # also the fork server's: a new rank would be as old
        self._imported: list[SourceFile] = []

    def imported(self) -> tuple[SourceFile, ...]:
        """The user's source files, each as it was when first seen here."""
        for name in sys.modules.keys() - self._judged:
            self._judged.add(name)
            path = getattr(sys.modules[name], "__file__", None)
            if isinstance(path, str) and _is_users(path) and (file := SourceFile.now(path)):
                self._imported.append(file)
        return tuple(self._imported)


@dataclass(frozen=True, slots=True)
class _TorchSettings:
    """What a function may set in torch for the whole process."""

    dtype: torch.dtype
    device: torch.device
    grad: bool
    determinism: int

    @staticmethod
    def now() -> _TorchSettings:
        return _TorchSettings(
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode(),
        )

    def restore(self) -> None:
        torch.set_default_dtype(self.dtype)
        # None is the CPU, too, without a mode that slows every torch function down
        torch.set_default_device(None if self.device.type == "cpu" else self.device)
        torch.set_grad_enabled(self.grad)
        if torch.get_deterministic_debug_mode() != self.determinism:  # setting it is slow
            torch.use_deterministic_algorithms(
                self.determinism > 0, warn_only=self.determinism == 1
            )


def _is_users(path: str) -> bool:
    inside = any(path.startswith(folder + os.sep) for folder in _FOREIGN_FOLDERS)
    return not inside and _PACKAGE_FOLDERS.isdisjoint(path.split(os.sep))


def _answer(task: Task, kept: _Kept) -> Returned | Raised:
    try:
        _enter(task, kept.settings)
        fn, args = pickle.loads(task.call)
        # What modules set while they are imported stays, since they stay; what fn sets does not.
        kept.settings = _TorchSettings.now()
        kept.imported()  # before fn runs: a file edited meanwhile is one that changed
        _join_group(task)
        with warnings.catch_warnings():
            result = fn(task.rank, *args)
    except BaseException as error:  # SystemExit, too, is an answer
        return _raised(error, f"raised {headline(error)}")
    try:
        return Returned(dumps_result(result))
    except Exception as error:
        kind = type(result).__name__
        return _raised(error, f"returned a {kind} that cannot be pickled: {headline(error)}")


def _enter(task: Task, settings: _TorchSettings) -> None:
    """Make this process look like one that torchrun had started from the caller's, just now."""
    os.environ.clear()
    os.environ.update(task.environ)
    os.environ.update(
        RANK=str(task.rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_RANK=str(task.rank),
        LOCAL_WORLD_SIZE=str(task.world_size),
    )
    prefer_loopback("GLOO_SOCKET_IFNAME")
    if task.cwd is not None:
        os.chdir(task.cwd)
    sys.path[:] = task.sys_path
    # multiprocessing made this the ranks' own: forkserver, which cannot send code of `__main__`.
    multiprocessing.set_start_method(task.start_method, force=True)
    settings.restore()
    forget_settings()
    torch.set_num_threads(1)  # the ranks share the cores
    # Ranks forked from one server would draw the same numbers.
    torch.seed()
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def prefer_loopback(variable: str) -> None:
    """Names the loopback interface in a variable, unless it names one already.

    Without a name the backend looks up the host's own, which need not resolve.
    """
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ.setdefault(variable, min(loopback))


def _join_group(task: Task) -> None:
    seconds = min(task.timeout, _COLLECTIVE_CAP) + _COLLECTIVE_EXTRA
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(task.rendezvous, task.world_size),  # type: ignore[attr-defined]  # documented, but not marked
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=seconds),
    )


def _close(kept: _Kept) -> Closed | Raised:
    try:
        if dist.is_initialized():  # fn may have left the group itself
            dist.destroy_process_group()
    except Exception as error:
        return _raised(error, f"could not leave its process group: {headline(error)}")
    # A group that is held in a cycle, as by an exception that was caught, would end in whichever
    # process collects it: in a fork of this one without the group's threads, with a fault.
    gc.collect()
    return Closed(kept.imported(), is_spent=has_run_rpc())


def _raised(error: BaseException, verdict: str) -> Raised:
    own_frame = error.__traceback__
    beyond = own_frame.tb_next if own_frame else None
    lines = traceback.format_exception(type(error), error, beyond or own_frame)
    try:
        pickled = dumps_result(error)
    except Exception:
        pickled = None
    return Raised(f"{verdict}\n{''.join(lines).rstrip()}", pickled)
