"""run_local: results in rank order, every failure told in full, and a pool that survives it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.checks import check_timeout
from shardwise.errors import ArgumentTypeError, ArgumentValueError, RankFailure
from shardwise.testing.local_run import run_local

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

# Nothing here is asserted to be fast. This bound only tells "ended early" from "waited for the
# timeout of 60 s or for gloo's own".
HANG_GUARD = 30.0


@dataclass(frozen=True, slots=True)
class Point:
    x: int

    def shifted(self, by: int) -> Point:
        return Point(self.x + by)


class TwoPartError(Exception):
    """Pickles, and cannot be unpickled: a real habit of real exception classes."""

    def __init__(self, part: str, other: str) -> None:
        super().__init__(f"{part} and {other}")


class MuteError(Exception):
    """An exception whose own text is a bug."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def _sum_of_ranks(rank: int) -> float:
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    return t.item()


def _pid(rank: int) -> int:
    return os.getpid()


def _busy(seconds: float = HANG_GUARD) -> None:
    """Stays in Python code, but never for good: a test that fails to end it still ends."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _failure_of(
    fn: Callable[[int], object], world_size: int, *, timeout: float = 60.0
) -> RankFailure:
    """The failure of this call, after proof that the pool still works."""
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_local(fn, world_size, timeout=timeout)
    assert time.monotonic() - began < HANG_GUARD
    assert run_local(lambda rank: dist.get_world_size(), world_size) == [world_size] * world_size
    return caught.value


# ---- results ----


@pytest.mark.parametrize("world_size", [1, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    assert run_local(lambda rank: rank * 10, world_size) == [10 * r for r in range(world_size)]


def test_sum_reaches_every_rank() -> None:
    assert run_local(_sum_of_ranks, world_size=3) == [3.0, 3.0, 3.0]


def test_arguments_follow_the_rank() -> None:
    def joined(rank: int, word: str, points: list[Point]) -> str:
        return f"{rank}{word}{points[rank].x}"

    assert run_local(joined, 2, "-", [Point(5), Point(6)]) == ["0-5", "1-6"]


def test_lambdas_see_the_values_they_close_over() -> None:
    offset = 7
    assert run_local(lambda rank: rank + offset, 2) == [7, 8]


@dataclass
class _Model:
    config: int


def test_an_attribute_may_have_the_name_of_a_module_of_settings() -> None:
    """There is a torch.distributed.config, which the function's words seem to ask for."""
    importlib.import_module("torch.distributed.config")
    assert run_local(lambda rank, model: model.config + dist.get_rank(), 1, _Model(3)) == [3]


def test_tensors_come_back_by_value() -> None:
    big = torch.arange(100_000.0)  # larger than a pipe holds
    results = run_local(lambda rank, t: t + rank, 2, big)
    assert all(torch.equal(result, big + rank) for rank, result in enumerate(results))


def test_classes_of_an_extension_module_are_accepted() -> None:
    def largest(rank: int, op: dist.ReduceOp.RedOpType) -> float:
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, op)
        return t.item()

    assert run_local(largest, 2, dist.ReduceOp.MAX) == [1.0, 1.0]


def test_two_threads_may_call_at_once() -> None:
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(run_local, _sum_of_ranks, size) for size in (2, 3)]
    assert [call.result() for call in calls] == [[1.0, 1.0], [3.0, 3.0, 3.0]]


# ---- what a rank finds around it ----


def test_ranks_see_the_variables_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SHARDWISE_PROBE")

    def variables(rank: int) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    monkeypatch.setenv("RANK", "99")
    monkeypatch.setenv("SHARDWISE_PROBE", "now")
    assert run_local(variables, 2) == [["0", "2", "0", "2", "now"], ["1", "2", "1", "2", "now"]]
    monkeypatch.delenv("SHARDWISE_PROBE")
    assert run_local(variables, 1) == [["0", "1", "0", "1", None]]


def test_ranks_share_the_callers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_local(lambda rank: os.getcwd(), 1) == [str(tmp_path)]


def test_ranks_stay_where_they_are_when_the_callers_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(RankFailure, match="SystemExit"):
        run_local(lambda rank: sys.exit(), 2)
    pids = run_local(_pid, 2)  # new processes
    assert run_local(_pid, 2) == pids
    with pytest.raises(FileNotFoundError):
        os.getcwd()


def test_ranks_have_the_callers_way_to_start_processes() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    expected = before or multiprocessing.get_all_start_methods()[0]
    assert run_local(lambda rank: multiprocessing.get_start_method(), 1) == [expected]
    assert multiprocessing.get_start_method(allow_none=True) == before


