"""The docs page: one row per op that says how it works on sharded tensors."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.ops.op_table.calls import calls_of, dtype_of, ops
from tests.ops.op_table.names import KNOWN_WRONG, MAY_GATHER
from tests.ops.op_table.trying import Cut, Kind, Outcome, cut, reference_of, try_call

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.ops.op_table.calls import OpCall

__all__ = [
    "LONG",
    "PAGE",
    "Effort",
    "Row",
    "Try",
    "page_of",
    "row_of",
    "rows_of_page",
    "tries_of",
    "try_op",
]

PAGE = Path(__file__).parents[3] / "docs" / "op-table.md"

_MEANING = {
    "rule": "computed where the pieces are: every sample, on every layout that was tried",
    "partly": "calls differ: some gather or are refused, as the remark says",
    "fallback": "gathers its tensors, computes, and cuts the result",
    "refused": "raises, for the reason in the remark",
    "wrong": "some call does not give what torch gives: a defect of ours",
    "not applicable": "takes no tensor that could be cut",
}

_HEAD = """# The op table

How every op of torch's own op table (`op_db` in `torch.testing._internal`, torch {version})
works on sharded tensors. For each, torch's samples were run on 1 to 4 simulated ranks with
tensors cut at random (uneven, empty, several or no pieces on a rank, irregular tilings,
replicas, pending sums, some tensors plain) and compared with plain torch: values and, where
torch has them, gradients; functions, methods, operators, in-place forms, `out=` and aliases.
Made by `make op-table`; `make test-long` runs all of it again, `make test` a part.

The values are those of torch, however an op works; what differs is the cost. A *rule* works on
the pieces, a *fallback* gathers, which `shardwise.implicit_comm` announces: see [math on sharded
tensors](ops.md). The table leaves out what holds for all: functions that are not linear gather
when they write in place into a pending sum, and `memory_format=torch.channels_last` is refused.

"""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried of each op: samples of the function, and layouts of each."""

    samples: int
    layouts: int
    has_variants: bool = True  # whether methods, operators, in-place forms and out= are tried


LONG = Effort(samples=4, layouts=2)  # of the page, and of `make test-long`


@dataclass(frozen=True, slots=True)
class Try:
    """One call on one cut, and how it went."""

    call: OpCall
    cuts: Cut
    world_size: int
    outcome: Outcome

    @property
    def kind(self) -> Kind:
        """How it went; what the head of the page says of all ops is left out."""
        first, kind = self.cuts[0], self.outcome.kind
        is_pending = self.call.writes and first is not None and first.pending is not None
        is_general = (kind == "fallback" and is_pending) or (
            kind == "refused" and "channels_last" in self.outcome.detail
        )
        return "rule" if is_general else kind

    def __str__(self) -> str:
        cuts = "; ".join(map(str, self.cuts))
        return f"{self.call} on {self.world_size} ranks, cut as {cuts}: {self.outcome.detail}"


@dataclass(frozen=True, slots=True)
class Row:
    """One op of the page."""

    op: str
    how: str
    remark: str

    def __str__(self) -> str:
        return f"| `{self.op}` | {self.how} | {self.remark} |"

    def admits(self, one: Try) -> bool:
        """Whether a call may go so."""
        if self.how in ("partly", "wrong"):
            return one.outcome.kind != "wrong" or self.how == "wrong"
        return self.how in (one.kind, one.outcome.kind)


def tries_of(op: Any, effort: Effort) -> list[Try]:
    """Calls of an op on random layouts. Of these, a smaller effort makes a part."""
    found = []
    for call in calls_of(op, effort.samples, has_variants=effort.has_variants):
        reference = reference_of(call)
        if reference is None:
            continue
        for turn in range(effort.layouts):
            world_size = (3, 4, 2, 1)[(call.number + turn) % 4]
            cuts = cut(call, world_size, str(turn))
            outcome = try_call(call, reference, cuts, world_size)
            found.append(Try(call, cuts, world_size, outcome))
    return found


def try_op(name: str) -> tuple[Row, list[str]]:
    """The row of an op, and what was wrong."""
    tries = tries_of(ops()[name], LONG)
    wrong = [str(one) for one in tries if one.outcome.kind == "wrong"]
    return row_of(name, ops()[name], tries), wrong


