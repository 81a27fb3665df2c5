"""Saving and loading 1 GiB on 4 local ranks, and converting 4 GiB.

Tensors of 64 MiB, cut into rows over 4 ranks: ours, DCP with DTensors, and the same bytes by plain
writes (with fsync) and reads, one file a rank. Loads go into tensors that are there: the same rows,
columns on 4 ranks, and columns on 2 (of which the raw read is of the same bytes in order). Files
are in the cache. All loads are checked first.

"bytes read" are those of all ranks beside those that they need, "over the target" is what the
resident memory of a rank grows by during a load, "convert" holds at most so much in one process.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise
from benchmarks.harness import Case, Result, System, measure
from benchmarks.ranks import clock, mesh, most_over_ranks, quiet_peers
from benchmarks.report import Options, Report, parse_options
from shardwise.checkpoint.reading import Reader
from shardwise.testing.memory import peak_growth

if TYPE_CHECKING:
    from collections.abc import Iterator

RAW, DCP = "raw", "DCP"
SIDE, QUICK_SIDE, NUM_TENSORS = 4096, 256, 16  # 1 GiB of float32
MAX_BYTES = 1 << 26
READ, HELD = "bytes read, % of needed", "over the target, MiB"
CONVERTED = "convert 4 GiB, peak of the process, MiB"


def values(side: int, number: int) -> torch.Tensor:
    return (torch.arange(side * side, dtype=torch.float32) + number).view(side, side)


def ours(side: int, dim: int) -> dict[str, Any]:
    return {
        f"w{k}": shardwise.distribute(values(side, k), shardwise.chunk(dim), src_rank=None)
        for k in range(NUM_TENSORS)
    }


def theirs(side: int, dim: int) -> dict[str, Any]:
    devices = mesh()
    return {
        f"w{k}": distribute_tensor(values(side, k), devices, [Shard(dim)], src_data_rank=None)
        for k in range(NUM_TENSORS)
    }


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    for tensor in state.values():
        tensor.zero_()
    return state


def pieces(state: dict[str, Any]) -> Iterator[memoryview]:
    for tensor in state.values():
        yield tensor.local_tensor().view(torch.uint8).view(-1).numpy().data


# -- the same bytes by hand ------------------------------------------------------------------------


def write_raw(state: dict[str, Any], folder: Path) -> None:
    with (folder / f"raw-{dist.get_rank()}").open("wb", buffering=0) as file:
        for piece in pieces(state):
            done = 0
            while done < len(piece):
                done += file.write(piece[done:])
        os.fsync(file.fileno())
    dist.barrier()


def read_raw(state: dict[str, Any], folder: Path, num_writers: int) -> None:
    """This rank's share of the files in order, into its own memory."""
    rank, each = dist.get_rank(), num_writers // dist.get_world_size()
    room = iter(pieces(state))
    piece = next(room)
    for number in range(rank * each, (rank + 1) * each):
        with (folder / f"raw-{number}").open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                piece = piece[count:]
                if not len(piece):
                    piece = next(room, memoryview(bytearray(1)))
    dist.barrier()


# -- cases -----------------------------------------------------------------------------------------


def saving(rank: int, folder: Path, options: Options) -> list[Result]:
    """On 4 ranks; leaves the files that are loaded afterwards."""
    quiet_peers()
    warnings.simplefilter("ignore", UserWarning)  # of DCP, that it overwrites
    torch.set_num_threads(1)
    side = QUICK_SIDE if options.quick else SIDE
    mine, other = ours(side, 0), theirs(side, 0)
    systems: dict[str, System] = {
        "ours": lambda: shardwise.checkpoint.save(mine, folder / "ours"),
        RAW: lambda: write_raw(mine, folder),
        DCP: lambda: dcp_save(other, checkpoint_id=folder / "dcp"),
    }
    case = Case("save", systems, group=group_name(4))
    repeats, budget = options.repeats, 10 * options.budget_s
    return [
        measure(case, repeats=repeats, budget_s=budget, clock=clock()),
        loading("load the same rows", side, 0, folder, options),
        loading("load columns", side, 1, folder, options),
    ]


def loading_on_two(rank: int, folder: Path, options: Options) -> list[Result]:
    quiet_peers()
    torch.set_num_threads(1)
    side = QUICK_SIDE if options.quick else SIDE
    return [loading("load columns", side, 1, folder, options)]


