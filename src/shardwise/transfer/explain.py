"""A plan in words: what moves, who is busiest, how much memory it takes."""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arguments import whole_number
from shardwise.transfer.moves import NO_GROUP
from shardwise.transfer.units import format_bytes
from shardwise.words import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardwise.geometry.box import Ints
    from shardwise.transfer.plan import TransferPlan
    from shardwise.transfer.schedule import Schedule

__all__ = ["explain_plan", "reductions_in_words", "total_in_words"]

_WIDTH = 80
_INDENT = 10  # of everything that stands beside a heading


def explain_plan(plan: TransferPlan, *, max_lines: int, max_bytes: int | None) -> str:
    """Text of at most 80 columns; the table has at most `max_lines` ranks."""
    max_lines = whole_number(max_lines, "max_lines")
    schedules = [plan.schedule()]
    if max_bytes is not None:
        schedules.append(plan.schedule(max_bytes))
    lines = [
        line
        for heading, words in _summary(plan, schedules)
        for line in _wrapped(words, first=heading.ljust(_INDENT), then=" " * _INDENT)
    ]
    return "\n".join([*lines, *_table(plan, schedules[-1], max_lines)])


def _wrapped(words: str, *, first: str = "", then: str = "") -> list[str]:
    """Lines of 80 columns that do not part a number from its unit."""
    glued = re.sub(r"(\d) (?=[KMGT]?i?B\b)", "\\1\xa0", words)
    lines = textwrap.wrap(glued, _WIDTH, initial_indent=first, subsequent_indent=then)
    return [line.replace("\xa0", " ") for line in lines]


def _summary(plan: TransferPlan, schedules: Sequence[Schedule]) -> Iterator[tuple[str, str]]:
    """Headings and what stands beside them."""
    traffic = plan.traffic
    yield "from", f"{plan.source}"
    yield "to", f"{plan.target}"
    numel = math.prod(plan.source.shape)
    yield (
        "tensor",
        f"{format_bytes(numel * plan.itemsize)}: {plural(numel, 'element')} of "
        f"{plural(plan.itemsize, 'byte')}",
    )
    yield "moves", total_in_words(plan)
    yield "stays", f"{format_bytes(int(traffic.kept.sum()))} on the ranks that hold it"
    if len(traffic.pair_bytes):
        yield "messages", _messages(plan)
        yield "busiest", _busiest(plan, traffic.sent, "send")
        yield "", _busiest(plan, traffic.received, "receive")
    if (words := reductions_in_words(plan)) is not None:
        yield "reduces", words
    for schedule in schedules:
        yield "memory" if schedule is schedules[0] else "", _memory(plan, schedule)


def total_in_words(plan: TransferPlan, *, exact: bool = True) -> str:
    """Bytes that change ranks, beside the least that have to."""
    if 0 in plan.source.shape:
        return "nothing moves: the tensor has no elements"
    if not plan.total_bytes:
        if plan.source == plan.target:
            return "nothing moves: the layouts are equal"
        return "nothing moves: every rank has what it needs"
    total = format_bytes(plan.total_bytes)
    if exact and plan.total_bytes >= 1024:
        total += f" ({plan.total_bytes:,} bytes)"
    if plan.total_bytes == plan.lower_bound:
        return f"{total} = lower bound"
    share = f"{plan.total_bytes / plan.lower_bound:.3g} x " if plan.lower_bound else ""
    return f"{total}, {share}the lower bound of {format_bytes(plan.lower_bound)}"


def _messages(plan: TransferPlan) -> str:
    """How many, and between how many pairs of ranks if some send twice; the most of a pair."""
    traffic, words = plan.traffic, plural(plan.num_messages, "message")
    num_pairs, each = len(traffic.pair_bytes), ""
    if num_pairs != plan.num_messages:  # a second step sends between the pairs of the first
        words, each = f"{words} between {plural(num_pairs, 'pair')} of ranks", " a pair"
    most = int(traffic.pair_bytes.argmax())
    return (
        f"{words}, at most {format_bytes(int(traffic.pair_bytes[most]))}{each} "
        f"(rank {traffic.pair_src[most]} to {traffic.pair_dst[most]})"
    )


