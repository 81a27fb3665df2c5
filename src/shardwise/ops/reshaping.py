"""`view`, `reshape` and `flatten`: the same elements, in the same order, in another shape.

[Note: groups] The dims of the two shapes are matched in groups of the same number of elements:
(4, 6, 5) and (4, 2, 3, 5) are three groups, of which the middle one splits a dim. A box is a box
in each group, and there becomes boxes of the other shape: where a dim is split, its interval is a
flat range; where dims are merged, a box is as many flat ranges as it has rows that are not whole.
Dims that do not divide each other, as (4, 6) and (6, 4), are merged first, then split.

[Note: too many parts] Where that would leave many small pieces on a rank, groups are brought to
flat ranges first. That moves data, and the result shows a copy.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shardwise._torch_compat import shares_memory
from shardwise.geometry import Box, Entry, Layout, even_cuts, flat_range_boxes
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outline_of
from shardwise.ops.pieces import Part, decide_view, operand_of
from shardwise.ops.reinterpreting import decide_reinterpreted
from shardwise.ops.rule import Rule, composite, register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardwise.ops.rule import Call, Decision

__all__: list[str] = []

_MOST_PARTS = 64  # of a box. [Note: too many parts]
Interval = tuple[int, int]
Slices = tuple[slice, ...]


class _Group(NamedTuple):
    """Dims of the two shapes that have the same elements. [Note: groups]"""

    dims: tuple[int, ...]  # of the operand, without those of size 1
    into: tuple[int, ...]  # of the result
    sizes: tuple[int, ...]
    new_sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def fine(self) -> tuple[int, ...] | None:
        """The sizes of which those of both shapes are products; None if there are none."""
        ends = sorted({*_ends(self.sizes), *_ends(self.new_sizes)})
        if any(b % a for a, b in itertools.pairwise(ends)):
            return None
        return tuple(b // a for a, b in itertools.pairwise(ends))[::-1]

    @property
    def merged(self) -> tuple[tuple[int, int], ...]:
        """Neighbours among the operand's dims that are in one dim of the result."""
        cuts = {*_ends(self.new_sizes)}
        ends = _ends(self.sizes)[::-1]
        pairs = zip(itertools.pairwise(self.dims), ends[1:-1], strict=True)
        return tuple(pair for pair, end in pairs if end not in cuts)


class _Part(NamedTuple):
    """A part of a box, in the dims of a group."""

    cut: tuple[Interval, ...]  # what is cut out of the operand, per dim
    between: tuple[int, ...]  # the shape that it is given then
    pick: Slices  # what is cut out of that
    box: tuple[Interval, ...]  # where it is in the result


def _ends(sizes: Sequence[int]) -> list[int]:
    """Elements of the last 0, 1, 2, ... dims."""
    return [1, *itertools.accumulate(reversed(sizes), lambda a, b: a * b)]


def _groups(shape: Sequence[int], new_shape: Sequence[int]) -> list[_Group]:
    """The fewest dims that go together, in order; of shapes with elements."""
    old = [dim for dim, size in enumerate(shape) if size > 1]
    new = [dim for dim, size in enumerate(new_shape) if size > 1]
    groups: list[_Group] = []
    while old:
        dims, into = [old.pop(0)], [new.pop(0)]
        while difference := math.prod(shape[dim] for dim in dims) - math.prod(
            new_shape[dim] for dim in into
        ):
            (into if difference > 0 else dims).append((new if difference > 0 else old).pop(0))
        sizes, new_sizes = [shape[dim] for dim in dims], [new_shape[dim] for dim in into]
        groups.append(_Group(tuple(dims), tuple(into), tuple(sizes), tuple(new_sizes)))
    return groups


