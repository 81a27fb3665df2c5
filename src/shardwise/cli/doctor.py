"""`shardwise doctor`: what is installed here, and whether two local ranks can work together."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import Json  # noqa: TC001  # typer reads the annotations

if TYPE_CHECKING:
    import torch

__all__ = ["Finding", "doctor", "findings", "self_test"]

_TESTED_TORCH = ("2.11", "2.13")  # versions that the tests were run with
_EXTRAS = {"matplotlib": "viz", "hypothesis": "testing"}  # package -> the extra that brings it
_SECONDS = 60.0  # after which the self test is given up


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    found: str
    is_fine: bool = True


def doctor(
    test: Annotated[
        bool, typer.Option("--test/--no-test", help="Run the self test on two local ranks.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Look whether this machine can run shardwise.

    Versions, backends, GPUs and settings, then a self test of some ten
    seconds: two local ranks cut a tensor, move it and train a step, and
    compare with one process. The exit status is 1 if something is wrong.

    \b
    Examples:
      shardwise doctor
      shardwise doctor --no-test
      shardwise doctor --json > report.json
    """
    found = findings()
    if test:
        found.append(self_test())
    is_fine = all(one.is_fine for one in found)
    if as_json:
        listed = [{"what": one.what, "found": one.found, "fine": one.is_fine} for one in found]
        print(json.dumps({"fine": is_fine, "findings": listed}, indent=2))
    else:
        _show(found)
    raise typer.Exit(0 if is_fine else 1)


def findings() -> list[Finding]:
    """What is here, without starting anything."""
    import torch
    import torch.distributed as dist

    from shardwise import __version__

    found = [
        Finding("shardwise", __version__),
        Finding("python", platform.python_version()),
        _torch_version(torch.__version__),
        Finding("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in torch"),
    ]
    if not dist.is_available():
        fix = "absent from this build of torch; install one that has it"
        found.append(Finding("torch.distributed", fix, is_fine=False))
    else:
        kinds = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        found += [Finding(name, "there" if has else "absent") for name, has in kinds.items()]
    found += _gpus()
    for name in _needed():
        found.append(Finding(name, _version(name) or "absent", bool(_version(name))))
    for name, extra in _EXTRAS.items():
        fix = f"absent; pip install 'shardwise[{extra}]' brings it"
        found.append(Finding(name, _version(name) or fix))
    found += [
        Finding(name, value) for name, value in os.environ.items() if name.startswith("SHARDWISE_")
    ]
    return found


def _torch_version(version: str) -> Finding:
    if version.startswith(tuple(f"{one}." for one in _TESTED_TORCH)):
        return Finding("torch", version)
    return Finding("torch", f"{version}, untested: the tests ran with {', '.join(_TESTED_TORCH)}")


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [Finding("gpu", "none that torch can use")]
    listed = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    return [
        Finding(f"gpu {k}", f"{one.name}, {one.total_memory / 2**30:.0f} GiB")
        for k, one in enumerate(listed)
    ]


def _needed() -> list[str]:
    """Packages that this one needs, but torch, which has a line of its own."""
    if _version("shardwise") is None:  # run from a folder that nobody installed
        return []
    lines = importlib.metadata.requires("shardwise") or []
    names = [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]
    return [name for name in names if name != "torch"]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- the self test ---------------------------------------------------------------------------------


def self_test(timeout: float = _SECONDS) -> Finding:
    """Two local ranks do what a program does, and compare it with one process."""
    import torch

    from shardwise.errors import RankFailure
    from shardwise.testing.local_run import run_local

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    began = time.perf_counter()
    try:
        for device in devices:
            run_local(_on_a_rank, 2, device, timeout=timeout)
    except RankFailure as failure:
        return Finding("self test", f"failed: {_last_line(failure)}", is_fine=False)
    seconds = time.perf_counter() - began
    return Finding("self test", f"2 ranks on {' and '.join(devices)}: fine, {seconds:.1f} s")


def _last_line(failure: Exception) -> str:
    cause = failure.__cause__ or failure
    lines = str(cause).strip().splitlines()
    return lines[-1] if lines else type(cause).__name__


def _on_a_rank(rank: int, kind: str) -> None:
    import torch

    device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if kind == "cuda" else kind)
    _move(device)
    _train(device)


def _move(device: torch.device) -> None:
    """Through uneven rows, columns and one rank, and back together."""
    import torch

    import shardwise

    full = torch.arange(77.0, device=device).view(7, 11)
    x = shardwise.distribute(full, shardwise.chunk(0, sizes=[6, 1]))
    for spec in (shardwise.chunk(1), shardwise.on_rank(1), shardwise.flat(), shardwise.replicate()):
        x = shardwise.reshard(x, spec)
        assert torch.equal(x.full_tensor(), full), f"{spec} changed the values"


def _train(device: torch.device) -> None:
    """A step of a tensor-parallel MLP, beside the same on one process."""
    import copy

    import torch

    import shardwise

    torch.manual_seed(0)
    plain: Any = torch.nn.Sequential(
        torch.nn.Linear(8, 10), torch.nn.GELU(), torch.nn.Linear(10, 8)
    ).to(device)
    cut = copy.deepcopy(plain)
    plan = shardwise.ShardingPlan(
        {"0.*": "chunk(0)", "2.weight": "chunk(1)"},
        output_plan={"2": "replicate()"},
        input_plan={"": "replicated"},
    )
    shardwise.shard_module(cut, plan)
    batch = torch.linspace(-1, 1, 32, device=device).view(4, 8)
    for model in (plain, cut):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(batch).square().mean().backward()
        optimizer.step()
    moved = shardwise.full_state_dict(cut, rank0_only=False)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(moved[name], tensor.cpu())


# -- words -----------------------------------------------------------------------------------------


def _show(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for one in found:
        mark = Text("ok") if one.is_fine else Text("!!", style="bold red")
        table.add_row(mark, Text(one.what), Text(one.found))
    Console(highlight=False).print(table)
