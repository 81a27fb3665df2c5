"""A plan as one rank of a group carries it out: all that does not depend on the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.comm.lowering import COLLECTIVES
from shardwise.comm.short import short_of

if TYPE_CHECKING:
    import torch

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
        "plan",
        "shapes",
        "short",
        "source_shapes",
        "usual_dtype",
    )

    def __init__(self, plan: TransferPlan, members: Communicator) -> None:
        if not plan.rank_set <= members.ranks.members:
            members.ranks.check_members(plan.ranks, what="the plan's layouts")
        self._rank = members.rank
        self._program: RankProgram | None = None
        # Known from the first `program()` on; none where a backend has collectives to prefer.
        self.short: Short | None = None
        self._may_be_short = not COLLECTIVES.get(members.backend)
        self.plan = plan
        self.shapes = plan.shapes_of(members.rank)
        self.source_shapes = self.shapes.source
        # Of the result on this rank, if it is one shard.
        self.only_shape = self.shapes.target[0] if len(self.shapes.target) == 1 else None
        # With which `usual_load` need not look at the dtype again. Never complex, of which a
        # tensor may be a conjugate view.
        self.usual_dtype: torch.dtype | None = None
        self.mark: Mark | None = None  # of an exchange of one tensor of that dtype

    def program(self) -> RankProgram:
        """What the rank does when the plan is carried out alone, without a cap."""
        if self._program is None:
            self._program = self.plan.schedule().program(self._rank)
            if self._may_be_short:
                self.short = short_of(self._program, self.plan.source.pending, self.shapes.target)
        return self._program


def rank_plan(plan: TransferPlan, members: Communicator) -> RankPlan:
    """The same one at every call, as long as the communicator keeps it.

    Found by identity, because a small exchange takes so little time that calls to hash and
    compare would be seen in it. What is kept holds the plan, so its id is its own.
    """
    known = members.rank_plans.get(id(plan))
    if known is None:
        known = RankPlan(plan, members)
        if len(members.rank_plans) >= _MOST:
            members.rank_plans.clear()
        members.rank_plans[id(plan)] = known
    return known
