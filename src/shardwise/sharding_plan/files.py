"""Plans as plain values, in YAML or JSON: to keep beside a model and to edit by hand.

Specs are text that `parse_spec` reads, built-in sharders text of the same form
(`Rowwise(output='chunk(1)')`). A spec that has no such text, of boxes one by one say, is its class
and arguments.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.arguments import items
from shardwise.errors import PlanTypeError, ShardingPlanError, ShardwiseError
from shardwise.sharder import Sharder
from shardwise.sharding_plan.matching import INPUT_WORDS
from shardwise.sharding_spec.calls import call_text, parse_call
from shardwise.sharding_spec.plain import plain_spec, spec_from_plain
from shardwise.sharding_spec.short import check_spec_text
from shardwise.sharding_spec.spec import ShardingSpec
from shardwise.sharding_spec.text import spec_text

if TYPE_CHECKING:
    from os import PathLike

    from shardwise.sharding_plan.api import ShardingPlan

__all__ = ["fields_from_plain", "plain_plan", "read_plain", "write_plain"]

_FIELDS = ("plan", "output_plan", "return_local_tensor", "input_plan")


# -- plain values ----------------------------------------------------------------------------------


def plain_plan(plan: ShardingPlan) -> dict[str, Any]:
    """The plan as dicts, lists and text; fields that it does not have are left out."""
    found: dict[str, Any] = {}
    for name in _FIELDS:
        field = getattr(plan, name)
        if isinstance(field, Mapping):
            found[name] = {key: _plain(one, f"{key!r} of {name}") for key, one in field.items()}
        elif field is not None:
            found[name] = list(field)
    return found


def _plain(entry: object, what: str) -> str | dict[str, Any]:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, ShardingSpec):
        if (text := spec_text(entry)) is not None:
            return text
        if (plain := plain_spec(entry)) is not None:
            return {plain[0]: plain[1]}
    if isinstance(entry, Sharder) and (text := _sharder_text(entry)) is not None:
        return text
    raise ShardingPlanError(
        f"{what} cannot be saved",
        expected="a built-in spec or Sharder",
        got=f"a {type(entry).__name__} of your own",
        fix="Save the rest, and set this entry in the code that loads the plan.",
    )


def fields_from_plain(plain: object, source: str = "the saved plan") -> dict[str, Any]:
    """The arguments of the ShardingPlan of which `plain_plan` gave this; checks all of it.

    Messages say that it came from `source`.
    """
    if not isinstance(plain, Mapping) or "plan" not in plain:
        raise ShardingPlanError(
            source,
            expected="a mapping with `plan`",
            got=sorted(plain) if isinstance(plain, Mapping) else type(plain).__name__,
            fix=f"Its keys are {', '.join(_FIELDS)}.",
        )
    for name in plain:
        if name not in _FIELDS:
            raise ShardingPlanError(source, expected=f"keys {', '.join(_FIELDS)}", got=repr(name))
    found: dict[str, Any] = {"plan": _entries(plain["plan"], "plan", source)}
    for name in ("output_plan", "input_plan"):
        if plain.get(name) is not None:
            found[name] = _entries(plain[name], name, source)
    if plain.get("return_local_tensor") is not None:
        found["return_local_tensor"] = items(
            plain["return_local_tensor"], f"return_local_tensor of {source}", of="names"
        )
    return found


def _entries(entries: object, field: str, source: str) -> dict[str, Any]:
    if not isinstance(entries, Mapping):
        raise PlanTypeError(
            f"{field} of {source}", expected="a mapping", got=type(entries).__name__
        )
    found = {}
    for key, value in entries.items():
        if not isinstance(key, str):
            raise PlanTypeError(
                f"key of {field} of {source}", expected="a dotted name", got=repr(key)
            )
        try:
            found[key] = _entry(value, field)
        except ShardwiseError as error:
            raise ShardingPlanError(f"{key!r} of {field} of {source}: {error}") from error
    return found


def _entry(value: object, field: str) -> Any:
    """A spec as its text; a spec without one and a Sharder as the object."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, arguments),) = value.items()
        return spec_from_plain(name, arguments)
    if not isinstance(value, str):
        raise PlanTypeError("spec", expected="text", got=type(value).__name__)
    if field == "input_plan" and value in INPUT_WORDS:
        return value
    if field == "plan" and (sharder := _sharder(value)) is not None:
        return sharder
    check_spec_text(value)
    return value


