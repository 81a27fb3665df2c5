"""Placements: a rank and a device, in the seed's syntax.

`rank:1/cuda:0` (a global rank), `trainer0/cuda:0` (an RPC worker's name), or a device alone.
Everywhere a placement is taken, such a string or a `torch.distributed._remote_device` will do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from shardwise._torch_compat import remote_device, rpc_worker_ranks
from shardwise.arguments import items, whole_number
from shardwise.errors import ArgumentTypeError, DeviceError, NotInitializedError, PlacementError
from shardwise.frozen_list import FrozenList

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Placement",
    "PlacementLike",
    "parse_placement",
    "parse_placements",
    "placement_at",
    "rank_of",
]

Placement = remote_device  # what a spec holds
PlacementLike = str | torch.device | remote_device  # what a caller may pass for one

_FORMS = "'rank:<rank>/<device>', '<worker name>/<device>' or '<device>'"


def parse_placement(value: PlacementLike) -> Placement:
    """The placement that a string names; a placement is returned as it is."""
    if isinstance(value, remote_device):
        return value
    if not isinstance(value, str | torch.device):
        raise ArgumentTypeError(
            "placement",
            expected=f"a string ({_FORMS}) or a torch.distributed._remote_device",
            got=f"{type(value).__name__}: {value!r}",
            fix=f"Write 'rank:{value}/cpu'." if isinstance(value, int) else None,
        )
    try:
        return remote_device(value)
    except ValueError as error:
        raise PlacementError(
            f"Could not parse remote_device: {value}",
            expected=_FORMS,
            fix="E.g. 'rank:0/cpu' or 'rank:3/cuda:1'.",
        ) from error
    except RuntimeError as error:  # of torch.device
        raise DeviceError(
            f"Could not parse remote_device: {value}: Invalid device string",
            expected="a device such as 'cpu' or 'cuda:0'",
        ) from error


def parse_placements(values: Iterable[PlacementLike], what: str) -> FrozenList[Placement]:
    """All placements of a spec; the caller's list is left as it is."""
    listed = items(values, f"{what}.placements", of="placements")
    placements = FrozenList(map(parse_placement, listed))
    if not placements:
        raise PlacementError(
            f"{what}.placements", expected="at least one", got="none", fix="E.g. ['rank:0/cpu']."
        )
    return placements


def rank_of(placement: Placement | None) -> int:
    """Global rank that a placement names; an RPC worker's name is looked up."""
    if placement is None:
        raise PlacementError(
            "remote device is None",
            expected="a placement such as 'rank:0/cpu'",
            got=None,
            fix="Give every shard a placement.",
        )
    rank, worker = placement.rank(), placement.worker_name()
    if rank is not None:
        return int(rank)
    if worker is None:
        raise PlacementError(
            f"placement '{placement}' names a device but no rank",
            fix=f"Write 'rank:0/{placement}' for rank 0.",
        )
    workers = rpc_worker_ranks()
    if workers is None:
        raise NotInitializedError(
            f"placement '{placement}' names a worker: RPC Framework needs to be initialized",
            fix="Call torch.distributed.rpc.init_rpc first, or write 'rank:<rank>/<device>'.",
        )
    if worker not in workers:
        raise PlacementError(
            f"Invalid worker name: {worker}", expected=f"one of {sorted(workers)}", got=worker
        )
    return workers[worker]


def placement_at(rank: object, device: str | torch.device) -> Placement:
    """Placement of `rank` on `device`; a bare 'cuda' becomes that rank's own GPU where known.

    Hosts are taken to be like this one: as many GPUs, and as many ranks, which torchrun's
    LOCAL_WORLD_SIZE says.
    """
    number = whole_number(rank, "rank")
    try:
        kind = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            "device", expected="a device such as 'cpu' or 'cuda:0'", got=repr(device)
        ) from error
    if kind == torch.device("cuda") and (num_gpus := torch.cuda.device_count()):
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", num_gpus))
        kind = torch.device("cuda", number % num_local % num_gpus)
    return remote_device(f"rank:{number}/{kind}")