def row_of(name: str, op: Any, tries: Sequence[Try]) -> Row:
    """What the page says of an op, by how its calls went."""
    kinds = {one.kind for one in tries}
    if "rule" in kinds and all(one.outcome.kind == "fallback" for one in tries):
        kinds = {"fallback"}
    if not tries:
        return Row(name, "not applicable", _why_not(op))
    if "wrong" in kinds:
        return Row(name, "wrong", KNOWN_WRONG.get(name, "not known yet"))
    if name in MAY_GATHER and kinds <= {"rule", "fallback"} and "rule" in kinds:
        return Row(name, "partly", MAY_GATHER[name])
    if kinds == {"rule"}:
        moves = any(one.outcome.moves for one in tries)
        return Row(name, "rule", "moves its tensor on some layouts" if moves else "")
    if kinds == {"fallback"}:
        return Row(name, "fallback", _inner_functions(name, tries))
    remarks = [
        *([f"gathers {_where('fallback', tries)}"] if "fallback" in kinds else []),
        *([_refusal(tries)] if "refused" in kinds else []),
    ]
    return Row(name, "refused" if kinds == {"refused"} else "partly", "; ".join(remarks))


def _why_not(op: Any) -> str:
    if dtype_of(op) is None:
        return "torch has no sample of it for the CPU"
    if op.name.startswith("sparse."):
        return "takes sparse tensors"
    return "takes no tensors" if not calls_of(op, 1) else "torch itself refuses its samples here"


def _inner_functions(name: str, tries: Sequence[Try]) -> str:
    """The functions that gather, if they are others than the op itself."""
    inner = {text for one in tries for text in one.outcome.detail.split(", ")}
    own = name.split(".")[-1], *name.split(".")[:-1]
    others = sorted(text for text in inner if text.split(".")[-1].strip("_") not in own)
    return f"in {', '.join(f'`{text}`' for text in others)}" if others == sorted(inner) else ""


def _refusal(tries: Sequence[Try]) -> str:
    refused = [one for one in tries if one.kind == "refused"]
    # Layouts are those that a call happened to get.
    reasons = ", ".join(sorted({one.outcome.detail.split(": got Layout")[0] for one in refused}))
    where = "" if len(refused) == len(tries) else f" {_where('refused', tries)}"
    return f"refused{where}: {reasons}" if where else reasons


def _where(kind: Kind, tries: Sequence[Try]) -> str:
    """For which calls it goes so, in words."""
    such = [one for one in tries if one.kind == kind]
    variants = sorted({one.call.variant for one in such})
    if "" not in variants:
        return f"as {', '.join(variants)}{_on_layouts(kind, such, tries)}"
    return _on_layouts(kind, such, tries).strip() or _for_arguments(such)


def _on_layouts(kind: Kind, such: Sequence[Try], tries: Sequence[Try]) -> str:
    if all(any(layout and layout.pending for layout in one.cuts) for one in such):
        return " of a pending sum"
    calls = {str(one.call) for one in such}
    mixed = {str(one.call) for one in tries if str(one.call) in calls and one.kind != kind}
    return " on some layouts" if mixed == calls else ""


def _for_arguments(such: Sequence[Try]) -> str:
    arguments = min((str(one.call).partition(": ")[2] for one in such), key=lambda t: (len(t), t))
    return f"for some arguments, as `{_escaped(arguments)}`"


def _escaped(text: str) -> str:
    plain = re.sub(r"<[^>]*>", "...", text).replace("|", "/")
    return plain if len(plain) <= 100 else f"{plain[:97]}..."


def page_of(rows: Iterable[Row]) -> str:
    """The page, which is the same whenever it is made."""
    listed = sorted(rows, key=lambda row: (row.op.lower(), row.op))
    counts = Counter(row.how for row in listed)
    summary = [
        f"| {how} | {counts[how]} | {meaning} |"
        for how, meaning in _MEANING.items()
        if counts[how] or how != "wrong"
    ]
    lines = [
        f"| how | of {len(listed)} ops | meaning |",
        "|---|---|---|",
        *summary,
        "",
        "| op | how | remark |",
        "|---|---|---|",
        *map(str, listed),
    ]
    version = torch.__version__.partition("+")[0]
    return _HEAD.format(version=version) + "\n".join(lines) + "\n"


def rows_of_page(text: str) -> dict[str, Row]:
    """The rows of a page, by op."""
    found = re.findall(r"^\| `(\S+)` \| ([a-z ]+) \| (.*) \|$", text, re.MULTILINE)
    return {op: Row(op, how, remark) for op, how, remark in found}
