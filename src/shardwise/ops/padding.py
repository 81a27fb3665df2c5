"""`pad`: boxes at the border of the tensor get what is added there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.geometry import Box
from shardwise.ops.call_arguments import arguments_of
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outlines
from shardwise.ops.pieces import Mapped, Part, decide_filled, decide_parts
from shardwise.ops.rearranging import Segment, decide_segments
from shardwise.ops.rule import Rule, register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.ops.rule import Call, Decision

__all__: list[str] = []

Pads = tuple[tuple[int, int], ...]  # per dim: before and after; negative ones cut off


def _pads(pad: Sequence[int], ndim: int) -> Pads:
    """Torch's list, which goes from the last dim to the first."""
    pairs = [(int(a), int(b)) for a, b in zip(pad[::2], pad[1::2], strict=True)]
    return ((0, 0),) * (ndim - len(pairs)) + tuple(reversed(pairs))


def _flat(pads: Sequence[tuple[int, int]]) -> list[int]:
    return [number for pair in reversed(pads) for number in pair]


def _decide_pad(call: Call) -> Decision | None:
    (result,) = outlines(call)
    given = arguments_of(call, "input pad mode value")
    pads = _pads(given["pad"], result.ndim)
    shape = tuple(result.shape)
    if given.get("mode", "constant") == "constant":
        return _decide_constant(call, pads, shape, given.get("value") or 0)
    segments = {}
    for dim, (before, after) in enumerate(pads):
        if (before, after) != (0, 0):
            found = _SEGMENTS[given["mode"]](call.operands[0].shape[dim], before, after)
            if found is None:
                return None
            segments[dim] = found
    return decide_segments(call, segments, shape)


def _decide_constant_pad_nd(call: Call) -> Decision:
    (result,) = outlines(call)
    given = arguments_of(call, "input pad value")
    pads = _pads(given["pad"], result.ndim)
    return _decide_constant(call, pads, tuple(result.shape), given.get("value", 0))


# -- numbers ---------------------------------------------------------------------------------------


def _decide_constant(call: Call, pads: Pads, shape: tuple[int, ...], value: Any) -> Decision:
    """Every rank pads its own boxes, those at the border by what is new there."""
    operand = call.operands[0]
    layout = operand.layout if value == 0 else operand.layout.bar  # 1 + 1 would be 2
    cut = [
        (max(-before, 0), size - max(-after, 0))
        for size, (before, after) in zip(operand.shape, pads, strict=True)
    ]
    if any(low >= high for low, high in cut) and 0 not in shape:
        return decide_filled(call, shape, value)

    def parts(box: Box) -> list[Part]:
        ends, spans, more = [], [], []
        dims = zip(box.start, box.stop, cut, pads, strict=True)
        for low, high, (first, last), (before, after) in dims:
            start = min(max(low, first), last)
            stop = max(min(high, last), start)
            is_border = start < stop
            left = max(before, 0) if is_border and start == first else 0
            right = max(after, 0) if is_border and stop == last else 0
            ends.append((start + before - left, stop + before + right))
            spans.append(slice(max(start - low, 0), max(stop - low, 0)))
            more.append((left, right))
        return [Part(Box.of(ends), _padder(tuple(spans), _flat(more), value))]

    return decide_parts(call, [Mapped(layout, parts)], shape)


def _padder(
    spans: tuple[slice, ...], more: list[int], value: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda piece: torch.constant_pad_nd(piece[spans], more, value)


# -- elements again --------------------------------------------------------------------------------


def _kept(size: int, before: int, after: int) -> Segment:
    """What stays of the dim itself."""
    return Segment(max(-before, 0), size - max(-after, 0), at=max(before, 0))


def _reflected(size: int, before: int, after: int) -> list[Segment]:
    kept = _kept(size, before, after)
    found = [kept]
    if before > 0:
        found.append(Segment(1, 1 + before, is_mirrored=True))
    if after > 0:
        end = kept.at + kept.high - kept.low
        found.append(Segment(size - 1 - after, size - 1, at=end, is_mirrored=True))
    return found


def _replicated(size: int, before: int, after: int) -> list[Segment]:
    kept = _kept(size, before, after)
    found = [kept]
    if before > 0:
        found.append(Segment(0, 1, stretch=before))
    if after > 0:
        end = kept.at + kept.high - kept.low
        found.append(Segment(size - 1, size, at=end, stretch=after))
    return found


def _wrapped(size: int, before: int, after: int) -> list[Segment] | None:
    """It goes around what stays; None where that is too little."""
    kept = _kept(size, before, after)
    if max(before, after) > kept.high - kept.low:
        return None
    found = [kept]
    if before > 0:
        found.append(Segment(kept.high - before, kept.high))
    if after > 0:
        end = kept.at + kept.high - kept.low
        found.append(Segment(kept.low, kept.low + after, at=end))
    return found


_SEGMENTS: dict[str, Callable[[int, int, int], list[Segment] | None]] = {
    "reflect": _reflected,
    "replicate": _replicated,
    "circular": _wrapped,
}

register(Rule("pad", _decide_pad), functions_named(["pad"]))
register(Rule("constant_pad_nd", _decide_constant_pad_nd), functions_named(["constant_pad_nd"]))