# -- sharders --------------------------------------------------------------------------------------


def _sharder_kinds() -> dict[str, type[Any]]:
    """The built-in sharders by name."""
    from shardwise import sharders

    found = {name: getattr(sharders, name) for name in sharders.__all__}
    return {name: kind for name, kind in found.items() if isinstance(kind, type)}


def _sharder_text(sharder: Sharder) -> str | None:
    """A built-in sharder as a call, with the arguments that are not the default."""
    kind = type(sharder)
    if _sharder_kinds().get(kind.__name__) is not kind:
        return None
    given = {one.name: getattr(sharder, one.name) for one in fields(kind)}
    defaults = {
        one.name: one.default_factory() if one.default_factory is not MISSING else one.default
        for one in fields(kind)
    }
    return call_text(kind.__name__, **{k: v for k, v in given.items() if v != defaults[k]})


def _sharder(text: str) -> Sharder | None:
    """The built-in sharder that the text makes; None if it begins with no such name."""
    kinds = _sharder_kinds()
    name = text.split("(")[0].strip()
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.6)
        if near and name[:1].isupper():  # as no spec is
            raise ShardingPlanError(f"no Sharder is called {name!r}", fix=f"Nearest: {near[0]!r}.")
        return None
    call = parse_call(text, fix=f"E.g. {name}().")
    try:
        sharder: Sharder = kinds[name](*call.args, **call.kwargs)
    except TypeError as error:
        raise ShardingPlanError(f"Sharder {text!r}", got=str(error)) from error
    return sharder


# -- files -----------------------------------------------------------------------------------------


def write_plain(plain: dict[str, Any], path: str | PathLike[str]) -> None:
    """Writes plain values as YAML (.yaml, .yml) or JSON (.json)."""
    import yaml

    file = Path(path)
    text = (
        json.dumps(plain, indent=2) + "\n"
        if _is_json(file)
        else yaml.dump(plain, Dumper=_dumper(), sort_keys=False, width=sys.maxsize)
    )
    file.write_text(text, encoding="utf-8")


def read_plain(path: str | PathLike[str]) -> Any:
    """The plain values of a YAML or JSON file. A key that stands twice is refused."""
    import yaml

    file = Path(path)
    is_json = _is_json(file)
    text = file.read_text(encoding="utf-8")
    try:
        if is_json:
            return json.loads(text, object_pairs_hook=_once_each)
        return yaml.load(text, _loader())
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ShardingPlanError(f"plan in {file}: {_in_short(error)}") from error
    except ShardwiseError as error:
        raise ShardingPlanError(f"plan in {file}: {error}") from error


def _in_short(error: Exception) -> str:
    """Where the text of a file ends to be YAML, in one line; JSON's error is one."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    return f"{problem}: line {mark.line + 1} column {mark.column + 1}"


def _is_json(file: Path) -> bool:
    if file.suffix not in (".json", ".yaml", ".yml"):
        raise ShardingPlanError(
            f"plan in {file}", expected=".yaml, .yml or .json", got=repr(file.suffix)
        )
    return file.suffix == ".json"


def _once_each(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The pairs as a dict. Of two equal keys the first would vanish without a word."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ShardingPlanError(f"{key!r} stands twice in the file", fix="Remove one of them.")
        found[key] = value
    return found


def _dumper() -> Any:
    """PyYAML's safe dumper, which writes every key in one line with its value, "" too."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def check_simple_key(self) -> bool:
            return bool(super().check_simple_key()) or isinstance(self.event, yaml.ScalarEvent)

    return Dumper


def _loader() -> Any:
    """PyYAML's safe loader, which refuses keys that stand twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _once_each([(self.construct_object(key, deep=True), None) for key, _ in node.value])
            return super().construct_mapping(node, deep=deep)

    return Loader
