"""Samples of every function that has a rule, by the rule's name: what the tests of ops run."""

from tests.ops.samples import (
    attention,
    convolution,
    elementwise,
    fourier,
    indexing,
    joining,
    linear_algebra,
    losses,
    normalizing,
    products,
    reductions,
    shapes,
)

from shardwise.testing import Sample

_FAMILIES: tuple[dict[str, list[Sample]], ...] = (
    attention.SAMPLES,
    convolution.SAMPLES,
    elementwise.SAMPLES,
    fourier.SAMPLES,
    indexing.SAMPLES,
    joining.SAMPLES,
    linear_algebra.SAMPLES,
    losses.SAMPLES,
    normalizing.SAMPLES,
    products.SAMPLES,
    reductions.SAMPLES,
    shapes.SAMPLES,
)
SAMPLES: dict[str, list[Sample]] = {}
for _family in _FAMILIES:
    for _name, _samples in _family.items():  # two families have an `unfold`
        SAMPLES.setdefault(_name, []).extend(_samples)
