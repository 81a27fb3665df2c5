"""Which random numbers: a seed, and a count of the fills made with it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.arguments import whole_number
from shardwise.errors import ArgumentValueError

__all__ = ["Key"]


@dataclass(frozen=True, slots=True)
class Key:
    """One stream of random numbers; two different keys give independent ones.

    `seed` is what a user chooses, `call` tells the fills made with that seed apart. A negative seed
    stands for its 64 bits, as in `torch.manual_seed`.

    >>> Key(-1) == Key(2**64 - 1)
    True
    """

    seed: int
    call: int = 0

    def __post_init__(self) -> None:
        seed = whole_number(self.seed, "Key.seed", least=-(2**63))
        call = whole_number(self.call, "Key.call")
        for number, name in ((seed, "seed"), (call, "call")):
            if number >= 2**64:
                raise ArgumentValueError(f"Key.{name}", expected="a number of 64 bits", got=number)
        object.__setattr__(self, "seed", seed % 2**64)
        object.__setattr__(self, "call", call)
