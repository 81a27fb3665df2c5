"""Which parts of which saved tensors a tensor is made of: `map` of `load`, as pure functions.

A rule becomes a mosaic ([Note: windows] in `mosaics.py`). Rules are made of each other: what `fuse`
joins and `part` cuts may itself be fused, cut or transposed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.arguments import whole_number, whole_numbers
from shardwise.checkpoint.mosaics import Mosaic
from shardwise.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from shardwise.geometry.splits import sized_cuts
from shardwise.sharding_plan.problems import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "Map",
    "Source",
    "fuse",
    "part",
    "sources_of",
    "targets_of",
    "transpose",
]

_MOST_SHOWN = 20  # problems of a map in one message


Shapes = Mapping[str, tuple[int, ...]]  # of the saved tensors, by name


class Source(ABC):
    """What a tensor is made of: a value of `map`. Made by `fuse`, `part` and `transpose`."""

    __slots__ = ()

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The saved tensors; in rules perhaps with `*`."""

    @abstractmethod
    def renamed(self, rename: Callable[[str], str]) -> Source:
        """The same with other names."""

    @abstractmethod
    def mosaic(self, shapes: Shapes) -> Mosaic:
        """The windows that it means for saved tensors of these shapes, among which all are."""


@dataclass(frozen=True, slots=True)
class _Name(Source):
    """A saved tensor as it is."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def renamed(self, rename: Callable[[str], str]) -> Source:
        return _Name(rename(self.name))

    def mosaic(self, shapes: Shapes) -> Mosaic:
        return Mosaic.whole(self.name, shapes[self.name])


@dataclass(frozen=True, slots=True)
class _Fused(Source):
    sources: tuple[Source, ...]
    dim: int
    groups: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for source in self.sources for name in source.names)

    def renamed(self, rename: Callable[[str], str]) -> Source:
        return _Fused(tuple(s.renamed(rename) for s in self.sources), self.dim, self.groups)

    def mosaic(self, shapes: Shapes) -> Mosaic:
        found = [source.mosaic(shapes) for source in self.sources]
        dim = _dim(self.dim, found[0].shape)
        outer = {(*one.shape[:dim], *one.shape[dim + 1 :]) for one in found}
        if len(outer) > 1 or any(one.shape[dim] % self.groups for one in found):
            groups = f", each in {self.groups} equal groups" if self.groups > 1 else ""
            shown = ", ".join(
                f"{'+'.join(source.names)} {one.shape}"
                for source, one in zip(self.sources, found, strict=True)
            )
            raise CheckpointError(
                "sources of fuse()", expected=f"shapes that join along dim {dim}{groups}", got=shown
            )
        lengths = [one.shape[dim] // self.groups for one in found]
        return Mosaic.joined(
            [
                one.cut(dim, group * length, (group + 1) * length)
                for group in range(self.groups)
                for one, length in zip(found, lengths, strict=True)
            ],
            dim,
        )


@dataclass(frozen=True, slots=True)
class _Part(Source):
    source: Source
    index: int
    sizes: int | tuple[int, ...]
    dim: int
    groups: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    def renamed(self, rename: Callable[[str], str]) -> Source:
        return _Part(self.source.renamed(rename), self.index, self.sizes, self.dim, self.groups)

    def mosaic(self, shapes: Shapes) -> Mosaic:
        found = self.source.mosaic(shapes)
        dim = _dim(self.dim, found.shape)
        size, groups, sizes = found.shape[dim], self.groups, self.sizes
        if isinstance(sizes, int):
            sizes = (size // sizes,) * sizes
        if sum(sizes) != size or any(length % groups for length in sizes):
            raise CheckpointError(
                f"sizes of part() of {'+'.join(self.names)}",
                expected=f"parts of dim {dim} of {found.shape}"
                + (f", each in {groups} equal groups" if groups > 1 else ""),
                got=self.sizes,
            )
        cuts = sized_cuts(size // groups, [length // groups for length in sizes]).tolist()
        low, high = cuts[self.index], cuts[self.index + 1]
        starts = range(0, size, size // groups) if size else (0,)
        return Mosaic.joined([found.cut(dim, at + low, at + high) for at in starts], dim)


@dataclass(frozen=True, slots=True)
class _Transposed(Source):
    source: Source
    dim0: int
    dim1: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    def renamed(self, rename: Callable[[str], str]) -> Source:
        return _Transposed(self.source.renamed(rename), self.dim0, self.dim1)

    def mosaic(self, shapes: Shapes) -> Mosaic:
        found = self.source.mosaic(shapes)
        dims = list(range(len(found.shape)))
        one, other = _dim(self.dim0, found.shape), _dim(self.dim1, found.shape)
        dims[one], dims[other] = dims[other], dims[one]
        return found.permute(dims)


def _dim(dim: int, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= dim < len(shape):
        raise CheckpointError("dim of a rule of map", expected=f"a dim of {shape}", got=dim)
    return dim % len(shape)


def fuse(*sources: str | Source, dim: int = 0, groups: int = 1) -> Source:
    """A tensor that is several saved ones, joined along a dim: q, k and v into qkv.

    With `groups` every source is cut into that many equal parts, and the first parts of all come
    before the second ones, as where heads are packed one after the other.

    >>> fuse("*.q.weight", "*.k.weight", "*.v.weight").names
    ('*.q.weight', '*.k.weight', '*.v.weight')
    """
    if not sources:
        raise ArgumentValueError("fuse()", expected="names of saved tensors", got="none")
    return _Fused(
        tuple(_source(one, "fuse()") for one in sources),
        whole_number(dim, "dim of fuse()", least=None),
        whole_number(groups, "groups of fuse()", least=1),
    )


def part(
    source: str | Source, index: int, sizes: int | Sequence[int], *, dim: int = 0, groups: int = 1
) -> Source:
    """A tensor that is one of the parts that a saved one is cut into along a dim: k out of qkv.

    `sizes` are the lengths of all parts, or how many equal ones there are. `groups` as in `fuse`.

    >>> part("*.qkv.weight", 1, [4096, 1024, 1024]).names
    ('*.qkv.weight',)
    """
    equal = isinstance(sizes, int) and not isinstance(sizes, bool)
    lengths = whole_number(sizes, "sizes of part()", least=1) if equal else None
    listed = lengths or whole_numbers(sizes, "sizes of part()")
    count = listed if isinstance(listed, int) else len(listed)
    number = whole_number(index, "index of part()")
    if number >= count:
        raise ArgumentValueError("index of part()", expected=f"one of {count} parts", got=number)
    return _Part(
        _source(source, "part()"),
        number,
        listed,
        whole_number(dim, "dim of part()", least=None),
        whole_number(groups, "groups of part()", least=1),
    )


def transpose(source: str | Source, dim0: int = -2, dim1: int = -1) -> Source:
    """A tensor that is a saved one with two dims exchanged.

    >>> transpose("*.weight").names
    ('*.weight',)
    """
    return _Transposed(
        _source(source, "transpose()"),
        whole_number(dim0, "dim0 of transpose()", least=None),
        whole_number(dim1, "dim1 of transpose()", least=None),
    )


def _source(value: object, what: str) -> Source:
    if isinstance(value, str):
        return _Name(value)
    if isinstance(value, Source):
        return value
    raise ArgumentTypeError(
        what,
        expected="the name of a saved tensor, or a rule such as fuse(...)",
        got=type(value).__name__,
    )


# Name in the model -> where it comes from in the checkpoint.
Map = Mapping[str, str | Source | None] | Callable[[str], Any]


def sources_of(targets: Iterable[str], rules: Map | None) -> dict[str, Source | None]:
    """What each target is made of; None: it is to be left as it is. Raises about the whole map.

    An exact name goes before patterns, of which at most one may fit a target. `*` is any text, and
    the n-th one of a source is what the n-th one of the pattern was. A target that no rule is for
    is the saved tensor of its own name.
    """
    names = list(targets)
    if rules is None:
        return {name: _Name(name) for name in names}
    if isinstance(rules, Mapping):
        return _by_patterns(names, rules)
    if not callable(rules):
        raise ArgumentTypeError(
            "map",
            expected="a dict from names of the state to saved names, or a function",
            got=type(rules).__name__,
        )
    given = {name: rules(name) for name in names}
    return {
        name: None if value is None else _source(value, f"map({name!r})")
        for name, value in given.items()
    }


def targets_of(saved: Iterable[str], rules: Mapping[str, str | Source | None]) -> list[str]:
    """The targets that the saved tensors give: what rules make of them, then those left over.

    A pattern is a target for each saved tensor that fits the first source of its rule. Raises about
    the whole map, and of a target that has too few sources.
    """
    names = list(saved)
    problems: list[str] = []
    found: dict[str, None] = {}
    used: set[str] = set()
    for pattern, source in _checked_patterns(rules, problems).items():
        if source is None:
            found.update(dict.fromkeys(name for name in names if _fit(pattern, name)))
            continue
        if pattern.count("*") > source.names[0].count("*"):
            problems.append(f"{pattern!r} has more * than {source.names[0]!r}.")
            continue
        fitting = [name for name in names if _fit(source.names[0], name)]
        if not fitting:
            problems.append(
                f"{source.names[0]!r} fits no saved tensor. {nearest(source.names[0], names, '')}"
            )
        for name in fitting:
            stars = _stars(source.names[0], name)
            found[_filled(pattern, stars)] = None
            used.update(_filled(one, stars) for one in source.names)
    problems += [f"there is no saved tensor {name!r}." for name in sorted(used - set(names))]
    if problems:
        raise _all_in_one(problems)
    return [*found, *(name for name in names if name not in used and name not in found)]


def _by_patterns(
    names: Sequence[str], rules: Mapping[str, str | Source | None]
) -> dict[str, Source | None]:
    problems: list[str] = []
    patterns = _checked_patterns(rules, problems)
    used: set[str] = set()
    found: dict[str, Source | None] = {}
    for name in names:
        fitting = [name] if name in patterns else [p for p in patterns if _fit(p, name)]
        used.update(fitting)
        if len(fitting) > 1:
            problems.append(
                f"{name!r} fits {len(fitting)} patterns: {', '.join(map(repr, fitting))}. "
                "Make them narrower."
            )
        source = patterns[fitting[0]] if fitting else _Name(name)
        if source is not None and fitting:
            source = source.renamed(partial(_filled, stars=_stars(fitting[0], name)))
        found[name] = source
    problems += [
        f"{pattern!r} fits nothing in the state. {nearest(pattern, list(names), '')}"
        for pattern in patterns
        if pattern not in used
    ]
    if problems:
        raise _all_in_one(problems)
    return found


def _checked_patterns(rules: Mapping[Any, Any], problems: list[str]) -> dict[str, Source | None]:
    patterns: dict[str, Source | None] = {}
    for pattern, value in rules.items():
        if not isinstance(pattern, str):
            problems.append(f"{pattern!r}: expected a name, got {type(pattern).__name__}.")
            continue
        if value is not None and not isinstance(value, str | Source):
            got = type(value).__name__
            problems.append(f"{pattern!r}: expected a saved name or fuse(...), got {got}.")
            continue
        source = patterns[pattern] = None if value is None else _source(value, "map")
        names = () if source is None else source.names
        many = [name for name in names if name.count("*") > pattern.count("*")]
        if many:
            problems.append(f"{pattern!r}: {many[0]!r} has more * than the pattern.")
    return patterns


def _all_in_one(problems: Sequence[str]) -> CheckpointError:
    if len(problems) == 1:
        return CheckpointError(f"map: {problems[0]}")
    lines = [f"  {number}. {one}" for number, one in enumerate(problems[:_MOST_SHOWN], 1)]
    if len(problems) > _MOST_SHOWN:
        lines.append(f"  and {len(problems) - _MOST_SHOWN} more")
    return CheckpointError("\n".join([f"map, {len(problems)} problems:", *lines]))


def _fit(pattern: str, name: str) -> re.Match[str] | None:
    parts = [re.escape(text) for text in pattern.split("*")]
    return re.fullmatch("(.*?)".join(parts), name, re.DOTALL)


def _stars(pattern: str, name: str) -> list[str]:
    match = None if pattern == name else _fit(pattern, name)
    return list(match.groups()) if match else []


def _filled(text: str, stars: Sequence[str]) -> str:
    """The text with the n-th `*` replaced by the n-th of the stars."""
    pieces = text.split("*")
    return pieces[0] + "".join(a + b for a, b in zip(stars, pieces[1:], strict=False))
