"""torch RPC among ranks of `run_local`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import rpc

from shardwise._torch_compat import forget_rpc_groups
from shardwise.testing.rank_process import prefer_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["rpc_workers"]


@contextmanager
def rpc_workers(rendezvous: str, rank: int, world_size: int) -> Iterator[None]:
    """RPC runs inside, on loopback; this process is the worker `trainer<rank>`.

    `rendezvous` is a path where no file is yet, the same for all workers. A process has to have the
    same rank each time.
    """
    prefer_loopback("TP_SOCKET_IFNAME")
    forget_rpc_groups()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{rendezvous}")
    start: Any = rpc.init_rpc  # not typed
    start(f"trainer{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        yield
        _wait_for_all(f"{rendezvous}.end", rank, world_size)
    finally:
        # A graceful one waits for the others by a count of all earlier ones of the process. Ranks
        # stay for later calls, and have not all been in the same groups before.
        rpc.shutdown(graceful=False)


def _wait_for_all(path: str, rank: int, world_size: int) -> None:
    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]  # documented, but not marked
    store.set(str(rank), "")
    store.wait([str(other) for other in range(world_size)])
