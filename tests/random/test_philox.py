from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.random import Key
from shardwise.random.philox import Philox, upper_product

WORDS = st.integers(0, 2**64 - 1)


def _unsigned(words: object) -> list[int]:
    return [int(word) % 2**64 for word in np.asarray(words).reshape(-1)]


def _by_hand(block: int, key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 as the paper has it, in Python's integers."""
    a, b, c, d = block, 0, 0, 0
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * a, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c, 2**64)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % 2**64, (k1 + 0xBB67AE8584CAA73B) % 2**64
    return [a, b, c, d]


def test_the_published_answer_for_zeros_is_found_in_every_way() -> None:
    answer = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    philox = Philox(Key(0, 0))
    assert _by_hand(0, (0, 0)) == answer
    assert _unsigned(philox.run(0, 1, torch.device("cpu"))) == answer
    assert _unsigned(philox.at_once(np.array([0]))) == answer
    assert _unsigned(philox.at_once(torch.tensor([0]))) == answer


@given(st.tuples(WORDS, WORDS), st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_all_ways_to_the_words_agree(key: tuple[int, int], firsts: list[int]) -> None:
    philox, count = Philox(Key(*key)), 3
    blocks = [first + k for first in firsts for k in range(count)]
    expected = [word for block in blocks for word in _by_hand(block, key)]
    assert (
        _unsigned([philox.run(first, count, torch.device("cpu")) for first in firsts]) == expected
    )
    assert _unsigned(philox.runs(firsts, count)) == expected
    assert _unsigned(philox.at_once(np.array(blocks))) == expected
    assert _unsigned(philox.at_once(torch.tensor(blocks))) == expected


@pytest.mark.parametrize("library", [np.array, torch.tensor])
@given(words=st.lists(WORDS, min_size=1), factor=st.integers(0, 2**64))
def test_the_upper_half_of_a_product_is_that_of_integers(
    library: type, words: list[int], factor: int
) -> None:
    signed = library([word - 2**64 if word >= 2**63 else word for word in words])
    expected = [word * factor // 2**64 for word in words]
    assert _unsigned(upper_product(signed, factor)) == expected
