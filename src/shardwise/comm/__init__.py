"""Layer 5: groups of ranks, plans carried out by them, and what all of them must agree on."""

from shardwise.comm.agreement import agree
from shardwise.comm.checks import check_timeout, set_check, should_check
from shardwise.comm.communicator import Communicator, Flight
from shardwise.comm.executor import execute, execute_all
from shardwise.comm.load import Transfer
from shardwise.comm.process_group import ProcessGroupCommunicator, communicator
from shardwise.comm.ranks import GroupRanks

__all__ = [
    "Communicator",
    "Flight",
    "GroupRanks",
    "ProcessGroupCommunicator",
    "Transfer",
    "agree",
    "check_timeout",
    "communicator",
    "execute",
    "execute_all",
    "set_check",
    "should_check",
]
