"""Docstrings as Markdown: doctests and drawings become code blocks. An extension of griffe."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["CodeInDocstrings", "as_markdown"]


class CodeInDocstrings(Extension):
    """Changes each docstring as it is read, so that mkdocstrings shows code as code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for every module, class, function and value."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The text with fences around doctests and around trees drawn with lines."""
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join(_fenced(block) for block in blocks)


def _fenced(block: str) -> str:
    lines = block.splitlines()
    if "├" in block:
        return "\n".join(["```text", *lines, "```"])
    start = next((k for k, line in enumerate(lines) if line.startswith(">>>")), None)
    if start is None:
        return block
    return "\n".join([*lines[:start], "", "```pycon", *lines[start:], "```"])