def test_a_data_loader_has_workers_for_a_class_that_ranks_cannot_import() -> None:
    class Squares(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index**2

    def loaded(rank: int) -> list[int]:
        return [int(x) for x in DataLoader(Squares(), batch_size=None, num_workers=2)]

    assert run_local(loaded, 2) == [[0, 1, 4, 9]] * 2


def test_what_a_function_sets_in_torch_ends_with_its_call() -> None:
    def state(rank: int) -> tuple[object, ...]:
        return (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode(),
            torch.get_num_threads(),
            list(warnings.filters),
        )

    def change(rank: int) -> tuple[object, ...]:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(2)
        warnings.simplefilter("error")
        return state(rank)

    before = run_local(state, 1)
    changed = run_local(change, 1)
    assert all(new != old for new, old in zip(changed[0], before[0], strict=True))
    assert run_local(state, 1) == before


def test_every_rank_and_call_draws_numbers_of_its_own() -> None:
    def draw(rank: int) -> list[float]:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return drawn

    calls = [*run_local(draw, 2), *run_local(draw, 2)]
    assert all(len(set(column)) == 4 for column in zip(*calls, strict=True))


def test_ranks_use_one_thread_and_gloo() -> None:
    found = run_local(lambda rank: (torch.get_num_threads(), dist.get_backend()), 2)
    assert found == [(1, "gloo"), (1, "gloo")]


def test_ranks_talk_over_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (interface,) = run_local(lambda rank: os.environ["GLOO_SOCKET_IFNAME"], 1)
    assert interface in ("lo", "lo0")


def test_each_call_has_a_process_group_of_its_own() -> None:
    def leave(rank: int) -> None:
        dist.destroy_process_group()

    # One rank only: with more, one could leave while another is still connecting to it.
    assert run_local(leave, 1) == [None]
    assert run_local(lambda rank: dist.get_world_size(), 3) == [3, 3, 3]


def test_the_rendezvous_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_local(_pid, 2)  # multiprocessing keeps a folder of its own from its first start on
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_local(lambda rank, folder: len(os.listdir(folder)), 2, tmp_path) == [1, 1]
    assert list(tmp_path.iterdir()) == []


# ---- code that ranks cannot import ----

MODULE = """
from dataclasses import dataclass

START = 100

@dataclass
class Mark:
    value: int

    def raised(self):
        return START + self.value

def mark(rank):
    return Mark(rank)

def is_imported(rank):
    import sys
    return __name__ in sys.modules
"""


def _module(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module loaded as pytest's importlib mode does: named, but on no path."""
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["elsewhere", "tests.testing.elsewhere", "os.elsewhere"])
def test_functions_of_unimportable_modules_travel_by_value(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _module(tmp_path / "elsewhere.py", name, monkeypatch)
    assert run_local(module.is_imported, 2) == [False, False]
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_functions_of_importable_modules_travel_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = _module(tmp_path / "within_reach.py", "within_reach", monkeypatch)
    assert run_local(module.is_imported, 2) == [True, True]


def test_ranks_run_an_edited_module_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_part.py").write_text("VALUE = 1")
    (tmp_path / "edited.py").write_text(
        "import edited_part\ndef value(rank): return edited_part.VALUE"
    )
    part = importlib.import_module("edited_part")
    module = importlib.import_module("edited")
    assert run_local(module.value, 2) == [1, 1]
    pids = run_local(_pid, 2)
    assert run_local(_pid, 2) == pids  # as long as nothing changes

    (tmp_path / "edited_part.py").write_text("VALUE = 1000")
    importlib.reload(part)
    assert run_local(module.value, 2) == [1000, 1000]


def test_what_a_module_sets_while_it_is_imported_stays_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in_double.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\n"
        "def dtype(rank): return torch.get_default_dtype()"
    )
    before = torch.get_default_dtype()
    module = importlib.import_module("in_double")
    torch.set_default_dtype(before)
    assert run_local(module.dtype, 1) == [torch.float64]
    assert run_local(module.dtype, 1) == [torch.float64]
    (tmp_path / "in_double.py").unlink()  # the ranks that imported it are replaced
    assert run_local(lambda rank: torch.get_default_dtype(), 1) == [before]


def test_results_are_instances_of_the_callers_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _module(tmp_path / "elsewhere.py", "elsewhere", monkeypatch)
    (mark,) = run_local(module.mark, 1)
    assert type(mark) is module.Mark
    # The class must not have been rebuilt on the way: its methods still see this module.
    monkeypatch.setattr(module, "START", 500)
    assert mark.raised() == 500
    assert run_local(lambda rank: Point(rank).shifted(1), 2) == [Point(1), Point(2)]


def test_a_class_made_inside_a_rank_comes_back_by_value() -> None:
    def made(rank: int) -> object:
        return type("Made", (), {"__module__": "__main__", "rank": rank})()

    (result,) = run_local(made, 1)
    assert getattr(result, "rank", None) == 0


# ---- the pool ----


def test_a_later_call_finds_the_same_processes() -> None:
    first = run_local(_pid, 2)
    assert run_local(_pid, 2) == first
    assert os.getpid() not in first
    larger = run_local(_pid, 4)
    assert larger[:2] == first
    assert len(set(larger)) == 4


def test_a_rank_that_died_between_calls_is_replaced() -> None:
    kept, killed = run_local(_pid, 2)
    os.kill(killed, signal.SIGKILL)
    end = time.monotonic() + HANG_GUARD
    while killed in {process.pid for process in multiprocessing.active_children()}:
        assert time.monotonic() < end
    after = run_local(_pid, 2)
    assert after[0] == kept
    assert after[1] != killed


def test_a_replaced_rank_finds_the_package_imported() -> None:
    with pytest.raises(RankFailure, match="division by zero"):
        run_local(lambda rank: 1 / 0, 1)
    assert run_local(lambda rank: "shardwise.modules" in sys.modules, 1) == [True]


def test_an_interrupt_ends_the_busy_ranks_and_reaches_the_caller() -> None:
    def interrupt(rank: int, caller: int) -> None:
        if rank == 0:
            os.kill(caller, signal.SIGINT)
        _busy()

    before = run_local(_pid, 2)
    # A shell's background jobs ignore interrupts.
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_local(interrupt, 2, os.getpid())
    finally:
        signal.signal(signal.SIGINT, was)
    assert not set(run_local(_pid, 2)) & set(before)


def test_an_interrupt_that_reaches_the_ranks_is_left_to_the_caller() -> None:
    assert run_local(lambda rank: os.kill(os.getpid(), signal.SIGINT), 2) == [None, None]


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    def start(rank: int, folder: Path) -> None:
        process = subprocess.Popen(["sleep", "60"])
        (folder / "pid").write_text(str(process.pid))
        _busy()

    with pytest.raises(RankFailure, match="still running after 3 s"):
        run_local(start, 1, tmp_path, timeout=3)
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + HANG_GUARD
    while _is_running(child):
        assert time.monotonic() < end


def _is_running(pid: int) -> bool:
    """Whether it runs; an ended process that nobody has waited for yet does not."""
    found = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE, text=True, check=False
    )
    return found.stdout.strip()[:1] not in ("", "Z")


