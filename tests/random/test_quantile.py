from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.special import erfinv, ndtri

from shardwise.random.quantile import normal32, normal64, quantile64

if TYPE_CHECKING:
    import pytest
    from numpy.typing import NDArray

    from shardwise.geometry.box import Ints


def _words(bits: int) -> Ints:
    """Random words of that many bits, and those next to the middle and to both ends."""
    ends = 2 ** (bits - 1)
    near = np.arange(2000)
    random = np.random.default_rng(0).integers(-ends, ends, 50_000)
    listed = [random, near - 1000, near - ends, ends - 1 - near]
    return np.concatenate(listed)


def _quantiles(words: Ints, bits: int) -> NDArray[np.float64]:
    """Normal numbers whose place in the distribution is that of the word among all words."""
    size = np.where(words >= 0, words, ~words)
    tail = (2 ** (bits - 1) - 1 - size + 0.5) * 2.0**-bits
    middle = np.sqrt(2.0) * erfinv((size + 0.5) * 2.0 ** (1 - bits))
    found: NDArray[np.float64] = np.sign(words + 0.5) * np.where(tail > 0.25, middle, -ndtri(tail))
    return found


def test_normal_numbers_of_32_bits_are_quantiles_to_float32_precision() -> None:
    words = _words(32)
    error = np.abs(normal32(words.astype(np.int32)) / _quantiles(words, 32) - 1)
    assert error.max() < 1.2e-6
    assert np.median(error) < 2e-7


def test_normal_numbers_of_64_bits_are_quantiles_to_float64_precision() -> None:
    words = _words(53)
    error = np.abs(normal64(words << 11) / _quantiles(words, 53) - 1)
    assert error.max() < 3e-15


def test_quantiles_are_right_far_out_in_the_tails() -> None:
    tail = 10.0 ** np.random.default_rng(0).uniform(-300, -0.5, 20_000)
    assert np.abs(quantile64(tail - 0.5, tail) / ndtri(tail) - 1).max() < 3e-15
    assert np.array_equal(quantile64(0.5 - tail, tail), -quantile64(tail - 0.5, tail))


def _square_root(values: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(torch.from_numpy(np.sqrt(values.numpy())))


def test_torch_computes_what_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, but for its square root on the CPU, which is not rounded as IEEE 754 says."""
    monkeypatch.setattr(torch, "sqrt", _square_root)
    short, long = _words(32).astype(np.int32), _words(53) << 11
    for normal, words in ((normal32, short), (normal64, long)):
        expected = torch.from_numpy(normal(words.copy()))
        assert torch.equal(normal(torch.from_numpy(words)), expected)
