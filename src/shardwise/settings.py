"""Settings: one value for the process, and another for a `with` block."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Change", "Setting", "forget_settings"]

T = TypeVar("T")

_settings: weakref.WeakSet[Setting[Any]] = weakref.WeakSet()


def forget_settings() -> None:
    """Gives every setting of the process its initial value, as if nobody had changed it."""
    for setting in _settings:
        setting._process = None


class Setting(Generic[T]):
    """A value that holds for the process, unless a `with` block of this context has another.

    `initial` gives the process its value at the first use, so that a wrong environment variable
    raises where the setting matters and not at import.
    """

    def __init__(self, name: str, initial: Callable[[], T]) -> None:
        self._initial = initial
        # Both are boxed in a tuple, since None may be a value.
        self._process: tuple[T] | None = None
        self._context: ContextVar[tuple[T] | None] = ContextVar(name, default=None)
        _settings.add(self)

    def get(self) -> T:
        """The value in force here."""
        held = self._context.get() or self._process
        if held is None:
            held = self._process = (self._initial(),)
        return held[0]

    def change(self, value: T) -> Change[T]:
        """Sets `value` at once; `with setting.change(value):` sets it for the block only.

        Outside of such blocks it is set for the process. Inside one, it is set until that ends.
        """
        return Change(self, value)


class Change(Generic[T]):
    """A change that has been made, and that a `with` statement limits to its block.

    Inside the block the value holds for this thread or task; other threads keep theirs.
    """

    def __init__(self, setting: Setting[T], value: T) -> None:
        self._setting = setting
        self._value = (value,)
        self._outer: list[tuple[T] | None] = []  # what to go back to, per block
        self._undo: tuple[tuple[T] | None, tuple[T] | None] | None
        self._undo = setting._process, setting._context.get()
        if setting._context.get() is None:
            setting._process = self._value
        else:
            setting._context.set(self._value)

    def __enter__(self) -> Self:
        if self._undo is not None:  # what was done at once is now done for the block only
            self._setting._process, outer = self._undo
            self._setting._context.set(outer)
            self._undo = None
        self._outer.append(self._setting._context.get())
        self._setting._context.set(self._value)
        return self

    def __exit__(self, *_: object) -> None:
        self._setting._context.set(self._outer.pop())
