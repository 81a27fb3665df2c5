"""torch's own op samples on sharded tensors, against the docs page that says how they work."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.ops.op_table.calls import OpCall, ops
from tests.ops.op_table.names import KNOWN_WRONG, MAY_GATHER, must_have_rule
from tests.ops.op_table.page import (
    PAGE,
    Effort,
    page_of,
    rows_of_page,
    tries_of,
    try_op,
)
from tests.ops.op_table.trying import reference_of, try_call

from shardwise.testing.op_check import layout_kinds

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = PAGE.read_text()
ROWS = rows_of_page(TEXT)
STRIDE = 12  # `make test` tries every 12th op with its variants

_MADE_WITH = re.search(r"torch (\S+)\)", TEXT)
pytestmark = pytest.mark.skipif(
    _MADE_WITH is None or _MADE_WITH[1] != torch.__version__.partition("+")[0],
    reason="the page is of another torch, which has other ops and samples",
)


def _check(name: str, effort: Effort) -> None:
    """No call goes otherwise than the page says."""
    for one in tries_of(ops()[name], effort):
        assert ROWS[name].admits(one), f"{one.outcome.kind}: {one}"


def test_the_page_has_every_op_and_nothing_else() -> None:
    assert set(ROWS) == set(ops())
    assert page_of(ROWS.values()) == TEXT


def test_what_must_have_a_rule_does_not_gather() -> None:
    required = {name for name, op in ops().items() if must_have_rule(name, op)}
    not_ours = {name for name in required if ROWS[name].how == "not applicable"}
    gathering = {name for name in required if ROWS[name].how == "partly"}
    by_rule = {name for name in required if ROWS[name].how == "rule"}
    wrong = {name for name in required if ROWS[name].how == "wrong"}
    assert required - by_rule - not_ours - wrong == gathering == set(MAY_GATHER)
    assert wrong <= set(KNOWN_WRONG)


def test_what_is_known_to_be_wrong_is_on_the_page() -> None:
    assert {name: row.remark for name, row in ROWS.items() if row.how == "wrong"} == KNOWN_WRONG


def _call(function: Callable[[Any], Any], *, has_grad: bool = True) -> OpCall:
    x = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3).requires_grad_()
    return OpCall("made up", "", 0, function, (x,), {}, has_grad, lambda result: result)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def _differs(x: Any) -> Any:
    return x.sin() if type(x) is torch.Tensor else x.sin() + 1e-3


def _differs_in_gradient(x: Any) -> Any:
    if type(x) is torch.Tensor:
        return _WrongGradient.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return x.clone()


@pytest.mark.parametrize(
    ("function", "kind", "detail"),
    [
        (torch.sin, "rule", ""),
        (torch.cov, "fallback", "cov"),
        (lambda x: torch.corrcoef(x.sin()), "fallback", "corrcoef"),
        (torch.Tensor.to_sparse, "refused", "pieces are dense"),
        (torch.poisson, "refused", "draw its own numbers"),
        (_differs, "wrong", "output 0"),
        (_differs_in_gradient, "wrong", "gradient 0"),
    ],
)
def test_a_try_says_how_a_call_went(function: Any, kind: str, detail: str) -> None:
    call = _call(lambda x: function(x / 13))
    reference = reference_of(call)
    assert reference is not None
    for layout in layout_kinds((4, 3), world_size=3).values():
        outcome = try_call(call, reference, [layout], 3)
        assert outcome.kind == kind, outcome
        assert detail in outcome.detail


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2, 3))]
)
def test_one_call_of_every_op_goes_as_the_page_says(part: int) -> None:
    for name in list(ROWS)[part::4]:
        _check(name, Effort(samples=1, layouts=1, has_variants=False))


@pytest.mark.parametrize("name", list(ROWS)[::STRIDE])
def test_a_part_of_the_ops_with_all_variants(name: str) -> None:
    _check(name, Effort(samples=2, layouts=1))


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_every_op_is_as_the_page_says(name: str) -> None:
    row, wrong = try_op(name)
    assert name in KNOWN_WRONG or not wrong, wrong
    assert str(row) == str(ROWS[name])