# ---- failures ----


def test_a_rank_that_raises_is_told_with_those_that_wait_for_it() -> None:
    def raise_in_one(rank: int) -> None:
        if rank == 1:
            raise ValueError("no luck")
        dist.barrier()

    failure = _failure_of(raise_in_one, 2)
    assert list(failure.failures) == [1, 0]
    assert failure.failures[1].startswith("rank 1 raised ValueError: no luck\nTraceback")
    assert "in raise_in_one" in failure.failures[1]
    waiting = "rank 0 was still running (waiting for the failed rank?) and was ended\n"
    assert failure.failures[0].startswith(waiting)
    assert "in raise_in_one" in failure.failures[0]
    assert all(story in str(failure) for story in failure.failures.values())
    assert isinstance(failure.__cause__, ValueError)


def test_every_failing_rank_shows_its_traceback() -> None:
    def raise_in_two(rank: int) -> None:
        if rank == 0:
            raise KeyError("left")
        if rank == 2:
            raise LookupError("right")

    failure = _failure_of(raise_in_two, 3)
    assert sorted(failure.failures) == [0, 2]
    assert "raise_in_two, world_size=3): 2 of 3 ranks failed" in str(failure)
    assert "rank 0 raised KeyError: 'left'\nTraceback" in str(failure)
    assert "rank 2 raised LookupError: right\nTraceback" in str(failure)
    assert str(failure).endswith("rank 1 returned")


def test_an_exception_that_cannot_be_rebuilt_is_still_told() -> None:
    def raise_two_parts(rank: int) -> None:
        raise TwoPartError("salt", "pepper")

    failure = _failure_of(raise_two_parts, 1)
    assert "rank 0 raised TwoPartError: salt and pepper" in str(failure)
    assert failure.__cause__ is None


