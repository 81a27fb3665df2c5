"""Functions that put elements elsewhere along dims: flip, roll, repeat, pads that repeat elements.

What happens along a dim is a list of segments: ranges of the operand that go to ranges of the
result. A box goes where its parts of the segments go, on its rank. Where a box is whole along all
dims that change, torch's own function does it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.geometry import Box
from shardwise.ops.call_arguments import arguments_of, dims_of, listed
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.own_functions import own_function
from shardwise.ops.pieces import Mapped, Part, decide_parts
from shardwise.ops.rule import Rule, composite, register

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.geometry import Layout
    from shardwise.ops.rule import Call, Decision

__all__ = ["Segment", "decide_segments", "repeat_interleave", "roll"]


class Segment(NamedTuple):
    """Elements `[low, high)` along a dim and where in the result they start."""

    low: int
    high: int
    at: int = 0
    is_mirrored: bool = False
    stretch: int = 1  # how often each element stands there

    @property
    def changes(self) -> bool:
        """Whether the elements themselves are put in another way."""
        return self.is_mirrored or self.stretch != 1

    def meet(self, low: int, high: int) -> _Range | None:
        """What of `[low, high)` is in this segment; of no elements, the place between them."""
        first, last = max(low, self.low), min(high, self.high)
        if first > last or (first == last and low < high):
            return None
        start = self.high - last if self.is_mirrored else first - self.low
        stop = self.high - first if self.is_mirrored else last - self.low
        return _Range(
            first - low,
            last - low,
            self.at + start * self.stretch,
            self.at + stop * self.stretch,
            self,
        )


class _Range(NamedTuple):
    """A part of a piece along a dim, and its place in the result."""

    low: int
    high: int
    start: int
    stop: int
    segment: Segment


def decide_segments(
    call: Call, segments: Mapping[int, Sequence[Segment]], shape: tuple[int, ...], *, lead: int = 0
) -> Decision:
    """The decision by segments per dim that changes.

    `lead`: how many dims the result has before those of the operand, along which all is repeated.
    """
    layout = call.operands[0].layout

    def parts(box: Box) -> list[Part]:
        if box.volume and all(_is_local(box, layout, dim, segments[dim]) for dim in segments):
            spans = {
                dim: _span(box, dim, along, shape[lead + dim]) for dim, along in segments.items()
            }
            return [Part(_placed(box, spans, shape[:lead]))]
        found = []
        ranges = [_ranges(box, dim, along) for dim, along in segments.items()]
        for chosen in itertools.product(*ranges):
            along = dict(zip(segments, chosen, strict=True))
            spans = {dim: (one.start, one.stop) for dim, one in along.items()}
            is_new = any(one.segment.changes for one in chosen) or bool(lead)
            make = _maker(along, shape[:lead])
            found.append(Part(_placed(box, spans, shape[:lead]), make, is_new=is_new))
        return found

    merge = [lead + dim for dim in segments]
    return decide_parts(call, [Mapped(layout, parts)], shape, merge=merge)


def _is_local(box: Box, layout: Layout, dim: int, segments: Sequence[Segment]) -> bool:
    """Whether torch's function does the same with the box as with the whole dim."""
    size = layout.shape[dim]
    return box.shape[dim] == size or [one[:2] for one in segments] == [(0, size)]


def _span(box: Box, dim: int, segments: Sequence[Segment], size: int) -> tuple[int, int]:
    """Where a box goes along a dim in one piece."""
    if len(segments) != 1:
        return 0, size
    ((_, _, start, stop, _),) = _ranges(box, dim, segments)
    return start, stop


def _ranges(box: Box, dim: int, segments: Sequence[Segment]) -> list[_Range]:
    """Where a box goes along a dim: at least one range, if only one without elements."""
    low, high = box.start[dim], box.stop[dim]
    found = [one for segment in segments if (one := segment.meet(low, high)) is not None]
    # A place without elements may lie at the ends of two segments.
    return (found if low < high else found[:1]) or [_Range(0, 0, 0, 0, Segment(0, 0))]


def _placed(box: Box, spans: Mapping[int, tuple[int, int]], lead: tuple[int, ...]) -> Box:
    ends = [spans.get(dim, end) for dim, end in enumerate(zip(box.start, box.stop, strict=True))]
    return Box.of([*((0, size) for size in lead), *ends])


def _maker(
    along: Mapping[int, _Range], lead: tuple[int, ...]
) -> Callable[[torch.Tensor], torch.Tensor]:
    mirrored = [dim for dim, one in along.items() if one.segment.is_mirrored]

    def make(piece: torch.Tensor) -> torch.Tensor:
        for dim, one in along.items():
            piece = piece.narrow(dim, one.low, one.high - one.low)
            if one.segment.stretch != 1:
                piece = piece.repeat_interleave(one.segment.stretch, dim)
        if mirrored:
            piece = piece.flip(mirrored)
        return piece.repeat(*lead, *(1,) * piece.dim()) if lead else piece

    return make


# -- the functions ---------------------------------------------------------------------------------


