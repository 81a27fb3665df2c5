"""What the outputs of a function on local pieces are, for all ranks: they tell each other.

Once per what is known of the arguments on all ranks, or at every call. All of it is checked and
raised alike on all ranks.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from shardwise.comm.agreement import explain, heard_by_all
from shardwise.comm.tracing import recorded
from shardwise.errors import OpError
from shardwise.sharded_tensor.entering import homes_of, inputs_behind, works_of
from shardwise.sharded_tensor.global_shapes import find_shape
from shardwise.sharded_tensor.reshard_target import target_of
from shardwise.sharding_spec.spec import ShardingSpec
from shardwise.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.geometry import Box, Layout
    from shardwise.sharded_tensor.state import State

__all__ = ["Outcome", "Outputs", "Pieces"]

Shape = tuple[int, ...]
Pieces = list[torch.Tensor]  # what a rank's calls gave
_MOST_KEPT = 1024  # outcomes of a group


class _Report(NamedTuple):
    """What a rank tells of the outputs of its calls, one after the other."""

    shapes: tuple[tuple[Shape, ...], ...]  # per output, per call
    kinds: tuple[tuple[torch.dtype, bool], ...] | None  # dtype and requires_grad; None: no call
    used: frozenset[int]  # the inputs of which an output has a gradient
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the outputs are, for all ranks."""

    layouts: tuple[Layout, ...]
    kinds: tuple[tuple[torch.dtype, bool], ...]
    used: frozenset[int]  # by some rank
    works: dict[int, int]  # by rank, the number of its work. [Note: whose work] in `entering.py`
    # Per output, per local piece: whether its gradient goes back here.
    is_home: tuple[tuple[bool, ...], ...]


