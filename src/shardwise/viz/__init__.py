"""Pictures of layouts and plans, for terminals, files, browsers and notebooks.

Knows geometry, transfer and rich, matplotlib only when a PNG or a PDF is wanted, and no torch.
"""

from shardwise.viz.layout_drawing import LayoutDrawing, draw_layout, print_layout
from shardwise.viz.page import html_page
from shardwise.viz.plan_drawing import PlanDrawing, draw_plan, print_plan
from shardwise.viz.saving import save_picture

__all__ = [
    "LayoutDrawing",
    "PlanDrawing",
    "draw_layout",
    "draw_plan",
    "html_page",
    "print_layout",
    "print_plan",
    "save_picture",
]
