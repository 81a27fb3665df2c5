"""The functions that reduce dims: a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch

from shardwise._torch_compat import autocast_dtype
from shardwise.ops import folds
from shardwise.ops.call_arguments import known_arguments
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import listed_results, outlines
from shardwise.ops.pointwise import decide_pointwise
from shardwise.ops.reducing import decide_terms
from shardwise.ops.rule import Rule, composite, register
from shardwise.ops.slots import decide_fold
from shardwise.ops.terms import Reduced, reduced_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.ops.rule import Call, Decision
    from shardwise.ops.slots import Fold

__all__: list[str] = []


class _Bound(dict[str, Any]):
    """The arguments of a call by name, and what torch gives for them."""

    results: list[torch.Tensor]  # without data

    def reduced(self, call: Call) -> Reduced | None:
        return reduced_of(call.operands[0], self.get("dim"), bool(self.get("keepdim", False)))

    def result_dtype(self, call: Call) -> folds.ResultDtype:
        """The dtype of the result at the time of a call: autocast may change it."""
        operand, usual = call.operands[0], self.dtypes[0]

        def found(device: torch.device) -> torch.dtype:
            if autocast_dtype(device.type) is None:
                return usual
            one = torch.ones((1,) * len(operand.shape), dtype=operand.dtype, device=device)
            return listed_results(call.invoke(one))[0].dtype

        return found

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [result.dtype for result in self.results]


def _bound(call: Call, names: str) -> _Bound | None:
    """The arguments by name; None where the rule does not know them. Raises what torch raises."""
    given = known_arguments(call, names)
    if given is None or len(call.operands) != 1:
        return None
    bound = _Bound(given)
    bound.results = outlines(call)
    return bound


def _rule(
    name: str, decide: Callable[[Call], Decision | None], *, reads_grad: bool = False
) -> None:
    register(Rule(name, decide, reads_grad=reads_grad), functions_named([name]))


def _packed(name: str) -> Callable[[list[Any]], Any]:
    """How torch returns several results of a function."""
    return cast("Callable[[list[Any]], Any]", getattr(torch.return_types, name))


def _read(call: Call, names: str) -> tuple[_Bound, Reduced] | None:
    """The arguments by name, and what is reduced; None: by gathering."""
    bound = _bound(call, names)
    reduced = None if bound is None else bound.reduced(call)
    return None if bound is None or reduced is None else (bound, reduced)


def _folded(name: str, names: str, make: Callable[[Call, Reduced, _Bound], Fold | None]) -> None:
    def decide(call: Call) -> Decision | None:
        if (read := _read(call, names)) is None:
            return None
        bound, reduced = read
        fold = make(call, reduced, bound)
        return None if fold is None else decide_fold(call, reduced, fold)

    _rule(name, decide)


# -- sums ------------------------------------------------------------------------------------------


def _sum(name: str, *, is_linear: bool = True, is_mean: bool = False) -> None:
    def decide(call: Call) -> Decision | None:
        if (read := _read(call, "input dim keepdim dtype")) is None:
            return None
        bound, reduced = read
        # With a `dtype` of integers each term would lose its own fraction.
        result = bound.dtypes[0]
        passes = is_linear and (result.is_floating_point or result.is_complex)
        return decide_terms(
            call, reduced, "sum", passes_terms=passes, is_mean=is_mean, stays_pending=True
        )

    _rule(name, decide)


_sum("sum")
_sum("mean", is_mean=True)
_sum("nansum", is_linear=False)


def _count_nonzero(call: Call) -> Decision | None:
    read = _read(call, "input dim")
    return None if read is None else decide_terms(call, read[1], "sum")


def _truth(name: str) -> None:
    def decide(call: Call) -> Decision | None:
        bound = _bound(call, "input dim keepdim")
        if bound is None or bound.get("dim") == ():  # which reduces nothing
            return None
        reduced = bound.reduced(call)
        op: Any = "min" if name == "all" else "max"
        return None if reduced is None else decide_terms(call, reduced, op)

    _rule(name, decide)


_rule("count_nonzero", _count_nonzero)
_truth("all")
_truth("any")


# -- largest and smallest --------------------------------------------------------------------------


def _amax(name: str, *, largest: bool) -> None:
    def decide(call: Call) -> Decision | None:
        if (read := _read(call, "input dim keepdim")) is None:
            return None
        bound, reduced = read
        dtype = bound.result_dtype(call)
        return _extreme(call, reduced, dtype, largest=largest, nan_gradient="nan")

    _rule(name, decide, reads_grad=True)


def _extreme(
    call: Call,
    reduced: Reduced,
    dtype: folds.ResultDtype,
    *,
    largest: bool,
    nan_gradient: folds.NanGradient,
    of_abs: bool = False,
    norm_dtype: torch.dtype | None = None,
) -> Decision:
    if not call.needs_grad:
        return decide_terms(call, reduced, "max" if largest else "min")
    fold = folds.extreme(
        reduced,
        dtype,
        largest=largest,
        nan_gradient=nan_gradient,
        of_abs=of_abs,
        norm_dtype=norm_dtype,
    )
    return decide_fold(call, reduced, fold)


def _max(name: str, *, largest: bool) -> None:
    pack = _packed(name)

    def decide(call: Call) -> Decision | None:
        if len(call.operands) == 2:
            return decide_pointwise(call, None) if "out" not in call.kwargs else None
        if (read := _read(call, "input dim keepdim")) is None:
            return None
        bound, reduced = read
        if "dim" not in bound:
            dtype = bound.result_dtype(call)
            return _extreme(call, reduced, dtype, largest=largest, nan_gradient="share")
        dim = reduced.dims[0] if reduced.dims else None
        fold = folds.index_of_extreme(reduced, largest=largest, dim=dim, has_value=True)
        return decide_fold(call, reduced, fold, pack=pack)

    _rule(name, decide, reads_grad=True)


def _argmax(name: str, *, largest: bool) -> None:
    def make(call: Call, reduced: Reduced, bound: _Bound) -> Fold:
        dim = None if bound.get("dim") is None or not reduced.dims else reduced.dims[0]
        return folds.index_of_extreme(reduced, largest=largest, dim=dim, has_value=False)

    _folded(name, "input dim keepdim", make)


_amax("amax", largest=True)
_amax("amin", largest=False)
_max("max", largest=True)
_max("min", largest=False)
_argmax("argmax", largest=True)
_argmax("argmin", largest=False)


@composite("aminmax", functions_named(["aminmax"]))
def _aminmax(input: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = () if dim is None else dim
    return torch.return_types.aminmax(
        (torch.amin(input, dims, keepdim), torch.amax(input, dims, keepdim))
    )


def _topk(call: Call) -> Decision | None:
    bound = _bound(call, "input k dim largest sorted")
    if bound is None:
        return None
    operand, k, dim = call.operands[0], bound["k"], bound.get("dim", -1)
    reduced = reduced_of(operand, dim, True, width=k)
    if reduced is None or not reduced.dims or not k:
        return None
    fold = folds.top(reduced, k, dim=reduced.dims[0], largest=bound.get("largest", True))
    return decide_fold(call, reduced, fold, pack=_packed("topk"))


_rule("topk", _topk)


# -- products, norms, moments ----------------------------------------------------------------------


_folded(
    "prod",
    "input dim keepdim dtype",
    lambda call, reduced, bound: folds.product(reduced, bound.get("dtype")),
)
_folded(
    "logsumexp",
    "input dim keepdim",
    lambda call, reduced, bound: (
        None
        if call.operands[0].dtype.is_complex
        else folds.log_sum_exp(reduced, bound.dtypes[0], bound.result_dtype(call))
    ),
)
_folded(
    "nanmean",
    "input dim keepdim dtype",
    lambda call, reduced, bound: folds.nan_mean(reduced, bound.dtypes[0]),
)


def _moments(name: str) -> None:
    def decide(call: Call) -> Decision | None:
        bound = _bound(call, "input dim unbiased keepdim correction")
        if bound is None:
            return None
        if isinstance(bound.get("dim"), bool):  # var(x, unbiased)
            bound["unbiased"] = bound.pop("dim")
        reduced = bound.reduced(call)
        if reduced is None:
            return None
        correction = bound.get("correction")
        if correction is None:
            correction = int(bound.get("unbiased", True))
        fold = folds.moments(
            reduced,
            bound.dtypes,
            correction,
            is_std=name.startswith("std"),
            is_complex=call.operands[0].dtype.is_complex,
        )
        return decide_fold(call, reduced, fold)

    _rule(name, decide)


for _name in ("var", "std", "var_mean", "std_mean"):
    _moments(_name)


def _vector_norm(call: Call) -> Decision | None:
    if (read := _read(call, "input ord dim keepdim dtype")) is None:
        return None
    bound, reduced = read
    p = bound.get("ord", 2)
    if math.isinf(p):
        return _extreme(
            call,
            reduced,
            bound.result_dtype(call),
            largest=p > 0,
            nan_gradient="zero",
            of_abs=True,
            norm_dtype=bound.get("dtype"),
        )
    return decide_fold(call, reduced, folds.vector_norm(reduced, p, bound.get("dtype")))


register(Rule("vector_norm", _vector_norm, reads_grad=True), functions_named(["vector_norm"]))


@composite("norm", [torch.norm, torch.Tensor.norm])
def _norm(
    input: torch.Tensor,
    p: float | str | None = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    given: dict[str, Any] = {"dtype": dtype} if out is None else {"dtype": dtype, "out": out}
    if p == "nuc":
        dims = (-2, -1) if dim is None else dim
        return torch.linalg.matrix_norm(input, "nuc", dims, keepdim, **given)
    order: Any = 2 if p is None or p == "fro" else p
    return torch.linalg.vector_norm(input, order, dim, keepdim, **given)


@composite("linalg_norm", [torch.linalg.norm])
def _linalg_norm(
    input: torch.Tensor,
    ord: float | str | None = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    given: dict[str, Any] = {"dtype": dtype} if out is None else {"dtype": dtype, "out": out}
    num_dims = input.ndim if dim is None else (len(dim) if isinstance(dim, list | tuple) else 1)
    if ord is None or (num_dims == 1 and not isinstance(ord, str)):
        order: Any = 2 if ord is None else ord
        return torch.linalg.vector_norm(input, order, dim, keepdim, **given)
    dims = (-2, -1) if dim is None else dim
    return torch.linalg.matrix_norm(input, ord, dims, keepdim, **given)


@composite("dist", functions_named(["dist"]))
def _dist(input: torch.Tensor, other: torch.Tensor, p: float = 2) -> Any:
    return torch.linalg.vector_norm(input - other, p)
