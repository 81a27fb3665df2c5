"""Pictures of layouts and plans for the terminal. Knows geometry, transfer and rich, no torch."""

from shardwise.viz.plan import PlanDrawing, draw_plan, print_plan
from shardwise.viz.terminal import LayoutDrawing, draw_layout, print_layout

__all__ = [
    "LayoutDrawing",
    "PlanDrawing",
    "draw_layout",
    "draw_plan",
    "print_layout",
    "print_plan",
]
