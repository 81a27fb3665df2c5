"""Layer 4: random numbers that depend on a key and the global index, and on nothing else.

torch's generators hand numbers out one after the other, so what an element gets depends on who
asked before: on the layout, the number of ranks, the device. Here the element at flat index `i`
of the *global* tensor gets a value that is a function of `(key, i)`, so every rank fills its own
box without a word to the others, and all boxes together are the tensor that one rank would have
made. Bit for bit, on the CPU and on CUDA.

>>> import torch
>>> from shardwise.geometry import Box
>>> whole = fill_normal_(torch.empty(4, 6), Box.whole((4, 6)), (4, 6), Key(seed=7))
>>> part = fill_normal_(torch.empty(2, 3), Box((1, 2), (3, 5)), (4, 6), Key(seed=7))
>>> torch.equal(part, whole[1:3, 2:5])
True
"""

from shardwise.random.distributions import (
    fill_bernoulli_,
    fill_cauchy_,
    fill_exponential_,
    fill_geometric_,
    fill_integers_,
    fill_log_normal_,
    fill_normal_,
    fill_trunc_normal_,
    fill_uniform_,
)
from shardwise.random.key import Key

__all__ = [
    "Key",
    "fill_bernoulli_",
    "fill_cauchy_",
    "fill_exponential_",
    "fill_geometric_",
    "fill_integers_",
    "fill_log_normal_",
    "fill_normal_",
    "fill_trunc_normal_",
    "fill_uniform_",
]
