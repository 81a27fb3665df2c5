"""Running a function on local ranks: for tests, notebooks and small scripts."""

from __future__ import annotations

import inspect
import multiprocessing
import operator
import os
import pickle
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, TypeVarTuple

from shardwise.arguments import is_whole_number
from shardwise.errors import ArgumentTypeError, ArgumentValueError, RankFailure
from shardwise.testing.pickling import dumps_call
from shardwise.testing.rank_pool import Exited, RankHandle, RankPool, is_rank_process, stacks_of
from shardwise.testing.rank_process import Closed, Raised, Returned, Step, Task
from shardwise.words import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["run_local"]

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

GRACE_AFTER_FAILURE = 2.0  # for the other ranks to fail, too, and tell why
_CLOSE_LIMIT = 20.0
_LONGEST_WAIT = 3600.0  # an endless timeout is waited for in pieces that select() accepts

# The one pool of this process. Module state, because its worth is to outlive the calls: a later
# call finds its ranks started and torch imported.
_pool = RankPool("forkserver")


def run_local(
    fn: Callable[[int, *Args], Result],
    world_size: SupportsIndex,
    *args: *Args,
    timeout: float = 60.0,
) -> list[Result]:
    """Every rank's `fn(rank, *args)`, in rank order, from local processes.

    >>> run_local(lambda rank, step: rank * step, 3, 10)
    [0, 10, 20]

    `fn` runs with a gloo process group as the default one, one torch thread, torchrun's
    variables, and the caller's environment, `sys.path` and working folder. Lambdas, closures and
    notebook functions will do; results come back by value. The processes stay for later calls.
    Each call has a process group, random seeds, warning filters and torch defaults (dtype, device,
    gradients, determinism) of its own; imported modules stay, with whatever `fn` changed in them,
    until the source file of one is edited.

    Raises `RankFailure` when a rank raises, exits, or has not returned after `timeout` seconds;
    its message holds every rank's traceback or stacks, and the ranks are replaced.
    """
    _check_not_in_a_rank()
    world_size = _checked_world_size(world_size)
    timeout = _checked_timeout(timeout)
    _check_function(fn, args)
    name = f"run_local({getattr(fn, '__qualname__', repr(fn))}, world_size={world_size})"
    call = _pickled(name, (fn, args))
    # In this order, ranks that may still be using the folder are ended before it is removed.
    with (
        tempfile.TemporaryDirectory(prefix="shardwise-") as folder,
        _current_pool().lend(world_size) as ranks,
    ):
        for rank, handle in enumerate(ranks):
            handle.send(
                Task(
                    rank=rank,
                    world_size=world_size,
                    call=call,
                    rendezvous=str(Path(folder, "rendezvous")),
                    timeout=timeout,
                    environ=dict(os.environ),
                    sys_path=tuple(sys.path),
                    cwd=_cwd(),
                    start_method=_start_method(),
                )
            )
        answers = _answers(name, ranks, timeout)
        results = [_loaded(name, rank, answers[rank]) for rank in range(world_size)]
        for handle in ranks:
            handle.send(Step.CLOSE)
        _answers(f"{name} at its end", ranks, _CLOSE_LIMIT)
    return results


def _check_not_in_a_rank() -> None:
    if is_rank_process():
        raise RankFailure(
            "run_local was called inside a rank of run_local",
            fix="Call it outside; for fewer ranks inside, use torch.distributed.new_group().",
        )


def _checked_world_size(world_size: SupportsIndex) -> int:
    what = "world_size of run_local"
    fix = "Write: run_local(fn, 2); the arguments of fn follow after it."
    if not is_whole_number(world_size):
        raise ArgumentTypeError(what, expected="a whole number", got=repr(world_size), fix=fix)
    number = operator.index(world_size)
    if number < 1:
        raise ArgumentValueError(what, expected="at least 1 rank", got=number, fix=fix)
    return number


def _checked_timeout(timeout: object) -> float:
    what, expected = "timeout of run_local", "a number of seconds above 0"
    fix = "Write: timeout=60.0, or timeout=math.inf to wait for ever."
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise ArgumentTypeError(what, expected=expected, got=repr(timeout), fix=fix)
    seconds = float(timeout)
    if not seconds > 0:  # nan is not
        raise ArgumentValueError(what, expected=expected, got=seconds, fix=fix)
    return seconds


