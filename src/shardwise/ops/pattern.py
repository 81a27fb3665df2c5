"""Functions that treat some dims of their operands one by one, and need others whole: in letters.

[Note: patterns] `ncHW->ncXY` is a pooling of pictures: an einsum with several results, in which an
upper-case letter is a dim that no rank may have a part of, and `...` stands for any dims that are
treated one by one. Dims of size 1 are broadcast. A dim of a result that no operand has is whole.
One term after the arrow stands for all results.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.ops.call_arguments import place_of
from shardwise.ops.contraction import decide_product
from shardwise.ops.forms import Factor, Form
from shardwise.ops.outlines import outline_of, outlines

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from shardwise.ops.forms import Labels, Scale
    from shardwise.ops.rule import Call, Decision, Operand

__all__ = ["Pattern", "aligned", "decide_along", "names_of"]

_LETTERS = string.ascii_lowercase
Shape = tuple[int, ...]
Names = tuple["Hashable", ...]


def aligned(count: int) -> Names:
    """Names of `count` dims that are aligned at the last."""
    return tuple(range(-count, 0))


def names_of(term: str, ndim: int) -> tuple[Any, ...] | None:
    """The names of the dims of an operand; those that `...` stands for are negative numbers."""
    before, dots, after = term.partition("...")
    letters = before + after
    hidden = ndim - len(letters)
    if hidden < 0 or (hidden and not dots) or not all(c.isascii() and c.isalpha() for c in letters):
        return None
    return (*before, *aligned(hidden), *after)


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a function does to the dims of its tensors. [Note: patterns]"""

    text: str
    operands: tuple[Operand, ...]  # one per term of the text
    addend: tuple[str, Operand] | None = None  # the letters of what is added to the result
    scales: tuple[tuple[Scale, ...], ...] = ()  # of each operand's dims

    def form(self, call: Call) -> Form | None:
        """The product that it is; None if the text does not fit the tensors.

        Raises what torch raises of their shapes.
        """
        inputs, _, outputs = self.text.partition("->")
        scales = self.scales or ((),) * len(self.operands)
        shapes = [_in_units(o.shape, s) for o, s in zip(self.operands, scales, strict=True)]
        results = [tuple(result.shape) for result in outlines(call)]
        given = _named(inputs.split(","), shapes)
        terms = outputs.split(",")
        made = _named(terms * len(results) if len(terms) == 1 else terms, results)
        if given is None or made is None:
            return None
        sizes = _sizes([*zip(given, shapes, strict=True), *zip(made, results, strict=True)])
        label = {name: k for k, name in enumerate(sizes)}

        def labels(names: Names, shape: Shape) -> Labels:
            pairs = zip(names, shape, strict=True)
            return tuple(label[name] if size == sizes[name] else None for name, size in pairs)

        listed = zip(given, shapes, self.operands, scales, strict=True)
        first, *others = [tuple(label[name] for name in names) for names in made]
        return Form(
            tuple(sizes.values()),
            tuple(Factor(place_of(call, o), labels(n, shape), s) for n, shape, o, s in listed),
            first,
            self._addend(call, labels),
            frozenset(k for name, k in label.items() if str(name).isupper()),
            others=tuple(others),
        )

    def _addend(self, call: Call, labels: Callable[[Names, Shape], Labels]) -> Factor | None:
        if self.addend is None:
            return None
        letters, operand = self.addend
        return Factor(place_of(call, operand), labels(tuple(letters), operand.shape))

    def decide(self, call: Call, **changes: Any) -> Decision | None:
        """The way to compute it for which the fewest bytes move; `changes` to the form."""
        form = self.form(call)
        if form is None:
            return None
        kind: Any = type(outline_of(call))
        is_named = issubclass(kind, tuple) and kind is not tuple
        decision = decide_product(call, replace(form, **changes))
        return replace(decision, pack=kind) if is_named else decision


def decide_along(call: Call, dims: Iterable[int], *, keeps: bool = True) -> Decision | None:
    """A function of one tensor that needs these dims whole; None: it has too many dims for letters.

    `keeps`: the result has them too, of any size.
    """
    (operand,) = call.operands
    ndim = len(operand.shape)
    if ndim > len(_LETTERS) // 2:
        return None
    whole = {dim % ndim for dim in dims} if ndim else set()
    given = "".join(_LETTERS[k].upper() if k in whole else _LETTERS[k] for k in range(ndim))
    made = "".join(
        _LETTERS[-1 - k].upper() if k in whole else _LETTERS[k]
        for k in range(ndim)
        if keeps or k not in whole
    )
    return Pattern(f"{given}->{made}", (operand,)).decide(call)


def _in_units(shape: Shape, scales: Sequence[Scale]) -> Shape:
    """The sizes of dims in units of their labels."""
    if not scales:
        return shape
    return tuple(scale.units_of(0, size)[1] for size, scale in zip(shape, scales, strict=True))


def _named(terms: Sequence[str], shapes: Sequence[Shape]) -> list[Names] | None:
    if len(terms) != len(shapes):
        return None
    found = [names_of(term, len(shape)) for term, shape in zip(terms, shapes, strict=True)]
    known = [names for names in found if names is not None]
    return known if len(known) == len(found) else None


def _sizes(named: Sequence[tuple[Names, Shape]]) -> dict[Hashable, int]:
    """The size of each name: of dims that are broadcast, that of the others."""
    sizes: dict[Hashable, int] = {}
    for names, shape in named:
        for name, size in zip(names, shape, strict=True):
            if sizes.setdefault(name, size) == 1:
                sizes[name] = size
    return sizes
