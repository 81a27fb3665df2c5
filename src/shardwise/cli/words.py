"""The words of a command: shapes, dtypes, specs, sizes in bytes, paths of pictures."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwise.arguments import whole_number
from shardwise.cli.options import NUM_RANKS
from shardwise.errors import ArgumentValueError, ShardwiseError
from shardwise.words import ranks_text, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from shardwise.geometry import Layout
    from shardwise.transfer import TransferPlan

__all__ = [
    "find_dtype",
    "itemsize_of",
    "layout_of",
    "naming",
    "parse_cap",
    "parse_shape",
    "write_pictures",
]

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


@contextmanager
def naming(option: str, argument: str) -> Iterator[None]:
    """What is wrong in this block is wrong with an option, which the library calls `argument`."""
    try:
        yield
    except ShardwiseError as error:
        words = str(error).removeprefix(f"{argument}: ")
        raise ArgumentValueError(f"{option}: {words}") from error
    except RecursionError as error:
        raise ArgumentValueError(f"{option} is nested too deeply") from error


def parse_cap(text: str) -> int:
    """Bytes of `--max-bytes`."""
    from shardwise.transfer.units import parse_bytes

    with naming("--max-bytes", "max_bytes"):
        return whole_number(parse_bytes(text, "max_bytes"), "max_bytes", least=1)


def layout_of(spec: str, shape: tuple[int, ...], *, option: str, world_size: int | None) -> Layout:
    """Layout that a spec written as text gives a tensor; of so many ranks, if that is given."""
    # Imported here: torch takes seconds, and --help should not.
    from shardwise.sharding_spec import parse_spec

    with naming(option, "spec"):
        ranks = range(world_size or NUM_RANKS)
        layout = parse_spec(spec, ranks=ranks, device="cpu").layout(shape)
    if world_size is not None and (beyond := [r for r in layout.ranks if r >= world_size]):
        raise ArgumentValueError(
            option,
            expected=f"ranks below {world_size:,}, which is --world-size",
            got=ranks_text(beyond),
            fix="Pass a larger --world-size, or other ranks.",
        )
    return layout


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
