"""Filling one box of a global tensor with random numbers.

All functions take `(tensor, box, shape, key, ...)`: the local `tensor` is the piece `box` of a
global tensor of `shape`. They fill it in place, whatever its strides, and return it. The value of
an element is a function of the key, its flat index in the global tensor (row-major), the
distribution and the dtype. float16 and bfloat16 numbers are those of float32, rounded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from shardwise.arguments import real_number, whole_number
from shardwise.errors import ArgumentTypeError, ArgumentValueError, GeometryError
from shardwise.geometry import Box
from shardwise.geometry.box import as_shape
from shardwise.random.arrays import Array, as_dtype, library
from shardwise.random.elementary import exp64, log64, tangent64
from shardwise.random.fill import fill_by_words
from shardwise.random.key import Key
from shardwise.random.philox import upper_product
from shardwise.random.quantile import halves64, normal32, normal64, quantile64
from shardwise.words import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

__all__ = [
    "fill_bernoulli_",
    "fill_cauchy_",
    "fill_exponential_",
    "fill_geometric_",
    "fill_integers_",
    "fill_log_normal_",
    "fill_normal_",
    "fill_trunc_normal_",
    "fill_uniform_",
]

_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_INTEGERS = {
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}

# -- distributions ---------------------------------------------------------------------------


def fill_uniform_(
    tensor: torch.Tensor,
    box: Box,
    shape: Sequence[int],
    key: Key,
    low: float = 0.0,
    high: float = 1.0,
) -> torch.Tensor:
    """Uniform numbers, low <= x < high also where the dtype is coarse.

    24 random bits, 53 for float64. A complex number has a uniform real and imaginary part.
    """
    sizes = _checked(tensor, box, shape, key, _FLOATS | _COMPLEX)
    dtype = tensor.dtype.to_real()
    least, most = _range_inside(dtype, low=low, high=high, has_end=False)
    start = _rounded(low, _computed_in(dtype))
    span = _rounded(float(high) - float(low), _computed_in(dtype))
    if not all(map(math.isfinite, (span, _rounded(low, dtype), _rounded(high, dtype)))):
        raise ArgumentValueError(
            "low, high and their difference",
            expected=f"numbers that are finite in {dtype}",
            got=f"{low} and {high}",
        )

    def values(words: Array) -> Array:
        found = _fractions(words)
        if (start, span) != (0.0, 1.0):
            found *= span
            found += start
        elif _computed_in(dtype) == dtype:
            return found  # below 1, and rounded no more
        return library(found).clip(found, least, most, out=found)

    return fill_by_words(tensor, box, sizes, key, _bits_for(dtype), values)


def fill_normal_(
    tensor: torch.Tensor,
    box: Box,
    shape: Sequence[int],
    key: Key,
    mean: float = 0.0,
    std: float = 1.0,
) -> torch.Tensor:
    """Normal numbers; those of float32 reach out to 6.3 `std`, those of float64 to 8.3.

    Of a complex number real and imaginary part each have half the variance and, as in
    `torch.Tensor.normal_`, the whole `mean`.
    """
    sizes = _checked(tensor, box, shape, key, _FLOATS | _COMPLEX)
    centre, spread = _mean_and_std(mean, std)
    if tensor.is_complex():
        spread *= math.sqrt(0.5)
    bits = _bits_for(tensor.dtype.to_real())

    def values(words: Array) -> Array:
        found = normal64(words) if bits == 64 else normal32(words)
        return _scaled(found, centre, spread)

    return fill_by_words(tensor, box, sizes, key, bits, values)


def fill_trunc_normal_(
    tensor: torch.Tensor,
    box: Box,
    shape: Sequence[int],
    key: Key,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
) -> torch.Tensor:
    """Normal numbers under the condition a <= x <= b, as of `torch.nn.init.trunc_normal_`.

    `a` and `b` are values, not multiples of `std`, and may lie far out in a tail.
    """
    sizes = _checked(tensor, box, shape, key, _FLOATS)
    centre, spread = _mean_and_std(mean, std)
    least, most = _range_inside(tensor.dtype, a=a, b=b, has_end=True)
    if spread == 0.0:
        _fill_constant(tensor, min(max(centre, least), most))
        return tensor
    first, last = (a - centre) / spread, (b - centre) / spread
    if first + last > 0:  # the lower tail is where small probabilities are exact
        first, last, spread = -last, -first, -spread
    start = _normal_cdf(first)
    span = _normal_cdf(last) - start
    if start + span < 1e-300:
        raise ArgumentValueError(
            "a and b",
            expected="a range in which a normal number can be",
            got=f"{a} and {b} for mean {mean} and std {std}",
        )

    def values(words: Array) -> Array:
        found = _fractions(words)
        found += 2.0**-54  # never 0
        found *= span
        found += start
        from_half = found - 0.5
        tail = abs(from_half)
        tail *= -1.0
        tail += 0.5
        is_lower = from_half < 0
        tail[is_lower] = found[is_lower]
        found = _scaled(quantile64(from_half, tail), centre, spread)
        return library(found).clip(found, least, most, out=found)

    return fill_by_words(tensor, box, sizes, key, 64, values)


def fill_integers_(
    tensor: torch.Tensor, box: Box, shape: Sequence[int], key: Key, low: int, high: int
) -> torch.Tensor:
    """Integers, low <= x < high, of any integer dtype or bool.

    A value is the upper half of the product of a 64-bit word and `high - low`, so values differ in
    probability by less than 2**-64.
    """
    sizes = _checked(tensor, box, shape, key, _INTEGERS | {torch.bool})
    least, end = _integer_range(tensor.dtype)
    first = whole_number(low, "low", least=least)
    stop = whole_number(high, "high", least=None)
    if not first < stop <= end:
        raise ArgumentValueError(
            "high", expected=f"low < high <= {end} for {tensor.dtype}", got=f"{low} and {high}"
        )
    span, start = stop - first, first if first < 2**63 else first - 2**64
    target = tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor

    def values(words: Array) -> Array:
        found = upper_product(words, span)
        found += start
        return found

    fill_by_words(target, box, sizes, key, 64, values)
    return tensor


def fill_bernoulli_(
    tensor: torch.Tensor,
    box: Box,
    shape: Sequence[int],
    key: Key,
    p: float = 0.5,
    *,
    value: float = 1.0,
) -> torch.Tensor:
    """`value` with probability `p`, to the nearest multiple of 2**-32, else 0.

    Of any real dtype.
    """
    sizes = _checked(tensor, box, shape, key, _FLOATS | _INTEGERS | {torch.bool})
    chance, scale = real_number(p, "p"), real_number(value, "value")
    if not 0.0 <= chance <= 1.0:
        raise ArgumentValueError("p", expected="a number from 0 to 1", got=p)
    below = round(chance * 2**32) - 2**31
    if below == 2**31:  # no int32, and all words are below it
        _fill_constant(tensor, value)
        return tensor
    if scale == 1.0:
        return fill_by_words(tensor, box, sizes, key, 32, lambda words: words < below)
    computed = _computed_in(tensor.dtype)

    def values(words: Array) -> Array:
        found = as_dtype(words < below, computed)
        found *= scale
        return found

    return fill_by_words(tensor, box, sizes, key, 32, values)


def fill_exponential_(
    tensor: torch.Tensor, box: Box, shape: Sequence[int], key: Key, rate: float = 1.0
) -> torch.Tensor:
    """Exponential numbers of mean 1 / `rate`; never 0."""
    sizes = _checked(tensor, box, shape, key, _FLOATS)
    scale = -1.0 / _positive(rate, "rate")
    least = torch.finfo(tensor.dtype).tiny

    def values(words: Array) -> Array:
        found = log64(_inner_fractions(words))
        found *= scale
        return library(found).clip(found, least, None, out=found)

    return fill_by_words(tensor, box, sizes, key, 64, values)


def fill_geometric_(
    tensor: torch.Tensor, box: Box, shape: Sequence[int], key: Key, p: float
) -> torch.Tensor:
    """How many trials the first success takes, 1 or more, if each succeeds with probability `p`.

    Of any real dtype; what an integer dtype cannot hold becomes its largest number.
    """
    sizes = _checked(tensor, box, shape, key, _FLOATS | _INTEGERS)
    chance = real_number(p, "p")
    if not 0.0 < chance < 1.0:
        raise ArgumentValueError("p", expected="a number between 0 and 1", got=p)
    scale = 1.0 / math.log1p(-chance)
    kind = torch.finfo if tensor.dtype.is_floating_point else torch.iinfo
    most = float(min(kind(tensor.dtype).max, 2**63 - 1024))  # a float64 below 2**63

    def values(words: Array) -> Array:
        found = log64(_inner_fractions(words))
        found *= scale
        library(found).ceil(found, out=found)
        return library(found).clip(found, 1.0, most, out=found)

    return fill_by_words(tensor, box, sizes, key, 64, values)


def fill_log_normal_(
    tensor: torch.Tensor,
    box: Box,
    shape: Sequence[int],
    key: Key,
    mean: float = 1.0,
    std: float = 2.0,
) -> torch.Tensor:
    """Numbers whose logarithms are normal, with this `mean` and `std`."""
    sizes = _checked(tensor, box, shape, key, _FLOATS)
    centre, spread = _mean_and_std(mean, std)

    def values(words: Array) -> Array:
        return exp64(_scaled(normal64(words), centre, spread))

    return fill_by_words(tensor, box, sizes, key, 64, values)


def fill_cauchy_(
    tensor: torch.Tensor,
    box: Box,
    shape: Sequence[int],
    key: Key,
    median: float = 0.0,
    sigma: float = 1.0,
) -> torch.Tensor:
    """Cauchy numbers."""
    sizes = _checked(tensor, box, shape, key, _FLOATS)
    centre, spread = real_number(median, "median"), _positive(sigma, "sigma")

    def values(words: Array) -> Array:
        from_half, tail = (half.reshape(-1) for half in halves64(words))
        return _scaled(tangent64(from_half, tail), centre, spread)

    return fill_by_words(tensor, box, sizes, key, 64, values)


# -- words to values -------------------------------------------------------------------------


def _fractions(words: Array) -> Array:
    """k * 2**-24 or k * 2**-53 in [0, 1), exactly; from the upper bits of each word."""
    dropped, bits, dtype = (
        (11, 53, torch.float64) if words.itemsize == 8 else (8, 24, torch.float32)
    )
    words >>= dropped
    found = as_dtype(words, dtype)
    found *= 2.0**-bits
    found += 0.5  # words are signed
    return found


def _inner_fractions(words: Array) -> Array:
    """Numbers between 0 and 1 of int64 words, never one of the two."""
    found = _fractions(words)
    found += 2.0**-54
    return library(found).clip(found, None, 1.0 - 2.0**-53, out=found).reshape(-1)


def _scaled(normal: Array, mean: float, std: float) -> Array:
    if std != 1.0:
        normal *= std
    if mean != 0.0:
        normal += mean
    return normal


# -- arguments -------------------------------------------------------------------------------


def _checked(
    tensor: torch.Tensor, box: Box, shape: Sequence[int], key: Key, dtypes: Set[torch.dtype]
) -> tuple[int, ...]:
    """`shape` as a tuple of ints; raises if the first arguments of a fill do not fit together."""
    expected: tuple[tuple[str, object, type], ...]
    expected = (("tensor", tensor, torch.Tensor), ("box", box, Box), ("key", key, Key))
    for name, value, kind in expected:
        if not isinstance(value, kind):
            raise ArgumentTypeError(
                name, expected=f"a {kind.__name__}", got=f"{type(value).__name__}: {value!r}"
            )
    sizes = as_shape(shape)
    if box.ndim != len(sizes) or not Box.whole(sizes).contains(box):
        raise GeometryError("box", expected=f"a box inside the shape {sizes}", got=str(box))
    if tuple(tensor.shape) != box.shape:
        raise GeometryError(
            "tensor", expected=f"the shape of its box, {box.shape}", got=tensor.shape
        )
    if tensor.dtype not in dtypes:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise ArgumentTypeError("dtype of tensor", expected=f"one of {names}", got=tensor.dtype)
    return sizes


def _mean_and_std(mean: float, std: float) -> tuple[float, float]:
    centre, spread = real_number(mean, "mean"), real_number(std, "std")
    if spread < 0 or math.inf in (abs(centre), spread):
        raise ArgumentValueError(
            "mean and std", expected="finite numbers, std >= 0", got=f"{mean} and {std}"
        )
    return centre, spread


def _positive(value: float, name: str) -> float:
    number = real_number(value, name)
    if not 0.0 < number < math.inf:
        raise ArgumentValueError(name, expected="a finite number > 0", got=value)
    return number


def _range_inside(dtype: torch.dtype, *, has_end: bool, **ends: float) -> tuple[float, float]:
    """The least and the largest number of `dtype` from one of two `ends` to the other.

    With the other, if `has_end`. They have the names that the caller knows them by.
    """
    (low, first), (high, last) = [(name, real_number(end, name)) for name, end in ends.items()]
    what, got = f"{low} and {high}", f"{ends[low]} and {ends[high]}"
    if not first < last:
        raise ArgumentValueError(what, expected=f"{low} < {high}", got=got)
    least, most = _rounded(first, dtype), _rounded(last, dtype)
    if least < first:
        least = _next(least, math.inf, dtype)
    if most > last or (most == last and not has_end):
        most = _next(most, -math.inf, dtype)
    if least > most:
        raise ArgumentValueError(what, expected=f"a range that holds a {dtype} number", got=got)
    return least, most


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))


def _next(value: float, towards: float, dtype: torch.dtype) -> float:
    ends = (torch.tensor(end, dtype=dtype, device="cpu") for end in (value, towards))
    return float(torch.nextafter(*ends))


def _integer_range(dtype: torch.dtype) -> tuple[int, int]:
    """The least number of `dtype`, and the one after the largest."""
    if dtype == torch.bool:
        return 0, 2
    found = torch.iinfo(dtype)
    return found.min, found.max + 1


def _normal_cdf(value: float) -> float:
    return math.erfc(-value * math.sqrt(0.5)) / 2


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bits_for(dtype: torch.dtype) -> int:
    """Of the word that makes a number of `dtype`."""
    return 64 if dtype == torch.float64 else 32


def _fill_constant(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.fill_(value)
