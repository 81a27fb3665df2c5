"""Layouts as plain values (lists, ints, strings), for files that strangers may write.

    {"shape": [4, 6], "boxes": [[0, 0, 2, 6], [2, 0, 4, 6]], "owners": [0, 1], "terms": null,
     "pending": null}

A box is its starts, then its stops. Earlier files have all starts and all stops instead, each as
one list of numbers; these are read, too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardwise.errors import LayoutError
from shardwise.geometry.box import Boxes, rows_of_ints
from shardwise.geometry.layout import Layout

if TYPE_CHECKING:
    from shardwise.geometry.box import Ints

__all__ = ["layout_from_plain", "plain_layout"]

_LIMIT = 2**63  # numbers are int64 in arrays
_MOST_DIMS = 31  # numpy 1 has 32, and a grid needs one for owners


def plain_layout(layout: Layout) -> dict[str, Any]:
    """The layout as plain values."""
    return {
        "shape": list(layout.shape),
        "boxes": np.hstack([layout.boxes.starts, layout.boxes.stops]).tolist(),
        "owners": layout.owners.tolist(),
        "terms": None if layout.terms is None else layout.terms.tolist(),
        "pending": layout.pending,
    }


def layout_from_plain(plain: object) -> Layout:
    """The layout of which `plain_layout` gave this; all of it is checked."""
    if not isinstance(plain, dict):
        _refuse("layout", "an object", plain)
    keys = ("starts", "stops") if "boxes" not in plain and "starts" in plain else ("boxes",)
    missing = [key for key in ("shape", *keys, "owners", "terms", "pending") if key not in plain]
    if missing:
        _refuse("layout", f"the keys {', '.join(map(repr, missing))}", sorted(map(str, plain)))
    shape, owners = _numbers(plain["shape"], "shape"), _numbers(plain["owners"], "owners")
    if len(shape) > _MOST_DIMS:
        _refuse("shape", f"at most {_MOST_DIMS} dims", len(shape))
    terms, pending = plain["terms"], plain["pending"]
    if pending is not None and not isinstance(pending, str):
        _refuse("pending", "null or a string", pending)
    if keys == ("boxes",):
        corners = _corners(plain["boxes"], len(shape))
        boxes = Boxes(corners[:, : len(shape)], corners[:, len(shape) :])
    else:
        boxes = Boxes(*(_ends(plain[key], key, (len(owners), len(shape))) for key in keys))
    return Layout(
        shape,
        boxes,
        np.array(owners, np.int64),
        terms=None if terms is None else np.array(_numbers(terms, "terms"), np.int64),
        pending=pending,  # type: ignore[arg-type]  # Layout checks it
    )


def _refuse(what: str, expected: str, got: object) -> NoReturn:
    raise LayoutError(what, expected=expected, got=f"{got!r:.60}")


def _numbers(value: object, what: str) -> list[int]:
    if not isinstance(value, list) or set(map(type, value)) - {int}:  # a bool is no int here
        _refuse(what, "a list of whole numbers", value)
    if value and not 0 <= min(value) <= max(value) < _LIMIT:
        _refuse(what, "numbers from 0 to 2**63 - 1", f"{min(value)} to {max(value)}")
    return value


def _corners(value: object, ndim: int) -> Ints:
    """Starts and stops of boxes, (n, 2 * ndim)."""
    expected = f"a list of boxes, each a list of {2 * ndim} numbers: starts, then stops"
    if not isinstance(value, list):
        _refuse("boxes", expected, value)
    for box in value:
        if not isinstance(box, list) or len(box) != 2 * ndim:
            _refuse("boxes", expected, box)
    _numbers(list(itertools.chain.from_iterable(value)), "boxes")
    return rows_of_ints(value, len(value), 2 * ndim)


def _ends(value: object, what: str, size: tuple[int, int]) -> Ints:
    """Starts or stops of boxes, (n, ndim), from the numbers one after the other."""
    numbers = _numbers(value, what)
    if len(numbers) != size[0] * size[1]:
        _refuse(what, f"{size[0]} x {size[1]} numbers", len(numbers))
    return np.array(numbers, np.int64).reshape(size)
