"""The tensor-parallel plans that Hugging Face models carry, as plans of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwise.errors import PlanTypeError, ShardingPlanError
from shardwise.sharders.cuts import Columnwise, Fused, Replicated, Rowwise, SequenceNorm
from shardwise.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.sharder import Sharder

__all__ = ["from_tp_plan"]

_EVERYWHERE = "replicate()"
_STYLES: dict[str, Sharder] = {
    "colwise": Columnwise(),
    "colwise_gather_output": Columnwise(_EVERYWHERE),
    "colwise_rep": Columnwise(_EVERYWHERE),
    "embedding_rowwise": Rowwise(),
    "packed_colwise": Fused(2),
    "replicate": Replicated(),
    "replicated_with_grad_allreduce": Replicated(),
    "rowwise": Rowwise(),
    "rowwise_rep": Rowwise(),
    "rowwise_split_input": Rowwise(),
    "sequence_parallel": SequenceNorm(),
    # "local" means that the weight is cut and the module's code sees its part. Here it sees whole
    # tensors, so the cut is all that is left; the sum waits for a "gather" further out.
    "local_colwise": Columnwise(),
    "local_rowwise": Rowwise(None),
}


def from_tp_plan(tp_plan: Mapping[str, str], *, prefix: str = "") -> ShardingPlan:
    """The plan that a dict such as `model.config.base_model_tp_plan` means for whole tensors.

    `colwise` cuts weight and bias by the features that a layer gives, `rowwise` by those that it
    reads, with the bias and the output on all ranks; `colwise_rep` and `colwise_gather_output` have
    their output on all ranks, `gather` is only that. Keys are paths of submodules, or patterns;
    `prefix` comes before each ("model."). Styles by which a module's own code works on local parts
    (`local`, expert parallelism) have no meaning for whole tensors, and are refused by name.

    Heads are cut where torch.chunk cuts the features; where they do not divide by the ranks,
    `shardwise.sharders.Attention` cuts between them.

    >>> plan = from_tp_plan({"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"})
    >>> plan.to_dict()["plan"]
    {'layers.*.q_proj': 'Columnwise()', 'layers.*.o_proj': 'Rowwise()'}
    """
    entries: dict[str, Sharder] = {}
    outputs: dict[str, str] = {}
    refused: list[str] = []
    for path, style in _styles(tp_plan):
        if style in _STYLES:
            entries[prefix + path] = _STYLES[style]
        elif style == "gather":
            outputs[prefix + path] = _EVERYWHERE
        else:
            refused.append(f"{path!r}: {style!r}")
    if refused:
        raise ShardingPlanError(
            "tp_plan",
            expected=f"styles with a meaning for whole tensors: {', '.join([*_STYLES, 'gather'])}",
            got=", ".join(refused),
            fix="Leave these out, and add entries of your own to the plan.",
        )
    return ShardingPlan(entries, outputs or None)


def _styles(tp_plan: object) -> Iterator[tuple[str, str]]:
    if not isinstance(tp_plan, Mapping):
        raise PlanTypeError("tp_plan", expected="a dict", got=type(tp_plan).__name__)
    for path, style in tp_plan.items():
        if not isinstance(path, str) or not isinstance(style, str):
            raise PlanTypeError("tp_plan", expected="a style by path", got=f"{path!r}: {style!r}")
        yield path, style
