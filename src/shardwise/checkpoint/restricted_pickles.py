"""Pickles of strangers, read without running anything: a few names stand for inert values.

[Note: restricted pickles] DCP keeps its metadata in a pickle. Here each class that such a file may
name is a stand-in that only keeps what it is given, every other name is refused, and nothing that
the file says is called but these. The opcodes are looked through before, because a few bytes can
ask for gigabytes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import TYPE_CHECKING, Any

from shardwise.errors import CheckpointError, DamagedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StandIn", "read_pickle"]


class StandIn:
    """An object of a class that is not made: what it was called with, and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field of a dataclass; None if it is not there."""
        if not isinstance(self.state, dict):
            raise TypeError(f"{type(self).__name__} without fields")
        return self.state.get(name)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        known: Callable[[str, str], Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        found = self._known(module, name)
        if found is None:
            raise CheckpointError(
                f"it names {module}.{name}",
                expected="only what torch.distributed.checkpoint itself writes",
                fix="Nothing of it was run. If you trust the file, load it with torch and save "
                "what it holds as tensors and plain values.",
            )
        return found

    def persistent_load(self, key: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("a persistent id")
        return self._persistent(key)


def read_pickle(
    data: bytes,
    what: str,
    known: Callable[[str, str], Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value in a pickle; `known(module, name)` is what a name stands for, or None.

    [Note: restricted pickles] Raises about `what`.
    """
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("LONG_BINPUT", "PUT") and int(argument or 0) > len(data):
                raise ValueError(f"{opcode.name} {argument}")
        return _Unpickler(data, known, persistent).load()
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedError(
            what,
            expected="a pickle of torch.distributed.checkpoint",
            got=f"{type(error).__name__}: {error}"[:300],
            fix="Take the file from where it came from again.",
        ) from error