def _runs(box: Sequence[Interval], sizes: Sequence[int]) -> list[tuple[Slices, Interval]] | None:
    """A box as flat ranges, and what each is of the box; None if there are too many."""
    last = max((dim for dim, (a, b) in enumerate(box) if (a, b) != (0, sizes[dim])), default=0)
    if math.prod(b - a for a, b in box[:last]) > _MOST_PARTS:
        return None
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    found = []
    for outer in itertools.product(*[range(a, b) for a, b in box[:last]]):
        first = sum(at * n for at, n in zip(outer, strides[:last], strict=True))
        low, high = box[last]
        slices = [slice(at - a, at - a + 1) for at, (a, _) in zip(outer, box[:last], strict=True)]
        slices += [slice(0, b - a) for a, b in box[last:]]
        found.append((tuple(slices), (first + low * strides[last], first + high * strides[last])))
    return found


def _split(interval: Interval, sizes: Sequence[int]) -> list[tuple[Interval, tuple[Interval, ...]]]:
    """An interval of a dim as boxes of the dims that it is split into, and the interval of each."""
    at = interval[0]
    found = []
    for box in flat_range_boxes(sizes, *interval):
        found.append(((at, at + box.volume), tuple(zip(box.start, box.stop, strict=True))))
        at += box.volume
    return found


def _parts_of_group(group: _Group, box: tuple[Interval, ...]) -> list[_Part] | None:
    """What becomes of a box in the dims of a group; None if there are too many parts."""
    fine = group.fine
    if fine is None:
        return _parts_by_flat(group, box)
    found: list[_Part] = []
    per_dim = [
        _split(one, sizes) for one, sizes in zip(box, _shared(fine, group.sizes), strict=True)
    ]
    for split in itertools.product(*per_dim):
        inner = [interval for _, fine_box in split for interval in fine_box]
        merged = [
            _runs(some, sizes)
            for some, sizes in zip(
                _shared(inner, group.new_sizes, fine), _shared(fine, group.new_sizes), strict=True
            )
        ]
        if any(runs is None for runs in merged):
            return None
        if len(found) + math.prod(len(runs or ()) for runs in merged) > _MOST_PARTS:
            return None
        found += [
            _Part(
                tuple(cut for cut, _ in split),
                tuple(b - a for a, b in inner),
                tuple(one for slices, _ in runs for one in slices),
                tuple(interval for _, interval in runs),
            )
            for runs in itertools.product(*[runs or () for runs in merged])
        ]
    return found


def _parts_by_flat(group: _Group, box: tuple[Interval, ...]) -> list[_Part] | None:
    """The same where dims of the two shapes do not divide each other."""
    runs = _runs(box, group.sizes)
    found: list[_Part] = []
    for slices, (first, last) in runs or ():
        cut = tuple(
            (low + one.start, low + one.stop) for one, (low, _) in zip(slices, box, strict=True)
        )
        for (low, high), target in _split((first, last), group.new_sizes):
            pick = (slice(low - first, high - first),)
            found.append(_Part(cut, (last - first,), pick, target))
    return found if runs is not None and len(found) <= _MOST_PARTS else None


def _shared(values: Sequence[Any], sizes: Sequence[int], of: Sequence[int] | None = None) -> Any:
    """The values, one per fine size, that belong to each of `sizes`, which are products of them."""
    fine = list(values if of is None else of)
    found, start = [], 0
    for size in sizes:
        stop = start + 1
        while math.prod(fine[start:stop]) < size:
            stop += 1
        found.append(list(values[start:stop]))
        start = stop
    return found


