"""`shardwise plan`: a model, a plan and a number of ranks; bytes per rank, and bytes per step."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from shardwise.cli.options import Json  # noqa: TC001  # typer reads the annotations
from shardwise.cli.words import find_dtype
from shardwise.errors import ArgumentTypeError, ArgumentValueError
from shardwise.words import headline

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from shardwise.cli.rehearsal import InputShape, Rehearsal
    from shardwise.sharding_plan import ShardingPlan
    from shardwise.sharding_plan.explaining import PlanTable

__all__ = ["plan"]

_MOST_RANKS = 4096  # each is a thread while a step is rehearsed


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="model.py:make, a function without arguments that makes the model; or the "
            "config.json of a Hugging Face model (llama, mistral, qwen2, qwen3)."
        ),
    ],
    world_size: Annotated[int, typer.Option(min=1, max=_MOST_RANKS, help="Number of ranks.")] = 4,
    plan_source: Annotated[
        str | None,
        typer.Option(
            "--plan",
            help="plan.yaml or plan.json, as ShardingPlan.save writes it; or plans.py:name, a "
            "ShardingPlan or a function of the world size. For a config.json: tensor parallel.",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="A tensor that a step calls the model with, such as 8x512:int64; once for each.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a plan makes of a model: bytes per rank, and what a step sends.

    Nothing is allocated: the model is made on the meta device, whatever its
    size. With --input a step, forward and backward, is rehearsed on simulated
    ranks, and what it would send is listed.

    \b
    Examples:
      shardwise plan model.py:make --plan plan.yaml --world-size 8
      shardwise plan model.py:make --plan plan.yaml --input 8x512:int64
      shardwise plan Llama-3.1-8B/config.json --world-size 8 --input 1x4096
      shardwise plan config.json --plan plans.py:uneven --json
    """
    found = _subject(model)
    given = _plan(plan_source, found, world_size)
    shapes = [_input_shape(text) for text in inputs or found.inputs]
    # Imported here: torch takes seconds, and --help should not.
    import torch

    with torch.device("meta"):
        made = found.make()
    table = given.explain(made, ranks=range(world_size))
    rehearsal = _rehearsal(found, given, world_size, shapes) if shapes else None
    if as_json:
        print(json.dumps(_values(table, rehearsal, world_size), indent=2))
    else:
        _show(table, rehearsal)


class _Subject(NamedTuple):
    """The model that is asked about."""

    make: Callable[[], nn.Module]
    plan: ShardingPlan | None  # that it has if none is given
    inputs: list[str]
    is_users: bool  # whether its code is a user's


# -- what was asked --------------------------------------------------------------------------------


def _subject(source: str) -> _Subject:
    if source.endswith(".json"):
        from shardwise.cli.language_models import CausalModel, length_of_text, tensor_parallel_plan

        config = _config(Path(source))
        inputs = [f"1x{length_of_text(config)}"]
        default = tensor_parallel_plan(config)
        return _Subject(lambda: CausalModel(config), default, inputs, is_users=False)
    return _Subject(_factory(source), None, [], is_users=True)


def _config(path: Path) -> dict[str, Any]:
    text = _read(path, "config.json")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ArgumentValueError(f"{path}", expected="an object", got=type(found).__name__)
    return found


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise ArgumentValueError(f"{what} {str(path)!r}: {reason}") from None


def _factory(source: str) -> Callable[[], nn.Module]:
    from torch import nn

    maker = _named(source, "MODEL", "model.py:make, or a config.json")
    if not callable(maker):
        raise ArgumentTypeError(
            f"{source}", expected="a function that makes the model", got=type(maker).__name__
        )

    def make() -> nn.Module:
        made = _called(source, maker)
        if not isinstance(made, nn.Module):
            raise ArgumentTypeError(
                f"what {source} returns", expected="a torch.nn.Module", got=type(made).__name__
            )
        return made

    return make


