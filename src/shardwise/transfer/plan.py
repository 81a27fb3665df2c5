"""TransferPlan: how a tensor gets from one layout to another, as a value."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.arguments import cap, whole_number
from shardwise.errors import PlanError
from shardwise.geometry import Boxes, Layout, check_layout
from shardwise.transfer.copies import copies, num_not_held
from shardwise.transfer.explain import explain_plan
from shardwise.transfer.moves import Moves
from shardwise.transfer.program import LocalShapes
from shardwise.transfer.reductions import least_elements, reductions
from shardwise.transfer.regions import BoxJoin, GridJoin, Regions, join
from shardwise.transfer.schedule import Schedule, cut_rounds
from shardwise.transfer.text import PlanRecord, plan_to_json
from shardwise.transfer.traffic import Traffic
from shardwise.transfer.weight import weight

if TYPE_CHECKING:
    from shardwise.geometry.box import Ints

__all__ = ["Message", "TransferPlan"]

_MOST_SCHEDULES = 4  # that a plan keeps, each under a cap of its own
_MOST_SETS = 64  # schedules that it keeps of sets in which it is the first


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What one rank sends to another in one step of a plan: boxes, packed one after the other."""

    src: int
    dst: int
    step: int
    boxes: Boxes
    nbytes: int


class TransferPlan:
    """Local copies, messages and reductions that take a tensor from `source` to `target`.

    A pure function of the two layouts and the size of an element: every rank derives the same
    plan, and nothing is exchanged. Computed when it is first asked for; one rank's part costs no
    more than that part and a look at the boxes (unless boxes of the source have replicas, which
    share the work by a view of the whole). Immutable and hashable.

    >>> from shardwise.geometry import Box
    >>> rows = Layout((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (4, 4))], owners=[0, 1])
    >>> columns = Layout((4, 4), [Box((0, 0), (4, 2)), Box((0, 2), (4, 4))], owners=[0, 1])
    >>> plan = TransferPlan(rows, columns, itemsize=4)
    >>> plan.total_bytes, plan.lower_bound, plan.bytes_sent(0)
    (32, 32, 16)
    """

    source: Layout
    target: Layout
    itemsize: int

    def __init__(self, source: Layout, target: Layout, itemsize: int) -> None:
        check_layout(source, "source of a plan")
        check_layout(target, "target of a plan")
        if source.shape != target.shape:
            raise PlanError(
                "layouts of a plan",
                expected=f"two of one shape, the source's {source.shape}",
                got=f"{target.shape} for the target",
                fix="Make the target's layout for the source's shape.",
            )
        # By its name, because plans are made without torch.
        is_dtype = type(itemsize).__name__ == "dtype"
        fix = f"Pass {itemsize}.itemsize." if is_dtype else None
        itemsize = whole_number(itemsize, "itemsize", least=1, fix=fix)
        # Nothing that is counted is more than every entry holding the whole tensor.
        most = math.prod(source.shape) * itemsize * (len(source) + len(target))
        if most >= 2**63:
            raise PlanError(
                "tensor",
                expected="fewer than 2**63 bytes on all ranks together",
                got=f"{source.shape} with {itemsize} bytes an element, up to {most} bytes",
                fix="Check the shape: no ranks have memory for so many.",
            )
        self._set(source=source, target=target, itemsize=itemsize)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise PlanError(
            f"TransferPlan.{name} cannot be set", fix="A plan is a value; make another."
        )

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    @cached_property
    def mark(self) -> int:
        """A number that stands for the plan, the same in every process."""
        ends = f"{self.source.fingerprint}{self.target.fingerprint}{self.itemsize}"
        return int.from_bytes(hashlib.blake2b(ends.encode(), digest_size=8).digest())

    # -- moves ------------------------------------------------------------------------------

    @cached_property
    def regions(self) -> Regions:
        """Where the two layouts meet."""
        return self._join.regions()

    @cached_property
    def _join(self) -> GridJoin | BoxJoin:
        return join(self.source, self.target)

    @cached_property
    def moves(self) -> Moves:
        """Everything that every rank does, as arrays, in one order."""
        return self._moves_in(self.regions)

    def _moves_in(self, regions: Regions) -> Moves:
        is_reduced = self._is_reduced(regions)
        if not is_reduced.any():
            return copies(self.source, self.target, regions, self.itemsize)
        copied = copies(self.source, self.target, regions[~is_reduced], self.itemsize)
        reduced = reductions(self.source, self.target, regions[is_reduced], self.itemsize)
        return Moves.concatenate([copied, reduced], self.source.ndim).in_order()

    def _is_reduced(self, regions: Regions) -> np.ndarray:
        """Which regions have several terms on either side."""
        if not self.has_pending:
            return np.zeros(len(regions), dtype=bool)
        several: np.ndarray = (self.source.num_terms[regions.source_box] > 1) | (
            self.target.num_terms[regions.target_box] > 1
        )
        return several

    def moves_of(self, rank: int) -> Moves:
        """The moves in which `rank` takes part, in the order of `moves`."""
        rank = whole_number(rank, "rank")
        known = self.__dict__.setdefault("_parts", {})
        if rank not in known:
            if "moves" in self.__dict__ or not self._is_separable:
                moves = self.moves
            else:
                moves = self._moves_in(self._join.regions_of(rank))
            known[rank] = moves.of_rank(rank)
        part: Moves = known[rank]
        return part

    @cached_property
    def _is_separable(self) -> bool:
        """Whether no choice depends on the whole: nothing is pending and no source box is twice."""
        return self.source.has_every_box_once and self.target.pending is None

    @cached_property
    def has_pending(self) -> bool:
        """Whether anything is pending before or after."""
        return self.source.pending is not None or self.target.pending is not None

    @cached_property
    def cleared_rows(self) -> Ints:
        """Rows of a pending target that start as the identity of its operation."""
        several = np.repeat(self.target.num_terms > 1, np.diff(self.target.box_rows))
        return np.flatnonzero(several & self.target.boxes.is_full)

    # -- bytes ------------------------------------------------------------------------------

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes of all ranks and of all pairs of ranks, as arrays."""
        return Traffic.of(self.moves, self.ranks, self.itemsize)

    @cached_property
    def num_messages(self) -> int:
        """Messages of all ranks together, as `messages` has them: one a pair of ranks and step."""
        if not self.moves.step.any():
            return len(self.traffic.pair_bytes)
        steps = [self.moves[self.moves.step == step] for step in (0, 1)]
        return sum(len(Traffic.of(one, self.ranks, self.itemsize).pair_bytes) for one in steps)

    def bytes_sent(self, rank: int) -> int:
        """Bytes that leave `rank`."""
        if "moves" in self.__dict__:
            return self.traffic.bytes_sent(whole_number(rank, "rank"))
        moves = self.moves_of(rank)
        return int(moves.volumes[moves.is_wire & (moves.src == rank)].sum()) * self.itemsize

    def bytes_received(self, rank: int) -> int:
        """Bytes that reach `rank`."""
        if "moves" in self.__dict__:
            return self.traffic.bytes_received(whole_number(rank, "rank"))
        moves = self.moves_of(rank)
        return int(moves.volumes[moves.is_wire & (moves.dst == rank)].sum()) * self.itemsize

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that change ranks."""
        return int(self.moves.volumes[self.moves.is_wire].sum()) * self.itemsize

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that have to change ranks, whatever the plan; found without it.

        Copies: what a rank will hold and does not hold before. Sums: the fewest of all ways to
        reduce each region whole and spread it, [Note: two steps] in `reductions.py`. With very many
        ways to choose who contributes, or to deal out addends to terms of a pending target, only
        some are compared, and the plan and this bound may both be above the least.
        """
        regions, is_reduced = self.regions, self._is_reduced(self.regions)
        copied, reduced = regions[~is_reduced], regions[is_reduced]
        moved = int((copied.volumes * num_not_held(self.source, self.target, copied)).sum())
        return (moved + least_elements(self.source, self.target, reduced)) * self.itemsize

    @cached_property
    def output_bytes(self) -> dict[int, int]:
        """Bytes that each rank of the target holds afterwards."""
        return self.target.bytes_per_rank(self.itemsize)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold something before or after, ascending."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @cached_property
    def rank_set(self) -> frozenset[int]:
        """The ranks that take part."""
        return frozenset(self.ranks)

    def shapes_of(self, rank: int) -> LocalShapes:
        """Shapes of the local shards of `rank`, before and after."""
        known: dict[int, LocalShapes] = self.__dict__.setdefault("_shapes", {})
        if rank not in known:
            known[rank] = LocalShapes.of(self, rank)
        return known[rank]

    def messages(self, rank: int) -> tuple[Message, ...]:
        """What `rank` sends and receives, by step, sender and receiver."""
        moves = self.moves_of(rank)
        wire = moves[moves.is_wire]
        order = np.lexsort((wire.dst, wire.src, wire.step))
        wire = wire[order]
        keys = np.column_stack([wire.step, wire.src, wire.dst])
        new = np.ones(len(wire), dtype=bool)
        new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
        found = []
        for rows in np.split(np.arange(len(wire)), np.flatnonzero(new)[1:]):
            if len(rows):
                step, src, dst = keys[rows[0]].tolist()
                boxes = Boxes(wire.starts[rows], wire.stops[rows])
                nbytes = int(boxes.volumes.sum()) * self.itemsize
                found.append(Message(src, dst, step, boxes, nbytes))
        return tuple(found)

    def schedule(self, max_bytes: int | None = None) -> Schedule:
        """The rounds in which the plan is carried out; `max_bytes` caps every rank's staging."""
        return self.schedule_with((), cap(max_bytes))

    def schedule_with(self, others: tuple[TransferPlan, ...], max_bytes: int | None) -> Schedule:
        """That of a set of plans of which this is the first: for `make_schedule`."""
        name, most = ("_sets", _MOST_SETS) if others else ("_schedules", _MOST_SCHEDULES)
        known: dict[object, Schedule] = self.__dict__.get(name, {})
        found = known.get((others, max_bytes))
        if found is None:
            found = cut_rounds((self, *others), max_bytes)
            # Few, as each has all moves again. A new dict, as another thread may read the old one.
            kept = list(self.__dict__.get(name, {}).items())[1 - most :]
            self._set(**{name: {**dict(kept), (others, max_bytes): found}})
        return found

    def forget_schedules(self) -> None:
        """Lets schedules be made anew if they are needed again.

        They know their plan, so without this a plan that nobody has is not freed at once.
        """
        for name in ("_schedules", "_sets"):
            self.__dict__.pop(name, None)

    def peak_bytes(self, rank: int, max_bytes: int | None = None) -> int:
        """Most bytes that `rank` has beyond its source shards: the output and the staging."""
        rank = whole_number(rank, "rank")
        return self.output_bytes.get(rank, 0) + self.schedule(max_bytes).staging_bytes(rank)

    # -- words and files --------------------------------------------------------------------

    def explain(self, *, max_lines: int = 24, max_bytes: int | None = None) -> str:
        """What moves and what it costs, for people: a summary and a table by rank.

        The table has at most `max_lines` ranks, the busiest. `max_bytes` adds the rounds and the
        memory under that cap, and the table's peaks are those under it.
        """
        return explain_plan(self, max_lines=max_lines, max_bytes=max_bytes)

    def to_json(self) -> str:
        """Text that `from_json` reads: the layouts, the totals, a digest of layouts and moves."""
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str, *, max_moves: int = 1 << 22) -> TransferPlan:
        """The plan that `to_json` wrote, made again from its layouts and compared with the record.

        Raises a PlanError if `text` says anything else, if it was edited, or if this version of the
        library plans otherwise; an ArgumentTypeError if it is no str. Safe on text from strangers:
        nothing is executed, and plans with more than about `max_moves` moves are refused before
        they take memory.
        """
        record = PlanRecord.parse(text)
        plan = cls(record.source, record.target, record.itemsize)
        record.check(plan, max_moves=whole_number(max_moves, "max_moves"))
        return plan

    # -- value semantics --------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TransferPlan):
            return NotImplemented
        return (self.itemsize, self.source, self.target) == (
            other.itemsize,
            other.source,
            other.target,
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.source, self.target, self.itemsize))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return TransferPlan, (self.source, self.target, self.itemsize)

    def __copy__(self) -> TransferPlan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TransferPlan:
        return self

    def __repr__(self) -> str:
        return f"TransferPlan({self.source} -> {self.target}, itemsize={self.itemsize})"

    def _repr_html_(self) -> str:
        """A small picture, for notebooks."""
        from shardwise.viz.notebook import plan_html

        return plan_html(self)

    @property
    def nbytes(self) -> int:
        """Memory of its layouts and of all that has been computed so far."""
        return weight(self)
