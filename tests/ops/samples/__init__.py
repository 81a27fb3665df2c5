"""Samples of every function that has a rule, by the rule's name: what the tests of ops run."""

from tests.ops.samples import (
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
    **elementwise.SAMPLES,
    **indexing.SAMPLES,
    **joining.SAMPLES,
    **losses.SAMPLES,
    **normalizing.SAMPLES,
    **products.SAMPLES,
    **reductions.SAMPLES,
    **shapes.SAMPLES,
}