def test_an_exception_without_a_text_is_still_told() -> None:
    def raise_mute(rank: int) -> None:
        if rank == 1:
            raise MuteError

    failure = _failure_of(raise_mute, 2)
    begin = "rank 1 raised MuteError: (its text raised RuntimeError)\nTraceback"
    assert failure.failures[1].startswith(begin)
    assert "in raise_mute" in failure.failures[1]


def test_a_failure_can_be_pickled() -> None:
    failure = RankFailure("it failed", failures={1: "rank 1 raised"})
    copy = pickle.loads(pickle.dumps(failure))
    assert (str(copy), copy.failures) == ("it failed", {1: "rank 1 raised"})


@pytest.mark.parametrize(
    ("end", "story"),
    [
        (lambda: os._exit(3), "rank 1 exited with code 3 without answering"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "rank 1 was ended by SIGKILL without answering",
        ),
    ],
)
def test_a_rank_that_exits_is_told_before_those_that_fail_by_it(
    end: Callable[[], None], story: str
) -> None:
    failure = _failure_of(lambda rank: end() if rank == 1 else dist.barrier(), 2)
    assert failure.failures[1] == story
    assert list(failure.failures) == [1, 0]


def test_a_system_exit_counts_as_raised() -> None:
    failure = _failure_of(lambda rank: sys.exit(4) if rank == 1 else None, 2)
    assert failure.failures[1].startswith("rank 1 raised SystemExit: 4\nTraceback")
    assert list(failure.failures) == [1]


def test_a_crash_shows_where_it_happened() -> None:
    def crash(rank: int) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    story = _failure_of(crash, 1).failures[0]
    assert story.startswith("rank 0 was ended by SIGSEGV without answering\n")
    assert " in crash" in story


def test_a_hang_ends_with_the_stacks_of_the_hung_ranks() -> None:
    def hang_in_two_ways(rank: int) -> None:
        if rank == 0:
            _busy()
        if rank == 1:
            dist.barrier()

    failure = _failure_of(hang_in_two_ways, 3, timeout=4)
    assert sorted(failure.failures) == [0, 1]
    for rank, frame in ((0, " in _busy"), (1, " in barrier")):
        story = failure.failures[rank]
        assert story.startswith(f"rank {rank} was still running after 4 s and was ended\n")
        assert frame in story
        assert " in hang_in_two_ways" in story
        assert "end_with_parent" not in story
    assert str(failure).endswith("rank 2 returned")


def test_a_result_that_cannot_be_pickled_names_rank_and_type() -> None:
    failure = _failure_of(lambda rank: threading.Lock() if rank == 1 else None, 2)
    assert "rank 1 returned a lock that cannot be pickled: TypeError: cannot" in str(failure)


def test_a_process_group_that_cannot_begin_is_the_ranks_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RankFailure, match="rank 1 raised RuntimeError") as caught:
        run_local(_pid, 2)
    assert "init_process_group" in str(caught.value)


def test_arguments_that_cannot_be_pickled_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="expected values that can be pickled, got TypeErr"):
        run_local(lambda rank, lock: None, 2, threading.Lock())


def test_arguments_that_fail_to_pickle_without_a_text_are_refused() -> None:
    class Mute:
        def __reduce__(self) -> str:
            raise MuteError

    with pytest.raises(ArgumentTypeError, match="got MuteError: "):
        run_local(lambda rank, mute: None, 2, Mute())


def test_a_world_size_may_be_any_integer() -> None:
    assert run_local(lambda rank: dist.get_world_size(), np.int64(2)) == [2, 2]


@pytest.mark.parametrize("timeout", [None, "60", True, 1j])
def test_a_timeout_of_the_wrong_type_is_refused(timeout: float) -> None:
    with pytest.raises(ArgumentTypeError, match="timeout of run_local: expected a number of sec"):
        run_local(_pid, 1, timeout=timeout)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, -math.inf])
def test_a_timeout_that_is_not_positive_is_refused(timeout: float) -> None:
    with pytest.raises(ArgumentValueError, match=f"seconds above 0, got {float(timeout)}"):
        run_local(_pid, 1, timeout=timeout)


def test_a_function_already_called_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="fn of run_local: expected a function, got 5"):
        run_local(5, 1)  # type: ignore[arg-type]  # the point of the test


