"""Plans as text: there and back, and everything that can be wrong with a file."""

from __future__ import annotations

import contextlib
import json
import re
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.plans import plans

import shardwise
from shardwise import transfer
from shardwise.errors import ArgumentTypeError, PlanError
from shardwise.geometry import Box, Boxes, Layout
from shardwise.transfer import TransferPlan, plan_reshard
from shardwise.transfer.counting import most_moves
from shardwise.transfer.text import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = (shardwise.chunk(dim, ranks=range(2)).layout((4, 6)) for dim in (0, 1))
PLAN = TransferPlan(ROWS, COLUMNS, 4)
SUM = TransferPlan(
    shardwise.partial(ranks=range(3)).layout((6, 4)),
    shardwise.chunk(0, ranks=range(3)).layout((6, 4)),
    4,
)


@given(plans())
def test_a_plan_comes_back_equal(plan: TransferPlan) -> None:
    text = plan.to_json()
    again = TransferPlan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert text.isascii()


def test_the_text_is_what_the_page_says() -> None:
    record = json.loads(PLAN.to_json())
    digest = record.pop("digest")
    assert re.fullmatch("[0-9a-f]{32}", digest)
    assert record == {
        "format": "shardwise.TransferPlan",
        "version": VERSION,
        "itemsize": 4,
        "source": {
            "shape": [4, 6],
            "boxes": [[0, 0, 2, 6], [2, 0, 4, 6]],
            "owners": [0, 1],
            "terms": None,
            "pending": None,
        },
        "target": {
            "shape": [4, 6],
            "boxes": [[0, 0, 4, 3], [0, 3, 4, 6]],
            "owners": [0, 1],
            "terms": None,
            "pending": None,
        },
        "totals": {"bytes": 48, "lower_bound": 48, "moves": 4, "messages": 2},
    }


