"""Layer 8: whole models: sharding them, moving them, their state."""

__all__: list[str] = []
