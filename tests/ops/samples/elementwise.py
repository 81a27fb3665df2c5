"""Samples of functions that work element by element: a table of names and what they are called on.

Every name gets a sample for each function that torch has of it: `torch.add`, `Tensor.add`. Where
there is an in-place function of the name too, it gets the same samples, written into a copy.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

import shardwise
from shardwise.ops.names import functions_named
from shardwise.testing import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.testing.op_check import Values

_Tensor: Any = torch.Tensor
_special: Any = torch.special
_SHAPE = (3, 5)
# Pairs of shapes, taken in turn: alike, broadcast either way and both ways, with a 0-d tensor.
_PAIRS = [
    ((3, 5), (3, 5)),
    ((4, 3), (3,)),
    ((3,), (4, 3)),
    ((4, 1), (1, 3)),
    ((3, 5), ()),
    ((), (5,)),
]
# Of in-place functions, of which the first operand cannot grow.
_PAIRS_IN_PLACE = [((3, 5), (3, 5)), ((4, 3), (3,)), ((4, 3), (4, 1)), ((5,), ()), ((), ())]

_UNARY: dict[Values, str] = {
    "real": """
        abs absolute angle arcsinh arctan asinh atan ceil celu cos cosh deg2rad elu erf erfc erfcx
        exp exp2 expit expm1 fix floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 i0e i1
        i1e isfinite isinf isnan isneginf isposinf isreal leaky_relu log_ndtr logical_not logsigmoid
        mish nan_to_num ndtr neg negative positive rad2deg relu relu6 resolve_neg round selu sgn
        sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign square tan tanh
        tanhshrink trunc airy_ai bessel_j0 bessel_j1 spherical_bessel_j0 modified_bessel_i0
        modified_bessel_i1
    """,
    "positive": """
        digamma entr gammaln lgamma log log10 log1p log2 psi reciprocal rsqrt sqrt bessel_y0
        bessel_y1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0
        scaled_modified_bessel_k1
    """,
    "unit": "acos arccos arcsin arctanh asin atanh erfinv logit ndtri",
    "complex": "conj conj_physical imag real resolve_conj",
    "bits": "bitwise_not __invert__",
}
_BINARY: dict[Values, str] = {
    "real": """
        add arctan2 atan2 copysign eq fmax fmin ge greater greater_equal gt hypot isclose le
        less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum
        mul multiply ne nextafter not_equal rsub sub subtract __eq__ __ge__ __gt__ __le__ __lt__
        __ne__ __rsub__ polar complex
    """,
    "positive": """
        div divide float_power floor_divide fmod pow remainder true_divide xlog1py xlogy zeta
        __floordiv__ __mod__ __pow__ __rdiv__ __rfloordiv__ __rmod__ __rpow__ gammainc gammaincc
        igamma igammac
    """,
    "ties": "heaviside",
    "whole": """
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
        shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
    """,
    "bits": """
        bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm
        __and__ __lshift__ __or__ __rand__ __rlshift__ __ror__ __rrshift__ __rshift__ __rxor__
        __xor__
    """,
}
# Linear functions, by operands with which a pending sum stays one.
_LINEAR: dict[tuple[str, ...], str] = {
    ("partial()",): "conj neg negative positive real resolve_conj resolve_neg",
    ("partial()", "partial()"): "add rsub sub subtract __rsub__",
    ("partial()", "replicate()"): "div divide mul multiply true_divide",
    ("replicate()", "partial()"): "mul multiply",
}
_IN_PLACE_OPERATORS = "__iand__ __ilshift__ __ior__ __irshift__ __ixor__"


def _above_one(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(x + 1.1)


def _in_place_functions(name: str) -> list[Any]:
    return [] if name.startswith("__") else functions_named([f"{name}_"])


def _settled(x: Any) -> Any:
    """A copy to write into, of which nothing is pending."""
    layout = getattr(x, "shard_layout", None)
    if layout is None or layout.pending is None:
        return x.clone()
    return shardwise.reshard(x, layout.bar)


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on a copy of its first tensor, which it has to return."""

    def call(x: Any, *others: Any) -> Any:
        copy = _settled(x)
        version = copy._version
        assert function(copy, *others) is copy
        assert copy._version > version
        return copy

    return call


