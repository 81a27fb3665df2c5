"""Pictures in files: SVG and HTML by ourselves, PNG and PDF by matplotlib."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise import arguments
from shardwise.arguments import whole_number
from shardwise.errors import ArgumentValueError
from shardwise.transfer import TransferPlan
from shardwise.viz.checking import check_drawable, check_title, number_or_none
from shardwise.viz.layout_scene import PixelRoom, layout_scene
from shardwise.viz.page import html_page
from shardwise.viz.plan_scene import plan_scene
from shardwise.viz.raster import raster_of
from shardwise.viz.svg import svg_of

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from shardwise.geometry import Layout

__all__ = ["save_picture"]

_SUFFIXES = (".html", ".svg", ".png", ".pdf")
_WIDTH = 900
_LAYOUT_ROOM = PixelRoom(width=_WIDTH, plane=(480, 360), most=(840, 720), least=6)
_PLAN_ROOM = PixelRoom(width=_WIDTH, plane=(380, 260), most=(_WIDTH // 2 - 60, 560), least=5)


def save_picture(
    picture_of: Layout | TransferPlan,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    itemsize: int | None = None,
    world_size: int | None = None,
    max_slices: int = 8,
    max_bytes: int | None = None,
) -> Path:
    """Writes a picture of a layout or a plan, and returns its path; the suffix says which kind.

    `.html` is one page that stands alone: boxes say what they are, all slices can be seen, and of
    a plan what each rank sends and receives. `.svg` needs nothing else either. `.png` and `.pdf`
    need matplotlib: `pip install 'shardwise[viz]'`.

    `itemsize` adds the bytes of a layout (a plan knows its own), `world_size` the ranks below it
    that hold nothing. At most `max_slices` slices are drawn; a page has all of them. `max_bytes`
    is the cap for the number of a plan's rounds. A path that cannot be written is an OSError.
    """
    itemsize = number_or_none(itemsize, "itemsize")
    world_size = number_or_none(world_size, "world_size")
    max_bytes = number_or_none(max_bytes, "max_bytes")
    target = arguments.path(path, "path of a picture")
    suffix = _checked_suffix(target)
    check_drawable(picture_of)
    check_title(title)
    if suffix == ".html":
        page = html_page(
            picture_of,
            title=title,
            itemsize=itemsize,
            world_size=world_size,
            max_bytes=max_bytes,
        )
        return _written(target, page.encode())
    most = whole_number(max_slices, "max_slices", least=1)
    if isinstance(picture_of, TransferPlan):
        room = replace(_PLAN_ROOM, max_slices=most)
        scene = plan_scene(picture_of, room, title=title, max_bytes=max_bytes)
    else:
        room = replace(_LAYOUT_ROOM, max_slices=most)
        scene = layout_scene(
            picture_of, room, title=title, itemsize=itemsize, world_size=world_size
        )
    image = svg_of(scene).encode() if suffix == ".svg" else raster_of(scene, suffix[1:])
    return _written(target, image)


def _written(target: Path, picture: bytes) -> Path:
    try:
        target.write_bytes(picture)
    except OSError as error:
        fix = "pass another path"
        if not target.parent.exists():
            fix = f"make the folder {str(target.parent)!r} first, or {fix}"
        # By its number the class stays what it was, such as FileNotFoundError.
        raise OSError(
            error.errno, f"{error.strerror}; {fix} for the picture", str(target)
        ) from error
    return target


def _checked_suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ArgumentValueError(
            "path of a picture",
            expected=f"one that ends in {' or '.join(_SUFFIXES)}",
            got=repr(str(path)),
        )
    return suffix
