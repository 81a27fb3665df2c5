"""Logarithm, exponential function and tangent by + - * / alone. [Note: two libraries]

All work on float64 arrays and overwrite what they are given.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from shardwise.random.arrays import Array, as_dtype, indices_where, library, viewed_as

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["exp64", "log64", "polynomial", "tangent64"]

_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # sqrt(1/2) as a float64
_LOG2_HIGH = 0.693147180369123816490  # so few bits that whole multiples of it are exact
_LOG2_LOW = 1.90821492927058770002e-10
_SIN = [(-1.0) ** k * math.pi ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(10)]
_COS = [(-1.0) ** k * math.pi ** (2 * k) / math.factorial(2 * k) for k in range(10)]


def log64(values: Array) -> Array:
    """Natural logarithms of normal numbers > 0, to an ulp or two.

    log(2**e m) = e log(2) + 2 artanh((m - 1) / (m + 1)) with sqrt(1/2) <= m < sqrt(2).
    """
    bits = viewed_as(values, torch.int64)
    exponents = bits - _SQRT_HALF_BITS
    exponents >>= 52
    bits -= exponents << 52
    ratio = values - 1.0
    values += 1.0
    ratio /= values
    series = polynomial([2.0 / (2 * k + 1) for k in range(11)], ratio * ratio)
    series *= ratio
    found = as_dtype(exponents, torch.float64)
    found *= math.log(2.0)
    found += series
    return found


def exp64(values: Array) -> Array:
    """Exponentials, to a few ulps; infinite beyond the largest number, 0 below the least normal.

    exp(n log(2) + r) = 2**n exp(r) with |r| <= log(2) / 2.
    """
    library(values).clip(values, -746.0, 710.0, out=values)
    whole = values * (1.0 / math.log(2.0))
    whole += 0.5
    library(whole).floor(whole, out=whole)
    values -= whole * _LOG2_HIGH
    values -= whole * _LOG2_LOW
    found = polynomial([1.0 / math.factorial(k) for k in range(15)], values)
    exponents = as_dtype(whole, torch.int64)
    half = exponents >> 1
    for part in (half, exponents - half):  # 2**n alone may be too large for a float64
        part += 1023
        part <<= 52
        found *= viewed_as(part, torch.float64)
    return found


def tangent64(from_half: Array, tail: Array) -> Array:
    """tan(pi (p - 1/2)) of probabilities p, given as `p - 1/2` and as `min(p, 1 - p)` > 0."""
    outside = indices_where(abs(from_half) > 0.25)
    at = from_half + 0.0
    at[outside] = tail[outside]
    square = at * at
    found = polynomial(_SIN, square)
    found *= at
    cosine = polynomial(_COS, square)
    upper, lower = found[outside], cosine[outside]
    lower *= library(lower).sign(from_half[outside])
    found[outside], cosine[outside] = lower, upper  # there it is the cotangent of what is left
    found /= cosine
    return found


def polynomial(coefficients: Sequence[float], at: Array, out: Array = None) -> Array:
    """Horner's rule; `coefficients` begin with the constant one."""
    first, *others, last = coefficients
    if last == 1.0:
        found = library(at).add(at, others.pop(), out=out)
        found *= at
    else:
        found = library(at).multiply(at, last, out=out)
    for coefficient in reversed(others):
        found += coefficient
        found *= at
    found += first
    return found