def _cut_alike(shapes: tuple[tuple[int, ...], ...]) -> tuple[str, ...]:
    """Rows of the result on each rank, and of each operand what belongs to them."""
    full = torch.broadcast_shapes(*shapes)
    has_rows = [len(shape) == len(full) > 0 and shape[0] == full[0] for shape in shapes]
    return tuple("chunk(0)" if one else "replicate()" for one in has_rows)


def _sample(
    call: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    values: Values | tuple[Values, ...] = "real",
    keeps: tuple[str, ...] | None = None,
) -> Sample:
    """With gradients if torch has gradients of it.

    Nothing is sent of operands that are in `keeps`, or by default cut alike.
    """
    keeps = _cut_alike(shapes) if keeps is None else keeps
    found = Sample(call, shapes, values, keeps=keeps)
    tensors = [t.requires_grad_(t.is_floating_point() or t.is_complex()) for t in found.tensors()]
    results = call(*tensors)
    listed = results if isinstance(results, tuple) else (results,)
    smooth = [result for result in listed if result.requires_grad]
    try:
        sum(result.abs().sum() for result in smooth).backward()
    except (AttributeError, RuntimeError):  # of no result, or of a derivative that torch has not
        return Sample(call, shapes, values, has_grad=False, keeps=keeps)
    return found


SAMPLES: dict[str, list[Sample]] = {}


def _add(name: str, *samples: Sample) -> None:
    SAMPLES.setdefault(name, []).extend(samples)


def _add_all(name: str, shapes: tuple[tuple[int, ...], ...], values: Any, *args: Any) -> None:
    """All functions of a name on tensors and further arguments, and the in-place ones."""
    for function in functions_named([name]):
        _add(name, _sample(_followed(function, args), shapes, values))
    for function in _in_place_functions(name):
        _add(f"{name}_", _sample(_in_place(_followed(function, args)), shapes, values))