class _Reshape(NamedTuple):
    """A change of shape; `is_view`: as of `view`, which raises where `reshape` copies."""

    shape: tuple[int, ...]
    new_shape: tuple[int, ...]
    groups: tuple[_Group, ...]
    is_view: bool

    def listed(self, box: Box) -> list[list[_Part]] | None:
        """The parts of a box in each group; None if there are too many."""
        found = []
        for group in self.groups:
            inside = tuple((box.start[dim], box.stop[dim]) for dim in group.dims)
            parts = _parts_of_group(group, inside)
            if parts is None:
                return None
            found.append(parts)
        return found if math.prod(map(len, found)) <= _MOST_PARTS else None

    def parts(self, box: Box) -> list[Part]:
        listed = self.listed(box)
        assert listed is not None
        return [self._part(box, chosen) for chosen in itertools.product(*listed)]

    def _part(self, box: Box, chosen: Sequence[_Part]) -> Part:
        cut = [slice(0, size) for size in box.shape]
        start, stop = [0] * len(self.new_shape), [1] * len(self.new_shape)
        for group, part in zip(self.groups, chosen, strict=True):
            for dim, (low, high) in zip(group.dims, part.cut, strict=True):
                cut[dim] = slice(low - box.start[dim], high - box.start[dim])
            for dim, (low, high) in zip(group.into, part.box, strict=True):
                start[dim], stop[dim] = low, high
        target = Box(tuple(start), tuple(stop))
        between = tuple(size for part in chosen for size in part.between)
        pick = tuple(one for part in chosen for one in part.pick)
        show = _show(
            None if _is_all(cut, box.shape) else tuple(cut),
            between,
            None if _is_all(pick, between) else pick,
            target.shape,
            torch.Tensor.view if self.is_view else torch.Tensor.reshape,
        )
        merged = tuple(pair for group in self.groups for pair in group.merged)
        if not self.is_view and merged:
            show = partial(_view_or_copy, show, merged)
        return Part(target, show)


def _is_all(slices: Sequence[slice], sizes: Sequence[int]) -> bool:
    pairs = zip(slices, sizes, strict=True)
    return all((one.start, one.stop) == (0, size) for one, size in pairs)


