"""Layer 6: one table from torch functions to rules, which see layouts and local pieces only."""

from shardwise.ops import (  # noqa: F401  # they fill the table
    along,
    attention,
    class_losses,
    convolution,
    diagonals,
    elementwise,
    embedding,
    inserting,
    joining,
    looking_up,
    losses,
    multi_head,
    normalizing,
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
