"""A sharded tensor as torch.distributed.checkpoint (DCP) sees it: chunks, each with its tensor.

DCP asks three methods of a tensor, which stand on the class and call these functions. It knows a
chunk of a tensor by its offsets alone, so boxes without elements, which may start where another box
does, are left out; of a tensor without elements there is one chunk, the whole, on every rank.
Replicas offer the same chunk, and DCP writes one of them. Its own types, which take a second to
import, are imported when it asks, and are there by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import is_written_for_hugging_face
from shardwise.errors import LoadError, OpError
from shardwise.geometry import Box

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardwise.sharded_tensor.state import State

__all__ = ["chunk_at", "chunk_list", "write_items"]


def write_items(state: State, name: str) -> list[WriteItem]:
    """What this rank offers DCP to write of the tensor `name`; nothing is written yet."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunks = _chunks(state, f"{name!r}")
    _check_writer(chunks, name, state)
    size, made = torch.Size(state.layout.shape), []
    for chunk, (_, tensor) in zip(_described(chunks), chunks, strict=True):
        properties = TensorProperties.create_from_tensor(tensor)
        index = MetadataIndex(name, chunk.offsets)
        data = TensorWriteData(chunk=chunk, properties=properties, size=size)
        made.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return made


def chunk_list(state: State) -> list[ChunkStorageMetadata]:
    """Where this rank's pieces are in the whole tensor, for DCP to find what to read."""
    return _described(_chunks(state, "a ShardedTensor"))


def chunk_at(state: State, index: MetadataIndex) -> torch.Tensor:
    """The local tensor, without gradient, of the chunk that DCP knows by its offsets."""
    chunks = _chunks(state, f"{index.fqn!r}")
    for box, tensor in chunks:
        if index.offset is not None and box.start == tuple(index.offset):
            return tensor.detach()
    raise LoadError(
        f"{index.fqn!r} in torch.distributed.checkpoint",
        rank=state.rank,
        expected=f"a chunk of this rank: {', '.join(str(box) for box, _ in chunks) or 'none'}",
        got=f"one at {index.offset}",
        fix="Do not reshard a tensor while a checkpoint of it is being written or read.",
    )


def _chunks(state: State, what: str) -> list[tuple[Box, torch.Tensor]]:
    """The local boxes that have elements, and their tensors."""
    if state.layout.pending is not None:
        raise OpError(
            f"{what} with a pending {state.layout.pending} in torch.distributed.checkpoint",
            rank=state.rank,
            expected="a tensor with nothing pending",
            fix="Reduce it first: shardwise.reshard(st, shardwise.replicate()), or to any spec.",
        )
    if 0 in state.layout.shape:
        whole = Box.whole(state.layout.shape)
        return [(whole, torch.empty(whole.shape, dtype=state.dtype, device=state.device))]
    held = zip(state.boxes, state.shards, strict=True)
    return [(box, tensor) for box, tensor in held if not box.is_empty]


def _described(chunks: list[tuple[Box, torch.Tensor]]) -> list[ChunkStorageMetadata]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))
        for box, _ in chunks
    ]


def _check_writer(chunks: list[Any], name: str, state: State) -> None:
    """Raises if what writes now would keep only the last of this rank's pieces, as it does."""
    if len(chunks) > 1 and is_written_for_hugging_face():
        raise OpError(
            f"{name!r} by HuggingFaceStorageWriter, whose files hold one piece of a tensor each",
            rank=state.rank,
            expected="at most one local shard with elements on each rank",
            got=f"{len(chunks)}: {', '.join(str(box) for box, _ in chunks[:8])}",
            fix="Save shardwise.reshard(st, shardwise.chunk(0)), or use DCP's FileSystemWriter.",
        )
