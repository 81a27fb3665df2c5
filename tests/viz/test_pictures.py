"""Pictures in files and notebooks: every box where it is, in the colours of its ranks."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
import xml.etree.ElementTree as ET
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from tests.viz.drawn import any_layout, layout_of

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.simulate import simulate
from shardwise.errors import ArgumentTypeError, ArgumentValueError, MissingPackageError
from shardwise.geometry import Box, Layout
from shardwise.transfer import TransferPlan, plan_reshard
from shardwise.viz import html_page, save_picture
from shardwise.viz.colors import rank_hex
from shardwise.viz.planes import Regions, iter_planes
from shardwise.viz.tiles import stripes_of, tiles_of

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the extra viz is not installed"
)


def saved_svg(picture_of: Layout | TransferPlan, folder: Path, **options: Any) -> ET.Element:
    path = save_picture(picture_of, folder / "picture.svg", **options)
    return ET.fromstring(path.read_text())


def hovers(svg: ET.Element) -> list[str]:
    return [title.text or "" for title in svg.iter(f"{SVG}title")]


def texts(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


def area(points: tuple[tuple[float, float], ...]) -> float:
    x, y = np.array(points).T
    return abs(float(x @ np.roll(y, 1) - y @ np.roll(x, 1))) / 2


# -- tiles -------------------------------------------------------------------------------------


@given(layout=any_layout(max_size=6, world_size=5))
def test_tiles_cover_a_plane_once_and_in_order(layout: Layout) -> None:
    regions = Regions.of(layout)
    for plane in iter_planes(regions) if len(regions) else ():
        tiles = tiles_of(plane, size=(90, 60), most=(120, 90), least=4)
        left, top, right, bottom = tiles.corners.T
        assert ((right - left) * (bottom - top)).sum() == tiles.width * tiles.height
        assert not tiles.sampled
        assert sorted(tiles.regions.tolist()) == sorted(plane.picked.tolist())
        # Boxes that follow each other in the tensor follow each other in the picture.
        starts = regions.starts[tiles.regions]
        if layout.ndim:
            order = np.argsort(left, kind="stable")
            assert (np.diff(starts[order, -1]) >= 0).all()


def test_boxes_that_have_no_room_are_sampled_evenly() -> None:
    plane = next(iter_planes(Regions.of(layout_of("block_cyclic(0, 1)", (5000, 4)))))
    tiles = tiles_of(plane, size=(90, 60), most=(120, 90), least=3)
    assert tiles.sampled
    assert len(tiles.regions) == 30
    assert set(np.diff(np.sort(tiles.regions)).tolist()) <= {166, 167}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_stripes_share_a_rectangle_among_their_colours(count: int) -> None:
    shares = np.zeros(count)
    for color, points in stripes_of(3, 5, 43, 25, count):
        shares[color] += area(points)
        assert all(3 <= x <= 43 and 5 <= y <= 25 for x, y in points)
    assert shares.sum() == pytest.approx(40 * 20)
    assert (shares > 0).all()


# -- layouts as SVG ----------------------------------------------------------------------------


def test_a_box_says_rank_offsets_sizes_and_bytes(tmp_path: Path) -> None:
    layout = layout_of("chunk(0, sizes=[4, 1, 3, 0])", (8, 6))
    svg = saved_svg(layout, tmp_path, itemsize=4, title="rows & <columns>")
    assert hovers(svg) == [
        "rank 0: [0:4, 0:6], 4 x 6, 96 B",
        "rank 1: [4:5, 0:6], 1 x 6, 24 B",
        "rank 2: [5:8, 0:6], 3 x 6, 72 B",
    ]
    assert "rows & <columns>" in texts(svg)
    assert {"empty", "0", "4", "5", "8", "6"} <= set(texts(svg))


def test_replicas_and_addends_are_striped_and_said(tmp_path: Path) -> None:
    for spec, label, note in [
        ("grid([1, 1], ranks=[[0, 3]])", "0,3", "a,b: the same box"),
        ("partial('max', ranks=[0, 3])", "0+3", "the maximum of the terms"),
    ]:
        svg = saved_svg(layout_of(spec, (4, 4)), tmp_path)
        assert label in texts(svg)
        assert any(note in text for text in texts(svg))
        fills = {polygon.get("fill") for polygon in svg.iter(f"{SVG}polygon")}
        assert {rank_hex(0), rank_hex(3)} <= fills
        dashed = any(polygon.get("stroke-dasharray") for polygon in svg.iter(f"{SVG}polygon"))
        assert dashed == ("+" in label)


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (2, 3, 4), (2, 2, 3, 4), (0, 3)])
def test_tensors_of_any_dims_are_drawn(shape: tuple[int, ...], tmp_path: Path) -> None:
    layout = layout_of("flat()" if shape else "replicate()", shape)
    words = hovers(saved_svg(layout, tmp_path))
    found = {re.sub(r".*\[(.*)\].*", r"\1", text) for text in words}
    assert found == {
        ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
        for box, _, _ in layout
        if 0 not in box.shape
    }


def test_slices_are_bounded_and_counted(tmp_path: Path) -> None:
    layout = layout_of("chunk(0)", (64, 2, 2), 64)
    words = texts(saved_svg(layout, tmp_path, max_slices=3))
    assert {"[0:1, :, :]", "[2:3, :, :]", "... and 61 more slices"} <= set(words)
    assert "[3:4, :, :]" not in words


@given(layout=any_layout(max_size=5, world_size=6))
def test_every_layout_has_a_picture_in_notebooks(layout: Layout) -> None:
    html = layout._repr_html_()
    found = ET.fromstring(html)
    assert "<script" not in html
    assert repr(layout) in "".join(found.itertext())
    assert len(html) < 100_000


# -- plans -------------------------------------------------------------------------------------

PLAN = plan_reshard(layout_of("chunk(0)", (8, 8)), layout_of("grid([2, 2])", (8, 8)), 4)


def test_a_plan_shows_both_layouts_the_matrix_and_the_lower_bound(tmp_path: Path) -> None:
    svg = saved_svg(PLAN, tmp_path)
    words = set(texts(svg))
    assert {"before", "after", "sent", "received", "=32 B", "32 B"} <= words
    assert any("moves 128 B = lower bound" in text for text in words)
    assert "32 B goes to 1 from 0" in hovers(svg)
    assert "32 B stays on 3" in hovers(svg)


def test_ranks_with_an_empty_shard_stand_below_the_layouts_of_a_plan(tmp_path: Path) -> None:
    plan = plan_reshard(layout_of("chunk(0)", (8, 6)), layout_of("chunk(1)", (8, 6)), 4)
    assert "empty shards after: rank 3" in texts(saved_svg(plan, tmp_path))
    assert "empty shards after: rank 3" in html_page(plan)
    assert "empty shards" not in html_page(PLAN)


def test_a_plan_of_many_ranks_is_drawn_in_blocks(tmp_path: Path) -> None:
    rows, columns = (layout_of(f"chunk({dim})", (512, 512), 256) for dim in (0, 1))
    words = texts(saved_svg(plan_reshard(rows, columns, 1), tmp_path))
    assert "256 ranks in blocks of 4" in words
    assert "248-251" in words


def test_a_plan_has_a_picture_in_notebooks_unless_it_is_large() -> None:
    html = PLAN._repr_html_()
    assert "before" in "".join(ET.fromstring(html).itertext())
    rows, columns = (layout_of(f"chunk({dim})", (1024, 1024), 1024) for dim in (0, 1))
    large = TransferPlan(rows, columns, 4)
    assert "<svg" not in large._repr_html_()
    assert "moves" not in vars(large), "a repr must not make the moves of a large plan"


def test_a_tensor_has_a_picture_in_notebooks() -> None:
    html = simulate(_tensor_html, 2).results
    for rank, text in enumerate(html):
        words = "".join(ET.fromstring(text).itertext())
        assert f"rank {rank} holds" in words
        assert "rank 1: [2:3, 0:4], 1 x 4, 16 B" in words


def _tensor_html(rank: int) -> str:
    tensor = sharded_tensor.zeros(shardwise.chunk(0, ranks=[0, 1], device="cpu"), 3, 4)
    return tensor._repr_html_()


# -- files -------------------------------------------------------------------------------------


@needs_matplotlib
@pytest.mark.parametrize("picture_of", [layout_of("grid([2, 2])", (6, 4)), PLAN])
def test_png_and_pdf_are_painted_by_matplotlib(
    picture_of: Layout | TransferPlan, tmp_path: Path
) -> None:
    png = save_picture(picture_of, tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert min(width, height) > 200
    assert save_picture(picture_of, tmp_path / "a.PDF").read_bytes().startswith(b"%PDF")


@needs_matplotlib
def test_a_png_has_each_rank_in_its_colour_to_scale(tmp_path: Path) -> None:
    from matplotlib.image import imread

    layout = Layout((4, 4), [Box((0, 0), (1, 4)), Box((1, 0), (4, 4))], [0, 1])
    pixels = (imread(save_picture(layout, tmp_path / "a.png"))[..., :3] * 255).round().astype(int)
    count = [
        int((pixels == [int(rank_hex(rank)[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).sum())
        for rank in (0, 1)
    ]
    swatch = 2000  # about that many pixels are in the legend, and labels hide a few
    assert 2.4 < (count[1] - swatch) / (count[0] - swatch) < 3.4


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.collections", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=r"pip install 'shardwise\[viz\]'"):
        save_picture(PLAN, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
    save_picture(PLAN, tmp_path / "a.svg")


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_path_that_cannot_be_written_says_what_to_do(tmp_path: Path, suffix: str) -> None:
    absent = tmp_path / "absent" / f"a{suffix}"
    message = r"No such file or directory; make the folder '.*absent' first, or pass another path"
    with pytest.raises(FileNotFoundError, match=message) as caught:
        save_picture(PLAN, absent)
    assert caught.value.filename == str(absent)
    folder = tmp_path / f"folder{suffix}"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match=r"; pass another path for the picture: '.*folder"):
        save_picture(PLAN, folder)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentValueError, match=r"\.html or \.svg or \.png or \.pdf, got 'a\.gif'"
    ):
        save_picture(PLAN, "a.gif")
    with pytest.raises(ArgumentTypeError, match=r"a Layout or a TransferPlan, got int"):
        save_picture(3, tmp_path / "a.svg")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentValueError, match="max_slices"):
        save_picture(PLAN, tmp_path / "a.svg", max_slices=0)
    with pytest.raises(ArgumentTypeError, match="path of a picture: expected a path"):
        save_picture(PLAN, 5)  # type: ignore[arg-type]  # wrong on purpose
    for draw in (html_page, partial(save_picture, path=tmp_path / "a.html")):
        with pytest.raises(ArgumentValueError, match="itemsize"):
            draw(PLAN.source, itemsize=0)
        with pytest.raises(ArgumentTypeError, match="title: expected a str or None, got int"):
            draw(PLAN, title=3)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(ArgumentTypeError, match="a Layout or a TransferPlan, got int"):
            draw(3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentTypeError, match="title"):
        save_picture(PLAN, tmp_path / "a.svg", title=3)  # type: ignore[arg-type]  # wrong on purpose
