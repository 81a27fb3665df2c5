"""How much memory a run needs at its peak: its tensors exactly, or the process as a whole."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import TorchDispatchMode, tree_leaves
from shardwise.comm.leftovers import give_back

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["peak_growth", "peak_tensor_bytes"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_tensor_bytes(run: Callable[[], object]) -> int:
    """Bytes of all tensors that `run()` makes, results included, where they are most: exact.

    Counts what this thread makes by torch functions, views once. Slow: every op is looked at.
    """
    allocations = _Allocations()
    with allocations:
        result = run()
    del result
    return allocations.peak


class _Allocations(TorchDispatchMode):
    """Follows the memory of tensors from the op that made it to its end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types of it
        self.peak = 0
        self._made: dict[int, int] = {}  # storage -> bytes
        self._given: set[int] = set()  # storages that were there before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made and storage._cdata not in self._given:
                self._given.add(storage._cdata)
                weakref.finalize(storage, self._given.discard, storage._cdata)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._made and storage._cdata not in self._given:
                self._made[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._made.pop, storage._cdata, None)
                self.peak = max(self.peak, sum(self._made.values()))
        return result


def _storages(values: Any) -> list[Any]:
    return [v.untyped_storage() for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


def peak_growth(run: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory grows at most during `run()` (Linux).

    Everything counts, a backend's own buffers and code that is used for the first time too. What
    the allocator kept from earlier runs is given back first, so that using it again counts.
    """
    gc.collect()
    give_back()
    _CLEAR.write_text("5")  # the peak starts anew
    before = _kib("VmRSS")
    result = run()
    grown = _kib("VmHWM") - before
    del result
    return grown << 10


def _kib(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {field}")
