"""The ranks of a group, and the one place where global ranks become group ranks and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from shardwise.arguments import whole_numbers
from shardwise.errors import ArgumentTypeError, ArgumentValueError, LayoutError, NotInitializedError
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardwise.geometry.box import Ints

__all__ = ["GroupRanks", "member_group"]


class _Positions(dict[int, int]):
    """Group rank by global rank; a rank that is no member raises."""

    def __missing__(self, rank: int) -> int:
        raise ArgumentValueError(
            f"rank {rank} in a group",
            expected=f"one of the group's {ranks_text(list(self))}",
            got=rank,
            fix="Ranks are global ones, also in a group that has fewer ranks than the world.",
        )


@dataclass(frozen=True, slots=True)
class GroupRanks:
    """The global ranks of a group, in order of group rank.

    >>> group = GroupRanks((3, 1))
    >>> group.group_rank(1), group.rank_at(0)
    (1, 3)
    """

    ranks: tuple[int, ...]
    members: frozenset[int] = field(init=False, repr=False, compare=False)  # the same, as a set
    group_rank_of: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranks = whole_numbers(self.ranks, "ranks of a group")
        positions = _Positions({rank: group_rank for group_rank, rank in enumerate(ranks)})
        if not ranks or len(positions) != len(ranks):
            raise ArgumentValueError(
                "ranks of a group", expected="each rank once, and at least one", got=ranks
            )
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "members", frozenset(ranks))
        object.__setattr__(self, "group_rank_of", positions)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> GroupRanks:
        """Ranks of a process group, None being the default one; raises as `member_group`."""
        return cls(tuple(dist.get_process_group_ranks(member_group(process_group))))

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.group_rank_of

    def group_rank(self, rank: int) -> int:
        """Position of a global rank in the group; raises if it is no member."""
        return self.group_rank_of[rank]

    def rank_at(self, group_rank: int) -> int:
        """Global rank at a position of the group."""
        if not 0 <= group_rank < len(self.ranks):
            raise ArgumentValueError(
                "group rank",
                expected=f"0 to {len(self.ranks) - 1}",
                got=group_rank,
                fix="It is a position in the group, and no global rank.",
            )
        return self.ranks[group_rank]

    def check_members(
        self,
        ranks: Iterable[int] | Ints,
        *,
        what: str,
        rank: int | None = None,
        fix: str = "Name global ranks that are members, or pass a group that has all of them.",
    ) -> None:
        """Raises an error about `what` if some of `ranks`, in any order, are not in the group.

        `rank` is the one that raises.
        """
        if not isinstance(ranks, np.ndarray):
            ranks = tuple(ranks)
            if self.members.issuperset(ranks):  # at once, as small calls do it too
                return
        named = np.unique(ranks).tolist()
        strangers = [rank for rank in named if rank not in self.group_rank_of]
        if strangers:
            raise LayoutError(
                f"{what}: Global rank {strangers[0]} does not exist in input process group",
                rank=rank,
                expected=f"only ranks of its group ({ranks_text(self.ranks)})",
                got=ranks_text(strangers),
                fix=fix,
            )


def member_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one for None; raises if this process cannot use it."""
    if not dist.is_initialized():
        raise NotInitializedError(
            "torch.distributed has no process group in this process",
            fix="Start the script with torchrun and call "
            "torch.distributed.init_process_group() first; or try it on local processes, "
            "shardwise.run_local(fn, world_size); or on this one alone: shardwise.init_single().",
        )
    # An object, because new_group() gives those whom it leaves out an int.
    group: object = dist.group.WORLD if process_group is None else process_group
    is_left_out = group == dist.GroupMember.NON_GROUP_MEMBER
    if not is_left_out and not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(
            "process_group",
            expected="a torch.distributed.ProcessGroup or None",
            got=repr(group),
            fix="Pass what torch.distributed.new_group() returned, or None for the default group; "
            "the argument of shardwise.comm.execute and execute_all is group=.",
        )
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ArgumentValueError(
            "process_group",
            rank=dist.get_rank(),
            expected="a group that this rank is a member of",
            got="one that leaves it out",
            fix="Let only members call: if torch.distributed.get_rank(group) >= 0: ...",
        )
    return group
