"""Checkpoints: saved from any layout, loaded into any other, without pickle."""

from shardwise.checkpoint.index import Index
from shardwise.checkpoint.loading import load, load_safetensors
from shardwise.checkpoint.mapping import fuse, part, transpose
from shardwise.checkpoint.matching import LoadedKeys
from shardwise.checkpoint.opening import load_index

__all__ = [
    "Index",
    "LoadedKeys",
    "fuse",
    "load",
    "load_index",
    "load_safetensors",
    "part",
    "transpose",
]
