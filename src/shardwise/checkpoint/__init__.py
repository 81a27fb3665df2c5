"""Checkpoints: saved from any layout, loaded into any other, without pickle."""

from shardwise.checkpoint.background import AsyncSave, Saved
from shardwise.checkpoint.converting import convert
from shardwise.checkpoint.differing import Diff, TensorDiff, ValueDiff, diff
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.loading import load, load_safetensors
from shardwise.checkpoint.mapping import fuse, part, transpose
from shardwise.checkpoint.matching import LoadedKeys
from shardwise.checkpoint.opening import load_index
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.verifying import Problem, Verified, verify

__all__ = [
    "AsyncSave",
    "Diff",
    "Index",
    "LoadedKeys",
    "Problem",
    "Saved",
    "TensorDiff",
    "ValueDiff",
    "Verified",
    "convert",
    "diff",
    "fuse",
    "load",
    "load_index",
    "load_safetensors",
    "part",
    "save",
    "transpose",
    "verify",
]
