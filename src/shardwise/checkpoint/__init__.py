"""Checkpoints: saved from any layout, loaded into any other, without pickle."""
