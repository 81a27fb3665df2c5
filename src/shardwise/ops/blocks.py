"""The blocks of a product by owner intersection, and who computes them.

[Note: blocks] Every product here has an einsum form: its dims have labels. A box of each operand
gives a block, the range that they share in the space of all labels; the boxes of an operand tile
it, so the blocks tile that space. A rank that holds all boxes of a block can compute it. What a
rank computes of one box of the output it adds up; what ranks compute of different ranges of a
contracted label are the terms of a pending sum. If every block has a rank, nothing moves.

[Note: who computes] Every rank computes what it can, if the blocks that ranks use a box for, or
that they add up, are equal or disjoint from rank to rank: then equal ones are replicas, and
different ones addends. Else every block goes to its lowest rank, which is always so.

[Note: following] If some block has no rank, the operands are brought to one of them: each of its
entries gets what it is multiplied with. The operand for which the fewest bytes move is the one that
stays. A pending operand is reduced on its way.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from shardwise.geometry import Box, Boxes, Entry, Layout, common_pieces, intersecting_pairs

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from shardwise.geometry.box import Ints
    from shardwise.ops.forms import Factor, Form

__all__ = ["Block", "Result", "blocks_of", "following", "result_of"]

Key = TypeVar("Key", bound="Hashable")


class Block(NamedTuple):
    """A part of the space of labels, and the boxes that it is computed from. [Note: blocks]"""

    box: Box  # a range of each label
    sources: tuple[Box, ...]  # of each factor
    ranks: frozenset[int]  # those that hold all of them


class _Distinct(NamedTuple):
    """The boxes of a layout, each once."""

    boxes: Boxes
    owners: tuple[frozenset[int], ...]


def _distinct(layout: Layout) -> _Distinct:
    first = layout.box_rows
    owners = layout.owners.tolist()
    return _Distinct(
        layout.boxes[first[:-1]],
        tuple(frozenset(owners[a:b]) for a, b in itertools.pairwise(first.tolist())),
    )


def _ranges(boxes: Boxes, factor: Factor, sizes: tuple[int, ...]) -> Boxes:
    """The boxes in the space of labels: whole where they have no dim.

    Of a label that stands twice, as in `ii`, the part that all its dims share.
    """
    starts = np.zeros((len(boxes), len(sizes)), np.int64)
    stops = np.tile(np.array(sizes, np.int64), (len(boxes), 1))
    for dim, label in enumerate(factor.labels):
        if label is not None:
            low, high = factor.scale(dim).units_of(boxes.starts[:, dim], boxes.stops[:, dim])
            starts[:, label] = np.maximum(starts[:, label], low)
            stops[:, label] = np.minimum(stops[:, label], high)
    return Boxes(starts, np.maximum(starts, stops))


def blocks_of(form: Form, layouts: Sequence[Layout]) -> list[Block] | None:
    """All blocks, in order of the output and then of the labels that are summed over.

    None if one of them has no rank that can compute it.
    """
    found = list(map(_distinct, layouts))
    space, picks = _overlaps(form, found)
    columns = [space.starts[:, label] for label in (*form.output, *form.summed)]
    order = np.lexsort(columns[::-1]) if columns else np.arange(len(space))
    blocks = []
    for row, pick in zip(order.tolist(), picks[order].tolist(), strict=True):
        sources = list(zip(found, pick, strict=True))
        ranks = frozenset.intersection(*[one.owners[k] for one, k in sources])
        if not ranks:
            return None
        blocks.append(Block(space[row], tuple(one.boxes[k] for one, k in sources), ranks))
    # Many a kernel with whole labels refuses tensors without elements.
    return blocks if form.whole else blocks + _empty_blocks(form, layouts)


def _overlaps(form: Form, found: Sequence[_Distinct]) -> tuple[Boxes, Ints]:
    """All parts of the space of labels, and of which box of each factor they are, (n, factors)."""
    space = Boxes.of([Box.whole(form.sizes)], len(form.sizes))
    picks: Ints = np.zeros((1, 0), np.int64)
    for factor, one in zip(form.factors, found, strict=True):
        full = np.flatnonzero(one.boxes.is_full)
        ranges = _ranges(one.boxes[full], factor, form.sizes)
        i, j = intersecting_pairs(space, ranges)
        picks = np.column_stack([picks[i], full[j]])
        space = Boxes(
            np.maximum(space.starts[i], ranges.starts[j]),
            np.minimum(space.stops[i], ranges.stops[j]),
        )
    return space, picks


def _empty_blocks(form: Form, layouts: Sequence[Layout]) -> list[Block]:
    """Blocks of empty boxes: a rank with an empty piece of an operand has one of the output.

    Only along labels of the output; an empty range to sum over adds nothing.
    """
    found: dict[tuple[Box, ...], set[int]] = defaultdict(set)
    for rank in {rank for layout in layouts for rank in _ranks_with_empty_boxes(layout)}:
        for sources in itertools.product(*[layout.boxes_of(rank) for layout in layouts]):
            if any(box.is_empty for box in sources) and not _has_empty_broadcast(form, sources):
                found[sources].add(rank)
    blocks = []
    for sources, ranks in sorted(found.items()):
        start, stop = [0] * len(form.sizes), list(form.sizes)
        for factor, box in zip(form.factors, sources, strict=True):
            for label, low, high in zip(factor.labels, box.start, box.stop, strict=True):
                if label is not None:
                    start[label], stop[label] = max(start[label], low), min(stop[label], high)
        is_box = all(low <= high for low, high in zip(start, stop, strict=True))
        has_terms = all(start[label] < stop[label] for label in form.summed)
        if is_box and has_terms and any(start[k] == stop[k] for k in form.output):
            blocks.append(Block(Box(tuple(start), tuple(stop)), sources, frozenset(ranks)))
    return blocks


def _has_empty_broadcast(form: Form, sources: Sequence[Box]) -> bool:
    """Whether a box has nothing along a dim that is broadcast, of which torch knows no product."""
    return any(
        label is None and not size
        for factor, box in zip(form.factors, sources, strict=True)
        for label, size in zip(factor.labels, box.shape, strict=True)
    )


def _ranks_with_empty_boxes(layout: Layout) -> set[int]:
    return set(layout.owners[~layout.boxes.is_full].tolist())


def following(form: Form, layouts: Sequence[Layout], anchor: int) -> list[Layout]:
    """The layouts in which every entry of one factor has what it is multiplied with.

    [Note: following]
    """
    boxes, owners = _distinct(layouts[anchor])
    full = np.flatnonzero(boxes.is_full)
    spaces = list(_ranges(boxes[full], form.factors[anchor], form.sizes))
    users = [owners[k] for k in full.tolist()]
    found = list(layouts)
    for k, (factor, layout) in enumerate(zip(form.factors, layouts, strict=True)):
        if k != anchor:
            parts = [
                (_needed_of(factor, layout.shape, space), ranks)
                for space, ranks in zip(spaces, users, strict=True)
                if not space.is_empty
            ]
            found[k] = _covering(layout.shape, parts)
    return found


def _needed_of(factor: Factor, shape: tuple[int, ...], space: Box) -> Box:
    """What of a factor is needed for a part of the space of labels.

    Of a label that stands twice only the first dim is cut, since squares along a diagonal would
    leave out the rest of the tensor.
    """
    start, stop = [0] * len(shape), list(shape)
    for dim, label in enumerate(factor.labels):
        if label is not None and label not in factor.labels[:dim]:
            start[dim], stop[dim] = factor.scale(dim).indices_of(
                space.start[label], space.stop[label]
            )
    return Box(tuple(start), tuple(stop))


def _covering(shape: tuple[int, ...], parts: Sequence[tuple[Box, frozenset[int]]]) -> Layout:
    """The layout in which ranks have these parts, cut where they overlap in part."""
    pieces = common_pieces([box for box, _ in parts])
    users: dict[Box, set[int]] = defaultdict(set)
    for box, ranks in parts:
        for piece in pieces[box]:
            users[piece] |= ranks
    entries = [Entry(box, rank) for box, ranks in users.items() for rank in sorted(ranks)]
    return Layout.of(shape, entries)


# -- who computes what -----------------------------------------------------------------------------


class Result(NamedTuple):
    """The output: its layout, and the blocks that each entry is the sum of."""

    layout: Layout
    blocks: dict[Entry, tuple[int, ...]]

    def entries_of(self, rank: int) -> list[Entry]:
        """In the order of the local pieces."""
        found = zip(self.layout.boxes_of(rank), self.layout.terms_of(rank), strict=True)
        return [Entry(box, rank, term) for box, term in found]


def result_of(form: Form, blocks: Sequence[Block]) -> Result:
    """What comes out of the blocks that ranks compute. [Note: who computes]"""
    pieces = _output_pieces(form, blocks)
    every = [block.ranks for block in blocks]
    sums = _blocks_by(pieces, every)
    uses = _blocks_by([tuple(enumerate(block.sources)) for block in blocks], every)
    if not all(_are_apart(by_rank) for by_rank in (*uses.values(), *sums.values())):
        sums = _blocks_by(pieces, [frozenset([min(ranks)]) for ranks in every])
    found: dict[Entry, tuple[int, ...]] = {}
    for box, by_rank in sums.items():
        if box.is_empty:  # nothing to add up
            found |= {Entry(box, rank): tuple(one[:1]) for rank, one in by_rank.items()}
        else:
            terms = {one: k for k, one in enumerate(sorted(set(map(tuple, by_rank.values()))))}
            found |= {
                Entry(box, rank, terms[tuple(one)]): tuple(one) for rank, one in by_rank.items()
            }
    return Result(Layout.of(form.shape, found, pending="sum"), found)


def _blocks_by(
    keys: Sequence[tuple[Key, ...]], who: Sequence[frozenset[int]]
) -> dict[Key, dict[int, list[int]]]:
    """The numbers of the blocks that have a key, by key and by the ranks that compute them."""
    found: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, (listed, ranks) in enumerate(zip(keys, who, strict=True)):
        for key, rank in itertools.product(listed, sorted(ranks)):
            found[key][rank].append(number)
    return found


def _are_apart(by_rank: Mapping[int, Sequence[int]]) -> bool:
    """Whether what two ranks have is equal or disjoint."""
    distinct = set(map(tuple, by_rank.values()))
    return sum(map(len, distinct)) == len(set(itertools.chain.from_iterable(distinct)))


def _output_pieces(form: Form, blocks: Sequence[Block]) -> list[tuple[Box, ...]]:
    """The boxes of the output that each block is a part of."""
    projected = [block.box.along(form.output) for block in blocks]
    pieces = common_pieces([box for box in projected if not box.is_empty])
    return [pieces.get(box, (box,)) for box in projected]
