"""The seed's paths of its embeddings, whose home is `shardwise.sharded_tensor._ops`."""

__all__: list[str] = []