def _flip(names: str, dims: tuple[int, ...] | None = None) -> None:
    def decide(call: Call) -> Decision:
        (result,) = outlines(call)
        given = arguments_of(call, "input dims", spreads=True)
        mirrored = dims_of(given["dims"], result.ndim) if dims is None else dims
        shape = tuple(result.shape)
        segments = {dim: [Segment(0, shape[dim], is_mirrored=True)] for dim in mirrored}
        return decide_segments(call, segments, shape)

    name = names.split()[0]
    register(Rule(name, decide), functions_named(names.split()))


def _decide_rot90(call: Call) -> Decision:
    """Boxes turn with the tensor, each by torch's own function."""
    (result,) = outlines(call)
    given = arguments_of(call, "input k dims")
    a, b = dims_of(given.get("dims", (0, 1)), result.ndim)
    turns = given.get("k", 1) % 4
    layout = call.operands[0].layout
    mirrored = {0: (), 1: (b,), 2: (a, b), 3: (a,)}[turns]

    def parts(box: Box) -> list[Part]:
        ends = list(zip(box.start, box.stop, strict=True))
        for dim in mirrored:
            size = layout.shape[dim]
            ends[dim] = (size - ends[dim][1], size - ends[dim][0])
        if turns % 2:
            ends[a], ends[b] = ends[b], ends[a]
        return [Part(Box.of(ends))]

    return decide_parts(call, [Mapped(layout, parts)], tuple(result.shape))


def _repeated(call: Call, counts: tuple[int, ...], shape: tuple[int, ...]) -> Decision:
    """`counts`: one per dim of the result."""
    operand = call.operands[0]
    lead = len(shape) - len(operand.shape)
    segments = {
        dim: [Segment(0, size, at=k * size) for k in range(count)]
        for dim, (size, count) in enumerate(zip(operand.shape, counts[lead:], strict=True))
        if count != 1
    }
    return decide_segments(call, segments, shape, lead=lead)


def _decide_repeat(call: Call) -> Decision:
    (result,) = outlines(call)
    counts = listed(arguments_of(call, "input repeats", spreads=True)["repeats"])
    return _repeated(call, counts, tuple(result.shape))


def _decide_tile(call: Call) -> Decision:
    (result,) = outlines(call)
    counts = listed(arguments_of(call, "input dims", spreads=True)["dims"])
    return _repeated(call, (1,) * (result.ndim - len(counts)) + counts, tuple(result.shape))


@own_function
def repeat_interleave(x: Any, *how: Any, **options: Any) -> torch.Tensor:
    """`torch.repeat_interleave`, which has a rule for a number of times and a dim."""
    return torch.repeat_interleave(x, *how, **options)


def _decide_repeat_interleave(call: Call) -> Decision | None:
    if [type(arg) for arg in call.args[1:]] != [int, int]:
        return None  # a number for each element: who holds what would depend on data
    (result,) = outlines(call)
    x, repeats, dim = call.args
    dim %= result.ndim
    shape = tuple(result.shape)
    return decide_segments(call, {dim: [Segment(0, x.shape[dim], stretch=repeats)]}, shape)


@composite("repeat_interleave", functions_named(["repeat_interleave"]))
def _repeat_interleave(
    input: Any,  # torch's name
    repeats: Any = None,
    dim: int | None = None,
    **options: Any,
) -> Any:
    """Without a dim, all elements are in one row."""
    if repeats is None:
        return repeat_interleave(input, **options)
    if type(repeats) is int and dim is None:
        return repeat_interleave(_in_a_row(input), repeats, 0, **options)
    return repeat_interleave(input, repeats, dim, **options)


@own_function
def roll(x: torch.Tensor, shifts: Any, dims: Any) -> torch.Tensor:
    """`torch.roll` along dims, which has a rule."""
    return torch.roll(x, shifts, dims)


def _decide_roll(call: Call) -> Decision:
    (result,) = outlines(call)
    _, shifts, dims = call.args
    shape, steps = tuple(result.shape), dict.fromkeys(dims_of(dims, result.ndim), 0)
    for dim, shift in zip(dims_of(dims, result.ndim), listed(shifts), strict=True):
        steps[dim] += shift
    segments = {}
    for dim, shift in steps.items():
        size = shape[dim]
        step = shift % size if size else 0
        segments[dim] = [Segment(0, size - step, at=step), Segment(size - step, size)]
    return decide_segments(call, segments, shape)


@composite("roll", functions_named(["roll"]))
def _roll(input: Any, shifts: Any, dims: Any = ()) -> Any:  # torch's name
    """Without dims, all elements are in one row."""
    if isinstance(dims, int) or len(dims):
        return roll(input, shifts, dims)
    rolled = roll(_in_a_row(input), shifts, 0)
    return rolled if input.dim() == 1 else rolled.reshape(input.shape)


def _in_a_row(x: Any) -> Any:
    return x if x.dim() == 1 else x.flatten()


_flip("flip")
_flip("fliplr", (1,))
_flip("flipud", (0,))
register(Rule("rot90", _decide_rot90), functions_named(["rot90"]))
register(Rule("repeat", _decide_repeat), functions_named(["repeat"]))
register(Rule("tile", _decide_tile), functions_named(["tile"]))
register(Rule("repeat_interleave", _decide_repeat_interleave), [repeat_interleave])
register(Rule("roll", _decide_roll), [roll])
