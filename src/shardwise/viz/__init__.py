"""Pictures of layouts for the terminal. Knows geometry and rich, nothing of torch."""

from shardwise.viz.terminal import LayoutDrawing, draw_layout, print_layout

__all__ = ["LayoutDrawing", "draw_layout", "print_layout"]
