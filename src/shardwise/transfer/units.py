"""Bytes as people read them."""

from __future__ import annotations

__all__ = ["format_bytes"]


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
