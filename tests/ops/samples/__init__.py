"""Samples of every function that has a rule, by the rule's name: what the tests of ops run."""

from tests.ops.samples import (
    along,
    attention,
    convolution,
    elementwise,
    indexing,
    joining,
    losses,
    normalizing,
    products,
    reductions,
    shapes,
)

from shardwise.testing import Sample

SAMPLES: dict[str, list[Sample]] = {
    **along.SAMPLES,
    **attention.SAMPLES,
    **convolution.SAMPLES,
    **elementwise.SAMPLES,
    **indexing.SAMPLES,
    **joining.SAMPLES,
    **losses.SAMPLES,
    **normalizing.SAMPLES,
    **products.SAMPLES,
    **reductions.SAMPLES,
    **shapes.SAMPLES,
}
