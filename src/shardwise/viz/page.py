"""One page that stands alone: a layout or a plan to look at with pointer and keyboard.

This side says what there is, `assets/page.js` draws it. Boxes travel as numbers of cuts, packed,
and cuts as text, since a script's numbers end at 2**53.
"""

from __future__ import annotations

import base64
import json
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.errors import ArgumentValueError
from shardwise.transfer import TransferPlan
from shardwise.transfer.units import format_bytes
from shardwise.viz.checking import check_drawable, check_title, number_or_none
from shardwise.viz.colors import rank_hex, rank_ink
from shardwise.viz.labels import NUM_LEVELS, box_label
from shardwise.viz.legend import Legend
from shardwise.viz.matrix import Matrix, shade_of
from shardwise.viz.notes import empty_shards, matrix_notes, plan_notes
from shardwise.viz.planes import Regions
from shardwise.words import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Layout
    from shardwise.geometry.box import Ints

__all__ = ["html_page"]

_MOST_ENTRIES = 200_000  # of a layout: a page of ten megabytes
_MOST_MOVES = 200_000  # of a plan; without them there is still the matrix
_MOST_BLOCKS = 128  # rows and columns of the matrix

Values = dict[str, Any]  # what json writes


def html_page(
    picture_of: Layout | TransferPlan,
    *,
    title: str | None = None,
    itemsize: int | None = None,
    world_size: int | None = None,
    max_bytes: int | None = None,
) -> str:
    """HTML of a page that needs no network; arguments as in `save_picture`."""
    check_drawable(picture_of)
    check_title(title)
    itemsize = number_or_none(itemsize, "itemsize")
    world_size = number_or_none(world_size, "world_size")
    max_bytes = number_or_none(max_bytes, "max_bytes")
    if isinstance(picture_of, TransferPlan):
        _check_size(picture_of.source)
        _check_size(picture_of.target)
        data = _plan_data(picture_of, max_bytes)
    else:
        _check_size(picture_of)
        data = _layout_data(picture_of, itemsize, world_size)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    words = str(picture_of) if title is None else title
    page, style, script = map(_asset, ("page.html", "page.css", "page.js"))
    return Template(page).substitute(title=escape(words), style=style, script=script, data=text)


def _check_size(layout: Layout) -> None:
    if len(layout) > _MOST_ENTRIES:
        raise ArgumentValueError(
            "layout of an HTML page",
            expected=f"at most {_MOST_ENTRIES:,} boxes",
            got=f"{len(layout):,}",
            fix="Write .svg or .png, which show a part.",
        )


def _asset(name: str) -> str:
    return files("shardwise.viz").joinpath("assets", name).read_text(encoding="utf-8")


# -- layouts -----------------------------------------------------------------------------------


def _layout_data(layout: Layout, itemsize: int | None, world_size: int | None) -> Values:
    legend = Legend.of(layout, itemsize=itemsize, world_size=world_size, most=_MOST_ENTRIES)
    ranks = [row.rank for row in legend.rows]
    regions = Regions.of(layout)
    cuts = _common_cuts(layout.shape, [(regions.starts, regions.stops)])
    return {
        "words": [repr(layout)],
        "itemsize": itemsize,
        "cuts": [[str(cut) for cut in along.tolist()] for along in cuts],
        "layouts": [_boxes_of(regions, cuts, ranks, name=None)],
        "ranks": _ranks(
            ranks,
            legend.headings,
            [legend.cells(row)[1:] for row in legend.rows],
            legend.words,
        ),
        "plan": None,
    }


def _boxes_of(regions: Regions, cuts: list[Ints], ranks: Sequence[int], name: str | None) -> Values:
    """The boxes of a layout, and who holds each; holders that are the same are said once."""
    slots = {rank: slot for slot, rank in enumerate(ranks)}
    owners: dict[tuple[tuple[int, ...], ...], int] = {}
    owner = []
    for region in range(len(regions)):
        by_term = tuple(map(tuple, regions.ranks_by_term(region)))
        owner.append(owners.setdefault(by_term, len(owners)))
    return {
        "name": name,
        "words": repr(regions.layout),
        "pending": regions.layout.pending,
        "boxes": _packed_boxes(regions.starts, regions.stops, cuts),
        "owner": _packed(np.array(owner, dtype=np.int64)),
        "owners": [
            {
                "labels": [box_label(by_term, level) for level in range(NUM_LEVELS)],
                "ranks": sorted({slots[rank] for ranks in by_term for rank in ranks}),
            }
            for by_term in owners
        ],
    }