def _busiest(plan: TransferPlan, load: Ints, verb: str) -> str:
    """`rank 3 sends 4.0 MiB, 1.5 x the mean of the 8 ranks that send`."""
    able = load[load > 0]
    most = int(load.argmax())
    size = format_bytes(int(load[most]))
    if len(able) == 1:
        return f"rank {plan.traffic.ranks[most]} alone {verb}s: {size}"
    if (able == load[most]).all():
        return f"{len(able):,} ranks {verb} {size} each"
    return (
        f"rank {plan.traffic.ranks[most]} {verb}s {size}, {load[most] / able.mean():.3g} x the "
        f"mean of the {len(able):,} ranks that {verb}"
    )


def reductions_in_words(plan: TransferPlan) -> str | None:
    """How many regions are reduced from how many addends, or None if there are none."""
    moves = plan.moves
    grouped = moves.group[moves.group != NO_GROUP]
    num_addends = np.bincount(grouped) if len(grouped) else grouped
    num_addends = num_addends[num_addends > 1]
    if not len(num_addends):
        return None
    low, high = int(num_addends.min()), int(num_addends.max())
    addends = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    words = f"{plural(len(num_addends), 'region')} of {addends} addends ({plan.source.pending})"
    spread = int(moves.volumes[moves.step == 1].sum()) * plan.itemsize
    if not spread:
        return words
    return f"{words}, then spreads the results ({format_bytes(spread)}) in a second step"


def _memory(plan: TransferPlan, schedule: Schedule) -> str:
    """Rounds and the largest peak: output and staging of one rank."""
    words = plural(len(schedule.rounds), "round")
    if schedule.max_bytes is not None:
        words = f"with at most {format_bytes(schedule.max_bytes)} of staging: {words}"
    if not plan.ranks:
        return words
    peaks = [_peak(plan, schedule, rank) for rank in plan.ranks]
    most = max(range(len(peaks)), key=peaks.__getitem__)
    rank = plan.ranks[most]
    return (
        f"{words}, peak {format_bytes(peaks[most])} on rank {rank} "
        f"(output {format_bytes(plan.output_bytes.get(rank, 0))}, "
        f"staging {format_bytes(schedule.staging_bytes(rank))})"
    )


def _peak(plan: TransferPlan, schedule: Schedule, rank: int) -> int:
    return plan.output_bytes.get(rank, 0) + schedule.staging_bytes(rank)


def _table(plan: TransferPlan, schedule: Schedule, max_lines: int) -> list[str]:
    """A line a rank; where there are too many, the busiest, and a word on the others."""
    traffic = plan.traffic
    if not len(traffic.ranks) or not max_lines:
        return []
    shown = np.arange(len(traffic.ranks))
    words = []
    if len(shown) > max_lines:
        order = np.argsort(-(traffic.sent + traffic.received), kind="stable")
        shown, rest = order[:max_lines], order[max_lines:]
        words = _wrapped(
            f"... and {len(rest):,} more, each sending at most "
            f"{format_bytes(int(traffic.sent[rest].max()))} and receiving at most "
            f"{format_bytes(int(traffic.received[rest].max()))}"
        )
    rows = [["rank", "sent", "received", "kept", "peers", "peak"]]
    for slot in shown.tolist():
        rank = int(traffic.ranks[slot])
        columns = (traffic.sent, traffic.received, traffic.kept)
        sizes = [format_bytes(int(column[slot])) for column in columns]
        peak = format_bytes(_peak(plan, schedule, rank))
        rows.append([f"{rank}", *sizes, f"{traffic.num_peers[slot]:,}", peak])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return ["", *lines, *words]
