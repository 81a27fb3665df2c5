"""Results that ranks make of what they hold: boxes are mapped, and nothing moves.

A function of this kind says what becomes of a box of each operand: *parts*, which are boxes of the
result with the way to make them of the piece. Parts are where the piece is, so replicas stay
replicas, addends of a pending reduction stay addends, and gradients need no exchange.

`decide_view` is for results that show the memory of one operand: every part is a torch view of its
piece, so that what is written into the one shows in the other. `decide_parts` is for results with
memory of their own, of any number of operands: parts that line up on the same ranks are merged.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.geometry import Box, Entry, Layout
from shardwise.ops.phantoms import tie_of
from shardwise.ops.rule import Decision, Need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardwise.ops.rule import Call, Invoke, Operand, OperandPieces, OutputPieces

__all__ = [
    "Mapped",
    "Part",
    "decide_filled",
    "decide_parts",
    "decide_view",
    "operand_of",
    "tied",
]


class Part(NamedTuple):
    """A box of the result, and how it is made of a piece."""

    box: Box
    make: Callable[[torch.Tensor], torch.Tensor] | None = None  # None: by the call's own function
    is_new: bool = True  # of `decide_parts`: whether this never shares memory with the piece


class Mapped(NamedTuple):
    """An operand in the layout in which it is needed, and what becomes of a box of it."""

    layout: Layout
    parts: Callable[[Box], Sequence[Part]]


class _Made(NamedTuple):
    """A part on this rank: of which addend, operand and piece."""

    part: Part
    term: int
    operand: int
    piece: int


class _Joined(NamedTuple):
    """Parts along a dim; None: parts without elements, of one box."""

    dim: int | None
    recipes: tuple[_Made | _Joined, ...]


def _placed(operands: Sequence[Mapped], rank: int) -> tuple[list[Entry], list[_Made]]:
    """Where all parts are, and how `rank` makes its own."""
    entries: list[Entry] = []
    made: list[_Made] = []
    for number, (layout, parts) in enumerate(operands):
        known = {box: parts(box) for box in dict.fromkeys(layout.boxes)}
        num_pieces = 0
        for box, owner, term in layout:
            for part in known[box]:
                own_term = term if part.box.volume else 0  # else there is nothing to add up
                entries.append(Entry(part.box, owner, own_term))
                if owner == rank:
                    made.append(_Made(part, own_term, number, num_pieces))
            num_pieces += owner == rank
    return entries, made


# -- views -----------------------------------------------------------------------------------------


def operand_of(call: Call) -> Operand | None:
    """The operand of a view; None if the call has others, which say something that we cannot see.

    As in `x[indices]` and `tensor_split(x, indices)`.
    """
    return call.operands[0] if len(call.operands) == 1 else None


def decide_view(
    call: Call,
    results: Sequence[tuple[tuple[int, ...], Callable[[Box], Sequence[Part]]]],
    *,
    layout: Layout | None = None,
    pack: Callable[[list[Any]], Any] | None = None,
    phantom: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Decision:
    """The decision for results of these shapes, each with the parts that a box has in it.

    Parts are views, and a box may have none. `layout` is where the operand is needed, if not where
    it is; `phantom` makes of a tensor without elements one of the results' dtype, if that is
    another.
    """
    source = call.operands[0].layout if layout is None else layout
    shown = [_shown(source, shape, parts, call.rank) for shape, parts in results]

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        return [[_part_of(one, pieces, invoke) for one in views] for _, views in shown]

    views = shown[0][1]
    is_one = len(views) == 1 == len(source.boxes_of(call.rank)) and len(shown) == 1

    return Decision(
        (Need(source), *[Need(other.layout) for other in call.operands[1:]]),
        tuple(found for found, _ in shown),
        kernel,
        phantom=lambda tie, *_: [tie if phantom is None else phantom(tie)] * len(shown),
        is_view=True,
        local=views[0].part.make if is_one and pack is None else None,
        pack=pack,
    )


def _shown(
    source: Layout, shape: tuple[int, ...], parts: Callable[[Box], Sequence[Part]], rank: int
) -> tuple[Layout, list[_Made]]:
    """The layout of a result, and how the pieces of `rank` are made, in its order."""

    def shown(box: Box) -> Sequence[Part]:
        if 0 in shape:
            return [Part(Box.whole(shape), lambda piece: _nothing_of(piece).view(shape))]
        return parts(box) if box.volume else ()

    entries, made = _placed([Mapped(source, shown)], rank)
    made.sort(key=lambda one: (one.part.box, one.term, one.piece))
    return Layout.of(shape, entries, pending=source.pending), made


def _nothing_of(piece: torch.Tensor) -> torch.Tensor:
    some = piece if piece.dim() else piece.view(1)
    return some.narrow(0, 0, 0)


# -- tensors of their own --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """A box of the result: who holds it, and how this rank makes each of its terms."""

    holders: frozenset[tuple[int, int]]  # (rank, term)
    recipes: dict[int, _Made | _Joined]  # term -> recipe


def decide_parts(
    call: Call,
    operands: Sequence[Mapped],
    shape: tuple[int, ...],
    *,
    merge: Iterable[int] = (),
    dtype: torch.dtype | None = None,
) -> Decision:
    """The decision by which every part is made where its piece is.

    Every box has at least one part, if only one without elements: a piece that goes nowhere would
    leave the graph ([Note: every rank is in every graph] in `comm/differentiable.py`).

    `merge`: the dims along which parts are merged. `dtype`, of the result: that of all operands.
    Pending reductions pass through; they have to be of one kind.
    """
    held = _held(*_placed(operands, call.rank))
    for dim in merge:
        held = _merged(held, dim)
    entries = [Entry(box, *holder) for box, one in held.items() for holder in one.holders]
    kinds = {one.layout.pending for one in operands} - {None}
    assert len(kinds) < 2
    output = Layout.of(shape, entries, pending=kinds.pop() if kinds else None)
    recipes = [
        recipe
        for _, _, recipe in sorted(
            (box, term, recipe) for box, one in held.items() for term, recipe in one.recipes.items()
        )
    ]
    result_dtype = call.operands[0].dtype if dtype is None else dtype

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        found = [_made(recipe, pieces, invoke) for recipe in recipes]
        follow = [piece for held in pieces for piece in held if piece.requires_grad]
        return [[one if one.requires_grad else tied(one, follow) for one in found]]

    is_one_call = [_is_call(recipe) for recipe in recipes] == [True]
    return Decision(
        tuple(Need(operand.layout) for operand in operands),
        (output,),
        kernel,
        phantom=lambda *ties: tie_of(ties, result_dtype),
        is_one_call=is_one_call,
    )


def _held(entries: Sequence[Entry], made: Sequence[_Made]) -> dict[Box, _Held]:
    """The parts by their boxes."""
    holders: dict[Box, set[tuple[int, int]]] = defaultdict(set)
    for box, owner, term in entries:
        holders[box].add((owner, term))
    recipes: dict[Box, dict[int, list[_Made]]] = defaultdict(lambda: defaultdict(list))
    for one in made:
        recipes[one.part.box][one.term].append(one)
    return {
        box: _Held(
            frozenset(owners),
            {
                term: found[0] if len(found) == 1 else _Joined(None, tuple(found))
                for term, found in recipes[box].items()
            },
        )
        for box, owners in holders.items()
    }


def _merged(held: dict[Box, _Held], dim: int) -> dict[Box, _Held]:
    """Boxes that follow one another along `dim` with the same holders, as one."""
    lines: dict[Any, list[Box]] = defaultdict(list)
    for box, one in held.items():
        lines[box.with_range(dim, 0, 0), one.holders].append(box)
    found: dict[Box, _Held] = {}
    for line in lines.values():
        for chain in _chains(line, dim):
            joined = chain[0].with_range(dim, chain[0].start[dim], chain[-1].stop[dim])
            made = _joined([held[one] for one in chain], dim)
            found[joined] = _both(found[joined], made) if joined in found else made
    return found


def _chains(line: Sequence[Box], dim: int) -> list[list[Box]]:
    """Boxes that differ along `dim` only, those together that follow one another."""
    found: list[list[Box]] = []
    for box in sorted(line, key=lambda box: (box.start[dim], box.stop[dim])):
        if found and found[-1][-1].stop[dim] == box.start[dim]:
            found[-1].append(box)
        else:
            found.append([box])
    return found


def _both(one: _Held, other: _Held) -> _Held:
    """What is held of a box without elements that came about twice."""
    recipes = one.recipes | other.recipes
    if one.recipes and other.recipes:
        recipes = {0: _Joined(None, (one.recipes[0], other.recipes[0]))}
    return _Held(one.holders | other.holders, recipes)


def _joined(chain: Sequence[_Held], dim: int) -> _Held:
    if len(chain) == 1:
        return chain[0]
    recipes = {
        term: _Joined(dim, tuple(one.recipes[term] for one in chain)) for term in chain[0].recipes
    }
    return _Held(chain[0].holders, dict(recipes))


# -- on a rank -------------------------------------------------------------------------------------


def _is_call(recipe: _Made | _Joined) -> bool:
    return isinstance(recipe, _Made) and recipe.part.make is None


def _made(
    recipe: _Made | _Joined,
    pieces: OperandPieces,
    invoke: Invoke,
    *,
    is_joined: bool = False,
) -> torch.Tensor:
    """What a recipe gives: memory of its own, unless it is joined with others at once."""
    if isinstance(recipe, _Joined):
        parts = [_made(one, pieces, invoke, is_joined=True) for one in recipe.recipes]
        if recipe.dim is None:
            return _in_a_row(parts).reshape(parts[0].shape)
        is_row = parts[0].dim() == 1
        return _in_a_row(parts).reshape(-1) if is_row else torch.cat(parts, recipe.dim)
    found = _part_of(recipe, pieces, invoke)
    return found if recipe.part.is_new or is_joined else found.clone()


def _part_of(made: _Made, pieces: OperandPieces, invoke: Invoke) -> torch.Tensor:
    make = invoke if made.part.make is None else made.part.make
    found: torch.Tensor = make(pieces[made.operand][made.piece])
    return found


def _in_a_row(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements, of shape (1, n).

    Not of shape (n,): of tensors of shape (0,) torch's `cat` has no gradients of gradients.
    """
    return torch.cat([part.reshape(1, -1) for part in parts], 1)


def tied(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor, following from the others too, for the sake of their graphs."""
    followed = [other for other in others if other.requires_grad]
    if not followed or not torch.is_grad_enabled():
        return tensor
    return _in_a_row([tensor, tie_of(followed, tensor.dtype)]).reshape(tensor.shape)


def decide_filled(call: Call, shape: tuple[int, ...], value: Any) -> Decision:
    """A result that has nothing of the operand, the same on all ranks."""
    operand = call.operands[0]

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        made = pieces[0][0].detach().new_full(shape, value)
        return [[tied(made, pieces[0])]]

    output = Layout.replicated(shape, call.ranks)
    return Decision((Need(operand.layout),), (output,), kernel)
