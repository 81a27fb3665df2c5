"""What the engine asks of a group of ranks, whether its ranks are processes or simulated."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from shardwise.comm.marks import Mark
    from shardwise.comm.rank_plan import RankPlan
    from shardwise.comm.ranks import GroupRanks
    from shardwise.geometry import ReduceOp

__all__ = ["Communicator", "EarlyFlight", "Flight", "simulated_rank"]

# The rank that this thread plays in a simulation, or None in a real process.
simulated_rank: ContextVar[Communicator | None] = ContextVar("simulated_rank", default=None)


class Flight(Protocol):
    """Messages of one round. Buffers are contiguous tensors of any shape and dtype on
    `Communicator.wire_device`; only their bytes matter.

    First every `receive`, then every `send`, then `launch`; a backend may start a message as soon
    as it is named, or all of them at `launch`. Every rank of the group calls `launch`, also one
    without messages: some backends connect the group then. Buffers may not be touched until they
    have landed, and the flight keeps them until then. No buffer is empty. Flights may overlap:
    messages between two ranks are matched in the order in which they were named.
    """

    def receive(self, peer: int, buffer: torch.Tensor) -> None:
        """Names a message from `peer`, which is to land in `buffer`."""

    def send(self, peer: int, buffer: torch.Tensor) -> None:
        """Names a message to `peer`, the bytes of `buffer`."""

    def launch(self) -> None:
        """Starts what has not been started yet."""

    def land(self, index: int) -> None:
        """Waits until the `index`-th receive is in its buffer."""

    def finish(self) -> None:
        """Waits until everything, the sends too, is over."""


class EarlyFlight(Flight, Protocol):
    """A flight that leaves before ranks have agreed. [Note: early messages] in `agreement.py`."""

    def tell(self) -> None:
        """After `launch`: the digest leaves by which they do."""

    def compared(self, *, timeout: float) -> list[bytes]:
        """Everybody's digest, as `Communicator.compare` gives it."""

    def leave(self, peers: Collection[int]) -> None:
        """Waits for all messages but those of these peers, which never come."""


class Communicator(Protocol):
    """A group of ranks as one of them sees it. Ranks are global everywhere."""

    # Plain attributes, because a small exchange looks at them more often than it sends. Fixed.
    rank: int
    ranks: GroupRanks
    backend: str  # by which the table of collectives is chosen: "gloo", "nccl", ...
    wire_device: torch.device  # where buffers must be for the backend to send them
    rank_plans: dict[int, RankPlan]  # those used last, by the id of their plan; starts empty
    decisions: dict[tuple[Any, ...], Any]  # of the rules of ops, which keep them here; starts empty
    kinds: dict[tuple[Any, ...], Any]  # of `kind_of`, which keeps them here; starts empty
    exchanges: dict[tuple[Any, ...], Any]  # of `exchange_of`, which keeps them here; starts empty
    cuts: dict[tuple[Any, ...], Any]  # of `distribute`, which keeps them here; starts empty
    num_disagreements: int  # in `agree`; starts at 0

    def flight(self, mark: Mark | None = None) -> Flight:
        """A new round of messages between pairs of ranks; of one exchange, they go by its mark."""

    def apart(self, tag: int) -> Communicator:
        """This group with flights whose messages meet only those of the same tag, if it can."""

    def early_flight(self, tag: int, digest: bytes) -> EarlyFlight | None:
        """A flight of `apart` beside a digest; None if it cannot, as on all other ranks."""

    def all_gather(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        """`output` = everybody's flat `mine`, in order of group rank; equal lengths."""

    def reduce_scatter(self, output: torch.Tensor, mine: torch.Tensor, op: ReduceOp) -> None:
        """`output` = this rank's part of the reduction of everybody's flat `mine`."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """In place, every rank's `tensor` becomes the reduction of all of them."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """In place, every rank's `tensor` becomes that of rank `source`."""

    def compare(self, digest: bytes, *, timeout: float) -> list[bytes]:
        """Everybody's digest (of one length), in order of group rank.

        Raises `AbsentRanksError` if some have not come after `timeout` seconds.
        """

    def tell(self, problem: Exception) -> None:
        """This rank raises before an exchange; those that wait for it are to raise, too."""

    def gather_objects(self, value: object) -> list[object]:
        """Everybody's value, in order of group rank; for error messages, not for hot paths."""
