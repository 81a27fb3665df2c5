"""From the names and patterns of a plan to the tensors and submodules of a module.

[Note: patterns] A key is a dotted name or a pattern, as fnmatch has them: `*` stands for any text,
dots included, `?` for one character, `[0-9]` for one of a set. So `layers.*.weight` is also
`layers.0.mlp.up.weight`. A key for tensors means all that it matches. A key for submodules means,
of those that it matches inside each other, the outermost: `layers.*` is each layer, not its parts.
The module itself is "", which no pattern matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from shardwise.arguments import items
from shardwise.errors import (
    ArgumentTypeError,
    PlanNameError,
    PlanPathError,
    PlanTypeError,
    ShardingPlanError,
    ShardwiseError,
)
from shardwise.sharder import Sharder
from shardwise.sharding_plan.plan_sharder import PlanSharder
from shardwise.sharding_plan.problems import (
    all_in_one,
    claimed_twice,
    clash,
    is_pattern,
    nearest,
    quoted,
)
from shardwise.sharding_spec.short import parse_spec
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch import nn

    from shardwise.sharding_plan.api import Meaning, ShardingPlan

__all__ = ["INPUT_WORDS", "Matched", "PlannedTensor", "inside", "match"]

INPUT_WORDS = ("local_rows", "replicated")  # what `input_plan` may say that is no spec
_INPUTS = '"local_rows", "replicated" or a spec'


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A parameter or buffer that is to be sharded: once, also if it has several names."""

    names: tuple[str, ...]  # dotted, all that the model has for it: several if it is tied
    tensor: torch.Tensor
    spec: ShardingSpec


@dataclass(frozen=True, slots=True)
class Matched:
    """What a plan means for a module. The plans of `PlanSharder` entries are part of it."""

    tensors: tuple[PlannedTensor, ...]
    sharders: tuple[tuple[str, Sharder], ...]  # those that have no plan
    outputs: tuple[tuple[str, ShardingSpec], ...]
    locals: tuple[str, ...]  # modules that return the local tensor
    inputs: tuple[tuple[str, Meaning], ...]


def match(plan: ShardingPlan, module: nn.Module, ranks: Sequence[int], device: str) -> Matched:
    """What `plan` means for `module` over these ranks. [Note: patterns]

    Pure: nothing moves. Raises one `ShardingPlanError` that lists all that is wrong, of the type
    that the first problem has: a `PlanTypeError`, say, which is a TypeError as well.
    """
    reader = _Reader.of(module, tuple(ranks), device)
    reader.read(plan, "")
    matched = Matched(
        tuple(reader.planned()),
        tuple((path, found[0].value) for path, found in reader.sharders.items()),
        tuple(reader.settled(reader.outputs)),
        tuple(path for path, _ in reader.settled(reader.locals)),
        tuple(reader.settled(reader.inputs)),
    )
    reader.check_clashes()
    if reader.problems:
        raise all_in_one(reader.problems, type(module).__name__)
    return matched


def inside(name: str, path: str) -> bool:
    """Whether `name` is `path` or below it: `fc1.weight` is inside `fc1`, `fc10.weight` is not."""
    return not path or name == path or name.startswith(f"{path}.")


@dataclass(frozen=True, slots=True)
class _Claim:
    """An entry of a plan, as one of the tensors or submodules that it is for sees it."""

    by: str  # the entry, for messages
    value: Any


_Claims = dict[str, list[_Claim]]  # by name or path


