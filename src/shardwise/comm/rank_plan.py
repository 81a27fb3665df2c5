"""A plan as one rank of a group carries it out: all that does not depend on the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.comm.lowering import COLLECTIVES
from shardwise.comm.marks import mark_of
from shardwise.comm.short import short_of
from shardwise.transfer.patterns import recognise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.marks import Mark
    from shardwise.comm.short import Short
    from shardwise.transfer import RankProgram, TransferPlan

__all__ = ["RankPlan", "rank_plan"]

_MOST = 64  # plans that a communicator keeps


class RankPlan:
    """Raises where it is made if the plan has ranks that are not in the group."""

    __slots__ = (
        "_may_be_short",
        "_program",
        "_rank",
        "mark",
        "only_shape",
        "pattern",
        "plan",
        "shapes",
        "short",
        "usual_dtype",
        "usual_kinds",
    )

    def __init__(self, plan: TransferPlan, members: Communicator, name: str | None) -> None:
        if not plan.rank_set <= members.ranks.members:
            what = "the plan's" if name is None else f"{name}: the plan's"
            for end, layout in (("source", plan.source), ("target", plan.target)):
                members.ranks.check_members(layout.ranks, what=f"{what} {end}", rank=members.rank)
        self._rank = members.rank
        self._program: RankProgram | None = None
        # Known from the first `program()` on; none where a backend has collectives to prefer.
        self.short: Short | None = None
        self._may_be_short = not COLLECTIVES.get(members.backend)
        # The collective that it is, where the backend has some.
        self.pattern = None if self._may_be_short else recognise(plan, members.ranks.ranks)
        self.plan = plan
        self.shapes = plan.shapes_of(members.rank)
        # Of the result on this rank, if it is one shard.
        self.only_shape = self.shapes.target[0] if len(self.shapes.target) == 1 else None
        # Of the exchange of one tensor as it was found right before, see `make_usual`.
        self.usual_dtype: torch.dtype | None = None
        self.usual_kinds: Sequence[tuple[object, ...]] = ()
        self.mark: Mark | None = None

    def make_usual(self, dtype: torch.dtype, wire: torch.device) -> None:
        """Shards like these are found right at a glance from now on, by `load.is_usual`.

        Not if they are complex, of which a tensor may be a conjugate view.
        """
        if not dtype.is_complex:
            self.usual_dtype = dtype
            # What `is_usual` asks of each.
            self.usual_kinds = [
                (dtype, shape, torch.strided, wire, False) for shape in self.shapes.source
            ]
            self.mark = mark_of([(self.plan, dtype)])

    def program(self) -> RankProgram:
        """What the rank does when the plan is carried out alone, without a cap."""
        if self._program is None:
            self._program = self.plan.schedule().program(self._rank)
            if self._may_be_short:
                self.short = short_of(self._program, self.plan.source.pending, self.shapes.target)
        return self._program


def rank_plan(plan: TransferPlan, members: Communicator, *, name: str | None = None) -> RankPlan:
    """The same one at every call, as long as the communicator keeps it. `name` is for errors.

    Found by identity, because a small exchange takes so little time that calls to hash and
    compare would be seen in it. What is kept holds the plan, so its id is its own.
    """
    known = members.rank_plans.get(id(plan))
    if known is None:
        known = RankPlan(plan, members, name)
        if len(members.rank_plans) >= _MOST:
            members.rank_plans.clear()
        members.rank_plans[id(plan)] = known
    return known
