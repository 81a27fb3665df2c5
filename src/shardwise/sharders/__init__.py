"""Sharders for the usual blocks of models, each a few lines over specs."""

from shardwise.sharders.blocks import MLP, Attention
from shardwise.sharders.cuts import Columnwise, Fused, Replicated, Rowwise, SequenceNorm
from shardwise.sharders.tables import EmbeddingTables
from shardwise.sharders.tp_plan import from_tp_plan

__all__ = [
    "MLP",
    "Attention",
    "Columnwise",
    "EmbeddingTables",
    "Fused",
    "Replicated",
    "Rowwise",
    "SequenceNorm",
    "from_tp_plan",
]
