"""Checkpoints: saved from any layout, loaded into any other, without pickle."""

from shardwise.checkpoint.background import AsyncSave, Saved
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.saving import save

__all__ = ["AsyncSave", "Index", "Saved", "load_index", "save"]
