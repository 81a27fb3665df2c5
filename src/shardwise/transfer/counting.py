"""How many moves a plan may have, without making them: a short text can ask for very many."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry import Boxes, overlapping_pairs

if TYPE_CHECKING:
    from shardwise.transfer.plan import TransferPlan

__all__ = ["most_moves"]


def most_moves(plan: TransferPlan, limit: int) -> int:
    """At least the number of moves, up to a small factor, found without making any of them.

    Counting stops soon after `limit`.
    """
    source, target = plan.source, plan.target
    for layout in (source, target):  # a grid has room in every cell for the most owners of any
        owners = np.diff(layout.box_rows)
        if (padded := len(owners) * int(owners.max(initial=0))) > limit:
            return padded
    if source.grid is not None and target.grid is not None:
        joint = zip(source.grid.cuts, target.grid.cuts, strict=True)
        regions = math.prod(len(np.union1d(*cuts)) - 1 for cuts in joint)
    else:
        distinct = [layout.boxes[layout.box_rows[:-1]] for layout in (source, target)]
        regions = math.prod(map(len, distinct))
        if regions > limit:  # then it is worth counting: boxes of one layout do not overlap
            both = Boxes(
                np.concatenate([boxes.starts for boxes in distinct]),
                np.concatenate([boxes.stops for boxes in distinct]),
            )
            regions = len(overlapping_pairs(both, limit=limit + 1))
    if regions > limit:
        return regions
    meet = plan.regions
    held = np.diff(source.box_rows)[meet.source_box]
    wanted = np.diff(target.box_rows)[meet.target_box]
    if source.pending is None and target.pending is None:
        return int(wanted.sum())
    return int((wanted * (held + wanted)).sum())  # [Note: two steps] in `reductions.py`