def _check_function(fn: object, args: tuple[object, ...]) -> None:
    if not callable(fn):
        raise ArgumentTypeError(
            "fn of run_local",
            expected="a function",
            got=repr(fn),
            fix="Write: run_local(fn, 2), without calling fn.",
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(0, *args)
    except TypeError as error:
        raise ArgumentTypeError(
            "fn of run_local, called as fn(rank, *args)",
            expected=f"to take the rank and {len(args)} more",
            got=f"fn{signature}: {error}",
            fix="For keyword arguments, write: run_local(functools.partial(fn, name=value), 2).",
        ) from None


def _pickled(name: str, call: object) -> bytes:
    try:
        return dumps_call(call)
    except Exception as error:
        raise ArgumentTypeError(
            f"{name} function and arguments",
            expected="values that can be pickled",
            got=headline(error),
            fix="Make such values inside the function.",
        ) from error


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # the folder was removed
        return None


def _start_method() -> str:
    # Asking for the default one would settle it, and the caller may want to set another later.
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def _current_pool() -> RankPool:
    global _pool
    if _pool.owner != os.getpid():
        # This process was forked from the pool's owner. The ranks answer to the owner, and so
        # does the fork server; spawning is slower and needs neither.
        _pool = RankPool("spawn")
    return _pool


def _answers(
    name: str, ranks: Sequence[RankHandle], timeout: float
) -> dict[int, Returned | Closed | Step]:
    """Every rank's next message; raises `RankFailure` if one failed or stayed silent."""
    heard = _heard(ranks, timeout)
    good = {rank: a for rank, a in heard.items() if isinstance(a, Returned | Closed | Step)}
    if len(good) == len(ranks):
        return good
    exited = {rank: a for rank, a in heard.items() if isinstance(a, Exited)}
    raised = {rank: a for rank, a in heard.items() if isinstance(a, Raised)}
    # An exit goes first: others raise because of it, and may be heard before it.
    stories = {rank: f"rank {rank} {a.story}" for rank, a in (exited | raised).items()}
    why = "(waiting for the failed rank?)" if stories else f"after {timeout:g} s"
    silent = [rank for rank in range(len(ranks)) if rank not in heard]
    stacks = stacks_of([ranks[rank] for rank in silent])
    for rank, stack in zip(silent, stacks, strict=True):
        stories[rank] = f"rank {rank} was still running {why} and was ended\n{stack}"
    raise _failure(name, stories, sorted(good)) from _first_exception(raised.values())


def _heard(
    ranks: Sequence[RankHandle], timeout: float
) -> dict[int, Returned | Raised | Closed | Step | Exited]:
    """The next message of each rank that speaks or dies in time, in order of arrival."""
    deadline = time.monotonic() + timeout
    heard: dict[int, Returned | Raised | Closed | Step | Exited] = {}
    while len(heard) < len(ranks) and (left := deadline - time.monotonic()) > 0:
        silent = {rank: h for rank, h in enumerate(ranks) if rank not in heard}
        ready = wait([s for h in silent.values() for s in h.sources], min(left, _LONGEST_WAIT))
        for rank, handle in silent.items():
            if any(source in ready for source in handle.sources):
                heard[rank] = handle.receive()
                if isinstance(heard[rank], Raised | Exited):
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
    return heard


def _failure(name: str, stories: Mapping[int, str], returned: Sequence[int]) -> RankFailure:
    """The error that tells every failed rank's story, the first failure first."""
    text = [f"{name}: {len(stories)} of {len(stories) + len(returned)} ranks failed"]
    text += stories.values()
    text += [f"rank {rank} returned" for rank in returned]
    return RankFailure("\n\n".join(text), failures=stories)


def _first_exception(raised: Iterable[Raised]) -> BaseException | None:
    """The earliest exception that can be rebuilt in this process; not all can."""
    for answer in raised:
        if answer.exception is not None:
            with suppress(Exception):
                error = pickle.loads(answer.exception)
                if isinstance(error, BaseException):
                    return error
    return None


def _loaded(name: str, rank: int, answer: Returned | Closed | Step) -> Any:
    assert isinstance(answer, Returned)
    try:
        return pickle.loads(answer.result)
    except Exception as error:
        story = f"rank {rank} returned a value that cannot be unpickled: {headline(error)}"
        raise RankFailure(f"{name}: {story}", failures={rank: story}) from error
