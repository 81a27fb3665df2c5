"""Door: the seed's path of its embedding_bag, for tables of any spec."""

from shardwise.sharded_tensor._ops import sharded_embedding_bag

__all__ = ["sharded_embedding_bag"]