def _show(
    cut: Slices | None,
    between: tuple[int, ...],
    pick: Slices | None,
    shape: tuple[int, ...],
    reshape: Callable[..., torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    if cut is None and pick is None:
        return lambda piece: reshape(piece, shape)

    def show(piece: torch.Tensor) -> torch.Tensor:
        if cut is not None:
            piece = piece[cut]
        if pick is not None:
            piece = reshape(piece, between)[pick]
        return reshape(piece, shape)

    return show


def _view_or_copy(
    show: Callable[[torch.Tensor], torch.Tensor],
    merged: Sequence[tuple[int, int]],
    piece: torch.Tensor,
) -> torch.Tensor:
    """What `reshape` gives: a view if dims that it merges follow on each other, else a copy.

    So also of a piece that is one row, which torch could show in any order: what the function gives
    may not depend on how the tensor is cut.
    """
    shown = show(piece)
    strides, sizes = piece.stride(), piece.shape
    is_view = all([strides[a] == strides[b] * sizes[b] for a, b in merged])
    return shown if is_view or not shares_memory(shown, piece) else shown.clone()


# -- [Note: too many parts] ------------------------------------------------------------------------


def _where_parts_are_few(layout: Layout, change: _Reshape) -> Layout:
    """The layout itself, or one that cuts less in the groups that would have too many parts."""
    if _has_few_parts(layout, change):
        return layout
    owners = _owners_of_cells(layout)
    if owners is not None:
        # The groups with the most cells first: one may do.
        order = sorted(change.groups, key=lambda group: -_num_cells(layout, group))
        for count in range(1, len(order) + 1):
            found = _flattened(layout, owners, order[:count])
            if _has_few_parts(found, change):
                return found
    return _of_ranges(layout.shape, layout.ranks)


def _has_few_parts(layout: Layout, change: _Reshape) -> bool:
    boxes = {box for box in layout.boxes if box.volume}
    return all(change.listed(box) is not None for box in boxes)


def _num_cells(layout: Layout, group: _Group) -> int:
    assert layout.grid is not None
    return math.prod(layout.grid.shape[dim] for dim in group.dims[1:])


def _owners_of_cells(layout: Layout) -> np.ndarray[Any, np.dtype[Any]] | None:
    """The ranks of each cell of a grid; of a pending reduction they are to share the cell."""
    if layout.grid is None:
        return None
    cells = np.empty(layout.grid.shape, dtype=object)
    for place in np.ndindex(cells.shape):
        ranks = [rank for rank in layout.grid.owners[place].tolist() if rank >= 0]
        cells[place] = tuple(dict.fromkeys(ranks))
    return cells


def _flattened(
    layout: Layout, owners: np.ndarray[Any, np.dtype[Any]], groups: Sequence[_Group]
) -> Layout:
    """In these groups the layout is cut into flat ranges, as many as it has cells there."""
    assert layout.grid is not None
    dims = [dim for group in groups for dim in group.dims]
    others = [dim for dim in range(layout.ndim) if dim not in dims]
    boxes: list[Box] = []
    ranks: list[int] = []
    for place in np.ndindex(*[owners.shape[dim] for dim in others]):
        index: list[Any] = [slice(None)] * layout.ndim
        low, high = [0] * layout.ndim, list(layout.shape)
        for dim, cell in zip(others, place, strict=True):
            index[dim] = cell
            low[dim], high[dim] = layout.grid.cuts[dim][cell : cell + 2].tolist()
        cells = [*owners[tuple(index)].reshape(-1)]
        for box, holders in _ranges(groups, _holders(cells, layout)):
            start, stop = list(low), list(high)
            for dim, (a, b) in box.items():
                start[dim], stop[dim] = a, b
            boxes += [Box(tuple(start), tuple(stop))] * len(holders)
            ranks += holders
    return Layout(layout.shape, boxes, ranks)


def _holders(cells: Sequence[tuple[int, ...]], layout: Layout) -> list[tuple[int, ...]]:
    if layout.pending is None:
        return list(cells)
    return list(dict.fromkeys((rank,) for cell in cells for rank in cell))


def _ranges(
    groups: Sequence[_Group], holders: Sequence[tuple[int, ...]]
) -> Iterable[tuple[dict[int, Interval], tuple[int, ...]]]:
    """Even flat ranges of the first group, the others whole; each with its holders."""
    first, *rest = groups
    whole = {
        dim: (0, size) for group in rest for dim, size in zip(group.dims, group.sizes, strict=True)
    }
    count = len(holders)
    # At whole slices of the outermost dim of the result, or of the operand, if there are enough.
    outer = next((n for n in (first.new_sizes[0], first.sizes[0]) if n >= count), first.numel)
    cuts = even_cuts(outer, count) * (first.numel // outer)
    for (a, b), ranks in zip(itertools.pairwise(cuts.tolist()), holders, strict=True):
        for box in flat_range_boxes(first.sizes, a, b):
            ends = zip(box.start, box.stop, strict=True)
            yield whole | dict(zip(first.dims, ends, strict=True)), ranks


def _of_ranges(shape: tuple[int, ...], ranks: Sequence[int]) -> Layout:
    """Even flat ranges of the whole tensor, one per rank."""
    cuts = even_cuts(math.prod(shape), len(ranks)).tolist()
    entries = [
        Entry(box, rank)
        for (a, b), rank in zip(itertools.pairwise(cuts), ranks, strict=True)
        for box in flat_range_boxes(shape, a, b)
    ]
    return Layout.of(shape, entries)


# -- the table -------------------------------------------------------------------------------------


def _decide(call: Call, *, is_view: bool = False) -> Decision | None:
    operand = operand_of(call)
    if operand is None:
        return None
    result = outline_of(call)
    if result.dtype != operand.dtype:
        return decide_reinterpreted(call, result.dtype)
    shape, new_shape = operand.shape, tuple(result.shape)
    if not result.numel():
        return decide_view(call, [(new_shape, lambda _: [])])
    change = _Reshape(shape, new_shape, tuple(_groups(shape, new_shape)), is_view)
    layout = _where_parts_are_few(operand.layout, change)
    return decide_view(call, [(new_shape, change.parts)], layout=layout)


for _name in ("reshape", "flatten", "ravel", "unflatten"):
    register(Rule(_name, _decide), functions_named([_name]))
register(Rule("view", partial(_decide, is_view=True)), functions_named(["view"]))


@composite("reshape_as", functions_named(["reshape_as"]))
def _reshape_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return input.reshape(other.shape)