def _set(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = to

    return change


def _drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        for key in path[:-1]:
            record = record[key]
        del record[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _drop("format"),
            r"plan: expected the keys 'format', .*'totals', 'digest', got no 'format'$",
        ),
        (_set("format", to="other"), r"format: expected 'shardwise.TransferPlan', got 'other'"),
        (_set("version", to=2), r"version: expected 3, got 2. Read it with the version that wrote"),
        (_drop("version"), r"plan: expected the keys .*, got no 'version'$"),
        (_set("version", to=99), r"version: expected 3, got 99. Read it with the version that"),
        (_set("version", to=True), r"version: expected 3, got True"),
        (_drop("source"), r"plan: expected the keys .*, got no 'source'$"),
        (_drop("digest"), r"plan: expected the keys .*, got no 'digest'$"),
        (_set("hello", to=1), r"plan: expected the keys .*, got 'hello' besides$"),
        (_set("totals", "hello", to=1), r"totals: expected the keys .*, got 'hello' besides$"),
        (_set("source", "hello", to=1), r"source: expected the keys .*, got 'hello' besides$"),
        (_set("source", "starts", to=[0]), r"source: expected the keys .*, got 'starts' besides$"),
        (_set("digest", to=7), r"digest: expected a string, got 7"),
        (_set("itemsize", to=0), r"itemsize: expected a whole number from 1 to 2\*\*63 - 1, got 0"),
        (_set("itemsize", to=2**63), r"itemsize: expected a whole number from 1 to 2\*\*63"),
        (_set("itemsize", to=True), r"itemsize: expected a whole number"),
        (_set("itemsize", to=4.0), r"itemsize: expected a whole number"),
        (_set("totals", to=[]), r"totals: expected an object, got \[\]"),
        (_drop("totals", "moves"), r"totals: expected the keys .*, got no 'moves'$"),
        (_set("totals", to={"a": 1}), r", got no 'bytes', .*'messages', and 'a' besides$"),
        (_set("totals", "moves", to="4"), r"totals.moves: expected a whole number"),
        (_set("source", to=None), r"source: layout: expected an object, got None"),
        (_drop("target", "owners"), r"target: layout: expected the keys 'owners'"),
        (_set("source", "shape", to=4), r"source: shape: expected a list of whole numbers, got 4"),
        (_set("source", "shape", to=[4, True]), r"source: shape: expected a list of whole numbers"),
        (_set("source", "shape", to=[1] * 40), r"source: shape: expected at most 31 dims, got 40"),
        (_set("source", "shape", to=[-4, 6]), r"source: shape: expected numbers from 0 to 2\*\*63"),
        (_set("source", "shape", to=[2**40] * 2), r"source: shape: expected fewer than 2\*\*63"),
        (_set("source", "boxes", to={}), r"source: boxes: expected a list of boxes"),
        (_set("source", "boxes", to=[[0, 0, 4]]), r"source: boxes: .* a list of 4 numbers: starts"),
        (_set("source", "boxes", to=[[0, 0, 4, 6.5]]), r"source: boxes: expected a list of whole"),
        (_set("source", "boxes", to=[[0, 0, 4, 2**64]]), r"source: boxes: expected numbers from 0"),
        (_set("source", "boxes", to=[[0, 0, 4, 6]]), r"source: owners: expected 1 whole numbers"),
        (_set("source", "boxes", to=[[0, 0, 4, 6]] * 2), r"digest of the plan|bytes of the plan"),
        (_set("source", "boxes", to=[[0, 0, 2, 6], [3, 0, 4, 6]]), r"source: layout: .*gap|cover"),
        (_set("source", "owners", to="01"), r"source: owners: expected a list of whole numbers"),
        (
            _set("source", "terms", to=[0, 1]),
            r"source: terms and pending: expected both or neither",
        ),
        (_set("source", "pending", to=["sum"]), r"source: pending: expected null or a string"),
        (_set("source", "pending", to="mean"), r"source: pending: expected None or one of"),
        (_set("target", "shape", to=[4, 7]), r"target: layout"),
        (
            _set("totals", "bytes", to=47),
            r"bytes of the plan, .*: expected 47, as recorded, got 48",
        ),
        (_set("digest", to="0" * 32), r"digest of the plan, made again from its layouts: expected"),
        (_set("source", "owners", to=[1, 0]), r"made again .* was edited, or another version"),
        (_set("itemsize", to=8), r"made again .* make the plan again with plan_reshard"),
    ],
)
def test_wrong_text_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    record = json.loads(PLAN.to_json())
    change(record)
    with pytest.raises(PlanError, match=message):
        TransferPlan.from_json(json.dumps(record))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"pending":"sum"', '"pending":"max"'),
        ('"pending":"sum"', '"pending":"avg"'),
        ('"terms":[0,1,2]', '"terms":[0,1,7]'),
    ],
)
def test_text_that_would_move_the_same_and_mean_something_else_is_refused(
    before: str, after: str
) -> None:
    text = SUM.to_json()
    assert TransferPlan.from_json(text) == SUM
    assert before in text
    with pytest.raises(PlanError, match=r"digest of the plan, made again .* The text was edited"):
        TransferPlan.from_json(text.replace(before, after))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text of a plan: expected JSON, got Expecting value"),
        ("{", "text of a plan: expected JSON"),
        ("[" * 100_000, "text of a plan: expected JSON"),
        ('{"format": ' + "9" * 10_000 + "}", "text of a plan: expected JSON"),
        ('{"format": NaN}', "numbers: expected whole numbers, got 'NaN'"),
        ("[]", r"plan: expected an object, got \[\]"),
        ("3", "plan: expected an object, got 3"),
        ("{}", "plan: expected the keys 'format', 'version', 'itemsize', .* got none$"),
    ],
)
def test_text_that_is_no_plan_is_refused(text: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        TransferPlan.from_json(text)


@pytest.mark.parametrize("value", [None, b"{}", PLAN], ids=["None", "bytes", "a plan"])
def test_what_is_no_text_is_an_argument_of_the_wrong_type(value: Any) -> None:
    message = f"^text of a plan: expected a str, got {type(value).__name__}$"
    with pytest.raises(ArgumentTypeError, match=message):
        TransferPlan.from_json(value)


def test_long_lists_of_keys_are_cut_between_keys() -> None:
    record = json.loads(PLAN.to_json()) | {f"a longer name {k}": k for k in range(2000)}
    with pytest.raises(PlanError, match=r"'a longer name 3' and 1,996 more besides$"):
        TransferPlan.from_json(json.dumps(record))
    with pytest.raises(PlanError, match=r"got 'n{56}\.\.\. besides$"):
        TransferPlan.from_json(json.dumps(json.loads(PLAN.to_json()) | {"n" * 5000: 1}))


def test_totals_count_the_messages_of_both_steps() -> None:
    everywhere = shardwise.replicate(ranks=range(4)).layout((512, 512))
    plan = TransferPlan(shardwise.partial(ranks=range(4)).layout((512, 512)), everywhere, 4)
    assert json.loads(plan.to_json())["totals"]["messages"] == 24
    record = json.loads(plan.to_json())
    record["totals"]["messages"] = 12
    with pytest.raises(PlanError, match=r"messages of the plan, .*: expected 12, as recorded, got"):
        TransferPlan.from_json(json.dumps(record))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=8,
    ),
    st.sampled_from(
        ["format", "version", "itemsize", "digest", "totals", "source", "target"]
        + [f"{end}.{key}" for end in ("source", "target") for key in ("shape", "boxes", "owners")]
        + [f"{end}.{key}" for end in ("source", "target") for key in ("terms", "pending")]
    ),
)
def test_whatever_stands_in_a_place_a_plan_or_a_plan_error_comes_out(value: Any, path: str) -> None:
    record = json.loads(PLAN.to_json())
    _set(*path.split("."), to=value)(record)
    found = None
    with contextlib.suppress(PlanError):
        found = TransferPlan.from_json(json.dumps(record))
    assert found in (None, PLAN)


