"""The dtypes that safetensors files can hold, by their codes, and what is never converted."""

from __future__ import annotations

import torch

from shardwise.errors import CheckpointError, DamagedError
from shardwise.words import dtype_name

__all__ = ["code_of", "dtype_of", "is_count"]

_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def code_of(dtype: torch.dtype, name: str) -> str:
    """The code of a dtype in safetensors files; raises about the tensor `name` if it has none."""
    if dtype not in _CODES:
        known = ", ".join(map(dtype_name, _CODES))
        raise CheckpointError(
            f"{name!r}",
            expected=f"a dtype that safetensors files can hold ({known})",
            got=dtype_name(dtype),
            fix="Save it in another dtype, such as torch.view_as_real(tensor) of a complex one.",
        )
    return _CODES[dtype]


def dtype_of(code: object, name: str) -> torch.dtype:
    """The dtype of a code; raises about the tensor `name` if there is none."""
    if not isinstance(code, str) or code not in _DTYPES:
        raise DamagedError(f"dtype of {name!r}", expected=f"one of {', '.join(_DTYPES)}", got=code)
    return _DTYPES[code]


def is_count(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is an optimizer's count of steps, which no dtype may round."""
    return not shape and name.rpartition(".")[2] == "step"
