"""Door: the seed's path of its embedding, for tables of any spec."""

from shardwise.sharded_tensor._ops import sharded_embedding

__all__ = ["sharded_embedding"]
