"""The words of a command: shapes, dtypes, specs, sizes in bytes, paths of pictures."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from shardwise.errors import ArgumentValueError
from shardwise.words import shortened

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from shardwise.geometry import Layout
    from shardwise.transfer import TransferPlan

__all__ = ["find_dtype", "itemsize_of", "layout_of", "parse_shape", "write_pictures"]

_MOST_DIGITS = 19  # of a size: more are beyond 2**63
_SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
    "f64": "float64",
}


def parse_shape(text: str) -> tuple[int, ...]:
    """Sizes of `8,6`, `8x6`, `8, 6`, `(8, 6)`, `8,` or, for a 0-d tensor, nothing."""
    bare = text.strip()
    if bare[:1] + bare[-1:] in ("()", "[]"):
        bare = bare[1:-1].strip()
    sizes = re.findall("[0-9]+", bare)
    fits = all(len(size) <= _MOST_DIGITS for size in sizes)
    if not (fits and re.fullmatch(r"([0-9]+(\s*[,x]\s*[0-9]+)*(\s*,)?)?", bare)):
        raise ArgumentValueError(
            "--shape", expected="sizes such as 8,6", got=shortened(repr(text), most=60)
        )
    return tuple(map(int, sizes))


def find_dtype(name: str) -> torch.dtype | None:
    """The dtype of `float32`, `torch.float32` or `fp32`; None if there is none."""
    import torch

    found = getattr(torch, _SHORT_DTYPES.get(name, name.removeprefix("torch.")), None)
    return found if isinstance(found, torch.dtype) else None


def itemsize_of(dtype: str) -> int:
    """Bytes of an element."""
    found = find_dtype(dtype)
    if found is None:
        raise ArgumentValueError(
            "--dtype",
            expected="a torch dtype such as float32 or bfloat16",
            got=shortened(repr(dtype), most=60),
        )
    return found.itemsize


def layout_of(spec: str, shape: tuple[int, ...], *, world_size: int) -> Layout:
    """Layout that a spec written as text gives a tensor."""
    # Imported here: torch takes seconds, and --help should not.
    from shardwise.sharding_spec import parse_spec

    return parse_spec(spec, ranks=range(world_size), device="cpu").layout(shape)


def write_pictures(
    picture_of: Layout | TransferPlan, paths: dict[str, Path | None], **options: Any
) -> None:
    """Writes a picture for each path, `{".svg": path}`, and says so on stderr."""
    from shardwise.transfer.units import format_bytes
    from shardwise.viz import save_picture

    for suffix, path in paths.items():
        if path is None:
            continue
        if path.suffix.lower() != suffix:
            raise ArgumentValueError(
                f"--{suffix[1:]}",
                expected=f"a path that ends in {suffix}",
                got=shortened(repr(str(path)), most=60),
            )
        try:
            save_picture(picture_of, path, **options)
        except OSError as error:
            raise ArgumentValueError(f"--{suffix[1:]}: {path}: {error.strerror}") from error
        # Not on stdout, which is for the drawing or for JSON.
        print(f"wrote {path} ({format_bytes(path.stat().st_size)})", file=sys.stderr)
