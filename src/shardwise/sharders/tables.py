"""Embedding tables of a recommender: each cut by rows or columns, or whole on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from shardwise.arguments import is_whole_number, whole_number
from shardwise.errors import PlanTypeError, ShardingPlanError
from shardwise.sharders.text import check_output, checked_numbers, spec_words
from shardwise.sharding_plan import PlanSharder, ShardingPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EmbeddingTables"]

_WORDS = ("row", "column", "table")


@dataclass(frozen=True)
class EmbeddingTables(PlanSharder):
    """The embeddings and embedding bags inside a module, each in its way.

    `tables`: by path inside the module, which may be a pattern: "row" (the rows are cut over all
    ranks), "column" (the features are), "table" (whole, on a rank that has room: large ones are
    dealt out first), or the rank that it is whole on. Others stay as they are. `output` says where
    each one's output goes.
    """

    tables: Mapping[str, str | int] = field(default_factory=lambda: {"*": "table"})
    output: str | None = "replicate()"
    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tables, Mapping):
            raise PlanTypeError(
                "EmbeddingTables.tables",
                expected="a dict such as {'users': 'row', 'ads': 2}",
                got=type(self.tables).__name__,
            )
        for path, way in self.tables.items():
            if not is_whole_number(way) and way not in _WORDS:
                raise ShardingPlanError(
                    f"{path!r} of EmbeddingTables.tables",
                    expected=f"one of {', '.join(_WORDS)}, or a rank",
                    got=repr(way),
                )
        object.__setattr__(self, "tables", dict(self.tables))
        object.__setattr__(self, "ranks", checked_numbers(self.ranks, "EmbeddingTables.ranks"))
        check_output(self.output, "EmbeddingTables")

    def plan(self, module: nn.Module, ranks: Sequence[int]) -> ShardingPlan:
        ways = self._ways(module)
        over = tuple(ranks) if self.ranks is None else tuple(self.ranks)
        entries = {
            f"{path}.weight": spec_words("chunk", 0 if way == "row" else 1, ranks=self.ranks)
            for path, way in ways.items()
            if way in ("row", "column")
        }
        sizes = {path: module.get_parameter(f"{path}.weight").nbytes for path in ways}
        whole = {path: way for path, way in ways.items() if f"{path}.weight" not in entries}
        for path, rank in _dealt_out(whole, sizes, over).items():
            entries[f"{path}.weight"] = f"on_rank({rank})"
        outputs = None if self.output is None else dict.fromkeys(ways, self.output)
        return ShardingPlan(entries, outputs)

    def _ways(self, module: nn.Module) -> dict[str, str | int]:
        """How each table is cut; raises if a pattern has none, or a table two."""
        paths = [
            path
            for path, one in module.named_modules()
            if path and isinstance(one, nn.Embedding | nn.EmbeddingBag)
        ]
        claims = {key: [path for path in paths if fnmatchcase(path, key)] for key in self.tables}
        for key, found in claims.items():
            if not found:
                raise ShardingPlanError(
                    f"{key!r} of EmbeddingTables.tables matches nothing",
                    expected=f"one of {', '.join(paths) or 'no tables'}",
                )
        ways: dict[str, str | int] = {}
        for key, found in claims.items():
            for path in found:
                if path in ways:
                    raise ShardingPlanError(
                        f"{path!r} is claimed by several of EmbeddingTables.tables",
                        got=[one for one, all_of in claims.items() if path in all_of],
                    )
                ways[path] = self.tables[key]
        return ways


def _dealt_out(
    ways: Mapping[str, str | int], sizes: Mapping[str, int], over: tuple[int, ...]
) -> dict[str, int]:
    """The rank of every whole table: as said, or the emptiest, for the largest tables first.

    >>> _dealt_out({"a": "table", "b": 1, "c": "table"}, {"a": 2, "b": 9, "c": 5}, (0, 1, 2))
    {'b': 1, 'c': 0, 'a': 2}
    """
    load = dict.fromkeys(over, 0)
    found: dict[str, int] = {}
    # Those with a rank first, since the others go where room is left.
    for path in sorted(ways, key=lambda path: (ways[path] == "table", -sizes[path])):
        way = ways[path]
        rank = min(load, key=load.__getitem__) if way == "table" else whole_number(way, "rank")
        found[path] = rank
        load[rank] = load.get(rank, 0) + sizes[path]
    return found
