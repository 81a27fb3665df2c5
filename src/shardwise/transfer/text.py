"""Plans as text: the two layouts, and totals with a digest to check them by.

JSON, so that a stranger's file can do nothing but be wrong. A plan is a function of its layouts:
the moves are not written down but found again, and compared by a digest of layouts and moves.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardwise.errors import ArgumentTypeError, PlanError, ShardwiseError
from shardwise.geometry.plain_layouts import layout_from_plain, plain_layout
from shardwise.transfer.counting import most_moves
from shardwise.words import shortened

if TYPE_CHECKING:
    from shardwise.geometry import Layout
    from shardwise.transfer.plan import TransferPlan

__all__ = ["FORMAT", "VERSION", "PlanRecord", "plan_to_json"]

FORMAT = "shardwise.TransferPlan"  # what the JSON of a plan says it is
VERSION = 3  # of that format

_LIMIT = 2**63  # numbers are int64 in arrays
_KEYS = ("format", "version", "itemsize", "source", "target", "totals", "digest")
_LAYOUT_KEYS = ("shape", "boxes", "owners", "terms", "pending")
_TOTALS_KEYS = ("bytes", "lower_bound", "moves", "messages")
_MOST_NAMED = 4  # keys, in a message
_MOST_SHOWN = 60  # characters of a value, in a message


def plan_to_json(plan: TransferPlan) -> str:
    """The plan as one line of JSON."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "itemsize": plan.itemsize,
        "source": plain_layout(plan.source),
        "target": plain_layout(plan.target),
        "totals": _totals(plan),
        "digest": _digest(plan),
    }
    return json.dumps(record, separators=(",", ":"))


def _totals(plan: TransferPlan) -> dict[str, int]:
    counts = (plan.total_bytes, plan.lower_bound, len(plan.moves), plan.num_messages)
    return dict(zip(_TOTALS_KEYS, counts, strict=True))


def _digest(plan: TransferPlan) -> str:
    ends = (plan.source.fingerprint, plan.target.fingerprint, plan.itemsize)
    digest = hashlib.blake2b(repr(ends).encode(), digest_size=16)
    for field in fields(plan.moves):
        array = getattr(plan.moves, field.name)
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
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
        record = _object(_loaded(text), "plan")
        # Before the keys, of which other formats and versions have others.
        if record.get("format", FORMAT) != FORMAT:
            _refuse("format", f"{FORMAT!r}", record["format"])
        version = record.get("version", VERSION)
        if type(version) is not int or version != VERSION:
            _refuse("version", VERSION, version, fix="Read it with the version that wrote it.")
        _keyed(record, "plan", _KEYS)
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
        found = {**_totals(plan), "digest": _digest(plan)}
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


# -- reading ---------------------------------------------------------------------------------


def _refuse(what: str, expected: object, got: object, *, fix: str | None = None) -> NoReturn:
    shown = shortened(repr(got), most=_MOST_SHOWN)
    raise PlanError(f"text of a plan, {what}", expected=expected, got=shown, fix=fix)


def _refuse_constant(name: str) -> NoReturn:
    _refuse("numbers", "whole numbers", name)


def _loaded(text: str) -> Any:
    if not isinstance(text, str):
        raise ArgumentTypeError("text of a plan", expected="a str", got=type(text).__name__)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanError("text of a plan", expected="JSON", got=str(error)) from error


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(what, "an object", value)
    return value


def _keyed(value: object, what: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """`value`, which has to be an object with these keys and no others."""
    found = _object(value, what)
    missing = [key for key in keys if key not in found]
    others = [key for key in found if key not in keys]
    if not missing and not others:
        return found
    differences = [f"no {_listed(missing)}"] if missing else []
    if others:
        differences.append(f"{_listed(others)} besides")
    raise PlanError(
        f"text of a plan, {what}",
        expected=f"the keys {', '.join(map(repr, keys))}",
        got=", and ".join(differences) if found else "none",
    )


def _listed(keys: list[str]) -> str:
    """The keys, of which long ones and long lists are cut."""
    named = [shortened(repr(key), most=_MOST_SHOWN) for key in keys[:_MOST_NAMED]]
    more = len(keys) - len(named)
    return ", ".join(named) + (f" and {more:,} more" if more else "")


def _number(value: object, what: str, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _LIMIT:
        _refuse(what, f"a whole number from {least} to 2**63 - 1", value)
    return value


def _layout(value: object, what: str) -> Layout:
    try:
        found = layout_from_plain(value)
    except ShardwiseError as error:
        raise PlanError(f"text of a plan, {what}: {error}") from error
    _keyed(value, what, _LAYOUT_KEYS)
    return found
