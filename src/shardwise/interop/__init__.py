"""To and from the tensors of others: DTensor, and torch's own ShardedTensor.

torch.distributed.checkpoint needs nothing from here: it asks the tensor itself.
"""

from __future__ import annotations

from shardwise.interop.dtensor import from_dtensor, to_dtensor
from shardwise.interop.torch_sharded_tensor import (
    from_torch_sharded_tensor,
    to_torch_sharded_tensor,
)

__all__ = [
    "from_dtensor",
    "from_torch_sharded_tensor",
    "to_dtensor",
    "to_torch_sharded_tensor",
]
