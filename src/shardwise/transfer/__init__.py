"""Layer 2: from one layout to another. Pure; knows numpy and scipy and nothing of torch."""

from shardwise.transfer.moves import Moves
from shardwise.transfer.plan import Message, TransferPlan
from shardwise.transfer.plan_cache import plan_reshard
from shardwise.transfer.program import RankProgram
from shardwise.transfer.relabel import Relabelling, relabel
from shardwise.transfer.schedule import Schedule, make_schedule
from shardwise.transfer.traffic import Traffic

__all__ = [
    "Message",
    "Moves",
    "RankProgram",
    "Relabelling",
    "Schedule",
    "Traffic",
    "TransferPlan",
    "make_schedule",
    "plan_reshard",
    "relabel",
]
