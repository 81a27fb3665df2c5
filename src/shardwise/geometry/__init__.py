"""Layer 1: boxes, cuts, tilings, layouts. Pure; knows numpy and nothing of torch."""

from shardwise.geometry.box import Box, Boxes
from shardwise.geometry.grid import Grid
from shardwise.geometry.layout import (
    REDUCE_OPS,
    Entry,
    Layout,
    ReduceOp,
    check_layout,
)
from shardwise.geometry.overlap import intersecting_pairs, overlapping_pairs
from shardwise.geometry.refining import common_pieces
from shardwise.geometry.splits import (
    block_cuts,
    even_cuts,
    flat_range_boxes,
    sized_cuts,
    weighted_sizes,
)
from shardwise.geometry.tiling import TilingReport, check_tiling, is_tiling

__all__ = [
    "REDUCE_OPS",
    "Box",
    "Boxes",
    "Entry",
    "Grid",
    "Layout",
    "ReduceOp",
    "TilingReport",
    "block_cuts",
    "check_layout",
    "check_tiling",
    "common_pieces",
    "even_cuts",
    "flat_range_boxes",
    "intersecting_pairs",
    "is_tiling",
    "overlapping_pairs",
    "sized_cuts",
    "weighted_sizes",
]