def _ranks(
    ranks: Sequence[int], headings: list[str], cells: list[list[str]], words: Sequence[str]
) -> Values:
    return {
        "names": [str(rank) for rank in ranks],
        "colors": [rank_hex(rank) for rank in ranks],
        "inks": [rank_ink(rank) for rank in ranks],
        "headings": headings,
        "cells": cells,
        "words": list(words),
    }


# -- plans -------------------------------------------------------------------------------------


def _plan_data(plan: TransferPlan, max_bytes: int | None) -> Values:
    regions = [Regions.of(layout) for layout in (plan.source, plan.target)]
    moves = plan.moves if len(plan.moves) <= _MOST_MOVES else None
    corners = [(r.starts, r.stops) for r in regions]
    corners += [] if moves is None else [(moves.starts, moves.stops)]
    cuts = _common_cuts(plan.source.shape, corners)
    return {
        "words": [f"from {plan.source}", f"to {plan.target}", *plan_notes(plan, max_bytes)],
        "itemsize": plan.itemsize,
        "cuts": [[str(cut) for cut in along.tolist()] for along in cuts],
        "layouts": [
            _boxes_of(r, cuts, plan.ranks, name)
            for r, name in zip(regions, ("before", "after"), strict=True)
        ],
        "ranks": _ranks(plan.ranks, *_plan_table(plan, max_bytes), [*empty_shards(plan)]),
        "plan": {
            **{name: getattr(plan.traffic, name).tolist() for name in ("sent", "received", "kept")},
            "moves": None if moves is None else _packed_moves(plan, cuts),
            "without_moves": f"{plural(len(plan.moves), 'move')} are too many for a page "
            f"(at most {_MOST_MOVES:,}): here are the sums",
            "matrix": _matrix(plan) if plan.total_bytes else None,
        },
    }


def _plan_table(plan: TransferPlan, max_bytes: int | None) -> tuple[list[str], list[list[str]]]:
    """Headings and a line for each rank, but for its name."""
    columns = zip(plan.traffic.sent, plan.traffic.received, plan.traffic.kept, strict=True)
    cells = [
        [*(format_bytes(int(n)) for n in sums), format_bytes(plan.peak_bytes(rank, max_bytes))]
        for rank, sums in zip(plan.ranks, columns, strict=True)
    ]
    return ["rank", "sent", "received", "kept", "peak"], cells


def _packed_moves(plan: TransferPlan, cuts: list[Ints]) -> Values:
    moves, ranks = plan.moves, plan.traffic.ranks
    return {
        "boxes": _packed_boxes(moves.starts, moves.stops, cuts),
        "src": _packed(np.searchsorted(ranks, moves.src)),
        "dst": _packed(np.searchsorted(ranks, moves.dst)),
        "step": _packed(moves.step),
        "wire": _packed(moves.is_wire.astype(np.int64)),
    }


def _matrix(plan: TransferPlan) -> Values:
    matrix = Matrix.of(plan.traffic, max_rows=_MOST_BLOCKS, max_columns=_MOST_BLOCKS)
    most = max(int(matrix.moved.max(initial=0)), 1)
    cells = [
        {
            "row": row,
            "column": column,
            "bytes": int(matrix.cells[row, column]),
            "own": bool(matrix.is_own[row, column]),
            "shade": shade_of(int(matrix.moved[row, column]) / most),
        }
        for row, column in np.argwhere(matrix.cells > 0).tolist()
    ]
    return {
        "rows": matrix.row_names,
        "columns": matrix.column_names,
        "cells": cells,
        "words": matrix_notes(plan, matrix),
    }


# -- numbers of cuts ---------------------------------------------------------------------------


def _common_cuts(shape: tuple[int, ...], corners: list[tuple[Ints, Ints]]) -> list[Ints]:
    """Per dim, where any of the boxes starts or stops, ascending; 0 alone without elements."""
    return [
        np.unique(np.concatenate([[0], *(ends[:, dim] for pair in corners for ends in pair)]))
        for dim in range(len(shape))
    ]


def _packed_boxes(starts: Ints, stops: Ints, cuts: list[Ints]) -> Values:
    low, high = (
        np.stack([np.searchsorted(along, ends[:, dim]) for dim, along in enumerate(cuts)], axis=1)
        if cuts
        else ends
        for ends in (starts, stops)
    )
    return {"count": len(starts), "low": _packed(low), "high": _packed(high)}


def _packed(values: Ints) -> Values:
    """Whole numbers below 2**32, each as one, two or four bytes."""
    width = next(w for w in (1, 2, 4) if int(values.max(initial=0)) < 1 << 8 * w)
    text = base64.b64encode(np.ascontiguousarray(values, dtype=f"<u{width}").tobytes())
    return {"width": width, "bytes": text.decode("ascii")}
