"""Checkpoints: saved from any layout, loaded into any other, without pickle."""

from shardwise.checkpoint.background import AsyncSave, Saved
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.loading import load, load_safetensors
from shardwise.checkpoint.mapping import fuse, part, transpose
from shardwise.checkpoint.matching import LoadedKeys
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.saving import save

__all__ = [
    "AsyncSave",
    "Index",
    "LoadedKeys",
    "Saved",
    "fuse",
    "load",
    "load_index",
    "load_safetensors",
    "part",
    "save",
    "transpose",
]