@dataclass(slots=True)
class _Reader:
    """Reads entries: what they claim, and what is wrong with them."""

    tensors: dict[str, torch.Tensor]
    modules: dict[str, nn.Module]
    ranks: tuple[int, ...]
    device: str
    tied: dict[int, list[str]]  # by id of the tensor: all its names
    problems: list[ShardwiseError] = field(default_factory=list)
    specs: _Claims = field(default_factory=dict)
    sharders: _Claims = field(default_factory=dict)
    outputs: _Claims = field(default_factory=dict)
    locals: _Claims = field(default_factory=dict)
    inputs: _Claims = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, ranks: tuple[int, ...], device: str) -> _Reader:
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        tied: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            tied.setdefault(id(tensor), []).append(name)
        return cls(tensors, dict(module.named_modules(remove_duplicate=False)), ranks, device, tied)

    # -- entries -------------------------------------------------------------------------------

    def read(self, plan: ShardingPlan, prefix: str, of: str = "") -> None:
        """Takes all entries of a plan for the submodule `prefix`; `of` says whose plan it is."""
        for key, value, by in self._entries(plan.plan, "plan", of):
            if isinstance(value, Sharder):
                self._read_sharder(key, value, prefix, by)
            elif isinstance(value, ShardingSpec | str):
                self._read_spec(key, value, prefix, by)
            else:
                self._add(
                    PlanTypeError(
                        f"Only `ShardingSpec` and `Sharder` are supported to shard {by}",
                        expected="a spec, its text or a Sharder",
                        got=type(value).__name__,
                    )
                )
        for key, value, by in self._entries(plan.output_plan, "output_plan", of):
            if not isinstance(value, ShardingSpec | str):
                self._add(
                    PlanTypeError(
                        f"Only `ShardingSpec` is supported as output_plan {by}",
                        expected="a spec or its text",
                        got=type(value).__name__,
                    )
                )
            elif (spec := self._spec(value, by)) is not None:
                self._claim(self.outputs, self._submodules(key, prefix, by), by, spec)
        for key, value, by in self._entries(plan.input_plan, "input_plan", of):
            self._read_input(key, value, prefix, by)
        for key, by in self._listed(plan.return_local_tensor, of):
            self._claim(self.locals, self._submodules(key, prefix, by), by, None)

    def _entries(self, entries: object, field: str, of: str) -> Iterator[tuple[str, Any, str]]:
        """Key, value and a name for messages of every entry that has a key."""
        if entries is None:
            return
        if not isinstance(entries, Mapping):
            self._add(
                PlanTypeError(
                    f"ShardingPlan.{field}{of}",
                    expected="a dict from names to what they get",
                    got=type(entries).__name__,
                )
            )
            return
        for key, value in entries.items():
            if isinstance(key, str):
                yield key, value, f"{key!r} of {field}{of}"
            else:
                self._add(
                    PlanTypeError(f"key of {field}{of}", expected="a dotted name", got=repr(key))
                )

    def _listed(self, names: object, of: str) -> Iterator[tuple[str, str]]:
        try:
            listed = [] if names is None else items(names, "return_local_tensor", of="names")
        except ArgumentTypeError as error:
            self._add(PlanTypeError(str(error)))
            return
        for name in listed:
            if isinstance(name, str):
                yield name, f"{name!r} of return_local_tensor{of}"
            else:
                self._add(
                    PlanTypeError(
                        f"item of return_local_tensor{of}", expected="a name", got=repr(name)
                    )
                )

    def _read_spec(self, key: str, value: ShardingSpec | str, prefix: str, by: str) -> None:
        spec = self._spec(value, by)
        names = self._find(self.tensors, key, prefix)
        if not names:
            self._add(self._no_tensor(key, prefix, by))
        for name in names if spec is not None else []:
            self._check_fit(name, spec, by)
        if spec is not None:
            self._claim(self.specs, names, by, spec)

    def _read_sharder(self, key: str, sharder: Sharder, prefix: str, by: str) -> None:
        if not key and not prefix:
            self._add(
                PlanPathError(
                    "path must not be empty for custom sharder!",
                    got=f"a {type(sharder).__name__} for the model itself",
                    fix="Call its shard(model), or give it the path of a submodule.",
                )
            )
            return
        paths = self._submodules(key, prefix, by)
        if not isinstance(sharder, PlanSharder):
            self._claim(self.sharders, paths, by, sharder)
            return
        done: set[int] = set()  # modules with several paths are sharded once
        for path in paths:
            if id(self.modules[path]) not in done:
                done.add(id(self.modules[path]))
                self._expand(sharder, path)

    def _expand(self, sharder: PlanSharder, path: str) -> None:
        of = f" of the {type(sharder).__name__} at {path!r}"
        try:
            plan = sharder.plan(self.modules[path], self.ranks)
        except ShardwiseError as error:
            self._add(ShardingPlanError(f"plan{of}: {error}"))
            return
        self.read(plan, path, of)

    def _read_input(self, key: str, value: Any, prefix: str, by: str) -> None:
        meaning: Any = value
        is_text = isinstance(value, str)
        if not is_text and not isinstance(value, ShardingSpec):
            self._add(PlanTypeError(by, expected=_INPUTS, got=type(value).__name__))
            return
        if is_text and value not in INPUT_WORDS and "(" not in value:
            fix = 'A spec may be text: "chunk(0)".'
            self._add(ShardingPlanError(by, expected=_INPUTS, got=repr(value), fix=fix))
            return
        if value not in INPUT_WORDS:
            meaning = self._spec(value, by)
        if meaning is not None:
            self._claim(self.inputs, self._submodules(key, prefix, by), by, meaning)

    def _spec(self, value: ShardingSpec | str, by: str) -> ShardingSpec | None:
        """The spec that an entry gives, if its text can be read."""
        if not isinstance(value, str):
            return value
        try:
            return parse_spec(value, ranks=self.ranks, device=self.device)
        except ShardwiseError as error:
            self._add(ShardingPlanError(f"{by}: {error}"))
            return None

    def _check_fit(self, name: str, spec: ShardingSpec | None, by: str) -> None:
        assert spec is not None
        shape = tuple(self.tensors[name].shape)
        what = f"{name!r} of shape {shape}, by {by}"
        try:
            found = spec.layout(shape).ranks
        except Exception as error:  # a user's spec may raise anything
            self._add(ShardingPlanError(f"{what}: {error}"))
            return
        if strange := sorted(set(found) - set(self.ranks)):
            self._add(
                ShardingPlanError(
                    f"{what}: Global rank {strange[0]} does not exist in input process group",
                    expected=f"ranks of {list(self.ranks)}",
                    got=strange,
                )
            )

    # -- names -----------------------------------------------------------------------------------

    def _find(self, names: Iterable[str], key: str, prefix: str) -> list[str]:
        """Names inside `prefix` that the key is or matches. [Note: patterns]"""
        start = f"{prefix}." if prefix else ""
        if not is_pattern(key):
            whole = start + key if key else prefix
            return [whole] if whole in names else []
        return [
            name
            for name in names
            if name.startswith(start) and name != prefix and fnmatchcase(name[len(start) :], key)
        ]

    def _submodules(self, key: str, prefix: str, by: str) -> list[str]:
        """Paths that the key is for: of those inside each other, the outermost."""
        outermost: list[str] = []
        for path in self._find(self.modules, key, prefix):  # parents come before their parts
            if not any(inside(path, other) for other in outermost):
                outermost.append(path)
        if not outermost and not self._is_unknown_yet(key, prefix):
            self._add(self._no_module(key, prefix, by))
        elif not outermost:
            outermost.append(f"{prefix}.{key}" if prefix else key)
        return outermost

    def _is_unknown_yet(self, key: str, prefix: str) -> bool:
        """Whether a path may be a part of what a Sharder will put in place of a submodule."""
        whole = f"{prefix}.{key}" if prefix else key
        return not is_pattern(key) and any(inside(whole, path) for path in self.sharders)

    def _no_tensor(self, key: str, prefix: str, by: str) -> PlanNameError:
        fix = nearest(key, [name for name in self.tensors if inside(name, prefix)], prefix)
        if paths := self._find(self.modules, key, prefix):
            below = [name for name in self.tensors if inside(name, paths[0])]
            fix = f"It is a submodule: take a Sharder, or name its tensors: {quoted(below)}."
        return PlanNameError(
            f"{by}: the model has no attribute (parameter or buffer) so named", fix=fix
        )

    def _no_module(self, key: str, prefix: str, by: str) -> PlanNameError:
        fix = nearest(key, [path for path in self.modules if path and inside(path, prefix)], prefix)
        if names := self._find(self.tensors, key, prefix):
            fix = f"{names[0]!r} is a tensor: give it a spec in `plan`."
        return PlanNameError(f"{by}: the model has no attribute (submodule) so named", fix=fix)

    # -- claims ----------------------------------------------------------------------------------

    def _claim(self, claims: _Claims, names: Iterable[str], by: str, value: Any) -> None:
        for name in names:
            claims.setdefault(name, []).append(_Claim(by, value))

    def planned(self) -> Iterator[PlannedTensor]:
        """What the specs are for, once each; adds what is claimed twice to the problems."""
        done: set[int] = set()
        for name, claims in self.specs.items():
            tensor = self.tensors[name]
            if len(claims) > 1:
                self._add(claimed_twice(repr(name), [c.by for c in claims]))
            if id(tensor) in done:
                continue
            done.add(id(tensor))
            tied = tuple(self.tied[id(tensor)])
            self._check_tied(tied, tensor)
            yield PlannedTensor(tied, tensor, claims[0].value)

    def _check_tied(self, names: tuple[str, ...], tensor: torch.Tensor) -> None:
        """Adds a problem if names of one tensor get specs that differ for it."""
        shape = tuple(tensor.shape)
        claims = [claim for name in names for claim in self.specs.get(name, ())[:1]]
        if len(claims) < 2:
            return
        try:
            layouts = {claim.value.layout(shape) for claim in claims}
        except Exception:  # which `_check_fit` has said
            return
        if len(layouts) > 1:
            self._add(
                claimed_twice(
                    f"{' = '.join(map(repr, names))}, one tied tensor,", [c.by for c in claims]
                )
            )

    def settled(self, claims: _Claims) -> Iterator[tuple[str, Any]]:
        """Path and value of what is claimed, once per module; adds contradictions."""
        first: dict[int, _Claim] = {}
        for path, found in claims.items():
            module = self.modules.get(path)
            if any(claim.value != found[0].value for claim in found):
                self._add(claimed_twice(repr(path), [c.by for c in found]))
                continue
            known = first.setdefault(id(module), found[0]) if module is not None else found[0]
            if known is found[0]:
                yield path, found[0].value
            elif known.value != found[0].value:
                self._add(
                    claimed_twice(
                        f"{path!r}, a module with several paths,", [known.by, found[0].by]
                    )
                )

    def check_clashes(self) -> None:
        """Adds a problem for every entry inside a submodule that a Sharder shards."""
        for path, claims in self.sharders.items():
            for other in claims[1:]:
                self._add(clash(other.by, path, claims[0].by))
            for name, others in self.specs.items():
                if any(inside(one, path) for one in self.tied[id(self.tensors[name])]):
                    self._add(clash(others[0].by, path, claims[0].by))
            for inner, others in self.sharders.items():
                if inner != path and inside(inner, path):
                    self._add(clash(others[0].by, path, claims[0].by))

    def _add(self, problem: ShardwiseError) -> None:
        self.problems.append(problem)
