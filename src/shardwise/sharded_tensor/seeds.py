"""Which random numbers come next: a seed and a count of calls per process group.

[Note: seeds] The key of a random call is (seed, how many random calls its group made before), so
the numbers depend neither on the layout nor on the ranks of the group: the first `randn` of a seed
is the same tensor everywhere. A call on one group does not move the count of another.

[Note: drawn again] A checkpointed function runs again in backward, and has to draw what it drew
first. Each run notes its keys with the call of `torch.utils.checkpoint` that it is in; a run in
backward takes those, and the counts stay where they are.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import checkpointed_runs
from shardwise.arguments import whole_number
from shardwise.comm.agreement import agree, agreed_numbers, heard_by_all
from shardwise.comm.communicator import simulated_rank
from shardwise.comm.process_group import communicator
from shardwise.errors import ArgumentTypeError, OpError
from shardwise.random import Key
from shardwise.settings import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from shardwise._torch_compat import CheckpointedRun
    from shardwise.comm.communicator import Communicator

__all__ = ["get_rng_state", "manual_seed", "next_key", "set_rng_state"]


@dataclass(slots=True)
class _Stream:
    seed: int
    epoch: int  # of the `manual_seed` for all groups that it follows; -1: it has its own
    count: int = 0


# [Note: drawn again] By the call: the keys of each group; by the run: how many it has taken.
_drawn: weakref.WeakKeyDictionary[Any, dict[Communicator, list[Key]]]
_drawn = weakref.WeakKeyDictionary()
_taken: weakref.WeakKeyDictionary[Any, dict[Communicator, int]] = weakref.WeakKeyDictionary()
# Module state, because it is the sharded side of torch's own global generator.
_streams: weakref.WeakKeyDictionary[Communicator, _Stream] = weakref.WeakKeyDictionary()
_CHOSEN: Setting[tuple[int, int | None]]  # epoch, seed for all groups
_CHOSEN = Setting("shardwise_seed", lambda: (0, None))


def manual_seed(seed: int, *, process_group: ProcessGroup | Communicator | None = None) -> None:
    """Starts the random numbers of sharded tensors anew; of one group only if it is given.

    All ranks call it with the same seed, which the next random call compares. Without it the seed
    is that of torch's own generator on the group's first rank, asked for once, at the first random
    call.

    Groups count their calls apart, so with one seed the first random tensor of each group is the
    same. Groups whose tensors are to differ get seeds of their own.
    """
    if process_group is not None or simulated_rank.get() is not None:
        members = communicator(process_group)
        with heard_by_all("manual_seed", members, hot=False):
            number = _checked_seed(seed)
        if not _runs_again():
            agree("manual_seed", {"seed": number}, group=members)
            _streams[members] = _Stream(number, epoch=-1)
        return
    number = _checked_seed(seed)
    if not _runs_again():
        _CHOSEN.change((_CHOSEN.get()[0] + 1, number))
        _streams.clear()


def _checked_seed(seed: int) -> int:
    number = whole_number(seed, "seed", least=-(2**63))
    Key(number)  # which checks its range
    return number


def get_rng_state(*, process_group: ProcessGroup | Communicator | None = None) -> dict[str, int]:
    """Where the random numbers of a group's sharded tensors stand: the same on all its ranks.

    All ranks call it. Save it with a checkpoint of training, and go on from there by
    `set_rng_state`, on any number of ranks. torch's own generators are not in it.
    """
    stream = _stream_of(communicator(process_group))
    return {"seed": stream.seed, "calls": stream.count}


def set_rng_state(
    state: Mapping[str, int], *, process_group: ProcessGroup | Communicator | None = None
) -> None:
    """Goes on with the random numbers that come after `get_rng_state()`. All ranks call it."""
    members = communicator(process_group)
    with heard_by_all("set_rng_state", members, hot=False):
        if not {"seed", "calls"} <= set(state):
            raise ArgumentTypeError(
                "state of set_rng_state", expected="what get_rng_state() returned", got=repr(state)
            )
        key = Key(state["seed"], state["calls"])
    if _runs_again():
        return
    agree("set_rng_state", {"seed": key.seed, "calls": key.call}, group=members)
    _streams[members] = _Stream(key.seed, epoch=-1, count=key.call)


def next_key(members: Communicator, generator: torch.Generator | None = None) -> Key:
    """The key of this random call of the group. All ranks ask, in the same order.

    Communicates only when the group's seed has to be asked for or compared, or a `generator` is
    given: then the key is one draw from it on the group's first rank.
    """
    key: Key | None = None
    inside: list[CheckpointedRun] = []
    for run in checkpointed_runs():
        if run.again is not None:
            key = _drawn_before(run, members)
            break
        inside.append(run)
    if key is None:
        key = _drawn_now(members, generator)
    for run in inside:
        _drawn.setdefault(run.call, {}).setdefault(members, []).append(key)
    return key


def _runs_again() -> bool:
    """Whether this is backward's run of a checkpointed function. [Note: drawn again]"""
    return any(run.again is not None for run in checkpointed_runs())


def _drawn_before(run: CheckpointedRun, members: Communicator) -> Key:
    """[Note: drawn again]"""
    keys = _drawn.get(run.call, {}).get(members, [])
    taken = _taken.setdefault(run.again, {})
    number = taken.get(members, 0)
    if number >= len(keys):
        raise OpError(
            "a checkpointed function draws more random numbers in backward than before",
            rank=members.rank,
            expected=f"{len(keys)} random calls on ranks {list(members.ranks)}",
            fix="What is checkpointed must make the same calls whenever it runs.",
        )
    taken[members] = number + 1
    return keys[number]


def _drawn_now(members: Communicator, generator: torch.Generator | None) -> Key:
    if generator is not None:
        return Key(_from_first(members, generator))
    stream = _stream_of(members)
    stream.count += 1
    return Key(stream.seed, stream.count - 1)


def _stream_of(members: Communicator) -> _Stream:
    stream = _streams.get(members)
    epoch, seed = _CHOSEN.get()
    if stream is None or stream.epoch not in (-1, epoch):
        if seed is None:
            seed = _from_first(members, None)
        else:
            agree("the first random call after manual_seed", {"seed": seed}, group=members)
        stream = _streams[members] = _Stream(seed, epoch)
    return stream


def _from_first(members: Communicator, generator: torch.Generator | None) -> int:
    """A seed that the first rank of the group chooses.

    By the exchange that compares, so that ranks that gave no generator are missed by the others,
    and what is wrong with one raises on all.
    """
    number, problem = 0, None
    try:
        if generator is not None and not isinstance(generator, torch.Generator):
            raise ArgumentTypeError(
                "generator", rank=members.rank, expected="a torch.Generator", got=repr(generator)
            )
        if members.rank == next(iter(members.ranks)):
            number = Key(torch.initial_seed()).seed if generator is None else _draw(generator)
    except Exception as error:  # whatever it is, the other ranks want to know
        problem = error
    what = "the first random call" if generator is None else "a random call with a generator"
    return agreed_numbers(what, {}, number, group=members, doing="seed", problem=problem)[0]


def _draw(generator: torch.Generator) -> int:
    """A seed, drawn on the device of the generator."""
    drawn = torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device)
    return int(drawn.item())
