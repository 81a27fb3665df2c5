"""Samples of Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.testing import Sample

_NAMES = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _fourier(name: str, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Sample:
    function = getattr(torch.fft, name)
    is_complex = name.startswith(("fft", "ifft", "irfft", "hfft"))
    values: Any = "complex" if is_complex else "real"
    return Sample(lambda x: function(x, *args, **kwargs), (shape,), values, keeps=("chunk(0)",))


SAMPLES: dict[str, list[Sample]] = {}
for _name in _NAMES:
    SAMPLES |= {
        f"fft.{_name}": [_fourier(_name, (4, 5)), _fourier(_name, (4, 5, 3), 4, 1)],
        f"fft.{_name}2": [_fourier(f"{_name}2", (4, 3, 5))],
        f"fft.{_name}n": [
            _fourier(f"{_name}n", (4, 3, 5), (2, 4)),
            _fourier(f"{_name}n", (4, 5), dim=1),
        ],
    }
