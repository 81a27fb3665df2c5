"""Notes below pictures: what the characters in them mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from shardwise.viz.colors import NUM_KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.viz.planes import Regions

__all__ = ["picture_notes"]

_REDUCED = {
    "sum": "the sum",
    "avg": "the average",
    "max": "the maximum",
    "min": "the minimum",
    "product": "the product",
}
_SIGNS = {  # in labels
    ",": "a,b: the same box on ranks a and b (replicas)",
    "-": "a-c: the same box on ranks a to c (replicas)",
}


def picture_notes(regions: Regions, *, keyed: bool, labels: frozenset[str]) -> Iterator[Text]:
    """What the characters in the picture mean, as far as they occur."""
    layout = regions.layout
    if keyed:
        note = "each character is the key of a rank"
        if len(regions.rows) > len(regions):
            note += "; keys alternate where several ranks hold one box"
        if len(layout.ranks) > NUM_KEYS:
            note += f"; keys repeat after {NUM_KEYS} ranks"
        yield Text(note, "italic")
    for sign, meaning in _SIGNS.items():
        if any(sign in label for label in labels):
            yield Text(meaning, "italic")
    for dots in ("…", ".."):
        if any(label.endswith(dots) for label in labels):
            yield Text(f"a{dots}: on rank a and others", "italic")
    if layout.pending is not None:
        note = f"pending {layout.pending}: the value is {_REDUCED[layout.pending]} of the terms"
        lead = "a+b: a term on rank a and one on rank b; " if any("+" in s for s in labels) else ""
        yield Text(lead + note, "italic")
