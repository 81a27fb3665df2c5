"""Shipped test tools: run functions on ranks, and hypothesis strategies for layouts.

`shardwise.testing.strategies` needs hypothesis (`pip install shardwise[testing]`) and is imported
by its own name.
"""

from shardwise.testing.local_run import run_local
from shardwise.testing.op_check import Sample, check_op

__all__ = ["Sample", "check_op", "run_local"]