def test_arguments_that_do_not_fit_the_function_are_refused() -> None:
    def keyword_only(rank: int, *, scale: int) -> int:
        return rank * scale

    call = r"called as fn\(rank, \*args\): expected to take the rank and 1 more"
    with pytest.raises(ArgumentTypeError, match=call) as caught:
        run_local(_pid, 2, 10)  # type: ignore[arg-type]  # the point of the test
    assert "too many positional arguments" in str(caught.value)
    with pytest.raises(ArgumentTypeError, match=r"missing a .*'scale'.*functools\.partial"):
        run_local(keyword_only, 2)  # type: ignore[arg-type]  # the point of the test
    assert run_local(functools.partial(keyword_only, scale=3), 2) == [0, 3]
    assert run_local(max, 2, 1) == [1, 1]  # a builtin without a signature


@pytest.mark.parametrize("world_size", [2.0, True, "2", None])
def test_a_world_size_of_the_wrong_type_is_refused(world_size: int) -> None:
    with pytest.raises(ArgumentTypeError, match="world_size of run_local: expected a whole number"):
        run_local(_pid, world_size)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"expected at least 1 rank, got {world_size}"):
        run_local(_pid, world_size)


def test_a_call_inside_a_rank_is_refused() -> None:
    failure = _failure_of(lambda rank: run_local(_pid, 1), 1)
    assert "run_local was called inside a rank of run_local. Call it outside" in str(failure)


# ---- the caller's end ----


def _output_of(script: str, tmp_path: Path) -> tuple[int, list[int]]:
    """Exit status and printed numbers, once all processes that hold the script's stdout ended."""
    path = tmp_path / "script.py"
    path.write_text(script)
    # A caller that is killed leaves its rendezvous behind; here, in a folder pytest removes.
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, text=True, env=environ
    )
    with process:
        try:
            output, _ = process.communicate(timeout=HANG_GUARD)
        finally:
            process.kill()
    return process.returncode, [int(word) for word in output.split()]


UNGUARDED = """
import multiprocessing, os
from shardwise.testing.local_run import run_local

print(*run_local(lambda rank: os.getpid(), 2), flush=True)
multiprocessing.set_start_method("spawn")  # raises if run_local has settled it

child = os.fork()
if child == 0:
    print(*run_local(lambda rank: rank + 10, 1), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.long
def test_a_script_needs_no_guard_may_fork_and_takes_its_ranks_along(tmp_path: Path) -> None:
    status, (first, second, from_fork) = _output_of(UNGUARDED, tmp_path)
    assert (status, from_fork) == (0, 10)
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


KILLED = """
import os, signal, subprocess, time
from shardwise.testing.local_run import run_local

def kill_the_caller(rank, caller):
    print(rank)
    subprocess.Popen(["sleep", "60"])
    os.kill(caller, signal.SIGKILL)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass

run_local(kill_the_caller, 1, os.getpid())
"""


@pytest.mark.long
def test_busy_ranks_and_their_children_end_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    # One that outlives the caller keeps stdout open, and reading it runs into the guard.
    assert _output_of(KILLED, tmp_path) == (-signal.SIGKILL, [0])


INTERRUPTED = """
import os, signal, threading, time
from multiprocessing import forkserver
from shardwise.testing.local_run import run_local

def interrupt():
    while forkserver._forkserver._forkserver_pid is None:
        time.sleep(0.01)
    time.sleep(0.3)  # it is importing torch now
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    run_local(lambda rank: rank, 2)
except KeyboardInterrupt:
    print(*run_local(lambda rank: rank + 10, 2))
"""


@pytest.mark.long
def test_a_call_works_after_an_interrupt_of_the_very_first(tmp_path: Path) -> None:
    assert _output_of(INTERRUPTED, tmp_path) == (0, [10, 11])


def test_tensors_of_new_dtypes_come_back() -> None:
    """torch can pickle these on its own, but not unpickle them."""
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        given = torch.arange(6).view(2, 3).to(dtype)
        (back,) = run_local(lambda rank, tensor: tensor[:, 1:], 1, given)
        assert torch.equal(back.to(torch.float32), given[:, 1:].to(torch.float32))
        assert back.dtype == dtype


def _changes_settings(_: int) -> str:
    found = f"{check_timeout():g} {sharded_tensor.rand(shardwise.chunk(0), 2).full_tensor()}"
    shardwise.set_check("always", timeout=7)
    shardwise.implicit_comm("allow")
    shardwise.manual_seed(3)
    return found


def test_a_call_begins_with_shardwises_own_settings_as_new() -> None:
    first, second = run_local(_changes_settings, 1), run_local(_changes_settings, 1)
    assert first != second  # another seed
    assert first[0].split()[0] == second[0].split()[0] == "60"
