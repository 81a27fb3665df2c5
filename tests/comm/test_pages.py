"""Large pages: asked for where they help, for no byte outside of the tensor."""

from __future__ import annotations

import mmap

import pytest
import torch

from shardwise.comm import pages

MIB = 1 << 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    calls: list[tuple[int, int, int]] = []

    def note(start: int, length: int, advice: int) -> int:
        calls.append((start, length, advice))
        return 0

    monkeypatch.setattr(pages, "_madvise", lambda: note)
    return calls


def test_whole_pages_within_a_large_tensor_are_asked_for(asked: list[tuple[int, int, int]]) -> None:
    like = torch.ones(1, dtype=torch.uint8)
    for is_like in (False, True):
        size = (9 * MIB,)
        made = pages.new_like(like, size) if is_like else pages.new_tensor(size, like.dtype, "cpu")
        start, length, advice = asked.pop()
        assert advice == mmap.MADV_HUGEPAGE
        assert start % (2 * MIB) == 0 == length % (2 * MIB)
        assert length >= 6 * MIB  # all but two parts of pages
        assert made.data_ptr() <= start
        assert start + length <= made.data_ptr() + made.nbytes
    assert not asked


def test_nothing_is_asked_for_small_tensors_nor_other_devices(
    asked: list[tuple[int, int, int]],
) -> None:
    pages.new_tensor((3 * MIB,), torch.uint8, "cpu")
    pages.new_tensor((9 * MIB,), torch.uint8, "meta")
    pages.new_like(torch.ones(1), (4,))
    pages.packed(torch.ones(9, 2).T)
    assert not asked


def test_what_is_packed_is_a_copy_only_if_it_must_be(asked: list[tuple[int, int, int]]) -> None:
    large = torch.arange(2 * MIB, dtype=torch.int32).view(1024, 2048)
    assert pages.packed(large) is large
    assert not asked
    copied = pages.packed(large.T)
    assert asked
    assert copied.is_contiguous()
    assert torch.equal(copied, large.T)


def test_where_there_are_no_large_pages_tensors_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    assert pages.new_tensor((9 * MIB,), torch.uint8, "cpu").nbytes == 9 * MIB
