"""How much memory a plan takes with all that it has found so far: what the cache of plans counts.

Arrays are counted exactly, each once, whoever shares it. Of Python objects the many are counted, by
about what one of them takes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from shardwise.geometry import Box, Boxes, Layout
from shardwise.geometry.grid import Grid
from shardwise.transfer.moves import Moves
from shardwise.transfer.program import LocalShapes, RankProgram
from shardwise.transfer.regions import BoxJoin, GridJoin, Regions
from shardwise.transfer.schedule import Schedule
from shardwise.transfer.traffic import Traffic

if TYPE_CHECKING:
    from shardwise.transfer.plan import TransferPlan

__all__ = ["weight"]

_PLAN = 2048  # bytes of a plan and its layouts without their arrays
_PIECE = 800  # of a piece of a rank's program
_BOX = 300
_SHAPE = 100
_NUMBER = 40  # with its place in a tuple
_ITEM = 100  # of a dict, with its key
_WITH_DICT = (Layout, Moves, Schedule)
_WITH_FIELDS = (Boxes, Grid, Regions, Traffic, BoxJoin, GridJoin)


def weight(plan: TransferPlan) -> int:
    """Bytes of the plan, its layouts, schedules and programs; others may use it meanwhile."""
    count = _Count(plan)
    count.add_all(vars(plan))
    return count.nbytes


class _Count:
    """Adds up what is added, each thing once."""

    def __init__(self, plan: TransferPlan) -> None:
        self.seen = {id(plan)}
        self.nbytes = _PLAN

    def add_all(self, named: dict[str, object]) -> None:
        for value in list(named.values()):  # in one go: another thread may add to them
            self.add(value)

    def add(self, value: object) -> None:
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):  # of a view all is held
                value = value.base
            self.nbytes += 0 if self._is_known(value) else value.nbytes
        elif isinstance(value, LocalShapes):
            self.nbytes += sum(map(len, value)) * _SHAPE
        elif isinstance(value, tuple | list):
            self._add_listed(value)
        elif isinstance(value, dict):
            held = list(value.values())
            self.nbytes += len(held) * _ITEM
            self._add_listed(held)
        elif isinstance(value, RankProgram):
            self.nbytes += _num_pieces(value) * _PIECE
        elif isinstance(value, _WITH_DICT) and not self._is_known(value):
            self.add_all(vars(value))
        elif isinstance(value, _WITH_FIELDS):
            for field in fields(value):
                self.add(getattr(value, field.name))

    def _add_listed(self, values: tuple[object, ...] | list[object]) -> None:
        """All of them, which are of one kind."""
        if values and isinstance(values[0], int):
            self.nbytes += len(values) * _NUMBER
        elif values and isinstance(values[0], Box):
            self.nbytes += len(values) * _BOX
        else:
            for value in values:
                self.add(value)

    def _is_known(self, value: object) -> bool:
        known = id(value) in self.seen
        self.seen.add(id(value))
        return known


def _num_pieces(program: RankProgram) -> int:
    return sum(
        len(turn.copies)
        + len(turn.reductions)
        + sum(len(message.parts) for message in (*turn.receives, *turn.sends))
        for turn in program.rounds
    )
