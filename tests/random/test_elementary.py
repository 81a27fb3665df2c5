"""Elementary functions by + - * / alone, against numpy's."""

from __future__ import annotations

import numpy as np
import torch

from shardwise.random.elementary import exp64, log64, tangent64


def test_exponentials_are_right_to_an_ulp_or_two() -> None:
    at = np.concatenate([np.linspace(-740.0, 709.0, 50_001), np.linspace(-1e-3, 1e-3, 1001)])
    wanted = np.exp(at)
    found = exp64(at.copy())
    normal = wanted > np.finfo(np.float64).tiny
    assert np.abs(found[normal] / wanted[normal] - 1).max() < 4.5e-16
    assert exp64(np.array([-800.0, 0.0])).tolist() == [0.0, 1.0]
    with np.errstate(over="ignore"):
        assert exp64(np.array([800.0])).tolist() == [np.inf]


def test_logarithms_are_right_to_an_ulp_or_two() -> None:
    at = np.concatenate([np.geomspace(1e-300, 1e300, 50_001), np.linspace(0.5, 2.0, 1000)])
    wanted = np.log(at)
    assert np.abs(log64(at.copy()) - wanted).max() <= 4.5e-16 * np.abs(wanted).max()


def test_tangents_are_right_near_the_ends_too() -> None:
    tail = np.geomspace(2.0**-54, 0.5, 10_001)
    wanted = np.where(tail > 0.25, np.tan(np.pi * (0.5 - tail)), 1 / np.tan(np.pi * tail))
    for sign in (-1.0, 1.0):
        found = tangent64(sign * (0.5 - tail), tail)
        assert np.allclose(found, sign * wanted, rtol=2e-15, atol=1e-16)


def test_both_libraries_round_alike() -> None:
    at = torch.linspace(-700.0, 700.0, 9999, dtype=torch.float64)
    positive = at.abs() + 1e-9
    for function, values in ((exp64, at), (log64, positive)):
        found = function(values.clone())
        assert torch.equal(found, torch.from_numpy(function(values.numpy().copy())))
