"""Remote references to the shards of other ranks, over torch RPC (`init_rrefs=True`).

[Note: no lock] References come by RPC, on threads of their own, and a tensor can die in a garbage
collection, which runs in the middle of anything, this file too: a lock taken there may be held by
the very thread that waits for it. So there is none. Numbers come from `itertools.count`, the map
is changed by single operations on a dict with int keys, and both are atomic in Python. An entry
ends by the callback of its weak reference, which does one such operation and nothing else.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import rpc_rank, rpc_worker_ranks
from shardwise.comm.agreement import agree
from shardwise.errors import AgreementError, ArgumentValueError, NotInitializedError, OpError
from shardwise.sharded_tensor.seed_views import local_shards_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.comm.communicator import Communicator
    from shardwise.sharded_tensor.state import State

__all__ = [
    "RemoteShards",
    "_register_remote_shards",
    "_sharded_tensor_map",
    "connect",
    "remote_shards",
]

_CALL = "init_rrefs=True"


class RemoteShards:
    """References to the shards of the other ranks that hold some; `by_rank` is filled by RPC.

    States that share their memory (a tensor and its `detach`) share it, too.
    """

    __slots__ = ("__weakref__", "by_rank")

    def __init__(self) -> None:
        self.by_rank: dict[int, list[Any]] = {}


# Module state, because RPC calls functions and not objects: which tensor a reference is for.
# [Note: no lock]
_sharded_tensor_map: dict[int, weakref.ref[RemoteShards]] = {}
_numbers = itertools.count()


def connect(state: State) -> State:
    """The state, with references to everybody's shards where `init_rrefs` asks for them.

    All ranks of the group call it; it returns once all of them have all references. Other RPC
    workers than the group's ranks take no part.
    """
    if state.init_rrefs and state.remote is None:
        state.remote = _connected(state)
    return state


def remote_shards(state: State) -> dict[int, list[Any]]:
    """Rank -> references to its shards, for all other ranks that hold some."""
    if not state.init_rrefs:
        raise OpError(
            "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available",
            rank=state.rank,
            fix="Make it with init_rrefs=True.",
        )
    remote: RemoteShards = connect(state).remote
    return remote.by_rank


def _register_remote_shards(sharded_tensor_id: int, rrefs: list[Any], rpc_rank: int) -> None:
    """Called by RPC from rank `rpc_rank`: here are its shards of that tensor of this rank."""
    reference = _sharded_tensor_map.get(sharded_tensor_id)
    found = None if reference is None else reference()
    if found is None:
        raise OpError(
            f"Could not find sharded_tensor_id: {sharded_tensor_id}",
            expected=f"one of {sorted(_sharded_tensor_map)}",
            fix="The tensor died while rank "
            f"{rpc_rank} sent its references; keep it until all ranks have made it.",
        )
    found.by_rank[rpc_rank] = rrefs


def _connected(state: State) -> RemoteShards:
    members, problem = state.comm, None
    workers: dict[int, str] = {}
    try:
        workers = _workers(members)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    agree(_CALL, {"layout": state.layout}, group=members, problem=problem)
    found, number = RemoteShards(), next(_numbers)
    _sharded_tensor_map[number] = weakref.ref(
        found, lambda _: _sharded_tensor_map.pop(number, None)
    )
    numbers = dict(zip(members.ranks, members.gather_objects(number), strict=True))
    failure = _sent(state, workers, numbers)
    # Also waits until everybody has sent, so that nothing is on its way any longer.
    failures = members.gather_objects(failure)
    _raise_failures(members, failures)
    found.by_rank = dict(sorted(found.by_rank.items()))
    return found


def _sent(state: State, workers: Mapping[int, str], numbers: Mapping[int, Any]) -> str | None:
    """Sends references to this rank's shards to all others; what went wrong, if something did."""
    from torch.distributed import rpc

    others = [rank for rank in state.comm.ranks if rank != state.rank]
    shards = local_shards_of(state)
    if not shards or not others:
        return None
    send: Any = rpc.rpc_async  # not typed
    try:
        rrefs = [rpc.RRef(shard) for shard in shards]
        waiting = [
            send(workers[rank], _register_remote_shards, args=(numbers[rank], rrefs, state.rank))
            for rank in others
        ]
        torch.futures.wait_all(waiting)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _workers(members: Communicator) -> dict[int, str]:
    """The name of each rank's RPC worker; raises unless all ranks of the group have one."""
    ranks = rpc_worker_ranks()
    if ranks is None:
        raise NotInitializedError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc if "
            "init_rrefs is set to True",
            rank=members.rank,
        )
    if rpc_rank() != members.rank:
        raise ArgumentValueError(
            "Default ProcessGroup and RPC ranks must be the same for ShardedTensor",
            rank=members.rank,
            expected=f"RPC rank {members.rank}, which is the process group's",
            got=f"RPC rank {rpc_rank()}",
            fix="Pass the same rank to init_process_group and init_rpc.",
        )
    names = {rank: name for name, rank in ranks.items()}
    absent = [rank for rank in members.ranks if rank not in names]
    if absent:
        raise ArgumentValueError(
            "RPC workers",
            rank=members.rank,
            expected=f"one for each rank of the group, {list(members.ranks)}",
            got=f"none for {absent}",
            fix="Let all of them call torch.distributed.rpc.init_rpc.",
        )
    return names


def _raise_failures(members: Communicator, failures: list[object]) -> None:
    failed = [
        f"rank {rank}: {failure!s:.400}"
        for rank, failure in zip(members.ranks, failures, strict=True)
        if failure is not None
    ]
    if failed:
        raise AgreementError(f"{_CALL}: references could not be sent: {'; '.join(failed)}")
