"""Layer 6: one table from torch functions to rules, which see layouts and local pieces only."""

from shardwise.ops import (  # noqa: F401  # they fill the table
    along,
    attention,
    batch_norms,
    class_losses,
    convolution,
    diagonals,
    elementwise,
    embedding,
    inserting,
    joining,
    layer_norms,
    looking_up,
    losses,
    multi_head,
    padding,
    pooling,
    products,
    rearranging,
    reductions,
    reinterpreting,
    reshaping,
    softmax,
    triangles,
    views,
    writing,
)
from shardwise.ops.rule import COMPOSITES, RULES, Call, Decision, Need, Operand, Rule, Then

__all__ = ["COMPOSITES", "RULES", "Call", "Decision", "Need", "Operand", "Rule", "Then"]
