"""A plan and a model in a table: every tensor, its spec, and what each rank holds of it."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from shardwise.arguments import whole_numbers
from shardwise.comm import communicator
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharding_plan.matching import inside, match
from shardwise.sharding_plan.problems import starred
from shardwise.sharding_spec.on_device import on_device
from shardwise.sharding_spec.text import spec_text
from shardwise.transfer.units import format_bytes
from shardwise.words import dtype_name, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from rich.console import RenderableType
    from torch import nn

    from shardwise.sharding_plan.api import ShardingPlan
    from shardwise.sharding_plan.matching import Matched, PlannedTensor

__all__ = ["PlanRow", "PlanTable", "explain_plan"]

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A parameter or buffer, or several that differ in the numbers of their names only."""

    names: tuple[str, ...]  # several if it is tied
    shape: tuple[int, ...]
    dtype: str
    spec: str | None  # None: the plan leaves it as it is
    before: dict[int, int]  # rank -> bytes
    after: dict[int, int]
    count: int = 1  # how many tensors these bytes are of

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "names": list(self.names),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "spec": self.spec,
            "bytes_now": dict(self.before),
            "bytes_after": dict(self.after),
        }


@dataclass(frozen=True, slots=True)
class PlanTable:
    """What a plan does to a model. Its str is a table; rich prints it, too."""

    model: str
    rows: tuple[PlanRow, ...]  # one per tensor
    sharders: tuple[str, ...]  # paths of submodules of which a Sharder decides

    @property
    def bytes_now(self) -> dict[int, int]:
        """Bytes that each rank holds."""
        return _total([row.before for row in self.rows])

    @property
    def bytes_after(self) -> dict[int, int]:
        """Bytes that each rank will hold; what a Sharder decides about counts as it is now."""
        return _total([row.after for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """The table as plain values: a dict per tensor, and the sums by rank."""
        return {
            "model": self.model,
            "tensors": [row.to_dict() for row in self.rows],
            "now": _summary(self.bytes_now),
            "after": _summary(self.bytes_after),
            "by_sharder": list(self.sharders),
        }

    def __str__(self) -> str:
        console = Console(width=_WIDTH, file=io.StringIO(), color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())

    def __rich__(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("parameter", overflow="fold")
        table.add_column("shape", no_wrap=True)
        table.add_column("spec", overflow="fold")
        held = self._held()
        for word, _ in held:
            table.add_column(f"{word} / rank", justify="right", no_wrap=True)
        for row in _folded(self.rows):
            name = " = ".join(row.names) + (f" (x{row.count})" if row.count > 1 else "")
            shape = "x".join(map(str, row.shape)) or "0-d"
            spans = [_span(row.before), _span(row.after)][-len(held) :]
            table.add_row(*[Text(cell) for cell in (name, shape, row.spec or "-", *spans)])
        lines = [f"{word:6}{_in_words(on_ranks)}" for word, on_ranks in held]
        if self.sharders:
            lines.append(f"as now: what Sharders decide about, {', '.join(self.sharders)}")
        head = f"{self.model}, {plural(len(self.rows), 'tensor')}"
        return Group(Text(head), Text(), table, Text(), *map(Text, lines))

    def _held(self) -> list[tuple[str, dict[int, int]]]:
        """Of a model on the meta device only what will be: now it holds nothing."""
        now, after = ("now", self.bytes_now), ("after", self.bytes_after)
        return [now, after] if any(now[1].values()) or not any(after[1].values()) else [after]


def explain_plan(
    plan: ShardingPlan, model: nn.Module, ranks: Sequence[int] | None = None
) -> PlanTable:
    """The table of a plan; raises as `match` does. Moves nothing."""
    over = tuple(communicator().ranks) if ranks is None else whole_numbers(ranks, "ranks")
    matched = match(plan, model, over, "cpu")
    rows = [_row(names, tensor, matched, over) for names, tensor in _tensors_of(model).values()]
    return PlanTable(type(model).__name__, tuple(rows), tuple(path for path, _ in matched.sharders))


def _tensors_of(model: nn.Module) -> dict[int, tuple[tuple[str, ...], torch.Tensor]]:
    """Parameters and buffers by id, each once, with all its names."""
    found: dict[int, tuple[tuple[str, ...], torch.Tensor]] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        known = found.get(id(tensor), ((), tensor))[0]
        found[id(tensor)] = ((*known, name), tensor)
    return found


def _row(
    names: tuple[str, ...], tensor: torch.Tensor, matched: Matched, ranks: tuple[int, ...]
) -> PlanRow:
    now = _held(tensor, ranks)
    stays = {rank: now[rank] for rank in now}
    if tensor.is_meta:
        now = dict.fromkeys(now, 0)  # until it is materialised
    planned = next((one for one in matched.tensors if one.tensor is tensor), None)
    sharder = next(
        (type(one).__name__ for path, one in matched.sharders if inside(names[0], path)), None
    )
    row = PlanRow(
        names,
        tuple(tensor.shape),
        dtype_name(tensor.dtype),
        None if sharder is None else f"by {sharder}",
        now,
        stays,
    )
    return row if planned is None else _with_spec(row, planned, ranks)


def _held(tensor: torch.Tensor, ranks: tuple[int, ...]) -> dict[int, int]:
    """Bytes by rank of a tensor with data: a plain one is on every rank."""
    if isinstance(tensor, ShardedTensor):
        held = tensor.shard_layout.bytes_per_rank(tensor.element_size())
        return dict.fromkeys(ranks, 0) | held
    return dict.fromkeys(ranks, tensor.numel() * tensor.element_size())


def _with_spec(row: PlanRow, planned: PlannedTensor, ranks: tuple[int, ...]) -> PlanRow:
    # Which device it is on says little here, and would make the text of equal cuts differ.
    spec = on_device(planned.spec, row.shape, "cpu")
    text = spec_text(spec, ranks=ranks, device="cpu") or type(planned.spec).__name__
    held = spec.layout(row.shape).bytes_per_rank(planned.tensor.element_size())
    return replace(row, spec=text, after=dict.fromkeys(row.before, 0) | held)


# -- words -----------------------------------------------------------------------------------------


def _folded(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Rows that are equal but for numbers in their names as one, with the bytes of all."""
    groups: dict[Any, list[PlanRow]] = {}
    for row in rows:
        names = tuple(starred(name) for name in row.names)
        held = (tuple(row.before.items()), tuple(row.after.items()))
        groups.setdefault((names, row.shape, row.dtype, row.spec, held), []).append(row)
    return [
        group[0]
        if len(group) == 1
        else replace(
            group[0],
            names=key[0],
            before=_total([row.before for row in group]),
            after=_total([row.after for row in group]),
            count=len(group),
        )
        for key, group in groups.items()
    ]


def _total(parts: Sequence[dict[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in parts:
        for rank, held in part.items():
            found[rank] = found.get(rank, 0) + held
    return dict(sorted(found.items()))


def _fullest(held: dict[int, int]) -> int | None:
    return max(held, key=held.__getitem__) if held else None


def _summary(held: dict[int, int]) -> dict[str, Any]:
    return {"bytes": held, "total": sum(held.values()), "fullest_rank": _fullest(held)}


def _span(held: dict[int, int]) -> str:
    """`64 B`, or `0 B to 64 B` where ranks hold different amounts."""
    least, most = min(held.values()), max(held.values())
    return format_bytes(most) if least == most else f"{format_bytes(least)} to {format_bytes(most)}"


def _in_words(held: dict[int, int]) -> str:
    rank = _fullest(held)
    if rank is None:
        return "nothing"
    total = f"{format_bytes(sum(held.values()))} on {plural(len(held), 'rank')}"
    if len(set(held.values())) == 1:
        return f"{total}, {format_bytes(held[rank])} each"
    return f"{total}, the fullest is rank {rank} with {format_bytes(held[rank])}"
