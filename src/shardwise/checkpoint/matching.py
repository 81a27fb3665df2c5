"""What of a checkpoint goes into which tensor of a state: a pure function of names and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwise.checkpoint.mapping import sources_of
from shardwise.errors import CheckpointError
from shardwise.sharding_plan.problems import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.checkpoint.index import Index
    from shardwise.checkpoint.mapping import Map, Source
    from shardwise.checkpoint.mosaics import Mosaic
    from shardwise.checkpoint.saved_state import SavedState
    from shardwise.checkpoint.targets import Targets

__all__ = ["LoadedKeys", "Matched", "check_keys", "match"]

_MOST_SHOWN = 10


class LoadedKeys(NamedTuple):
    """What `load` found besides what it loaded as it was."""

    missing: list[str]  # of the state, not in the checkpoint: they keep their values
    unexpected: list[str]  # in the checkpoint, but not in the state
    converted: list[str]  # of the state, saved in another dtype

    def __repr__(self) -> str:
        if not any(self):
            return "<All keys loaded>"
        parts = (f"{name}={value!r}" for name, value in self._asdict().items() if value)
        return f"LoadedKeys({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Matched:
    """What the tensors of a state are made of, and the names that have no partner."""

    mosaics: dict[str, Mosaic]
    keys: LoadedKeys
    wanted: dict[str, tuple[str, ...]]  # of missing tensors: the saved ones that are not there


def match(targets: Targets, saved: SavedState, rules: Map | None) -> Matched:
    """Raises, about all of them, where shapes, dtypes or rules do not fit."""
    index = saved.index
    sources = sources_of(targets.tensors, rules)
    shapes = {name: tensor.shape for name, tensor in index.tensors.items()}
    problems: list[str] = []
    mosaics: dict[str, Mosaic] = {}
    wanted: dict[str, tuple[str, ...]] = {}
    for name, source in sources.items():
        if source is None:
            continue
        absent = tuple(one for one in source.names if one not in shapes)
        if absent:
            wanted[name] = absent
            problems += [_no_tensor(name, one) for one in absent if one in saved.values]
            continue
        try:
            mosaics[name] = _checked(name, targets.tensors[name], source, index)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise _misfit(problems, index)
    # A tied parameter that files have by one name only, as Hugging Face's do, gets its values.
    filled = {id(targets.tensors[name]) for name in mosaics}
    wanted = {name: one for name, one in wanted.items() if id(targets.tensors[name]) not in filled}
    used = {one for name in mosaics for one in _names(sources[name])}
    missing = [*wanted, *targets.missing]
    unexpected = [one for one in shapes if one not in used]
    unexpected += [one for one in saved.values if one not in targets.taken]
    converted = [
        name
        for name in mosaics
        if {index.tensors[one].dtype for one in _names(sources[name])}
        != {targets.tensors[name].dtype}
    ]
    return Matched(mosaics, LoadedKeys(missing, unexpected, converted), wanted)


def _names(source: Source | None) -> tuple[str, ...]:
    return () if source is None else source.names


def _checked(name: str, tensor: torch.Tensor, source: Source, index: Index) -> Mosaic:
    """The windows of a tensor, if they have its shape and dtypes that it can hold."""
    mosaic = source.mosaic({one: index.tensors[one].shape for one in source.names})
    origin = "" if source.names == (name,) else f" (from {', '.join(source.names)})"
    if mosaic.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{name!r}{origin}",
            expected=f"shape {tuple(tensor.shape)}, as in the state",
            got=f"{mosaic.shape} in the checkpoint",
        )
    for one in source.names:
        if not _can_hold(tensor.dtype, index.tensors[one].dtype):
            raise CheckpointError(
                f"{name!r}{origin}",
                expected=f"a dtype that {tensor.dtype} can hold",
                got=f"{index.tensors[one].dtype} in the checkpoint",
                fix="Load it into a tensor of that dtype, and convert it yourself.",
            )
    return mosaic


def _can_hold(to: torch.dtype, saved: torch.dtype) -> bool:
    """Whether values may be converted: floats may be rounded, other values must stay."""
    if to == saved or to.is_complex:
        return True
    if to.is_floating_point:
        return not saved.is_complex
    if saved == torch.bool:
        return True
    if to == torch.bool or saved.is_floating_point or saved.is_complex:
        return False
    own, other = torch.iinfo(to), torch.iinfo(saved)
    return own.min <= other.min and other.max <= own.max


def _no_tensor(name: str, saved_name: str) -> str:
    return f"{name!r}: expected a tensor, got a plain value {saved_name!r} in the checkpoint."


def _misfit(problems: Sequence[str], index: Index) -> CheckpointError:
    head = f"checkpoint {str(index.path)!r} does not fit the state"
    if len(problems) == 1:
        return CheckpointError(f"{head}: {problems[0]}", fix="Nothing was loaded.")
    lines = [f"  {number}. {one}" for number, one in enumerate(problems[:_MOST_SHOWN], 1)]
    if len(problems) > _MOST_SHOWN:
        lines.append(f"  and {len(problems) - _MOST_SHOWN} more")
    text = "\n".join([f"{head}, {len(problems)} problems:", *lines])
    return CheckpointError(text + "\n", fix="Nothing was loaded.")


def check_keys(
    missing: Sequence[str],
    unexpected: Sequence[str],
    wanted: Mapping[str, tuple[str, ...]],
    index: Index,
) -> None:
    """Raises if names are missing or unexpected, with those that are near; `wanted` of `Matched`.

    Some may be missing on other ranks.
    """
    if not missing and not unexpected:
        return
    lines = []
    for name in missing[:_MOST_SHOWN]:
        absent = wanted.get(name, (name,))
        origin = "" if absent == (name,) else f", which is made of {', '.join(absent)}"
        near = _near(absent[0], unexpected or list(index.tensors))
        if absent[0] in index.unreadable:
            near = f" It cannot be read: {index.unreadable[absent[0]]}"
        lines.append(f"  missing in the checkpoint: {name!r}{origin}.{near}")
    if len(missing) > _MOST_SHOWN:
        lines.append(f"  and {len(missing) - _MOST_SHOWN} more that are missing")
    lines += [
        f"  not in the state: {name!r}.{_near(name, missing)}" for name in unexpected[:_MOST_SHOWN]
    ]
    if len(unexpected) > _MOST_SHOWN:
        lines.append(f"  and {len(unexpected) - _MOST_SHOWN} more that are not in the state")
    raise CheckpointError(
        "\n".join([f"checkpoint {str(index.path)!r} and the state differ:", *lines]) + "\n",
        fix="Nothing was loaded. Pass strict=False to load the rest, or map={...} to rename.",
    )


def _near(name: str, others: Sequence[str]) -> str:
    return f" {nearest(name, list(others), '')}" if others else ""
