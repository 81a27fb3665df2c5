"""How many moves a plan may have, without making them: a short text can ask for very many."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry import Boxes, overlapping_pairs
from shardwise.transfer.copies import most_copies
from shardwise.transfer.reductions import most_reduced

if TYPE_CHECKING:
    from shardwise.transfer.plan import TransferPlan

__all__ = ["most_moves"]


def most_moves(plan: TransferPlan, limit: int) -> int:
    """The number of moves or more, found without making any of them.

    Many more only where large regions with replicas are cut less than they might be, or where no
    dim has room for the parts of a sum. Counting stops soon after `limit`.
    """
    source, target = plan.source, plan.target
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
    if source.pending is None and target.pending is None:
        return int(most_copies(source, target, meet, plan.itemsize).sum())
    return int(most_reduced(source, target, meet, plan.itemsize).sum())
