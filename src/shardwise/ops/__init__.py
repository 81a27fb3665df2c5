"""Layer 6: one table from torch functions to rules, which see layouts and local pieces only.

`rule.py` says what a rule is. How a family of functions works (`pointwise.py`, `contraction.py`,
`reducing.py`) stands apart from the names of its functions (`elementwise.py`, `products.py`,
`reductions.py`), unless they are few. `docs/architecture.md` has all families and their files.
"""

from shardwise.ops import (  # noqa: F401  # they fill the table
    attention,
    batch_norms,
    class_losses,
    convolution,
    cumulative,
    diagonals,
    elementwise,
    embedding,
    fourier,
    inserting,
    joining,
    layer_norms,
    linear_algebra,
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
    sorting,
    triangles,
    views,
    writing,
)
from shardwise.ops.rule import COMPOSITES, RULES, Call, Decision, Need, Operand, Rule, Then

__all__ = ["COMPOSITES", "RULES", "Call", "Decision", "Need", "Operand", "Rule", "Then"]
