"""Bytes as people read them."""

from __future__ import annotations

import re

from shardwise.errors import ArgumentValueError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def format_bytes(count: int) -> str:
    """`512 B`, `1.5 KiB`, `4.0 GiB`.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1023.95 or unit == "TiB":
            break
    return f"{size:,.1f} {unit}"


def parse_bytes(text: str, what: str) -> int:
    """A number of bytes from `512`, `64MB`, `1.5 GiB` or `2g`; raises about `what`.

    >>> parse_bytes("1.5 KiB", "size")
    1536
    """
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ArgumentValueError(what, expected="a size such as 2GiB or 500MB", got=repr(text))
    return int(float(found[1]) * _UNITS[found[2]])
