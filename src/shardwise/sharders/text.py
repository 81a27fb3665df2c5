"""What sharders share: their arguments as plain values, and specs as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.arguments import whole_numbers
from shardwise.errors import PlanTypeError, ShardingPlanError
from shardwise.geometry.splits import weighted_sizes
from shardwise.sharding_spec.calls import call_text
from shardwise.sharding_spec.short import check_spec_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

__all__ = ["balanced", "check_output", "checked_numbers", "spec_words", "tensor_of"]


def spec_words(word: str, *args: Any, ranks: Sequence[Any] | None, **kwargs: Any) -> str:
    """Text of a spec; without ranks it is for those of the group.

    >>> spec_words("chunk", 0, sizes=None, ranks=(1, 2))
    'chunk(0, ranks=[1, 2])'
    """
    given = {key: value for key, value in {**kwargs, "ranks": ranks}.items() if value is not None}
    return call_text(word, *args, **given)


def balanced(size: int, parts: int) -> tuple[int, ...]:
    """Lengths of `parts` pieces that differ by one at most, so that few are empty."""
    return tuple(weighted_sizes(size, [1] * parts))


def checked_numbers(values: object, what: str) -> tuple[int, ...] | None:
    """A list of whole numbers as a tuple, by which sharders from files and from code compare."""
    return None if values is None else whole_numbers(values, what)


def check_output(output: object, sharder: str) -> None:
    """Raises unless it is text of the spec that a sharder brings its output to, or None."""
    if output is None:
        return
    if not isinstance(output, str):
        raise PlanTypeError(
            f"{sharder}.output",
            expected="text of a spec, such as 'replicate()', or None",
            got=type(output).__name__,
            fix="Pass None, and the spec in the plan's output_plan.",
        )
    check_spec_text(output)


def tensor_of(module: nn.Module, name: str, sharder: str) -> torch.Tensor:
    """A parameter of a module; raises if it has none of that name."""
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        names = [known for known, _ in module.named_parameters()]
        raise ShardingPlanError(
            f"{sharder} needs the parameter {name!r} of a {type(module).__name__}",
            got=f"a module with {', '.join(names[:8]) or 'no parameters'}",
        ) from error