def loading(name: str, side: int, dim: int, folder: Path, options: Options) -> Result:
    mine, other = ours(side, dim), theirs(side, dim)
    systems: dict[str, System] = {
        "ours": lambda: shardwise.checkpoint.load(mine, folder / "ours"),
        DCP: lambda: dcp_load(other, checkpoint_id=folder / "dcp"),
        RAW: lambda: read_raw(mine, folder, 4),
    }
    expected = ours(side, dim)
    counts = {
        READ: {"ours": percent_read(zeroed(mine), folder)},
        HELD: {"ours": most_over_ranks(held(zeroed(mine), folder)), "max_bytes": MAX_BYTES >> 20},
    }
    dcp_load(zeroed(other), checkpoint_id=folder / "dcp")
    for key, tensor in expected.items():
        assert torch.equal(mine[key].local_tensor(), tensor.local_tensor())
        assert torch.equal(other[key].to_local(), tensor.local_tensor())
    del expected
    case = Case(name, systems, group=group_name(dist.get_world_size()), counts=counts)
    budget = 10 * options.budget_s
    return measure(case, repeats=options.repeats, budget_s=budget, clock=clock())


class CountingReader(Reader):
    """Adds up what all readers have read."""

    total = 0

    def __exit__(self, *error: Any) -> None:
        CountingReader.total += self.bytes_read
        super().__exit__(*error)


def percent_read(state: dict[str, Any], folder: Path) -> int:
    """What all ranks read, of what they need."""
    CountingReader.total = 0
    with patch("shardwise.checkpoint.loading.Reader", CountingReader):
        shardwise.checkpoint.load(state, folder / "ours")
    needed = sum(len(piece) for piece in pieces(state))
    found = torch.tensor([CountingReader.total, needed], dtype=torch.float64)
    dist.all_reduce(found)
    return round(100 * float(found[0] / found[1]))


def held(state: dict[str, Any], folder: Path) -> int:
    load = partial(shardwise.checkpoint.load, max_bytes=MAX_BYTES)
    return peak_growth(lambda: load(state, folder / "ours")) >> 20


def group_name(world_size: int) -> str:
    return f"{world_size} ranks"


def converting(folder: Path, options: Options) -> Result:
    """4 GiB in rows to columns, in a process of its own."""
    side = QUICK_SIDE if options.quick else SIDE
    source = folder / "four"
    shardwise.run_local(save_four, 4, source, side)
    work = (
        "import sys, shardwise; shardwise.checkpoint.convert(sys.argv[1], sys.argv[2], "
        'world_size=4, plan={"*": "chunk(1)"}, max_bytes=1 << 28)'
    )
    command = [sys.executable, "-c", work, str(source), str(folder / "out")]

    def convert() -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)
        subprocess.run(command, check=True)

    name = "convert rows to columns"
    result = measure(
        Case(name, {"ours": convert}, group="one process"), repeats=1, budget_s=options.budget_s
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    return replace(result, counts={CONVERTED: {"ours": peak}})


def save_four(rank: int, path: Path, side: int) -> None:
    state = {f"part{k}.{key}": t for k in range(4) for key, t in ours(side, 0).items()}
    shardwise.checkpoint.save(state, path)


def add_bars(report: Report) -> None:
    four, two = group_name(4), group_name(2)
    report.check_ratio("save", group=four, system=RAW, limit=1.3)
    report.check_ratio("load the same rows", group=four, system=RAW, limit=1.3)
    report.check_ratio("load columns", group=four, system=DCP, limit=0.2)
    report.check_ratio("load columns", group=two, system=DCP, limit=0.2)
    report.check_count(READ, system="ours", limit=110, unit="%")
    report.check_count(HELD, system="ours", limit=MAX_BYTES >> 20, unit="MiB")
    report.check_count(CONVERTED, system="ours", limit=1024, unit="MiB")


def main() -> None:
    options = parse_options(__doc__ or "")
    report = Report("checkpoint", options)
    with tempfile.TemporaryDirectory(dir=os.environ.get("SHARDWISE_BENCH_DIR")) as name:
        folder = Path(name)
        print("4 ranks ...", file=sys.stderr)
        report.results += shardwise.run_local(saving, 4, folder, options, timeout=3000)[0]
        print("2 ranks ...", file=sys.stderr)
        report.results += shardwise.run_local(loading_on_two, 2, folder, options, timeout=3000)[0]
        print("convert ...", file=sys.stderr)
        report.results.append(converting(folder, options))
    add_bars(report)
    report.finish()


if __name__ == "__main__":
    main()
