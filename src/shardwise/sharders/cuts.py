"""Single modules by their features: the two ways to cut a weight, packed weights, and copies.

A weight has a dim of the features that it reads and one of those that it gives. *Column-wise* cuts
what it gives, and so the output; *row-wise* cuts what it reads, and leaves a pending sum, which
`output` says what becomes of. One after the other they need that sum and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.arguments import is_whole_number, whole_number
from shardwise.errors import ShardingPlanError
from shardwise.sharders.text import (
    balanced,
    check_output,
    checked_numbers,
    spec_words,
    tensor_of,
)
from shardwise.sharding_plan import PlanSharder, ShardingPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Columnwise", "Fused", "Replicated", "Rowwise", "SequenceNorm"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CHANNEL_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


@dataclass(frozen=True)
class Replicated(PlanSharder):
    """Every parameter and buffer on all ranks; `output` as in `Rowwise`."""

    output: str | None = None
    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check(self)

    def plan(self, module: nn.Module, ranks: Sequence[int]) -> ShardingPlan:
        names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
        spec = spec_words("replicate", ranks=self.ranks)
        return ShardingPlan(dict.fromkeys(names, spec), _outputs(self.output))


@dataclass(frozen=True)
class SequenceNorm(Replicated):
    """A norm whose input is cut along the sequence: `Rowwise(output="chunk(1)")` comes before it.

    Each rank normalises its part of the positions; the output is gathered for what comes next, by
    default. What each rank adds to the gradients of the weights is summed.
    """

    output: str | None = "replicate()"


@dataclass(frozen=True)
class Columnwise(PlanSharder):
    """Cut by the features that a module gives: a linear layer, an embedding, a convolution.

    The bias is cut along, and so is the output: the next module may be `Rowwise`, or `output`
    brings it elsewhere ("replicate()" to all ranks). A convolution with groups is cut between them.
    Norms by channels are cut like a convolution before them.

    `sizes`: features per rank, else as torch.chunk cuts. `dim`: of the weight, for modules of other
    kinds. `ranks`: by default those of the group.
    """

    output: str | None = None
    sizes: Sequence[int] | None = None
    dim: int | None = None
    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check(self)

    def plan(self, module: nn.Module, ranks: Sequence[int]) -> ShardingPlan:
        sizes = self.sizes or _between_groups(module, len(self.ranks or ranks))
        if isinstance(module, _CHANNEL_NORMS):
            return ShardingPlan(self._norm(module, sizes), _outputs(self.output))
        weight = tensor_of(module, "weight", "Columnwise")
        dim = _dim(self, module, weight.ndim, gives=True)
        entries = {"weight": spec_words("chunk", dim, sizes=sizes, ranks=self.ranks)}
        if _has_bias(module):
            entries["bias"] = spec_words("chunk", 0, sizes=sizes, ranks=self.ranks)
        return ShardingPlan(entries, _outputs(self.output))

    def _norm(self, module: nn.Module, sizes: Sequence[int] | None) -> dict[str, str]:
        cut = spec_words("chunk", 0, sizes=sizes, ranks=self.ranks)
        everywhere = spec_words("replicate", ranks=self.ranks)  # the count of batches
        named = [*module.named_parameters(), *module.named_buffers()]
        return {name: cut if tensor.ndim else everywhere for name, tensor in named}


@dataclass(frozen=True)
class Rowwise(PlanSharder):
    """Cut by the features that a module reads: a linear layer, a vocabulary, a convolution.

    The input may be cut likewise, as `Columnwise` leaves it. Every rank has a part of every sum;
    `output` says what becomes of it: "replicate()" (the sum on all ranks), "chunk(1)" (a part of
    the positions on each), or None: it stays pending. The bias is on all ranks.

    `sizes`, `dim` and `ranks` as in `Columnwise`.
    """

    output: str | None = "replicate()"
    sizes: Sequence[int] | None = None
    dim: int | None = None
    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check(self)

    def plan(self, module: nn.Module, ranks: Sequence[int]) -> ShardingPlan:
        if isinstance(module, _CONVOLUTIONS) and module.groups > 1:
            raise ShardingPlanError(
                "Rowwise for a convolution with groups",
                got=f"{module.groups} groups",
                fix="Columnwise cuts it between its groups: what they read and what they give.",
            )
        weight = tensor_of(module, "weight", "Rowwise")
        dim = _dim(self, module, weight.ndim, gives=False)
        entries = {"weight": spec_words("chunk", dim, sizes=self.sizes, ranks=self.ranks)}
        if _has_bias(module):
            entries["bias"] = spec_words("replicate", ranks=self.ranks)
        return ShardingPlan(entries, _outputs(self.output))


@dataclass(frozen=True)
class Fused(PlanSharder):
    """Several layers packed in one weight, side by side: gate and up, or Q, K and V.

    Each section is cut as `Columnwise` cuts a layer, so every rank has its part of all of them, and
    `y.chunk(2, -1)` or `y.split(...)` of the output moves nothing. `sections`: how many equal ones,
    or their lengths. For heads, see `Attention`.
    """

    sections: int | Sequence[int] = 2
    output: str | None = None
    dim: int | None = None
    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check(self)
        given: Any = self.sections
        if is_whole_number(given):
            given = whole_number(given, "Fused.sections", least=1)
        else:
            given = checked_numbers(given, "Fused.sections")
        object.__setattr__(self, "sections", given)

    def plan(self, module: nn.Module, ranks: Sequence[int]) -> ShardingPlan:
        weight = tensor_of(module, "weight", "Fused")
        dim = _dim(self, module, weight.ndim, gives=True)
        lengths = self._lengths(weight.shape[dim])
        entries = {"weight": spec_words("fused", dim, lengths, ranks=self.ranks)}
        if _has_bias(module):
            entries["bias"] = spec_words("fused", 0, lengths, ranks=self.ranks)
        return ShardingPlan(entries, _outputs(self.output))

    def _lengths(self, size: int) -> list[int]:
        if not isinstance(self.sections, int):
            return list(self.sections)
        if size % self.sections:
            raise ShardingPlanError(
                "Fused.sections",
                expected=f"a number that divides {size}, or lengths",
                got=self.sections,
            )
        return [size // self.sections] * self.sections


def _check(sharder: Any) -> None:
    """Checks the arguments that sharders have in common, and makes tuples of lists."""
    name = type(sharder).__name__
    check_output(sharder.output, name)
    for key in ("ranks", "sizes"):
        if hasattr(sharder, key):
            object.__setattr__(
                sharder, key, checked_numbers(getattr(sharder, key), f"{name}.{key}")
            )


def _outputs(output: str | None) -> dict[str, str] | None:
    return None if output is None else {"": output}


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def _between_groups(module: nn.Module, parts: int) -> tuple[int, ...] | None:
    """Features per rank that part no group, where a module has groups."""
    if isinstance(module, nn.GroupNorm):
        groups, size = module.num_groups, module.num_channels
    elif isinstance(module, _CONVOLUTIONS) and module.groups > 1:
        groups, size = module.groups, module.out_channels
    else:
        return None
    return tuple(count * (size // groups) for count in balanced(groups, parts))


def _dim(sharder: Any, module: nn.Module, ndim: int, *, gives: bool) -> int:
    """The dim of the weight that has the features that the module gives, or reads."""
    if sharder.dim is not None:
        return whole_number(sharder.dim, f"{type(sharder).__name__}.dim", least=-ndim)
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
        return 0 if gives else 1
    is_grouped = isinstance(module, _TRANSPOSED) and module.groups > 1
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, *_TRANSPOSED)) and not is_grouped:
        return 1 if gives else 0
    raise ShardingPlanError(
        f"{type(sharder).__name__} for a {type(module).__name__}"
        + (" with groups" if is_grouped else ""),
        expected="a linear layer, an embedding or a convolution",
        fix="Say which dim of its weight is cut: dim=0, or give its parameters specs.",
    )
