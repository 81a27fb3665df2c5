"""The functions that work element by element: a table of names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import OpError
from shardwise.ops.names import functions_named
from shardwise.ops.outlines import outline
from shardwise.ops.pointwise import decide_pointwise, pointwise, with_dims
from shardwise.ops.rule import Need, Operand, Rule, composite, register

if TYPE_CHECKING:
    from shardwise.ops.pointwise import Linear
    from shardwise.ops.rule import Call, Decision, Invoke, OperandPieces, OutputPieces

__all__: list[str] = []

_Tensor: Any = torch.Tensor

# Linear ones keep a pending sum pending; see `Linear` in `pointwise.py`.
_LINEAR: dict[Linear, str] = {
    "each": "add sub subtract rsub __rsub__ neg negative positive conj real imag resolve_conj "
    "resolve_neg",
    "one": "mul multiply",
    "first": "div divide true_divide",
}
_OTHERS = """
    abs absolute acos acosh addcdiv addcmul airy_ai angle arccos arccosh arcsin arcsinh arctan
    arctan2 arctanh asin asinh atan atan2 atanh bessel_j0 bessel_j1 bessel_y0 bessel_y1 bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    clamp clamp_max clamp_min clip complex conj_physical copysign cos cosh deg2rad digamma elu entr
    eq erf erfc erfcx erfinv exp exp2 expit expm1 fake_quantize_per_tensor_affine fix float_power
    floor floor_divide fmax fmin fmod frac gammainc gammaincc gammaln gcd ge gelu greater
    greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hermite_polynomial_h
    hermite_polynomial_he hypot i0 i0e i1 i1e igamma igammac isclose isfinite isinf isnan isneginf
    isposinf isreal laguerre_polynomial_l lcm ldexp le leaky_relu legendre_polynomial_p lerp less
    less_equal lgamma log log10 log1p log2 log_ndtr logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish modified_bessel_i0
    modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln mvlgamma nan_to_num ndtr
    ndtri ne nextafter not_equal polar polygamma pow psi rad2deg reciprocal relu relu6 remainder
    round rsqrt scaled_modified_bessel_k0 scaled_modified_bessel_k1 selu sgn
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w sigmoid sign signbit silu sin sinc sinh softplus softshrink
    softsign spherical_bessel_j0 sqrt square tan tanh tanhshrink threshold trunc where xlog1py xlogy
    zeta
    __and__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lshift__ __lt__ __mod__ __ne__
    __or__ __pow__ __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmod__ __ror__ __rpow__ __rrshift__
    __rshift__ __rxor__ __xor__
"""
_IN_PLACE_OPERATORS = "__iand__ __ilshift__ __ior__ __ipow__ __irshift__ __ixor__"


def _register(names: str, linear: Linear | None = None) -> None:
    for name in names.split():
        register(pointwise(name, linear), functions_named([name]))
        changing = functions_named([f"{name}_"]) if not name.startswith("__") else []
        register(pointwise(f"{name}_", linear, in_place=True), changing)


for _linear, _names in _LINEAR.items():
    _register(_names, _linear)
_register(_OTHERS)
for _name in _IN_PLACE_OPERATORS.split():
    register(pointwise(_name, in_place=True), functions_named([_name]))
register(pointwise("fill"), functions_named(["fill"]))  # `fill_` is no function of two tensors
register(pointwise("real", "each"), [_Tensor.real.__get__])
register(pointwise("imag", "each"), [_Tensor.imag.__get__])


def _decide_frexp(call: Call) -> Decision | None:
    """Two results, cut alike."""
    one = decide_pointwise(call, None)
    assert one is not None

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        return [list(part) for part in zip(*one.kernel(pieces, invoke)[0], strict=True)]

    pack: Any = torch.return_types.frexp
    return replace(one, outputs=one.outputs * 2, kernel=kernel, is_one_call=False, pack=pack)


def _decide_prelu(call: Call) -> Decision | None:
    """The weight has one number, or one per channel, which is dim 1 of the input."""
    x, weight = call.operands
    num_channels = x.shape[1] if len(x.shape) > 1 else 1
    if x.dtype != weight.dtype or weight.shape not in ((), (1,), (num_channels,)):
        raise OpError(
            "prelu",
            rank=call.rank,
            expected=f"a weight of {x.dtype} and shape (1,) or ({num_channels},)",
            got=f"one of {weight.dtype} and shape {weight.shape}",
        )
    more = max(len(x.shape) - 2, -1 if not x.shape else 0) if weight.shape else 0
    keep = len(weight.shape) + min(more, 0)
    wide = Operand(with_dims(weight.layout, more), weight.dtype, weight.is_plain)
    found = decide_pointwise(call._replace(operands=(x, wide)), None)
    assert found is not None
    layout, work = found.needs[1]
    need = Need(with_dims(layout, -more), None if work is None else with_dims(work, -more))

    def kernel(pieces: OperandPieces, invoke: Invoke) -> OutputPieces:
        weights = [piece.reshape((*piece.shape[:keep], *[1] * more)) for piece in pieces[1]]
        return found.kernel([pieces[0], weights], lambda x, w: invoke(x, w.reshape(-1)))

    return replace(found, needs=(found.needs[0], need), kernel=kernel, phantom=torch.mul)


register(Rule("frexp", _decide_frexp, reads_numbers=False), functions_named(["frexp"]))
register(Rule("prelu", _decide_prelu, reads_numbers=False), functions_named(["prelu"]))


@composite("glu", functions_named(["glu"]))
def _glu(input: Any, dim: int = -1) -> Any:  # torch's name
    """Half of a dim times the sigmoid of the other half, wherever these are."""
    result = torch.nn.functional.glu(outline(input), dim)
    half = result.shape[dim]
    return input.narrow(dim, 0, half) * torch.sigmoid(input.narrow(dim, half, half))