def _called(source: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise ArgumentValueError(f"{source} raises {headline(error)}") from error


def _named(source: str, what: str, expected: str) -> Any:
    """The object of `file.py:name`. The file runs as the program that it is a part of would."""
    file, _, name = source.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ArgumentValueError(what, expected=expected, got=repr(source))
    path = Path(file)
    _read(path, "file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where dataclasses look for themselves
    sys.path.insert(0, str(path.parent.resolve()))  # for what the file imports, now or later
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ArgumentValueError(f"{file} cannot be run: {headline(error)}") from error
    if not hasattr(module, name):
        raise ArgumentValueError(f"{file} has no {name!r}", fix=f"Pass {file}:NAME of one it has.")
    return getattr(module, name)


def _plan(source: str | None, subject: _Subject, world_size: int) -> ShardingPlan:
    from shardwise.sharding_plan import ShardingPlan

    if source is None:
        if subject.plan is None:
            raise ArgumentValueError(
                "--plan", expected="plan.yaml, plan.json or plans.py:name", got="none"
            )
        return subject.plan
    if not source.endswith((".yaml", ".yml", ".json")):
        found = _named(source, "--plan", "plan.yaml, plan.json or plans.py:name")
        if callable(found):
            found = _called(source, lambda: found(world_size))
        if not isinstance(found, ShardingPlan):
            raise ArgumentTypeError(
                f"{source}", expected="a ShardingPlan", got=type(found).__name__
            )
        return found
    _read(Path(source), "plan")
    return ShardingPlan.load(source)


def _input_shape(text: str) -> InputShape:
    from shardwise.cli.rehearsal import InputShape

    sizes, _, name = text.partition(":")
    dtype = find_dtype(name or "int64")
    if not re.fullmatch(r"\d{1,18}(x\d{1,18})*", sizes) or dtype is None:
        raise ArgumentValueError(
            "--input", expected="sizes and a dtype such as 8x512:int64", got=repr(text[:60])
        )
    return InputShape(tuple(map(int, sizes.split("x"))), dtype)


def _rehearsal(
    subject: _Subject, given: ShardingPlan, world_size: int, shapes: list[InputShape]
) -> Rehearsal:
    from rich.console import Console

    from shardwise.cli.rehearsal import rehearse

    with Console(stderr=True).status(f"rehearsing a step on {world_size} ranks"):
        return rehearse(subject.make, given, world_size, shapes, names_lines=subject.is_users)


# -- what is shown ---------------------------------------------------------------------------------


def _values(table: PlanTable, rehearsal: Rehearsal | None, world_size: int) -> dict[str, Any]:
    step: dict[str, Any] | None = None
    if rehearsal is not None:
        step = {
            "problem": rehearsal.problem,
            "bytes_sent": rehearsal.sent,
            "ops": [
                {"op": line.op, "at": line.at, "times": line.times, "bytes_sent": line.sent}
                for line in rehearsal.lines
            ],
        }
    return {"world_size": world_size, **table.to_dict(), "step": step}


def _show(table: PlanTable, rehearsal: Rehearsal | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(table)
    console.print()
    if rehearsal is None:
        console.print("Pass --input 8x512:int64, say, to see what a step sends.")
    elif rehearsal.problem is not None:
        problem = f"What a step sends is not known; without data it raises {rehearsal.problem}"
        console.print(problem, markup=False)
    else:
        _show_step(rehearsal, console)


def _show_step(rehearsal: Rehearsal, console: Any) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from shardwise.transfer.units import format_bytes

    if not any(rehearsal.sent.values()):
        console.print("A step, forward and backward, sends nothing.")
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("sent in a step", overflow="fold")
    has_lines = any(line.at for line in rehearsal.lines)
    for title in ("at", "times", "most / rank", "all ranks")[0 if has_lines else 1 :]:
        table.add_column(title, justify="left" if title == "at" else "right", no_wrap=True)
    rows = [(one.op, one.at, str(one.times), one.sent) for one in rehearsal.lines]
    times = sum(one.times for one in rehearsal.lines)
    for op, at, count, sent in [*rows, ("together", "", str(times), rehearsal.sent)]:
        most, total = format_bytes(max(sent.values())), format_bytes(sum(sent.values()))
        cells = [op, at, count, most, total] if has_lines else [op, count, most, total]
        table.add_row(*map(Text, cells))
    console.print(table)
