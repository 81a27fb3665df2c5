"""Sharders for the usual blocks of models, each a few lines over specs."""

__all__: list[str] = []
