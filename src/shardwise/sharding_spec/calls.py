"""Text that looks like a call with plain values; nothing of it is run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from shardwise.errors import SpecError

__all__ = ["TextCall", "call_text", "parse_call"]


@dataclass(frozen=True, slots=True)
class TextCall:
    """What stands in the text: `name(*args, **kwargs)`."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def parse_call(text: str, *, fix: str) -> TextCall:
    """The call that the text is; raises a `SpecError`, which ends with `fix`, if it is none.

    >>> parse_call("chunk(0, sizes=[5, 3])", fix="")
    TextCall(name='chunk', args=(0,), kwargs={'sizes': [5, 3]})
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("not a call")
        args = tuple(ast.literal_eval(argument) for argument in call.args)
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (ValueError, TypeError, SyntaxError, AttributeError, RecursionError, MemoryError):
        raise SpecError(
            "spec", expected="a call with plain values", got=f"{text!r:.80}", fix=fix
        ) from None
    return TextCall(call.func.id, args, kwargs)


def call_text(name: str, *args: Any, **kwargs: Any) -> str:
    """The text of a call, with lists for tuples.

    >>> call_text("chunk", 0, sizes=(5, 3))
    'chunk(0, sizes=[5, 3])'
    """
    words = [repr(_listed(value)) for value in args]
    words += [f"{key}={_listed(value)!r}" for key, value in kwargs.items()]
    return f"{name}({', '.join(words)})"


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return value