def _forged(source: Layout, target: Layout) -> str:
    """Text of a plan that its writer never made."""
    ends = {}
    for name, layout in (("source", source), ("target", target)):
        boxes = np.hstack([layout.boxes.starts, layout.boxes.stops]).tolist()
        owners = layout.owners.tolist()
        terms = None if layout.terms is None else layout.terms.tolist()
        ends[name] = {"shape": layout.shape, "boxes": boxes, "owners": owners, "terms": terms}
        ends[name]["pending"] = layout.pending
    totals = dict.fromkeys(["bytes", "lower_bound", "moves", "messages"], 0)
    record = {"format": "shardwise.TransferPlan", "version": VERSION, "itemsize": 1, **ends}
    return json.dumps({**record, "totals": totals, "digest": ""})


def _many(kind: str) -> tuple[Layout, Layout]:
    n = 4000
    each = shardwise.chunk(0, ranks=range(n)).layout((n,))
    everybody = shardwise.replicate(ranks=range(n)).layout((n,))
    if kind == "grids":
        return tuple(shardwise.chunk(d, ranks=range(n)).layout((n, n)) for d in (0, 1))  # type: ignore[return-value]  # two
    if kind == "tilings":
        strips = [Box((k, 0), (k + 1, n)) for k in range(1, n)]
        halves = [Box((0, 0), (1, 5)), Box((0, 5), (1, n))]
        return Layout((n, n), [*halves, *strips], range(n + 1)), _many("grids")[1]
    if kind == "replicas":
        return each, everybody
    if kind == "sums":
        large = (n, n)  # of which every rank reduces a part
        everybody = shardwise.replicate(ranks=range(n)).layout(large)
        return shardwise.partial(ranks=range(n)).layout(large), everybody
    first = [Box((0,), (1,))] * (n - 1)  # a box on all ranks among boxes on one
    return Layout((n,), [*each.boxes, *first], [*range(n), *range(1, n)]), each


@pytest.mark.parametrize("kind", ["grids", "tilings", "replicas", "sums"])
def test_a_short_text_cannot_ask_for_a_huge_plan(kind: str) -> None:
    text = _forged(*_many(kind))
    tracemalloc.start()
    with pytest.raises(PlanError, match=r"moves of the plan: expected at most 1,000,000, got a pl"):
        TransferPlan.from_json(text, max_moves=1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 * len(text) + 300 * 1_000_000


def test_boxes_on_many_ranks_among_boxes_on_one_take_no_memory_to_read() -> None:
    text = _forged(*_many("ragged"))
    tracemalloc.start()
    with pytest.raises(PlanError, match=r"moves of the plan, made again from its layouts: exp"):
        TransferPlan.from_json(text, max_moves=10_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 * len(text)


def _one_row_on_many() -> TransferPlan:
    rows = np.arange(3000)
    starts = np.r_[rows, np.zeros(63, np.int64)][:, None]
    source = Layout((3000,), Boxes(starts, starts + 1), np.r_[rows % 64, np.arange(1, 64)])
    target = Layout((3000,), Boxes(rows[:, None], rows[:, None] + 1), (rows + 1) % 64)
    return TransferPlan(source, target, 4)


def _small_sum() -> TransferPlan:
    ranks = range(500)
    everywhere = shardwise.replicate(ranks=ranks).layout((8,))
    return TransferPlan(shardwise.partial(ranks=ranks).layout((8,)), everywhere, 4)


@pytest.mark.parametrize("make", [_one_row_on_many, _small_sum])
def test_what_is_small_is_read_though_it_has_many_ranks(make: Callable[[], TransferPlan]) -> None:
    plan = make()
    most = int(1.1 * len(plan.moves))
    assert TransferPlan.from_json(plan.to_json(), max_moves=most) == plan


@given(plans(), st.booleans())
def test_moves_are_counted_well_before_they_are_made(plan: TransferPlan, is_cut: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            patch.setattr(transfer.reductions, "_FEW", 0)
            patch.setattr(transfer.reductions, "_LEAST_PART", 1)
        most = most_moves(plan, 1 << 30)
        assert len(plan.moves) <= most


def test_parts_that_no_dim_has_room_for_are_counted_as_boxes() -> None:
    shape = (2,) * 12  # 60 parts are flat ranges, of up to 23 boxes each
    source, target = (
        shardwise.parse_spec(text, ranks=range(60)).layout(shape)
        for text in ("partial()", "replicate()")
    )
    plan = TransferPlan(source, target, 8)
    most = most_moves(plan, 1 << 30)
    assert 3 * 60 * 119 < len(plan.moves) <= most < 23 * 60 * 121


def test_a_larger_plan_is_read_on_request() -> None:
    source, target = (shardwise.chunk(dim, ranks=range(30)).layout((60, 60)) for dim in (0, 1))
    text = plan_reshard(source, target, 2).to_json()
    with pytest.raises(PlanError, match=r"at most 899, .* Pass a larger max_moves if you trust"):
        TransferPlan.from_json(text, max_moves=899)
    assert TransferPlan.from_json(text, max_moves=900) == plan_reshard(source, target, 2)
