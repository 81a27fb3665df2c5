"""The functions that reduce dims: a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
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

    from shardwise.geometry import ReduceOp
    from shardwise.ops.rule import Call, Decision
    from shardwise.ops.slots import Fold

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class _Read:
    """A call of one tensor, as the table reads it."""

    call: Call
    given: dict[str, Any]  # the arguments by name
    reduced: Reduced
    dtypes: tuple[torch.dtype, ...]  # of the results

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or what stands for it if it was not given."""
        return self.given.get(name, default)

    def result_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the result at the time of a call: autocast may change it."""
        if autocast_dtype(device.type) is None:
            return self.dtypes[0]
        (operand,) = self.call.operands
        one = torch.ones((1,) * len(operand.shape), dtype=operand.dtype, device=device)
        return listed_results(self.call.invoke(one))[0].dtype


def _read(call: Call, names: str) -> _Read | None:
    """A call with these arguments; None: by gathering. Raises what torch raises."""
    given = known_arguments(call, names)
    if given is None or len(call.operands) != 1:
        return None
    dtypes = tuple(result.dtype for result in outlines(call))
    if "unbiased" in names and isinstance(given.get("dim"), bool):  # var(x, unbiased)
        given["unbiased"] = given.pop("dim")
    reduced = reduced_of(call.operands[0], given.get("dim"), bool(given.get("keepdim", False)))
    return None if reduced is None else _Read(call, given, reduced, dtypes)


def _rule(
    name: str,
    names: str,
    decide: Callable[[_Read], Decision | None],
    *,
    reads_grad: bool = False,
) -> None:
    """Registers what is decided of calls with these arguments."""

    def decide_call(call: Call) -> Decision | None:
        read = _read(call, names)
        return None if read is None else decide(read)

    register(Rule(name, decide_call, reads_grad=reads_grad), functions_named([name]))


def _packed(name: str) -> Callable[[list[Any]], Any]:
    """How torch returns several results of a function."""
    return cast("Callable[[list[Any]], Any]", getattr(torch.return_types, name))


def _folded(name: str, names: str, make: Callable[[_Read], Fold]) -> None:
    _rule(name, names, lambda read: decide_fold(read.call, read.reduced, make(read)))


# -- sums ------------------------------------------------------------------------------------------


def _sum(name: str, *, is_linear: bool = True, is_mean: bool = False) -> None:
    def decide(read: _Read) -> Decision:
        # With a `dtype` of integers each term would lose its own fraction.
        (result,) = read.dtypes
        passes = is_linear and (result.is_floating_point or result.is_complex)
        return decide_terms(
            read.call, read.reduced, "sum", passes_terms=passes, is_mean=is_mean, stays_pending=True
        )

    _rule(name, "input dim keepdim dtype", decide)


def _truth(name: str, op: ReduceOp) -> None:
    def decide(read: _Read) -> Decision | None:
        if read.get("dim") == ():  # which reduces nothing
            return None
        return decide_terms(read.call, read.reduced, op)

    _rule(name, "input dim keepdim", decide)


_sum("sum")
_sum("mean", is_mean=True)
_sum("nansum", is_linear=False)
_rule("count_nonzero", "input dim", lambda read: decide_terms(read.call, read.reduced, "sum"))
_truth("all", "min")
_truth("any", "max")


# -- largest and smallest --------------------------------------------------------------------------


def _extreme(
    read: _Read,
    *,
    largest: bool,
    nan_gradient: folds.NanGradient,
    of_abs: bool = False,
    norm_dtype: torch.dtype | None = None,
) -> Decision:
    if not read.call.needs_grad:
        return decide_terms(read.call, read.reduced, "max" if largest else "min")
    fold = folds.extreme(
        read.reduced,
        read.result_dtype,
        largest=largest,
        nan_gradient=nan_gradient,
        of_abs=of_abs,
        norm_dtype=norm_dtype,
    )
    return decide_fold(read.call, read.reduced, fold)


def _amax(name: str, *, largest: bool) -> None:
    def decide(read: _Read) -> Decision:
        return _extreme(read, largest=largest, nan_gradient="nan")

    _rule(name, "input dim keepdim", decide, reads_grad=True)


def _max(name: str, *, largest: bool) -> None:
    pack = _packed(name)

    def decide(call: Call) -> Decision | None:
        if len(call.operands) == 2:
            return decide_pointwise(call, None) if "out" not in call.kwargs else None
        read = _read(call, "input dim keepdim")
        if read is None:
            return None
        if "dim" not in read.given:
            return _extreme(read, largest=largest, nan_gradient="share")
        dim = read.reduced.dims[0] if read.reduced.dims else None
        fold = folds.index_of_extreme(read.reduced, largest=largest, dim=dim, has_value=True)
        return decide_fold(call, read.reduced, fold, pack=pack)

    register(Rule(name, decide, reads_grad=True), functions_named([name]))


def _argmax(name: str, *, largest: bool) -> None:
    def make(read: _Read) -> Fold:
        has_dim = read.get("dim") is not None and read.reduced.dims
        dim = read.reduced.dims[0] if has_dim else None
        return folds.index_of_extreme(read.reduced, largest=largest, dim=dim, has_value=False)

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


def _topk(read: _Read) -> Decision | None:
    (operand,), k = read.call.operands, read.given["k"]
    reduced = reduced_of(operand, read.get("dim", -1), True, width=k)
    if reduced is None or not reduced.dims or not k:
        return None
    fold = folds.top(k, dim=reduced.dims[0], largest=read.get("largest", True))
    return decide_fold(read.call, reduced, fold, pack=_packed("topk"))


_rule("topk", "input k dim largest sorted", _topk)


# -- products, norms, moments ----------------------------------------------------------------------


def _log_sum_exp(read: _Read) -> Decision | None:
    if read.call.operands[0].dtype.is_complex:
        return None
    fold = folds.log_sum_exp(read.reduced, read.dtypes[0], read.result_dtype)
    return decide_fold(read.call, read.reduced, fold)


def _moments(name: str) -> None:
    def make(read: _Read) -> Fold:
        given = read.get("correction")
        correction = int(read.get("unbiased", True)) if given is None else given
        fold = folds.moments(
            read.reduced,
            read.dtypes,
            correction,
            is_std=name.startswith("std"),
            is_complex=read.call.operands[0].dtype.is_complex,
        )
        # Gradients of an infinite variance are what torch makes of it; those of parts would be
        # differences of infinities.
        return fold._replace(is_of_parts=correction < read.reduced.count)

    _folded(name, "input dim unbiased keepdim correction", make)


def _vector_norm(read: _Read) -> Decision:
    p, dtype = read.get("ord", 2), read.get("dtype")
    if math.isinf(p):
        return _extreme(read, largest=p > 0, nan_gradient="zero", of_abs=True, norm_dtype=dtype)
    fold = folds.vector_norm(read.reduced, p, dtype)
    return decide_fold(read.call, read.reduced, fold)


_folded(
    "prod",
    "input dim keepdim dtype",
    lambda read: folds.product(read.reduced, read.get("dtype")),
)
_folded(
    "nanmean",
    "input dim keepdim dtype",
    lambda read: folds.nan_mean(read.reduced, read.dtypes[0]),
)
_rule("logsumexp", "input dim keepdim", _log_sum_exp)
for _name in ("var", "std", "var_mean", "std_mean"):
    _moments(_name)
_rule("vector_norm", "input ord dim keepdim dtype", _vector_norm, reads_grad=True)


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
