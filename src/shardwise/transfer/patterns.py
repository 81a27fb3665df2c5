"""Regular patterns in a plan: those for which a backend may have a collective of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.geometry import Layout
    from shardwise.transfer.plan import TransferPlan

__all__ = ["Pattern", "recognise"]

# A plan that a backend may have a collective for.
Pattern = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


def recognise(plan: TransferPlan, ranks: tuple[int, ...]) -> Pattern | None:
    """The collective over exactly these ranks that the plan is, or None.

    all_gather: even pieces, one a rank, become a copy on every rank. reduce_scatter: one addend of
    the whole tensor a rank becomes even pieces. all_reduce: such addends become a copy on every
    rank. broadcast: the whole tensor on one rank becomes a copy on every rank.
    """
    source, target = plan.source, plan.target
    if len(ranks) < 2 or 0 in source.shape or target.pending is not None:
        return None
    # One entry a rank: an empty box beside the whole one would be another local tensor.
    spread = target.is_replicated and _is_over(target, ranks) and len(target) == len(ranks)
    if source.pending is not None:
        if not _is_one_addend_each(source, ranks):
            return None
        if spread:
            return "all_reduce"
        return "reduce_scatter" if _is_one_even_piece_each(target, ranks) else None
    if not spread:
        return None
    if _is_one_even_piece_each(source, ranks):
        return "all_gather"
    return "broadcast" if len(source) == 1 and source.ranks[0] in ranks else None


def _is_over(layout: Layout, ranks: Sequence[int]) -> bool:
    return layout.ranks == tuple(sorted(ranks))


def _is_one_even_piece_each(layout: Layout, ranks: Sequence[int]) -> bool:
    """Whether every rank has one box, all of one size, and no two the same."""
    volumes = layout.boxes.volumes
    return (
        len(layout) == len(ranks)
        and _is_over(layout, ranks)
        and len(layout.box_rows) - 1 == len(ranks)
        and bool((volumes == volumes[0]).all())
    )


def _is_one_addend_each(layout: Layout, ranks: Sequence[int]) -> bool:
    """Whether every rank has one addend of the whole tensor, all of them different."""
    return (
        len(layout) == len(ranks)
        and _is_over(layout, ranks)
        and len(layout.box_rows) == 2
        and int(layout.num_terms[0]) == len(ranks)
    )
