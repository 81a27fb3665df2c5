"""What a notebook shows of a layout, a plan or a sharded tensor: a small picture as HTML.

No script, no network, and nothing that takes long or communicates.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from shardwise.viz.layout_scene import PixelRoom, layout_scene
from shardwise.viz.plan_scene import plan_scene
from shardwise.viz.svg import svg_of

if TYPE_CHECKING:
    from shardwise.geometry import Layout
    from shardwise.transfer import TransferPlan
    from shardwise.viz.scene import Scene

__all__ = ["layout_html", "plan_html"]

_ROOM = PixelRoom(width=720, plane=(240, 160), most=(300, 180), least=12, max_slices=4, max_ranks=8)
_MOST_RANKS = 16  # of the matrix
_MOST_ENTRIES = 1024  # of a plan's layouts: more would take seconds


def layout_html(layout: Layout, *, words: str | None = None, itemsize: int | None = None) -> str:
    """HTML of a layout below `words`, by default its repr."""
    scene = layout_scene(layout, _ROOM, itemsize=itemsize, with_words=False)
    return _html(repr(layout) if words is None else words, scene)


def plan_html(plan: TransferPlan) -> str:
    """HTML of a plan; in words only if it is too large to be made in passing."""
    if len(plan.source) + len(plan.target) > _MOST_ENTRIES:
        return _html(repr(plan), None)
    return _html(repr(plan), plan_scene(plan, _ROOM, max_ranks=_MOST_RANKS, with_words=False))


def _html(words: str, scene: Scene | None) -> str:
    picture = "" if scene is None else svg_of(scene, margin=4, ground=None)
    return f"<div><div><code>{escape(words)}</code></div>{picture}</div>"
