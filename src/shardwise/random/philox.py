"""Philox4x64-10: random words as a function of a counter and a key.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC'11. It passes all of TestU01; its 32-bit sister is the generator of torch on GPUs. A block is
four words of 64 bits, from a counter of four words and a key of two. Here the counter is
`(block, 0, 0, 0)` and the key `(seed, call)`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise._torch_compat import elementwise_kernel
from shardwise.random.arrays import Array, zeros_like

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.random.key import Key

__all__ = ["BLOCK", "Philox", "cost_at_once", "cost_of_run", "upper_product"]

BLOCK = 4  # words
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B  # the golden ratio and sqrt(3) - 1
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_HALF = np.uint64(32)


class Philox:
    """The random words of one key, made in one of three ways with equal results.

    [Note: ways to the words] numpy has this generator in C, for the CPU. It makes a block in 16 ns,
    but needs 1.5 us (as long as 100 blocks) to find its place. The same by arithmetic on arrays of
    words takes 130 ns a block (8 blocks) wherever it is. So runs of blocks that are close together
    are cut out of one long run that goes through the gaps, long runs are made one by one, and
    short ones far apart all at once. Elsewhere than on the CPU there is only the last; on CUDA it
    is one kernel.
    """

    def __init__(self, key: Key) -> None:
        halves = [key.seed, key.call]
        self._round_keys = [
            [_signed(half + n * step) for half, step in zip(halves, _KEY_STEPS, strict=True)]
            for n in range(_ROUNDS)
        ]
        self._generator = np.random.Philox(counter=0, key=0)
        self._counter = [0] * 4
        self._state = _numpy_state(self._counter, halves)
        self._state_before_0 = _numpy_state([2**64 - 1] * 4, halves)

    def run(self, first: int, count: int, device: torch.device) -> Array:
        """Words of `count` blocks from number `first` on, int64."""
        if device.type == "cpu":
            return self.runs([first], count)
        return self.at_once(torch.arange(first, first + count, device=device))

    def runs(self, firsts: list[int], count: int) -> Array:
        """The same for several runs, one after the other, on the CPU."""
        generator, state, counter = self._generator, self._state, self._counter
        found = []
        for first in firsts:
            counter[0] = first - 1  # numpy counts up before it makes a block
            generator.state = state if first else self._state_before_0
            found.append(generator.random_raw(count * BLOCK))
        return (found[0] if len(found) == 1 else np.concatenate(found)).view(np.int64)

    def at_once(self, blocks: Array) -> Array:
        """Words of blocks by number, int64, where `blocks` is."""
        if isinstance(blocks, torch.Tensor) and blocks.is_cuda:
            seed, call = self._round_keys[0]
            return torch.stack(_kernel()(blocks, seed=seed, call=call), 1).reshape(-1)
        word0 = blocks + 0  # a copy
        word1, word2, word3 = (zeros_like(word0) for _ in range(3))
        for key0, key1 in self._round_keys:
            high0 = upper_product(word0, _MULTIPLIERS[0])
            high1 = upper_product(word2, _MULTIPLIERS[1])
            high1 ^= word1
            high1 ^= key0
            high0 ^= word3
            high0 ^= key1
            word0 *= _signed(_MULTIPLIERS[0])
            word2 *= _signed(_MULTIPLIERS[1])
            word0, word1, word2, word3 = high1, word2, high0, word0
        found = zeros_like(word0, columns=BLOCK)
        for k, word in enumerate((word0, word1, word2, word3)):
            found[:, k] = word
        return found.reshape(-1)


_CODE = """
template <typename T>
void philox4x64(T block, T seed, T call, T& a, T& b, T& c, T& d) {
  unsigned long long w0 = block, w1 = 0, w2 = 0, w3 = 0, k0 = seed, k1 = call;
  for (int round = 0; round < ROUNDS; ++round) {
    unsigned long long h0 = __umul64hi(w0, M0), h1 = __umul64hi(w2, M1);
    unsigned long long l0 = w0 * M0, l1 = w2 * M1;
    w0 = h1 ^ w1 ^ k0; w1 = l1; w2 = h0 ^ w3 ^ k1; w3 = l0;
    k0 += S0; k1 += S1;
  }
  a = w0; b = w1; c = w2; d = w3;
}
"""


@cache
def _kernel() -> Callable[..., tuple[torch.Tensor, ...]]:
    """(blocks, seed=, call=) -> the four words of each; compiled at the first call."""
    names = {"M0": _MULTIPLIERS[0], "M1": _MULTIPLIERS[1], "S0": _KEY_STEPS[0], "S1": _KEY_STEPS[1]}
    code = _CODE.replace("ROUNDS", str(_ROUNDS))
    for name, value in names.items():
        code = code.replace(name, f"{value:#x}ULL")
    found: Callable[..., tuple[torch.Tensor, ...]]
    found = elementwise_kernel(code, num_outputs=BLOCK, seed=0, call=0)
    return found


def cost_of_run(count: int) -> int:
    """Of a run of `count` blocks, in blocks that follow others. [Note: ways to the words]"""
    return 100 + count


def cost_at_once(count: int) -> int:
    """Of `count` blocks anywhere, likewise."""
    return 8 * count


def upper_product(words: Array, factor: int) -> Array:
    """The upper 64 of the 128 bits of word * factor, both unsigned, factor <= 2**64.

    By halves, as on paper. No sum below has more than 64 bits, so nothing is lost where int64
    wraps around.
    """
    factor_low, factor_high = factor & _LOW, factor >> 32
    low, high = words & _LOW, _upper_half(words)
    middle = high * factor_low
    middle += _upper_half(low * factor_low)
    upper = _upper_half(middle)
    if factor_high:
        middle &= _LOW
        low *= factor_high
        low += middle
        high *= factor_high
        upper += high
        upper += _upper_half(low)
    return upper


def _upper_half(words: Array) -> Array:
    if isinstance(words, np.ndarray):
        unsigned = words.view(np.uint64)
        return (unsigned >> _HALF).view(np.int64)
    halves = words >> 32
    halves &= _LOW  # without the copies of the sign
    return halves


def _numpy_state(counter: list[int], key: list[int]) -> Any:
    """A state of numpy's generator; of lists, which it reads four times as fast as arrays."""
    return {
        "bit_generator": "Philox",
        "state": {"counter": counter, "key": key},
        "buffer": [0] * BLOCK,
        "buffer_pos": BLOCK,  # at its end
        "has_uint32": 0,
        "uinteger": 0,
    }


def _signed(word: int) -> int:
    """The int64 with the low 64 bits of `word`."""
    return (word + 2**63) % 2**64 - 2**63