class Outputs:
    """What a caller says of the outputs of a function, and the outcomes that are known."""

    def __init__(self, name: str, targets: Sequence[Any], out_shapes: Any) -> None:
        self.name = name
        self.targets = targets  # specs, Layouts or tensors, one per output
        self.out_shapes = out_shapes
        # By group, by what is known of the arguments on all ranks.
        self.known: WeakKeyDictionary[Communicator, dict[Hashable, Outcome]] = WeakKeyDictionary()

    def outcome(
        self,
        key: Hashable,
        made: list[Pieces],
        moved: Sequence[State],
        members: Communicator,
        problem: Exception | None,
    ) -> Outcome:
        """The outputs of all ranks; told by all unless it is known."""
        known = self.known.setdefault(members, {})
        found = known.get(key)
        if found is None or self.out_shapes == "exchange":
            reports = _told(self.name, made, moved, members, problem)
            found = self._understood(reports, [state.layout for state in moved], members)
            if len(known) >= _MOST_KEPT:
                known.clear()
            known[key] = found
            return found
        with heard_by_all(self.name, members):
            if problem is not None:
                raise problem
            self._check_as_before(found, made, members.rank)
        return found

    def _check_as_before(self, found: Outcome, made: list[Pieces], rank: int) -> None:
        for layout, kind, pieces in zip(found.layouts, found.kinds, made, strict=True):
            expected = [(box.shape, *kind) for box in layout.boxes_of(rank)]
            got = [(tuple(p.shape), p.dtype, p.requires_grad) for p in pieces]
            if got != expected:
                raise OpError(
                    f"{self.name} returns something else than before, for arguments alike",
                    rank=rank,
                    expected=f"shape, dtype, requires_grad {expected}",
                    got=got,
                    fix='Pass out_shapes="exchange", with which ranks tell each other each time.',
                )

    def _understood(
        self,
        reports: Mapping[int, _Report],
        inputs: Sequence[Layout],
        members: Communicator,
    ) -> Outcome:
        """What the outputs are, from what all ranks tell; the same on all, errors too."""
        layouts = []
        for number, target in enumerate(self.targets):
            pieces = {rank: report.shapes[number] for rank, report in reports.items()}
            layouts.append(self._layout(number, target, pieces, members))
        kinds = self._kinds(reports, members.rank)
        works = works_of(layouts, members.ranks)
        homes = homes_of(layouts, works)
        self._check_pending(inputs, works, members.rank)
        mine = works[members.rank]
        is_home = tuple(
            tuple(
                homes[number, box, term] == mine
                for box, term in zip(
                    layout.boxes_of(members.rank), layout.terms_of(members.rank), strict=True
                )
            )
            for number, layout in enumerate(layouts)
        )
        used = frozenset[int]().union(*[report.used for report in reports.values()])
        return Outcome(tuple(layouts), kinds, used, works, is_home)

    def _layout(
        self,
        number: int,
        target: Any,
        pieces: Mapping[int, tuple[Shape, ...]],
        members: Communicator,
    ) -> Layout:
        rank = members.rank
        what = f"output {number} of {self.name}"
        shape: Shape | None
        if isinstance(self.out_shapes, tuple):
            shape = self.out_shapes[number]
        elif isinstance(target, ShardingSpec):
            shape = find_shape(target, pieces)
        else:
            shape = target_of(target, tuple(target.shape), rank).layout.shape
        if shape is None:
            raise OpError(
                f"{what}: no global shape gives these pieces by its spec {target}",
                rank=rank,
                got=_by_rank(pieces),
                fix="Change out_specs, or pass out_shapes=[...] with the global shapes.",
            )
        layout = target_of(target, shape, rank).layout
        members.ranks.check_members(layout.ranks, what=f"out_specs of {self.name}")
        wrong = {
            owner: shapes
            for owner, shapes in pieces.items()
            if shapes != tuple(box.shape for box in layout.boxes_of(owner))
        }
        if wrong:
            wanted = {owner: tuple(box.shape for box in layout.boxes_of(owner)) for owner in wrong}
            raise OpError(
                f"{what} of global shape {shape}",
                rank=rank,
                expected=f"pieces {_by_rank(wanted)}",
                got=_by_rank(wrong),
            )
        return layout

    def _kinds(
        self, reports: Mapping[int, _Report], rank: int
    ) -> tuple[tuple[torch.dtype, bool], ...]:
        told = {owner: report.kinds for owner, report in reports.items() if report.kinds}
        if not told:
            if self.targets:
                raise OpError(f"{self.name}: no rank has a piece of the arguments", rank=rank)
            return ()
        if len(set(told.values())) > 1:
            raise OpError(
                f"{self.name}: outputs differ in dtype or requires_grad",
                rank=rank,
                got="; ".join(f"rank {owner}: {kinds}" for owner, kinds in told.items()),
            )
        return next(iter(told.values()))

    def _check_pending(self, inputs: Sequence[Layout], works: Mapping[int, int], rank: int) -> None:
        """Replicas of an addend are for the same work: there is nothing that would sum them."""
        for layout in inputs:
            met: dict[tuple[Box, int], int] = {}
            for box, owner, term in layout if layout.pending is not None else ():
                if met.setdefault((box, term), works[owner]) != works[owner]:
                    raise OpError(
                        f"{self.name}: an addend of {layout} is on ranks that compute other things",
                        rank=rank,
                        fix="Choose in_specs in which nothing is pending.",
                    )


def _told(
    name: str,
    made: list[Pieces],
    moved: Sequence[State],
    members: Communicator,
    problem: Exception | None,
) -> dict[int, _Report]:
    """What all ranks have to tell; if one of them failed, all raise."""
    kinds = tuple(
        (pieces[0].dtype, any(p.requires_grad for p in pieces)) for pieces in made if pieces
    )
    shapes = tuple(tuple(tuple(piece.shape) for piece in pieces) for pieces in made)
    carriers = [state.carriers for state in moved]
    used = inputs_behind([piece for held in made for piece in held], carriers)
    report = _Report(shapes, kinds or None, used, None if problem is None else str(problem))
    if len(members.ranks) == 1:
        reports: list[Any] = [report]
    else:
        with recorded("exchange output shapes", members, len(pickle.dumps(report))):
            reports = members.gather_objects(report)
    if any(one.problem is not None for one in reports):
        if len(members.ranks) == 1:
            assert problem is not None
            raise problem
        explain(name, {}, group=members, problem=problem)
    return dict(zip(members.ranks, reports, strict=True))


def _by_rank(pieces: Mapping[int, tuple[Shape, ...]]) -> str:
    ranks: dict[tuple[Shape, ...], list[int]] = {}
    for rank, shapes in pieces.items():
        ranks.setdefault(shapes, []).append(rank)
    return "; ".join(
        f"{ranks_text(owners)}: {', '.join(map(str, shapes)) or 'none'}"
        for shapes, owners in ranks.items()
    )
