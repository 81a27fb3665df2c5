"""One call on simulated ranks, compared with plain torch: how it went, or what is wrong."""

from __future__ import annotations

import random
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import torch
from tests.ops.op_table.calls import seeded

import shardwise
from shardwise._torch_compat import RandomMarks, tree_leaves, tree_map
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.sharded_tensor import implicit, tensor
from shardwise.sharded_tensor.dispatch import function_name
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.testing.op_check import _check_value, _sharded, _weighed, layout_kinds
from shardwise.testing.strategies import examples, layouts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.ops.op_table.calls import OpCall

    from shardwise.geometry import Layout

__all__ = ["Kind", "Outcome", "Reference", "cut", "reference_of", "try_call"]

Kind = Literal["rule", "fallback", "refused", "wrong"]
Cut = list["Layout | None"]  # one per tensor; None: given as a plain tensor

_UNINITIALIZED = ("empty_like", "new_empty", "new_empty_strided")  # whose values mean nothing

# Not tried on pending sums: two read the last bits of floats, which a sum of terms has otherwise,
# the others round every term of a sum to 16 bits, which is more than the tolerance of results.
_READS_BITS = ("bfloat16", "chalf", "equal", "half", "hash_tensor")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call went: by rules alone, by gathering, refused or wrong."""

    kind: Kind
    detail: str = ""  # the functions that gathered, the reason of the refusal, what is wrong
    moves: bool = False  # whether a rule brought its only tensor to another layout


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain torch gives."""

    outputs: list[Any]
    inputs: list[torch.Tensor]  # after the call, which may write into them
    written: list[bool]
    gradients: list[torch.Tensor | None] | None  # None: nothing to differentiate
    is_random: bool


def reference_of(call: OpCall) -> Reference | None:
    """What plain torch gives of a call; None if torch itself refuses it."""
    with seeded(), _quiet():
        full = [_leaf(t, call.has_grad) for t in call.tensors]
        marks = RandomMarks([], torch.device("cpu"))
        try:
            result = call(list(full))
            is_random = marks.have_moved()
            gradients = _gradients(call, result, full) if call.has_grad else None
        except Exception:
            return None
    # Not by versions: torch writes the statistics of norms without counting one.
    written = [not _is_same(t, before) for t, before in zip(full, call.tensors, strict=True)]
    return Reference(_detached(result), [t.detach() for t in full], written, gradients, is_random)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())


def cut(call: OpCall, world_size: int, seed: str) -> Cut:
    """A random layout for every tensor of a call; some stay plain, at least one does not."""
    draw = random.Random(f"{call.op} {call.variant} {call.number} {world_size} {seed}")
    found: Cut = []
    for number, held in enumerate(call.tensors):
        # Nothing sharded is written into a plain tensor.
        may_be_plain = len(call.tensors) > 1 and not (call.writes and number == 0)
        if may_be_plain and draw.random() < 0.15:
            found.append(None)
            continue
        shape = tuple(held.shape)
        kinds = list(layout_kinds(shape, world_size=world_size).values())
        if draw.random() < 0.3:
            kinds = _odd_layouts(shape, world_size) or kinds
        if call.op in _READS_BITS:
            kinds = [one for one in kinds if one.pending is None]
        found.append(draw.choice(kinds))
    if all(one is None for one in found):
        found[0] = layout_kinds(tuple(call.tensors[0].shape), world_size=world_size)["replicated"]
    return found


@cache
def _odd_layouts(shape: tuple[int, ...], world_size: int) -> list[Layout]:
    """Layouts that are no grids, with replicas and addends of some boxes only."""
    drawn = examples(layouts(shape=shape, world_size=world_size, max_boxes=5), 8)
    return [layout for layout in drawn if layout.pending in (None, "sum")]


def try_call(call: OpCall, reference: Reference, cuts: Cut, world_size: int) -> Outcome:
    """Runs a call on tensors that are cut so, and says how it went. Never raises."""
    # Seeded here, not by ranks: they share torch's generator, and would see each other's draws.
    with seeded(), recorded() as notes, _quiet():
        results = simulate(lambda rank: _on_rank(call, reference, cuts), world_size).results
    raised = [one for one in results if one is not None]
    if any(isinstance(one, _Refusal) for one in raised):
        texts = sorted({str(one) for one in raised})
        is_unanimous = len(raised) == world_size and len(texts) == 1
        return Outcome("refused" if is_unanimous else "wrong", " / ".join(texts))
    if raised:
        return Outcome("wrong", " / ".join(sorted({str(one) for one in raised})))
    if notes.gathered:
        return Outcome("fallback", ", ".join(sorted(set(notes.gathered))))
    is_alone = len(cuts) == 1 and cuts[0] is not None and cuts[0].pending is None
    return Outcome("rule", moves=is_alone and bool(notes.moved))


class _Refusal(Exception):
    """What a refused call said, without rank and fix."""


class _Wrong(Exception):
    """What is wrong."""


