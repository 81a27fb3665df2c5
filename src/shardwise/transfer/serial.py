"""Plans as text: the two layouts, and totals with a digest of the moves to check them by.

JSON, so that a stranger's file can do nothing but be wrong. A plan is a function of its layouts:
the moves are not written down but found again, and compared by their digest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardwise.errors import PlanError, ShardwiseError
from shardwise.geometry import Boxes, Layout, overlapping_pairs
from shardwise.geometry.box import rows_of_ints

if TYPE_CHECKING:
    from shardwise.geometry.box import Ints
    from shardwise.transfer.moves import Moves
    from shardwise.transfer.plan import TransferPlan

__all__ = ["FORMAT", "VERSION", "PlanRecord", "most_moves", "plan_to_json"]

FORMAT = "shardwise.TransferPlan"  # what the JSON of a plan says it is
VERSION = 1  # of that format

_LIMIT = 2**63  # numbers are int64 in arrays
_MOST_DIMS = 31  # numpy 1 has 32, and a grid needs one for owners
_LAYOUT_KEYS = ("shape", "boxes", "owners", "terms", "pending")
_TOTALS_KEYS = ("bytes", "lower_bound", "moves", "messages")


def plan_to_json(plan: TransferPlan) -> str:
    """The plan as one line of JSON; a box is its starts, then its stops."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "itemsize": plan.itemsize,
        "source": _layout_to_json(plan.source),
        "target": _layout_to_json(plan.target),
        "totals": _totals(plan),
        "digest": _digest(plan.moves),
    }
    return json.dumps(record, separators=(",", ":"))


def _layout_to_json(layout: Layout) -> dict[str, Any]:
    return {
        "shape": list(layout.shape),
        "boxes": np.hstack([layout.boxes.starts, layout.boxes.stops]).tolist(),
        "owners": layout.owners.tolist(),
        "terms": None if layout.terms is None else layout.terms.tolist(),
        "pending": layout.pending,
    }


def _totals(plan: TransferPlan) -> dict[str, int]:
    counts = (plan.total_bytes, plan.lower_bound, len(plan.moves), len(plan.traffic.pair_bytes))
    return dict(zip(_TOTALS_KEYS, counts, strict=True))


