"""`shardwise demo`: a small GPT sharded, trained, resharded, saved, resumed and converted."""

__all__: list[str] = []