def _followed(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    return lambda *tensors: function(*tensors, *args)


def _add_unary() -> None:
    for kind, names in _UNARY.items():
        for name in names.split():
            for function in functions_named([name]):
                _add(name, _sample(function, (_SHAPE,), kind))
            for function in _in_place_functions(name):
                _add(f"{name}_", _sample(_in_place(function), (_SHAPE,), kind))
    for name in ("acosh", "arccosh"):
        _add(name, _sample(_above_one(getattr(torch, name)), (_SHAPE,), "positive"))
        method = getattr(_Tensor, f"{name}_")
        _add(f"{name}_", _sample(_above_one(method), (_SHAPE,), "positive"))


def _add_binary() -> None:
    turn = 0
    for kind, names in _BINARY.items():
        for name in names.split():
            for function in functions_named([name]):
                _add(name, _sample(function, _PAIRS[turn % len(_PAIRS)], kind))
                turn += 1
            for function in _in_place_functions(name):
                shapes = _PAIRS_IN_PLACE[turn % len(_PAIRS_IN_PLACE)]
                _add(f"{name}_", _sample(_in_place(function), shapes, kind))
    for name in _IN_PLACE_OPERATORS.split():
        _add(name, _sample(_in_place(getattr(_Tensor, name)), ((4, 3), (3,)), "bits"))


def _add_with_arguments() -> None:
    three = ((4, 3), (3,), (4, 1))
    _add_all("addcdiv", three, "positive")
    _add_all("addcmul", three, "real")
    _add_all("clamp", (_SHAPE,), "real", -0.5, 0.5)
    _add_all("clamp", three, "distinct")
    _add_all("clamp_max", ((4, 3), (3,)), "distinct")
    _add_all("clamp_min", ((4, 3), (4, 1)), "distinct")
    _add_all("clip", three, "distinct")
    _add_all("clip", (_SHAPE,), "real", None, 0.5)
    _add_all("ldexp", ((4, 3), (3,)), ("real", "bits"))
    _add_all("lerp", three, "real")
    _add_all("lerp", ((4, 3), (3,)), "real", 0.25)
    _add_all("masked_fill", ((4, 3), (3,)), ("real", "truth"), 2.5)
    _add_all("masked_fill", ((4, 3), (4, 1), ()), ("real", "truth", "real"))
    _add_all("multigammaln", (_SHAPE,), "positive", 1)
    _add_all("mvlgamma", (_SHAPE,), "positive", 1)
    _add_all("fake_quantize_per_tensor_affine", (_SHAPE,), "real", 0.1, 2, 0, 15)
    _add("fill", _sample(torch.fill, ((4, 3), ())))
    _add("fill", _sample(partial(torch.fill, value=1.5), ((4, 3),)))
    _add_all("frexp", (_SHAPE,), "real")
    _add_all("threshold", (_SHAPE,), "real", 0.1, 20.0)
    _add(
        "where",
        _sample(torch.where, ((4, 1), (3,), (4, 3)), ("truth", "real", "real")),
        _sample(_Tensor.where, ((4, 3), (3,), ()), ("real", "truth", "real")),
        _sample(lambda c, x: torch.where(c, x, 1.0), ((4, 3), (3,)), ("truth", "real")),
        _sample(lambda c, x: torch.where(c, 2, x), ((3,), (4, 3)), ("truth", "bits")),
        _sample(torch.where, ((5,),), "ties", keeps=()),  # which looks for indices
    )
    for function in (torch.polygamma, _special.polygamma):
        _add("polygamma", _sample(partial(function, 1), (_SHAPE,), "positive"))
    _add("polygamma", _sample(lambda x: x.polygamma(2), (_SHAPE,), "positive"))
    _add("polygamma_", _sample(_in_place(lambda x: x.polygamma_(1)), (_SHAPE,), "positive"))
    _add("__ipow__", _sample(_in_place(_Tensor.__ipow__), ((4, 3), (3,)), "positive"))
    for shapes in (
        ((4, 3), (3,)),
        ((2, 3, 4), (3,)),
        ((2, 3, 2, 2), (1,)),
        ((5,), (1,)),
        ((4, 3), ()),
        ((), (1,)),
    ):
        keeps = ("chunk(0)" if shapes[0] else "replicate()", "replicate()")
        _add("prelu", _sample(F.prelu, shapes, keeps=keeps))


def _add_pending() -> None:
    """Linear functions send nothing of a pending sum, nor add it up."""
    for operands, names in _LINEAR.items():
        for name in names.split():
            for function in functions_named([name]):
                _add(name, _sample(function, ((4, 3),) * len(operands), "real", operands))


# What functions are called with beyond tensors, and what operators come to.
_EXTRA: list[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...], Any]] = [
    ("add", lambda x, y: torch.add(x, y, alpha=3), ((4, 3), (3,)), "real"),
    ("add", lambda x: 1 + x, (_SHAPE,), "real"),
    ("add", lambda x, y: x + y, ((), ()), ("real", "bits")),
    ("add", lambda x, y: x + y, ((4, 3), ()), ("bits", "real")),
    ("add", lambda x, y: x + y, ((4, 3), ()), ("real", "complex")),
    ("add", lambda x: x + 1.5, (_SHAPE,), "bits"),
    ("add", lambda x: x + x, (_SHAPE,), "real"),
    ("add", lambda x, y: x + y, ((0, 3), (3,)), "real"),
    ("add", lambda x, y: x + y, ((2, 3, 2, 2), (3, 1, 1)), "real"),
    ("add", lambda x, y: x + y, ((1, 1, 1), (1, 0)), "real"),
    ("add", lambda x, y: x + y, ((1, 1), (1, 3)), "real"),
    ("sub", lambda x, y: torch.sub(x, other=y, alpha=2), ((4, 3), (4, 3)), "real"),
    ("__rsub__", lambda x: 2 - x, (_SHAPE,), "real"),
    ("mul", lambda x: x * x, (_SHAPE,), "real"),
    ("mul", lambda x: 3 * x, (_SHAPE,), "complex"),
    ("mul", lambda x, y: x * y, ((4, 3), (3,)), "truth"),
    ("mul", lambda x, y: x * y, ((4, 3), (3,)), ("bits", "truth")),
    ("div", lambda x: x / 3, (_SHAPE,), "bits"),
    ("div", lambda x, y: torch.div(x, y, rounding_mode="floor"), ((4, 3), (3,)), "positive"),
    ("div", lambda x, y: x / y, ((4, 3), (3,)), ("real", "positive")),
    ("__rdiv__", lambda x: 1 / x, (_SHAPE,), "positive"),
    ("__floordiv__", lambda x: x // 2, (_SHAPE,), "bits"),
    ("__rfloordiv__", lambda x: 7 // x, (_SHAPE,), "positive"),
    ("remainder", lambda x: x % 3, (_SHAPE,), "bits"),
    ("__rmod__", lambda x: 5 % x, (_SHAPE,), "positive"),
    ("__pow__", lambda x: x**2, (_SHAPE,), "real"),
    ("__pow__", lambda x: x**0.5, (_SHAPE,), "positive"),
    ("__rpow__", lambda x: 2**x, (_SHAPE,), "real"),
    ("pow", lambda x: torch.pow(2.0, x), (_SHAPE,), "real"),
    ("neg", lambda x: -x, (_SHAPE,), "complex"),
    ("abs", abs, (_SHAPE,), "complex"),
    ("exp", torch.exp, (_SHAPE,), "complex"),
    ("sgn", torch.sgn, (_SHAPE,), "complex"),
    ("real", lambda x: x.real, (_SHAPE,), "complex"),
    ("real", lambda x: x.real, (_SHAPE,), "real"),
    ("imag", lambda x: x.imag * 2, (_SHAPE,), "complex"),
    ("conj", lambda x: x.conj() * x, (_SHAPE,), "complex"),
    ("__and__", lambda x, y: x & y, ((4, 3), (3,)), "truth"),
    ("__or__", lambda x: x | 1, (_SHAPE,), "bits"),
    ("__xor__", lambda x: 3 ^ x, (_SHAPE,), "bits"),
    ("__lshift__", lambda x: x << 2, (_SHAPE,), "bits"),
    ("__rshift__", lambda x: x >> 1, (_SHAPE,), "bits"),
    ("__invert__", lambda x: ~x, (_SHAPE,), "truth"),
    ("eq", lambda x: x == 1, (_SHAPE,), "ties"),
    ("__eq__", lambda x, y: x == y, ((4, 3), (3,)), "ties"),
    ("lt", lambda x, y: (x < y) & (y >= 0), ((4, 3), (3,)), "ties"),
    ("clamp", lambda x: torch.clamp(x, max=0.5), (_SHAPE,), "real"),
    ("clamp", lambda x, y: x.clamp(min=y), ((4, 3), (3,)), "distinct"),
    ("clamp", lambda x, y: torch.clamp(x, max=y), ((4, 3), (4, 1)), "distinct"),
    ("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=2), ((3,), (4, 1), (3,)), "real"),
    ("round", lambda x: torch.round(x, decimals=1), (_SHAPE,), "real"),
    ("nan_to_num", lambda x: torch.nan_to_num(x.log(), nan=3.0), (_SHAPE,), "real"),
    ("logit", lambda x: torch.logit(x, eps=0.1), (_SHAPE,), "unit"),
    ("float_power", lambda x: torch.float_power(x, 2), (_SHAPE,), "bits"),
    ("isclose", lambda x, y: torch.isclose(x, y, atol=1.0), ((4, 3), (3,)), "ties"),
    ("xlogy", lambda x: torch.xlogy(2.0, x), (_SHAPE,), "positive"),
    ("maximum", torch.maximum, ((4, 3), (3,)), "ties"),
    ("gelu", lambda x: F.gelu(x, approximate="tanh"), (_SHAPE,), "real"),
    ("elu", lambda x: F.elu(x, alpha=0.5), (_SHAPE,), "real"),
    ("celu", lambda x: F.celu(x, 0.5), (_SHAPE,), "real"),
    ("leaky_relu", lambda x: F.leaky_relu(x, negative_slope=0.2), (_SHAPE,), "real"),
    ("hardtanh", lambda x: F.hardtanh(x, -0.3, 0.4), (_SHAPE,), "real"),
    ("softplus", lambda x: F.softplus(x, beta=2, threshold=1), (_SHAPE,), "real"),
    ("softshrink", lambda x: F.softshrink(x, lambd=0.1), (_SHAPE,), "real"),
    ("hardshrink", lambda x: F.hardshrink(x, lambd=0.1), (_SHAPE,), "real"),
    ("threshold", lambda x: F.threshold(x, 0.1, value=3), (_SHAPE,), "real"),
    ("relu", torch.nn.ReLU(), (_SHAPE,), "real"),
    ("silu", torch.nn.SiLU(), ((2, 3, 2),), "real"),
]
_EXTRA_IN_PLACE: list[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...], Any]] = [
    ("add_", operator.iadd, ((4, 3), (3,)), "real"),
    ("sub_", operator.isub, ((4, 3), (4, 3)), "real"),
    ("mul_", operator.imul, ((4, 3), (4, 1)), "real"),
    ("div_", operator.itruediv, ((4, 3), (3,)), "positive"),
    ("floor_divide_", operator.ifloordiv, ((4, 3), (3,)), "positive"),
    ("remainder_", operator.imod, ((4, 3), (3,)), "positive"),
    ("add_", lambda x, y: x.add_(y, alpha=2), ((4, 3), ()), ("real", "bits")),
    ("mul_", lambda x: x.mul_(x), (_SHAPE,), "real"),
    ("clamp_", lambda x: x.clamp_(min=0), (_SHAPE,), "real"),
    ("relu", lambda x: F.relu(x, inplace=True), (_SHAPE,), "real"),
    ("relu", lambda x: F.relu(x, True), (_SHAPE,), "real"),
    ("relu", torch.nn.ReLU(inplace=True), (_SHAPE,), "real"),
    ("relu6", lambda x: F.relu6(x, inplace=True), (_SHAPE,), "real"),
    ("silu", lambda x: F.silu(x, inplace=True), (_SHAPE,), "real"),
    ("hardswish", lambda x: F.hardswish(x, inplace=True), (_SHAPE,), "real"),
    ("hardtanh", lambda x: F.hardtanh(x, -0.5, 0.5, inplace=True), (_SHAPE,), "real"),
    ("elu", lambda x: F.elu(x, 0.5, True), (_SHAPE,), "real"),
    ("leaky_relu", lambda x: F.leaky_relu(x, 0.2, True), (_SHAPE,), "real"),
    ("threshold", lambda x: F.threshold(x, 0.1, 2.0, True), (_SHAPE,), "real"),
    ("__ipow__", operator.ipow, ((4, 3), (3,)), "positive"),
]

_add_unary()
_add_binary()
_add_with_arguments()
_add_pending()
for _name, _call, _shapes, _values in _EXTRA:
    _add(_name, _sample(_call, _shapes, _values))
for _name, _call, _shapes, _values in _EXTRA_IN_PLACE:
    _add(_name, _sample(_in_place(_call), _shapes, _values))

# Conversions are no functions with rules: the class does them on local tensors. Each addend of a
# pending sum is rounded by itself, so that halves are made of numbers that need no rounding.
_CONVERTING: dict[Values, str] = {
    "positive": "bool byte cdouble cfloat char clone contiguous double float int long short",
    "whole": "bfloat16 half",
}
CONVERSIONS: dict[str, list[Sample]] = {
    **{
        name: [_sample(getattr(_Tensor, name), (_SHAPE,), kind)]
        for kind, names in _CONVERTING.items()
        for name in names.split()
    },
    "to": [
        _sample(lambda x: x.to(torch.float32), (_SHAPE,)),
        _sample(lambda x: x.to(torch.int32, copy=True), (_SHAPE,)),
        _sample(lambda x, y: x.to(y), (_SHAPE, _SHAPE), ("bits", "real")),
    ],
    "type": [_sample(lambda x: x.type(torch.float32), (_SHAPE,))],
    "type_as": [_sample(lambda x, y: x.type_as(y), (_SHAPE, (5,)), ("real", "complex"))],
}