def _digest(moves: Moves) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for field in fields(moves):
        digest.update(np.ascontiguousarray(getattr(moves, field.name), dtype="<i8").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What a file says: the layouts, and how the plan between them came out."""

    source: Layout
    target: Layout
    itemsize: int
    totals: dict[str, int]
    digest: str

    @classmethod
    def parse(cls, text: str) -> PlanRecord:
        """The record in `text`, which nobody vouches for; a PlanError says what is wrong."""
        record = _keyed(_loaded(text), "plan", ("format",))
        if record["format"] != FORMAT:
            _refuse("format", f"{FORMAT!r}", record["format"])
        version = _keyed(record, "plan", ("version",))["version"]
        if type(version) is not int or version != VERSION:
            _refuse("version", VERSION, version, fix="Read it with the version that wrote it.")
        _keyed(record, "plan", ("itemsize", "source", "target", "totals", "digest"))
        totals = _keyed(record["totals"], "totals", _TOTALS_KEYS)
        if not isinstance(record["digest"], str):
            _refuse("digest", "a string", record["digest"])
        return cls(
            _layout(record["source"], "source"),
            _layout(record["target"], "target"),
            _number(record["itemsize"], "itemsize", least=1),
            {name: _number(totals[name], f"totals.{name}") for name in _TOTALS_KEYS},
            record["digest"],
        )

    def check(self, plan: TransferPlan, *, max_moves: int) -> None:
        """Raises unless `plan`, made of the record's layouts, is the plan that was recorded.

        Makes the plan's moves, so it first counts them: a short file can ask for very many.
        """
        if (most := most_moves(plan, max_moves)) > max_moves:
            raise PlanError(
                "moves of the plan",
                expected=f"at most {max_moves:,}",
                got=f"a plan that may have {most:,} or more",
                fix="Pass a larger max_moves if you trust the text.",
            )
        found = {**_totals(plan), "digest": _digest(plan.moves)}
        recorded = {**self.totals, "digest": self.digest}
        for name in found:
            if recorded[name] != found[name]:
                raise PlanError(
                    f"{name} of the plan, made again from its layouts",
                    expected=f"{recorded[name]!r:.60}, as recorded",
                    got=repr(found[name]),
                    fix="The text was edited, or another version of shardwise made it; make the "
                    "plan again with plan_reshard.",
                )


def most_moves(plan: TransferPlan, limit: int) -> int:
    """At least the number of moves, up to a small factor, found without making any of them.

    Counting stops soon after `limit`.
    """
    source, target = plan.source, plan.target
    for layout in (source, target):  # a grid has room in every cell for the most owners of any
        owners = np.diff(layout.box_rows)
        if (padded := len(owners) * int(owners.max(initial=0))) > limit:
            return padded
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
    held = np.diff(source.box_rows)[meet.source_box]
    wanted = np.diff(target.box_rows)[meet.target_box]
    if source.pending is None and target.pending is None:
        return int(wanted.sum())
    return int((wanted * (held + wanted)).sum())  # [Note: two steps] in `reductions.py`


# -- reading ---------------------------------------------------------------------------------


def _refuse(what: str, expected: object, got: object, *, fix: str | None = None) -> NoReturn:
    raise PlanError(f"text of a plan, {what}", expected=expected, got=f"{got!r:.60}", fix=fix)


def _refuse_constant(name: str) -> NoReturn:
    _refuse("numbers", "whole numbers", name)


def _loaded(text: str) -> Any:
    if not isinstance(text, str):
        _refuse("as a whole", "a str", type(text).__name__)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanError("text of a plan", expected="JSON", got=str(error)) from error


def _keyed(value: object, what: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """`value`, which has to be an object with these keys."""
    if not isinstance(value, dict):
        _refuse(what, "an object", value)
    missing = [key for key in keys if key not in value]
    if missing:
        _refuse(what, f"the keys {', '.join(map(repr, missing))}", sorted(value))
    return value


def _number(value: object, what: str, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _LIMIT:
        _refuse(what, f"a whole number from {least} to 2**63 - 1", value)
    return value


def _numbers(value: object, what: str) -> list[int]:
    if not isinstance(value, list) or set(map(type, value)) - {int}:  # a bool is no int here
        _refuse(what, "a list of whole numbers", value)
    if value and not 0 <= min(value) <= max(value) < _LIMIT:
        _refuse(what, "numbers from 0 to 2**63 - 1", f"{min(value)} to {max(value)}")
    return value


def _layout(value: object, what: str) -> Layout:
    record = _keyed(value, what, _LAYOUT_KEYS)
    shape = _numbers(record["shape"], f"{what}.shape")
    if len(shape) > _MOST_DIMS:
        _refuse(f"{what}.shape", f"at most {_MOST_DIMS} dims", len(shape))
    terms, pending = record["terms"], record["pending"]
    if pending is not None and not isinstance(pending, str):
        _refuse(f"{what}.pending", "null or a string", pending)
    corners = _corners(record["boxes"], f"{what}.boxes", len(shape))
    try:
        return Layout(
            shape,
            Boxes(corners[:, : len(shape)], corners[:, len(shape) :]),
            np.array(_numbers(record["owners"], f"{what}.owners"), np.int64),
            terms=None if terms is None else np.array(_numbers(terms, f"{what}.terms"), np.int64),
            pending=pending,  # type: ignore[arg-type]  # Layout checks it
        )
    except PlanError:
        raise
    except ShardwiseError as error:
        raise PlanError(f"text of a plan, {what}: {error}") from error


def _corners(value: object, what: str, ndim: int) -> Ints:
    """Starts and stops of boxes, (n, 2 * ndim)."""
    expected = f"a list of boxes, each a list of {2 * ndim} numbers: starts, then stops"
    if not isinstance(value, list):
        _refuse(what, expected, value)
    for box in value:
        if not isinstance(box, list) or len(box) != 2 * ndim:
            _refuse(what, expected, box)
    _numbers(list(itertools.chain.from_iterable(value)), what)
    return rows_of_ints(value, len(value), 2 * ndim)
