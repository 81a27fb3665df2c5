"""torch RPC among ranks of `run_local`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed import rpc

from shardwise.testing.rank_process import prefer_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["rpc_workers"]


@contextmanager
def rpc_workers(rendezvous: str, rank: int, world_size: int) -> Iterator[None]:
    """RPC runs inside, on loopback; this process is the worker `trainer<rank>`.

    `rendezvous` is a path where no file is yet, the same for all workers. Once in a process: torch
    meets later groups by what it counted in earlier ones. Ranks that have run RPC are not kept for
    later calls of `run_local`.
    """
    prefer_loopback("TP_SOCKET_IFNAME")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{rendezvous}")
    start: Any = rpc.init_rpc  # not typed
    start(f"trainer{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    is_done = False
    try:
        yield
        is_done = True
    finally:
        # Gracefully, if it can be: torch may crash when a worker leaves with messages under way.
        rpc.shutdown(graceful=is_done)
