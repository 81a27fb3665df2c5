"""The page: what it says without a browser, and what it does in one."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from tests.viz.browser import CHROMIUM, Browser, open_browser
from tests.viz.drawn import any_layout, layout_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

from shardwise.errors import ArgumentValueError
from shardwise.geometry import Layout
from shardwise.transfer import TransferPlan, plan_reshard
from shardwise.viz import html_page, save_picture

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt install chromium")


def plan_of(before: str, after: str, shape: tuple[int, ...], num_ranks: int = 4) -> TransferPlan:
    source, target = (layout_of(spec, shape, num_ranks) for spec in (before, after))
    return plan_reshard(source, target, 4)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def numbers(packed: dict[str, Any]) -> list[int]:
    text = base64.b64decode(packed["bytes"])
    found: list[int] = np.frombuffer(text, f"<u{packed['width']}").tolist()
    return found


def boxes(packed: dict[str, Any], cuts: list[list[str]]) -> list[str]:
    """Boxes as `start:stop` of each dim."""
    ndim = len(cuts)
    low, high = (
        np.reshape(numbers(packed[name]), (packed["count"], ndim)) for name in ("low", "high")
    )
    return [
        ", ".join(f"{cuts[d][a[d]]}:{cuts[d][b[d]]}" for d in range(ndim))
        for a, b in zip(low, high, strict=True)
    ]


# -- without a browser ---------------------------------------------------------------------------


@given(layout=any_layout(max_size=5, world_size=5))
def test_the_page_has_every_box_with_its_owners(layout: Layout) -> None:
    data = data_of(html_page(layout, itemsize=2))
    (listed,) = data["layouts"]
    owners = [listed["owners"][at]["ranks"] for at in numbers(listed["owner"])]
    names = data["ranks"]["names"]
    expected: dict[str, set[int]] = {}
    for box, rank, _ in layout:
        if box.volume:
            index = ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
            expected.setdefault(index, set()).add(rank)
    found = zip(boxes(listed["boxes"], data["cuts"]), owners, strict=True)
    assert {box: {int(names[slot]) for slot in held} for box, held in found} == expected


@given(source=any_layout(max_size=4, world_size=4))
def test_the_page_of_a_plan_has_every_move(source: Layout) -> None:
    plan = TransferPlan(source, Layout.replicated(source.shape, [1, 5]), 4)
    data = data_of(html_page(plan))
    moves = data["plan"]["moves"]
    names = [int(name) for name in data["ranks"]["names"]]
    assert [names[slot] for slot in numbers(moves["src"])] == plan.moves.src.tolist()
    assert [names[slot] for slot in numbers(moves["dst"])] == plan.moves.dst.tolist()
    assert sum(data["plan"]["sent"]) == plan.total_bytes == sum(data["plan"]["received"])
    if source.ndim:
        ends = zip(plan.moves.starts.tolist(), plan.moves.stops.tolist(), strict=True)
        listed = [", ".join(f"{a}:{b}" for a, b in zip(*end, strict=True)) for end in ends]
        assert boxes(moves["boxes"], data["cuts"]) == listed


def test_the_page_needs_no_network_and_minds_its_title() -> None:
    page = html_page(layout_of("chunk(0)", (8,)), title="</title><script>alert(1)</script>")
    assert "alert(1)</script>" not in page
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert "http" not in page.replace('http-equiv="Content', "")


def test_numbers_beyond_a_scripts_are_exact() -> None:
    size = 2**62 + 1
    data = data_of(html_page(layout_of("chunk(0)", (size,), 2)))
    assert data["cuts"] == [["0", str(2**61 + 1), str(size)]]


def test_a_plan_with_too_many_moves_keeps_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.viz.page._MOST_MOVES", 15)
    data = data_of(html_page(plan_of("chunk(0)", "chunk(1)", (8, 8))))
    assert data["plan"]["moves"] is None
    assert data["plan"]["without_moves"].startswith("16 moves are too many")
    assert data["plan"]["sent"] == [48] * 4


def test_too_many_boxes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.viz.page._MOST_ENTRIES", 3)
    with pytest.raises(ArgumentValueError, match=r"at most 3 boxes, got 4\. Write \.svg or \.png"):
        html_page(layout_of("chunk(0)", (8,)))


# -- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def info(browser: Browser) -> str:
    text: str = browser.read("document.getElementById('info').textContent")
    return text


def rank(browser: Browser) -> str:
    text: str = browser.read("document.getElementById('rank').value")
    return text


def place_in(browser: Browser, view: int, *, right: float, down: float) -> tuple[float, float]:
    """A place in a picture, as shares of its width and height without the offsets around it."""
    browser.place(f"#view-{view}")
    left, top, width, height = browser.read(
        f"(() => {{ const v = views[{view}], b = v.canvas.getBoundingClientRect(); "
        "const last = (a) => a[a.length - 1]; "
        "return [b.left + v.left, b.top + v.top, last(v.scale.x), last(v.scale.y)]; })()"
    )
    return left + right * width, top + down * height


@needs_chromium
def test_pointer_and_slider_find_every_box(browser: Browser, tmp_path: Path) -> None:
    layout = layout_of("flat()", (2, 3, 4, 5), 4)
    browser.open(save_picture(layout, tmp_path / "a.html", itemsize=4))
    assert browser.requests == [(tmp_path / "a.html").as_uri()]

    browser.hover(*place_in(browser, 0, right=0.5, down=0.25))
    assert info(browser) == (
        "rank 0: [0:1, 0:1, 0:4, 0:5], offsets (0, 0, 0, 0), sizes (1, 1, 4, 5), 80 B"
    )
    tip = "document.getElementById('tip')"
    assert browser.read(f"{tip}.hidden") is False
    assert browser.read(f"{tip}.textContent") == info(browser)

    # dim 1 by the keyboard: 0:1 -> 1:2, where the flat range of rank 0 ends in the middle.
    browser.read("document.getElementById('dim-1').focus()")
    browser.press("ArrowRight")
    assert browser.read("document.getElementById('slice-1').textContent") == "1:2 of 3"
    for down, held in ((0.25, "rank 0: [0:1, 1:2, 0:2, 0:5]"), (0.75, "rank 1: [0:1, 1:2, 2:4")):
        browser.hover(*place_in(browser, 0, right=0.5, down=down))
        assert info(browser).startswith(held)

    # dim 0 down and dim 1 across: now dims 2 and 3 have sliders.
    for key, dim in (("rows", 0), ("columns", 1)):
        browser.read(
            f"(() => {{ const s = document.getElementById('{key}-dim'); s.value = {dim}; "
            "s.dispatchEvent(new Event('change')); })()"
        )
    sliders = "[...document.querySelectorAll('input[type=range]')].map((e) => e.id)"
    assert browser.read(sliders) == ["dim-2", "dim-3"]
    browser.hover(*place_in(browser, 0, right=0.9, down=0.75))
    assert info(browser).startswith("rank 3: [1:2, 2:3, 0:4, 0:5]")
    assert browser.complaints == []


@needs_chromium
def test_the_keyboard_goes_from_box_to_box(browser: Browser, tmp_path: Path) -> None:
    layout = layout_of("grid([2, 2], ranks=[[0, 4], [1], [2], [3]])", (8, 6))
    browser.open(save_picture(layout, tmp_path / "a.html", world_size=7))
    for _ in range(20):
        browser.press("Tab")
        if browser.read("document.activeElement.id") == "view-0":
            break
    said = []
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowLeft"):
        browser.press(key)
        said.append(info(browser).partition(":")[0])
    assert said == ["ranks 0,4 (replicas)", "rank 1", "rank 3", "rank 3", "rank 2"]
    browser.press("Enter")
    assert rank(browser) == "2"
    wide = browser.read("views[0].canvas.clientWidth")
    browser.press("+")
    assert browser.read("views[0].canvas.clientWidth") > wide
    browser.press("Escape")
    assert rank(browser) == ""
    assert "holds nothing" in browser.read("document.getElementById('ranks').textContent")
    assert browser.complaints == []


@needs_chromium
def test_a_click_shows_what_a_rank_sends_and_receives(browser: Browser, tmp_path: Path) -> None:
    plan = plan_of("chunk(0)", "grid([2, 2])", (8192, 8192))
    browser.open(save_picture(plan, tmp_path / "a.html"))
    words = browser.read("document.getElementById('words').textContent")
    assert "moves 128.0 MiB = lower bound" in words

    pixel = "Array.from(views[{view}].canvas.getContext('2d').getImageData({x}, {y}, 1, 1).data)"

    def color(view: int, right: float, down: float) -> list[int]:
        x, y = place_in(browser, view, right=right, down=down)
        left, top = browser.read(
            f"(() => {{ const b = views[{view}].canvas.getBoundingClientRect(); "
            "return [b.left, b.top]; })()"
        )
        found: list[int] = browser.read(pixel.format(view=view, x=x - left, y=y - top))
        return found[:3]

    own = color(0, 0.6, 0.3)  # of rank 1, before anything is chosen
    peer = color(0, 0.6, 0.1)
    browser.click(*place_in(browser, 0, right=0.5, down=0.3))
    assert rank(browser) == "1"
    detail = browser.read("document.getElementById('detail').textContent")
    assert detail.startswith("rank 1 sends 32.0 MiB, receives 32.0 MiB, keeps 32.0 MiB")
    assert "sends torankbytesboxes032.0 MiB1" in detail
    # Its left half goes to rank 0, in whose colour it is; the right half stays.
    assert color(0, 0.1, 0.3) == peer
    assert color(0, 0.9, 0.3) == own
    # Afterwards it has the upper right: half from rank 0, half its own.
    assert color(1, 0.9, 0.1) == peer
    assert color(1, 0.9, 0.3) == own

    browser.hover(*browser.place("#matrix"))
    assert re.fullmatch(r"rank \d sends .* to rank \d|.* stays on rank \d", info(browser))
    browser.click(*browser.place("#clear"))
    assert browser.read("document.getElementById('detail').textContent") == ""
    assert browser.complaints == []


@needs_chromium
@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (3, 2, 2, 2, 2)])
def test_every_kind_of_tensor_opens_in_dark_and_light(
    browser: Browser, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    plan = plan_of("partial()", "replicate()", shape)
    path = save_picture(plan, tmp_path / "a.html")
    for scheme, is_dark in (("dark", True), ("light", False)):
        browser.scheme(scheme)
        browser.open(path)
        ground = browser.read("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == is_dark
        browser.read("choose(1)")
        assert browser.complaints == []


@needs_chromium
def test_thousands_of_boxes_are_drawn_and_found(browser: Browser, tmp_path: Path) -> None:
    layout = layout_of("grid([64, 64])", (4096, 4096), 4096)
    browser.open(save_picture(layout, tmp_path / "a.html", itemsize=2))
    browser.hover(*place_in(browser, 0, right=0.999, down=0.999))
    assert info(browser).startswith("rank 4095: [4032:4096, 4032:4096]")
    browser.read("document.getElementById('rank').focus()")
    for digit in "4000":
        browser.press(digit)
    assert browser.read("data.ranks.names[state.rank]") == "4000"
    assert browser.complaints == []


@needs_chromium
def test_a_rank_is_found_among_many_before_and_after(browser: Browser, tmp_path: Path) -> None:
    plan = plan_of("chunk(0)", "chunk(1)", (600, 600), 300)
    browser.open(save_picture(plan, tmp_path / "a.html"))
    browser.read("choose(299)")
    words = browser.read("document.getElementById('detail').textContent")
    assert words.startswith("rank 299 sends 4.7 KiB, receives 4.7 KiB, keeps 16 B")
    assert "... and 43 more ranks" in words  # of 299 peers, 256 have a row
    browser.hover(*browser.place("#matrix"))
    assert re.search(r"ranks \d+-\d+", info(browser))  # 300 ranks are in blocks
    assert browser.complaints == []
