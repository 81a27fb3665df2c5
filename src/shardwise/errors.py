"""Every exception that shardwise raises on purpose.

ShardwiseError
├── GeometryError        ValueError      a box or a cut that cannot be
│   └── TilingError                      boxes overlap, leave gaps or leave the tensor
├── LayoutError          ValueError      entries that are not a layout of this shape
├── PlacementError       ValueError      a placement that names no rank or no device
│   └── DeviceError      RuntimeError    a device that torch does not know
├── SpecError            ValueError      a recipe that does not fit itself or the shape
│   └── NamedDimError    NotImplementedError
├── MetadataError        ValueError      shard metadata that contradicts itself
│   ├── PickleError      RuntimeError    metadata that cannot be written or read
│   └── ShardCountError  RuntimeError    more or fewer local shards than the metadata has
├── PlanError            ValueError      layouts between which there is no plan, a cap too small
├── ShardingPlanError    ValueError      a model's plan that does not fit the model
│   ├── PlanNameError    AttributeError  an entry that names nothing in the model
│   ├── PlanTypeError    TypeError       an entry that is no spec and no Sharder
│   ├── PlanPathError    KeyError        a Sharder for the model itself
│   └── PlanClashError   RuntimeError    entries inside a submodule that a Sharder shards
├── ArgumentTypeError    TypeError       an argument of the wrong type
├── ArgumentValueError   ValueError      an argument out of its range
├── AbsentNameError      AttributeError  a name that a module does not have
├── OutOfRangeError      IndexError      an index that no element has
├── OpError              RuntimeError    an op that nothing can run on these tensors
├── LoadError            RuntimeError    a saved tensor that does not fit this rank or group
├── MissingPackageError  ImportError     a package of an extra that is not installed
├── CheckpointError      RuntimeError    a checkpoint that cannot be written or read
│   └── DamagedError                     a checkpoint of which the files are not what was saved
├── NotInitializedError  RuntimeError    a process group or RPC has to be started first
├── AgreementError       ValueError      ranks that passed different arguments, or wrong ones
├── AbsentRanksError     RuntimeError    ranks that did not come to an exchange in time
└── RankFailure          RuntimeError    a rank of `run_local` raised, died or hung

Each is also the built-in exception beside it, the one that torch raises in its place, so `except`
clauses survive the change of prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AbsentNameError",
    "AbsentRanksError",
    "AgreementError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "CheckpointError",
    "DamagedError",
    "DeviceError",
    "GeometryError",
    "LayoutError",
    "LoadError",
    "MetadataError",
    "MissingPackageError",
    "NamedDimError",
    "NotInitializedError",
    "OpError",
    "OutOfRangeError",
    "PickleError",
    "PlacementError",
    "PlanClashError",
    "PlanError",
    "PlanNameError",
    "PlanPathError",
    "PlanTypeError",
    "RankFailure",
    "ShardCountError",
    "ShardingPlanError",
    "ShardwiseError",
    "SpecError",
    "TilingError",
]

_ABSENT: Any = object()


class ShardwiseError(Exception):
    """Base of all; builds one message from its parts.

    `[rank 3] 'fc1.weight' local shard: expected (128, 64), got (127, 64). Pass the sizes ...`
    """

    def __init__(
        self,
        what: str,
        *,
        rank: int | None = None,
        expected: Any = _ABSENT,
        got: Any = _ABSENT,
        fix: str | None = None,
    ) -> None:
        parts = []
        if expected is not _ABSENT:
            parts.append(f"expected {expected}")
        if got is not _ABSENT:
            parts.append(f"got {got}")
        message = what if rank is None else f"[rank {rank}] {what}"
        if parts:
            message += ": " + ", ".join(parts)
        if fix is not None:
            end = "" if message.endswith("\n") else " " if message.endswith((".", "!")) else ". "
            message += end + fix
        # args is the finished message alone, so that pickling and re-raising in another
        # process need no keyword arguments.
        super().__init__(message)
        self.rank = rank


class GeometryError(ShardwiseError, ValueError):
    """A box or a cut that cannot be: negative sizes, sizes that do not add up."""


class TilingError(GeometryError):
    """Boxes that overlap, leave gaps or leave the tensor."""


class LayoutError(ShardwiseError, ValueError):
    """Entries that are not a layout: one rank twice, a term without an operation."""


class PlacementError(ShardwiseError, ValueError):
    """A placement that names no rank, an unknown worker or no device."""


class DeviceError(PlacementError, RuntimeError):
    """A device that torch does not know."""


class SpecError(ShardwiseError, ValueError):
    """A sharding spec that contradicts itself or does not fit the tensor's shape."""


class NamedDimError(SpecError, NotImplementedError):
    """A dim given by name; dims are integers."""


class MetadataError(ShardwiseError, ValueError):
    """Shard metadata that contradicts itself."""


class PickleError(MetadataError, RuntimeError):
    """Metadata that cannot be written to a pickle or read from one."""


class ShardCountError(MetadataError, RuntimeError):
    """Local shards of which the metadata has another number."""


class PlanError(ShardwiseError, ValueError):
    """Layouts between which there is no plan, or a memory cap that nothing fits under."""


class ShardingPlanError(ShardwiseError, ValueError):
    """A plan for a model that does not fit it, or a file that holds none."""


class PlanNameError(ShardingPlanError, AttributeError):
    """An entry of a plan that names no tensor or no submodule of the model."""


class PlanTypeError(ShardingPlanError, TypeError):
    """An entry of a plan that is neither a spec nor a Sharder."""


class PlanPathError(ShardingPlanError, KeyError):
    """A Sharder whose path is empty."""

    __str__ = Exception.__str__  # KeyError's shows its message in quotes


class PlanClashError(ShardingPlanError, RuntimeError):
    """An entry of a plan inside a submodule that a Sharder shards."""


class ArgumentTypeError(ShardwiseError, TypeError):
    """An argument of the wrong type."""


class ArgumentValueError(ShardwiseError, ValueError):
    """An argument out of its range."""


class AbsentNameError(ShardwiseError, AttributeError):
    """A name that a module does not have."""


class OutOfRangeError(ShardwiseError, IndexError):
    """An index that no element has."""


class OpError(ShardwiseError, RuntimeError):
    """An op that nothing can run on these tensors."""


class LoadError(ShardwiseError, RuntimeError):
    """A saved tensor that does not fit this rank or its group, or a file that is damaged."""


class MissingPackageError(ShardwiseError, ImportError):
    """A package that this needs, and that only an extra of shardwise installs."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that cannot be written or read."""


class DamagedError(CheckpointError):
    """A checkpoint of which the files are not what was saved: cut off, changed, missing."""


class NotInitializedError(ShardwiseError, RuntimeError):
    """A process group or RPC that the call needs has not been started."""


class AgreementError(ShardwiseError, ValueError):
    """Ranks that passed different arguments, or of which some passed wrong ones."""


class AbsentRanksError(ShardwiseError, RuntimeError):
    """Ranks that did not come to an exchange in time; `ranks` are the absent ones."""

    def __init__(self, what: str, *, ranks: Sequence[int] = (), **parts: Any) -> None:
        super().__init__(what, **parts)
        self.ranks = tuple(ranks)


class RankFailure(ShardwiseError, RuntimeError):
    """One or more ranks of `run_local` raised, died or hung; holds every rank's story."""

    def __init__(
        self, what: str, *, failures: Mapping[int, str] | None = None, **parts: Any
    ) -> None:
        super().__init__(what, **parts)
        self.failures = dict(failures or {})  # rank -> its story, the first failure first