def _on_rank(call: OpCall, reference: Reference, cuts: Cut) -> Exception | None:
    """Runs on each simulated rank; what went wrong is returned, since all ranks have to go on."""
    try:
        given = _given(call, cuts)
        with shardwise.plain_inputs("replicated"):
            if reference.is_random:
                shardwise.manual_seed(7)
            try:
                result = call(list(given))
            except OpError as error:
                return _Refusal(_reason(str(error)))
        _check(call, reference, given, result)
        if reference.is_random:
            _check_layout_does_not_show(call, given, result)
    except Exception as error:
        return _Wrong(f"{type(error).__name__}: {_first_lines(str(error))}")
    return None


def _given(call: OpCall, cuts: Cut) -> list[Any]:
    return [
        _leaf(t, call.has_grad)
        if layout is None
        else _sharded(t.detach().contiguous(), layout, call.has_grad and t.requires_grad)
        for t, layout in zip(call.tensors, cuts, strict=True)
    ]


def _leaf(held: torch.Tensor, has_grad: bool) -> torch.Tensor:
    copied = held.detach().clone(memory_format=torch.contiguous_format)
    return copied.requires_grad_(has_grad and held.requires_grad)


def _check(call: OpCall, reference: Reference, given: list[Any], result: Any) -> None:
    """Raises AssertionError unless outputs, written inputs and gradients are those of torch."""
    found = tree_leaves(result)
    assert len(found) == len(reference.outputs), "another number of outputs"
    for number, (one, expected) in enumerate(zip(found, reference.outputs, strict=True)):
        if reference.is_random or call.op in _UNINITIALIZED:
            _check_kind(f"output {number}", one, expected)
        else:
            _check_value(f"output {number}", one, expected)
    if reference.is_random:
        return
    for number, one in enumerate(given):
        if reference.written[number]:
            _check_value(f"input {number} after the call", one, reference.inputs[number])
    if reference.gradients is not None:
        gradients = _gradients(call, result, given)
        assert gradients is not None, "the result does not require grad"
        for number, (own, expected) in enumerate(zip(gradients, reference.gradients, strict=True)):
            _check_gradient(f"gradient {number}", own, expected)


def _check_kind(what: str, one: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert one.dtype == expected.dtype, f"{what}: {one.dtype} is not {expected.dtype}"
        assert one.shape == expected.shape, f"{what}: {one.shape} is not {expected.shape}"


def _check_gradient(what: str, own: Any, expected: torch.Tensor | None) -> None:
    if expected is None:
        assert own is None or not _full(own).any(), f"{what}: there should be none"
    else:
        assert own is not None, f"{what} is missing"
        _check_value(what, own, expected)


def _check_layout_does_not_show(call: OpCall, given: list[Any], result: Any) -> None:
    """The same seed gives the same numbers when every rank holds all of every tensor."""
    everywhere = [
        shardwise.as_replicated(_full(one).detach().clone())
        if isinstance(one, ShardedTensor)
        else one
        for one in _given(call, _as_given(given))
    ]
    shardwise.manual_seed(7)
    with shardwise.plain_inputs("replicated"):
        again = call(everywhere)
    for number, (one, other) in enumerate(
        zip(tree_leaves(result), tree_leaves(again), strict=True)
    ):
        if isinstance(one, torch.Tensor):
            _check_value(f"random output {number} on another layout", one, _full(other))


def _as_given(given: Sequence[Any]) -> Cut:
    return [one.shard_layout if isinstance(one, ShardedTensor) else None for one in given]


def _gradients(call: OpCall, result: Any, leaves: Sequence[Any]) -> list[Any] | None:
    """The gradients of a loss in which every element of the result has another weight."""
    whole = call.processed(tree_map(_full, result))
    parts = [
        _weighed(one)
        for one in tree_leaves(whole)
        if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    if not parts:
        return None
    sum(parts).backward()  # type: ignore[union-attr]  # parts is not empty
    return [leaf.grad for leaf in leaves]


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def _detached(result: Any) -> list[Any]:
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in tree_leaves(result)]


def _reason(message: str) -> str:
    """The reason in the message of a refusal: without rank and function, and without the fix."""
    text = re.sub(r"^\[rank \d+\] ", "", message)
    _, colon, reason = text.partition("of a ShardedTensor: ")
    return (reason if colon else text).split(". ")[0].rstrip(".")


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:300]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(slots=True)
class _Notes:
    gathered: list[str]
    moved: list[str]


@contextmanager
def recorded() -> Iterator[_Notes]:
    """Notes which functions gather their tensors, even if nothing has to be sent, or move them."""
    notes, fallback = _Notes([], []), tensor._fallback[0]

    def note_gather(func: Any, *rest: Any) -> Any:
        notes.gathered.append(function_name(func))
        return fallback(func, *rest)

    def note_move(func: Any, message: str) -> None:
        if " moves its tensors" in message:
            notes.moved.append(message)

    tensor.register_fallback(note_gather)
    try:
        with (
            patch.object(implicit, "_warn_once", note_move),
            shardwise.implicit_comm("warn"),
        ):
            yield notes
    finally:
        tensor.register_fallback(fallback)
