"""Who needs which box of an operand, and for what: from uses to a `Need`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from shardwise.geometry import Box, Layout, is_tiling
from shardwise.ops.rule import Need
from shardwise.transfer import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    import torch

    from shardwise.ops.rule import Operand

__all__ = ["Spot", "Use", "bytes_moved", "need_of", "needed_parts", "number_work"]


class Use(NamedTuple):
    """A rank uses a box of an operand for a piece of work."""

    box: Box
    rank: int
    work: Hashable


class Spot(NamedTuple):
    """Where a rank finds its piece of an operand: which of its pieces, and what part of it."""

    piece: int
    part: tuple[slice, ...] | None = None

    def of(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor there."""
        found = pieces[self.piece]
        return found if self.part is None else found[self.part]


def need_of(
    shape: tuple[int, ...], uses: Iterable[Use], rank: int
) -> tuple[Need, dict[tuple[Box, Hashable], int]]:
    """The need that covers all uses, and where `rank` finds the piece for each of its own.

    Ranks that use a box for the same work compute the same gradient; ranks that use it for other
    work, another addend of it. Where their work overlaps in part, its pieces are kept apart.
    """
    by_box: dict[Box, dict[int, dict[Hashable, None]]] = defaultdict(lambda: defaultdict(dict))
    for box, user, work in uses:
        by_box[box][user][work] = None
    boxes, owners, terms = [], [], []
    mine: dict[tuple[Box, Hashable], int] = {}  # the term of each use of `rank`
    for box, users in by_box.items():
        number = number_work(box, users)
        for user, works in users.items():
            used = sorted({number[work] for work in works})
            boxes += [box] * len(used)
            owners += [user] * len(used)
            terms += used
        mine |= {(box, work): number[work] for work in users.get(rank, ())}
    work = Layout(shape, boxes, owners, terms=terms, pending="sum") if any(terms) else None
    layout = Layout(shape, boxes, owners) if work is None else work.bar
    entries = layout if work is None else work
    place = {
        entry: k
        for k, entry in enumerate(zip(entries.boxes_of(rank), entries.terms_of(rank), strict=True))
    }
    return Need(layout, work), {use: place[use[0], term] for use, term in mine.items()}


def needed_parts(
    operand: Operand, output: Layout, parts: Mapping[Box, Box], rank: int
) -> tuple[Need, tuple[Spot, ...]]:
    """The need of which each box of `output` uses one part; where each local box finds its own.

    The operand is cut into the parts if they tile it. Else all of it goes to every box.
    """
    if not len(output):  # of a tensor without elements
        return Need(operand.layout.bar), ()
    whole = Box.whole(operand.shape)
    is_cut = is_tiling(list(dict.fromkeys(parts.values())), operand.shape)
    uses = [Use(parts[box] if is_cut else whole, owner, (box, term)) for box, owner, term in output]
    need, place = need_of(operand.shape, uses, rank)
    spots = []
    for box, term in zip(output.boxes_of(rank), output.terms_of(rank), strict=True):
        part = parts[box]
        if is_cut:
            spots.append(Spot(place[part, (box, term)]))
        else:
            spots.append(Spot(place[whole, (box, term)], part.slices()))
    return need, tuple(spots)


def number_work(box: Box, users: Mapping[int, Mapping[Hashable, None]]) -> dict[Hashable, int]:
    """The term of each piece of work that the box is used for."""
    works = dict.fromkeys(work for user in sorted(users) for work in users[user])
    if not box.volume:  # nothing to add up
        return dict.fromkeys(works, 0)
    distinct = dict.fromkeys(frozenset(users[user]) for user in sorted(users))
    if sum(map(len, distinct)) == len(works):  # equal or disjoint: one addend per user
        return {work: k for k, together in enumerate(distinct) for work in together}
    return {work: k for k, work in enumerate(works)}


def bytes_moved(operand: Operand, need: Need) -> int:
    """Bytes between ranks to bring an operand where it is needed."""
    if operand.layout == need.layout:
        return 0
    return plan_reshard(operand.layout, need.layout, operand.dtype.itemsize).total_bytes
