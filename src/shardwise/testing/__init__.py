"""Shipped test tools: run functions on ranks, check ops, and hypothesis strategies for layouts.

`shardwise.testing.strategies` needs hypothesis (`pip install shardwise[testing]`) and is imported
by its own name. Every rank process imports this package, so what they do not need waits.
"""

from typing import TYPE_CHECKING, Any

from shardwise.testing.local_run import run_local

if TYPE_CHECKING:
    from shardwise.testing.op_check import Sample, check_op

__all__ = ["Sample", "check_op", "run_local"]


def __getattr__(name: str) -> Any:
    if name not in ("Sample", "check_op"):
        raise AttributeError(f"module 'shardwise.testing' has no attribute {name!r}")
    from shardwise.testing import op_check

    return getattr(op_check, name)
