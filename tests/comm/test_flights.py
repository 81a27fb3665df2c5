"""Tests of what messages are made of."""

from __future__ import annotations

import torch

from shardwise.comm.flights import as_bytes


def test_an_expanded_element_has_bytes_like_any_other() -> None:
    element = torch.arange(3.0)[1].expand(1, 1)
    assert as_bytes(element).view(torch.float32).tolist() == [1.0]


def test_bytes_share_the_memory_of_a_part_of_a_tensor() -> None:
    tensor = torch.zeros(3, 2)
    as_bytes(tensor[1:]).view(torch.float32).fill_(7)
    assert tensor.tolist() == [[0, 0], [7, 7], [7, 7]]
