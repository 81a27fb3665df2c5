"""Samples of every function that has a rule, by the rule's name: what the tests of ops run."""

from tests.ops.samples import along, attention, convolution, elementwise, products, reductions

from shardwise.testing import Sample

SAMPLES: dict[str, list[Sample]] = {
    **along.SAMPLES,
    **attention.SAMPLES,
    **convolution.SAMPLES,
    **elementwise.SAMPLES,
    **products.SAMPLES,
    **reductions.SAMPLES,
}
