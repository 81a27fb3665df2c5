"""Every function that has a rule does what it does on full tensors, on layouts of every kind."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from tests.ops.samples import (
    SAMPLES,
    attention,
    convolution,
    elementwise,
    fourier,
    linear_algebra,
    products,
)

import shardwise
from shardwise.ops import COMPOSITES, RULES
from shardwise.sharding_spec import parse_spec
from shardwise.testing import check_op
from shardwise.testing.op_check import check_op_here, layout_kinds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.geometry import Layout

TABLE = {**SAMPLES, **elementwise.CONVERSIONS}
ALL = [(name, sample) for name, samples in TABLE.items() for sample in samples]
IDS = [f"{name}-{k}" for name, samples in TABLE.items() for k in range(len(samples))]

# [Note: one rule for many] Functions of a family share one rule, so that together they see every
# case many times: each sample is tried on a few layouts, chosen by its number, and each function on
# real ranks by its first sample. A long run tries sixty times as many.
MOST_CASES = 2
FEWER_CASES = {
    **dict.fromkeys([*elementwise.SAMPLES, *elementwise.CONVERSIONS], 1),
    **dict.fromkeys([*fourier.SAMPLES, *linear_algebra.SAMPLES, *convolution.POOLINGS], 1),
    **dict.fromkeys([*attention.SAMPLES, *products.SAMPLES], 1),
}


def _cases(number: int) -> list[tuple[Layout, ...]]:
    name, sample = ALL[number]
    kinds = [layout_kinds(shape).values() for shape in sample.shapes]
    every = list(itertools.product(*kinds))
    most = FEWER_CASES.get(name, MOST_CASES) * settings().max_examples // 15
    return random.Random(number).sample(every, min(most, len(every)))


NAMES = {rule.name for rule in RULES.values()} | {one.name for one in COMPOSITES.values()}
STATED = [number for number, (_, sample) in enumerate(ALL) if sample.keeps]


def test_every_rule_has_samples() -> None:
    assert set(SAMPLES) == NAMES


def test_every_rule_states_layouts_that_it_keeps() -> None:
    stated = {ALL[number][0] for number in STATED}
    assert sorted(NAMES - stated) == [], "no sample of these says `keeps`, and what they then send"


def _in_brief(numbers: Iterable[int]) -> list[Any]:
    """The first of these samples of every function, and of the rest a third; others if long."""
    listed = list(numbers)
    first = {ALL[number][0]: number for number in reversed(listed)}.values()
    return [
        pytest.param(
            number,
            id=IDS[number],
            marks=() if number in first or number % 3 == 0 else pytest.mark.long,
        )
        for number in listed
    ]


@pytest.mark.parametrize("number", _in_brief(range(len(ALL))))
def test_simulated(number: int) -> None:
    _, sample = ALL[number]
    for layouts in _cases(number):
        check_op(sample, layouts)


@pytest.mark.parametrize("number", _in_brief(STATED))
def test_layouts_that_are_kept(number: int) -> None:
    _, sample = ALL[number]
    layouts = [
        parse_spec(spec, ranks=range(4), device="cpu").layout(shape)
        for spec, shape in zip(sample.keeps, sample.shapes, strict=True)
    ]
    # Not less either: a statement that leaves room would not see when more is sent.
    assert check_op(sample, layouts, policy="error") == sample.most_bytes


def _on_rank(rank: int) -> None:
    for name, (sample, *_) in SAMPLES.items():
        layouts = [_uneven(shape) for shape in sample.shapes]
        try:
            check_op_here(sample, layouts)
        except AssertionError as error:
            raise AssertionError(name) from error


def _uneven(shape: tuple[int, ...]) -> Layout:
    """Cut unevenly over two of three ranks; the third holds nothing."""
    spec = f"chunk(0, sizes=[{shape[0] - 1}, 1])" if shape and shape[0] else "on_rank(1)"
    return parse_spec(spec, ranks=range(2), device="cpu").layout(shape)


def test_on_real_ranks() -> None:
    shardwise.run_local(_on_rank, 3, timeout=600.0)
