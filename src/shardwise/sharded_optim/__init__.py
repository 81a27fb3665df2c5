"""Optimizers of sharded tensors, as the seed has them."""

__all__: list[str] = []
