"""Inverse of the normal distribution function, by + - * / and sqrt. [Note: two libraries]

With it one uniform number gives one normal number, so that an element needs nothing of its
neighbours, and a truncated normal is as easy as a whole one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.random.arrays import Array, as_dtype, indices_where, library, viewed_as
from shardwise.random.elementary import log64, polynomial

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["halves64", "normal32", "normal64", "quantile64"]

# -- 32 bits ---------------------------------------------------------------------------------

# [Note: normal32] For x = 2 u - 1 and y = ((1 - x) (1 + x)) ** (1/8), the quotient of the normal
# quantile of u and x is a smooth function of y: nine decades of tail become 0.06 <= y <= 1. These
# are the coefficients of its rational approximation down to u = 2**-33, the constant one first,
# fitted to the least relative error, 1.3e-7. In float32 the result is right to 1e-6, mostly to
# 2e-7. They are for 2**31 x and 2**31 (1 - |x|), which are integers and a half, and so 2**7.75 y.
_UPPER32 = (
    *(13.718476, 2.690366, 0.03211904, -0.00039804715),
    *(1.9284544e-06, -4.201104e-09, 3.5113579e-12),
)
_LOWER32 = (3.143207e09, 8.587924e08, 2.0923994e07, -91353.7, 195.9166, 1.0)


def normal32(words: Array) -> Array:
    """Standard normal float32 numbers of int32 words; up to 6.3 in size. [Note: normal32]"""
    apart = words >> 31
    apart ^= words
    apart ^= 2**31 - 1
    tail = _centred(apart, torch.float32)
    spare = viewed_as(apart, torch.float32)  # the less memory is used, the more is in the cache
    root = 2.0**32 - tail
    root *= tail
    for _ in range(3):
        library(root).sqrt(root, out=root)
    normal = polynomial(_UPPER32, root, out=tail)
    normal /= polynomial(_LOWER32, root, out=spare)
    spare[...] = words
    spare += 0.5
    normal *= spare
    return normal


# -- 64 bits ---------------------------------------------------------------------------------

# M. J. Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied
# Statistics 37 (1988), PPND16: right to 16 digits for tails down to 1e-316. Upper and lower
# polynomials of the middle, of the tails, and of the tails beyond exp(-25).
_MIDDLE64 = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_TAIL64 = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_FAR64 = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)
_MIDDLE = 0.425  # the middle ends this far from 1/2
_FAR = 5.0


def normal64(words: Array) -> Array:
    """Standard normal float64 numbers of int64 words, of which 53 bits count; up to 8.3 in size."""
    return quantile64(*halves64(words))


def halves64(words: Array) -> tuple[Array, Array]:
    """Probabilities p of int64 words, as `p - 1/2` and `min(p, 1 - p)`; overwrites the words."""
    words >>= 11
    apart = words >> 63
    apart ^= words
    apart ^= 2**52 - 1
    from_half, tail = _centred(words, torch.float64), _centred(apart, torch.float64)
    from_half *= 2.0**-53
    tail *= 2.0**-53
    return from_half, tail


def quantile64(from_half: Array, tail: Array) -> Array:
    """Normal quantiles of probabilities p, given as `p - 1/2` and as `min(p, 1 - p)`.

    Each of the two is exact where the other is not. `tail` is above 1e-300. The result is 1-d.
    """
    from_half, tail = from_half.reshape(-1), tail.reshape(-1)
    at = from_half * from_half
    at *= -1.0
    at += _MIDDLE**2
    found = _quotient(_MIDDLE64, at)
    found *= from_half
    outside = indices_where(at < 0.0)
    found[outside] = _tail_quantile(tail[outside], from_half[outside])
    return found


def _tail_quantile(tail: Array, from_half: Array) -> Array:
    root = log64(tail)
    root *= -1.0
    library(root).sqrt(root, out=root)
    found = _quotient(_TAIL64, root - 1.6)
    far = indices_where(root > _FAR)
    if len(far):
        found[far] = _quotient(_FAR64, root[far] - _FAR)
    found *= library(found).sign(from_half)
    return found


# -- both ------------------------------------------------------------------------------------


def _centred(words: Array, dtype: torch.dtype) -> Array:
    """word + 1/2: never 0, and as often below it as above."""
    floats = as_dtype(words, dtype)
    floats += 0.5
    return floats


def _quotient(polynomials: Sequence[Sequence[float]], at: Array) -> Array:
    upper, lower = polynomials
    found = polynomial(upper, at)
    found /= polynomial(lower, at)
    return found
