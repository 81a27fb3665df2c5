"""Words below pictures: what the characters in them mean, and what a plan comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.transfer.explain import reductions_in_words, total_in_words
from shardwise.transfer.units import format_bytes
from shardwise.viz.colors import NUM_KEYS
from shardwise.words import plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.transfer import TransferPlan
    from shardwise.viz.matrix import Matrix
    from shardwise.viz.planes import Regions

__all__ = ["empty_shards", "matrix_notes", "picture_notes", "plan_notes"]

_REDUCED = {
    "sum": "the sum",
    "avg": "the average",
    "max": "the maximum",
    "min": "the minimum",
    "product": "the product",
}
_SIGNS = {  # in labels
    ",": "a,b: the same box on ranks a and b (replicas)",
    "-": "a-c: the same box on ranks a to c (replicas)",
}


def picture_notes(regions: Regions, *, keyed: bool, labels: frozenset[str]) -> Iterator[str]:
    """What the characters in the picture mean, as far as they occur."""
    layout = regions.layout
    if keyed:
        note = "each character is the key of a rank"
        if len(regions.rows) > len(regions):
            note += "; keys alternate where several ranks hold one box"
        if len(layout.ranks) > NUM_KEYS:
            note += f"; keys repeat after {NUM_KEYS} ranks"
        yield note
    for sign, meaning in _SIGNS.items():
        if any(sign in label for label in labels):
            yield meaning
    for dots in ("…", ".."):
        if any(label.endswith(dots) for label in labels):
            yield f"a{dots}: on rank a and others"
    if layout.pending is not None:
        note = f"pending {layout.pending}: the value is {_REDUCED[layout.pending]} of the terms"
        lead = "a+b: a term on rank a and one on rank b; " if any("+" in s for s in labels) else ""
        yield lead + note


def empty_shards(plan: TransferPlan) -> Iterator[str]:
    """Which ranks have shards without elements before and after, if the tensor has any."""
    if 0 in plan.source.shape:
        return
    for when, layout in (("before", plan.source), ("after", plan.target)):
        ranks = [rank for rank, held in layout.bytes_per_rank(1).items() if not held]
        if ranks:
            yield f"empty shards {when}: {ranks_text(ranks)}"


def matrix_notes(plan: TransferPlan, matrix: Matrix) -> list[str]:
    """What the cells of a matrix mean, as far as it is not plain."""
    has_own = matrix.cells[matrix.is_own].any()
    if matrix.block_size == 1:
        return ["=: stays on its rank"] if has_own else []
    notes = [f"{len(matrix.ranks):,} ranks in blocks of {matrix.block_size}"]
    if inside := plan.total_bytes - int(matrix.moved.sum()):
        words = f"{format_bytes(inside)} moves inside, and counts as sent and received"
        return [*notes, f"=: stays in its block ({words})"]
    return notes + (["=: stays in its block"] if has_own else [])


def plan_notes(plan: TransferPlan, max_bytes: int | None) -> Iterator[str]:
    """What moves, beside the least, what stays, and the rounds; then what is reduced, if it is."""
    rounds = plural(len(plan.schedule(max_bytes).rounds), "round")
    if max_bytes is not None:
        rounds += f" with max_bytes {format_bytes(max_bytes)}"
    moves = "moves " if plan.total_bytes else ""
    stays = format_bytes(int(plan.traffic.kept.sum()))
    yield f"{moves}{total_in_words(plan, exact=False)}; stays {stays}; {rounds}"
    if (reduced := reductions_in_words(plan)) is not None:
        yield f"reduces {reduced}"
