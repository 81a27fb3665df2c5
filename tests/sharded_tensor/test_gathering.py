"""The whole tensor in one place: every dtype bit for bit, into memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import sharded_tensor
from shardwise.comm.simulate import simulate
from shardwise.errors import AgreementError, LayoutError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int64),
]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _dtypes(rank: int) -> None:
    for dtype in DTYPES:
        same, most = torch.Generator().manual_seed(0), 2 if dtype == torch.bool else 256
        full = torch.randint(most, (5 * 3 * dtype.itemsize,), dtype=torch.uint8, generator=same)
        full = full.view(dtype).view(5, 3)
        for spec in (
            shardwise.chunk(0),
            shardwise.on_rank(1),
            shardwise.block_cyclic(1, 1, ranks=[1, 0]),
            shardwise.replicate(),
        ):
            x = shardwise.distribute(full, spec)
            assert x.dtype == dtype
            found: Any = x.gather(1)
            assert (found is None) == (rank != 1)
            out = torch.zeros(5, 3, dtype=dtype) if rank == 1 else None
            assert x.gather(1, out=out) is out
            assert torch.equal(_bits(x.full_tensor()), _bits(full))
            if out is not None:
                assert torch.equal(_bits(found), _bits(full))
                assert torch.equal(_bits(out), _bits(full))
                found.zero_()  # which is not the tensor's own memory
            assert torch.equal(_bits(x.full_tensor()), _bits(full))
    large = torch.tensor([16777217, 2**62 + 1])
    x = shardwise.distribute(large, shardwise.chunk(0))
    found = x.gather(0, enforce_dtype=True)
    assert found is None or found.tolist() == large.tolist()
    found = x.gather(0, dtype=torch.float64)
    assert found is None or torch.equal(found, large.double())


def _other_whole_numbers(rank: int) -> None:
    """An `out` that looks like the index of torch's `gather` is one, as `out=` always."""
    for dtype in (torch.float32, torch.int32):
        x: Any = sharded_tensor.ones(shardwise.chunk(0), 4, 3, dtype=dtype)
        out = torch.zeros(4, 3, dtype=torch.int64) if rank == 1 else None
        assert x.gather(1, out=out) is out
        assert out is None or (out == 1).all()
    out = None if out is None else out.zero_()
    assert x.gather(1, out) is out  # of a tensor of whole numbers
    assert out is None or (out == 1).all()


def test_an_out_may_have_other_whole_numbers_than_the_tensor() -> None:
    simulate(_other_whole_numbers, 2)


def test_every_dtype_arrives_bit_for_bit() -> None:
    shardwise.run_local(_dtypes, 2)


def _refused(rank: int) -> None:
    x = sharded_tensor.ones(shardwise.chunk(0), 4, 3)
    everywhere = sharded_tensor.ones(shardwise.replicate(), 4, 3)
    outs: list[Any] = [
        (x, torch.empty(1, 3).expand(4, 3), "elements have a place in memory each"),
        (x, torch.empty(4, 3, device="meta"), "tensors with data"),
        (x, torch.ones(4, 3).to_sparse(), "dense tensors"),
        (x, torch.empty(4, 3, dtype=torch.complex64).conj(), "memory is their values"),
        (x, torch.empty(4), "have size"),
        (everywhere, everywhere.local_tensor(), "memory that nothing else"),
    ]
    for tensor, out, words in outs:
        with pytest.raises((LayoutError, AgreementError, ValueError), match=words):
            tensor.gather(0, out=out if rank == 0 else None)
        found = tensor.gather(0)  # the group is as good as before
        assert found is None or torch.equal(found, torch.ones(4, 3))


def test_what_cannot_be_filled_is_refused_before_anything_is_sent() -> None:
    shardwise.run_local(_refused, 2, timeout=30)


def _group(rank: int) -> None:
    group = dist.new_group([2, 1])
    if rank:
        spec = shardwise.chunk(0, ranks=[1, 2])
        x: Any = sharded_tensor.ones(spec, 4, process_group=group)
        for made in (
            torch.zeros_like(x, dtype=torch.float64),
            torch.rand_like(x, dtype=torch.float64),
            x.new_zeros(4, dtype=torch.float64),
            x.new_ones(7, dtype=torch.float64),
            x.clone().double(),
            x.detach().double(),
        ):
            assert made._process_group is group
            assert made.dtype == torch.float64
            assert made.full_tensor().shape == made.shape  # rank 0 is not asked
    dist.barrier()


def test_tensors_like_others_stay_in_their_group() -> None:
    shardwise.run_local(_group, 3, timeout=30)
