"""Every function that has a rule does what it does on full tensors, on layouts of every kind."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
from tests.ops.samples import SAMPLES, along, convolution, elementwise

import shardwise
from shardwise.ops import COMPOSITES, RULES
from shardwise.sharding_spec import parse_spec
from shardwise.testing import Sample, check_op
from shardwise.testing.op_check import check_op_here, layout_kinds

if TYPE_CHECKING:
    from shardwise.geometry import Layout

ALL = [(name, sample) for name, samples in SAMPLES.items() for sample in samples]
IDS = [f"{name}-{k}" for name, samples in SAMPLES.items() for k in range(len(samples))]
MOST_CASES = 12  # layouts per sample, chosen by its number

# [Note: one rule for many] Functions of elements share one rule, as others do, so that together
# they see every case many times: each is tried on a few layouts only, and on real ranks by its
# first sample.
ONE_OF_MANY = {*elementwise.SAMPLES, *convolution.POOLINGS, *along.SAMPLES}


def _cases(number: int, sample: Sample, most: int = MOST_CASES) -> list[tuple[Layout, ...]]:
    kinds = [layout_kinds(shape).values() for shape in sample.shapes]
    every = list(itertools.product(*kinds))
    return random.Random(number).sample(every, min(most, len(every)))


def test_every_rule_has_samples() -> None:
    names = {rule.name for rule in RULES.values()} | {one.name for one in COMPOSITES.values()}
    assert names == set(SAMPLES)


@pytest.mark.parametrize("number", range(len(ALL)), ids=IDS)
def test_simulated(number: int) -> None:
    name, sample = ALL[number]
    most = 3 if name in ONE_OF_MANY else MOST_CASES
    for layouts in _cases(number, sample, most):
        check_op(sample, layouts)


@pytest.mark.parametrize("number", range(len(ALL)), ids=IDS)
def test_layouts_that_are_kept(number: int) -> None:
    _, sample = ALL[number]
    if sample.keeps:
        layouts = [
            parse_spec(spec, ranks=range(4), device="cpu").layout(shape)
            for spec, shape in zip(sample.keeps, sample.shapes, strict=True)
        ]
        assert check_op(sample, layouts, policy="error") <= sample.most_bytes


def _on_rank(rank: int) -> None:
    for number, (name, sample) in enumerate(ALL):
        if name in ONE_OF_MANY and sample is not SAMPLES[name][0]:
            continue
        layouts = [_uneven(shape) for shape in sample.shapes]
        try:
            check_op_here(sample, layouts)
        except AssertionError as error:
            raise AssertionError(f"{name}, sample {number}") from error


def _uneven(shape: tuple[int, ...]) -> Layout:
    """Cut unevenly over two of three ranks; the third holds nothing."""
    spec = f"chunk(0, sizes=[{shape[0] - 1}, 1])" if shape and shape[0] else "on_rank(1)"
    return parse_spec(spec, ranks=range(2), device="cpu").layout(shape)


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_rank, 3, timeout=300)
