"""A process without any process group, as the only rank of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.ranks import GroupRanks
from shardwise.errors import ArgumentValueError

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator, Flight
    from shardwise.comm.marks import Mark
    from shardwise.comm.rank_plan import RankPlan
    from shardwise.geometry import ReduceOp

__all__ = ["ALONE", "Alone"]


class Alone:
    """A `Communicator` of one rank, which needs nothing of torch.distributed."""

    def __init__(self) -> None:
        self.rank = 0
        self.ranks = GroupRanks((0,))
        self.backend = "gloo"
        self.wire_device = torch.device("cpu")
        self.rank_plans: dict[int, RankPlan] = {}
        self.decisions: dict[tuple[Any, ...], Any] = {}
        self.kinds: dict[tuple[Any, ...], Any] = {}
        self.exchanges: dict[tuple[Any, ...], Any] = {}
        self.cuts: dict[tuple[Any, ...], Any] = {}
        self.num_disagreements = 0

    def flight(self, mark: Mark | None = None) -> Flight:
        return _NoFlight()

    def apart(self, tag: int) -> Communicator:
        return self

    def early_flight(self, tag: int, digest: bytes) -> None:
        """There is nobody to agree with."""

    def all_gather(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        output.copy_(mine)

    def reduce_scatter(self, output: torch.Tensor, mine: torch.Tensor, op: ReduceOp) -> None:
        output.copy_(mine)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """What one rank has is the reduction."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """What one rank has, it has sent."""

    def compare(self, digest: bytes, *, timeout: float) -> list[bytes]:
        return [digest]

    def tell(self, problem: Exception) -> None:
        """Nobody waits."""

    def gather_objects(self, value: object) -> list[object]:
        return [value]


class _NoFlight:
    """A round without messages, since there is nobody to send them to."""

    def receive(self, peer: int, buffer: torch.Tensor) -> None:
        raise _no_peer(peer)

    def send(self, peer: int, buffer: torch.Tensor) -> None:
        raise _no_peer(peer)

    def launch(self) -> None:
        pass

    def land(self, index: int) -> None:
        pass

    def finish(self) -> None:
        pass


def _no_peer(peer: int) -> ArgumentValueError:
    return ArgumentValueError("peer of a message", expected="nobody but this rank", got=peer)


# The one of this process, by which what belongs to a group is found again.
ALONE = Alone()
