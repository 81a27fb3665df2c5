"""Layouts of one tensor, the way from one to another, and a tensor that goes it (`make tour`)."""

from __future__ import annotations

import time

import numpy as np
import torch
from rich.console import Console

import shardwise
from shardwise.errors import TilingError
from shardwise.geometry import Box, Boxes, Layout, check_tiling
from shardwise.viz import draw_layout, draw_plan

SHAPE = (12, 8)
EXAMPLES = {
    "chunk(0)": "Rows, cut evenly, as torch.chunk does.",
    "chunk(0, sizes=[5, 4, 0, 3])": "Rows of chosen sizes. Rank 2 gets none, and that is fine.",
    "grid([2, 2])": "Rows and columns at once.",
    "grid([2, 1], ranks=[[0, 1], [2, 3]])": "Two halves, two copies of each.",
    "fused(0, [4, 4, 4])": "Q, K and V in one weight: each is cut on its own, so that every "
    "rank holds its heads of all three.",
    "block_cyclic(1, 1)": "Columns dealt out in turn.",
    "flat(sizes=[34, 21, 30, 11])": "Ragged ranges of the flattened tensor, as FSDP cuts. Each "
    "is a few boxes.",
    "partial()": "Every rank holds an addend; the tensor is their sum, which waits.",
}


def main() -> None:
    console = Console()
    console.print(
        f"\n[bold]One {SHAPE[0]} x {SHAPE[1]} tensor on four ranks, laid out in "
        f"{len(EXAMPLES)} ways[/]\n"
        "A layout is a list of boxes and who holds them. Everything else follows from it.\n"
    )
    for text, why in EXAMPLES.items():
        layout = shardwise.parse_spec(text, ranks=range(4), device="cpu").layout(SHAPE)
        console.print(f"[bold]shardwise.{text}[/]", highlight=False)
        console.print(why)
        console.print(draw_layout(layout, itemsize=4, world_size=4, height=8))
        console.print()
    check_a_tiling(console)
    check_many_boxes(console)
    move_a_tensor(console)
    console.print('Now try: .venv/bin/shardwise show --shape 8,6 --spec "chunk(1)"\n', markup=False)


def check_a_tiling(console: Console) -> None:
    """A wrong layout is refused, and the message names the offenders."""
    console.print("[bold]A layout that is wrong says where[/]")
    console.print("Rank 0 holds rows 0-6, rank 1 rows 5-10 of twelve:")
    try:
        Layout(SHAPE, [Box((0, 0), (7, 8)), Box((5, 0), (11, 8))], owners=[0, 1])
    except TilingError as error:
        console.print(f"  TilingError: {error}\n", style="red", markup=False, highlight=False)


def check_many_boxes(console: Console) -> None:
    """A large tiling, in random order."""
    cells = np.stack([axis.ravel() for axis in np.indices((2, 50_000))], axis=1)
    cells = np.random.default_rng(0).permutation(cells)
    boxes = Boxes(3 * cells, 3 * cells + 3)
    begin = time.perf_counter()
    report = check_tiling(boxes, (6, 150_000))
    took = 1e3 * (time.perf_counter() - begin)
    assert report.ok
    console.print("[bold]Checking is fast[/]")
    console.print(f"{report.describe()}: checked in {took:.0f} ms.\n", highlight=False)


def move_a_tensor(console: Console) -> None:
    """A plan, and a sharded tensor on four local processes that goes that way, and back."""
    shape = (1200, 800)
    texts = ("flat(sizes=[340000, 210000, 300000, 110000])", "grid([2, 2], ranks=[3, 1, 0, 2])")
    before, after = (shardwise.parse_spec(text, ranks=range(4), device="cpu") for text in texts)
    plan = shardwise.plan_reshard(before.layout(shape), after.layout(shape), itemsize=4)
    console.print(f"[bold]From {texts[0]}\nto   {texts[1]}[/]", highlight=False)
    console.print("The plan is known before anything moves, on every rank, without asking others.")
    console.print(draw_plan(plan))
    console.print()

    def move(rank: int) -> tuple[str, float, bool]:
        """Every rank makes its own boxes, moves them, and computes a gradient through the move."""
        values = torch.arange(1200.0 * 800).view(shape)
        x = shardwise.from_callback(before, shape, values.__getitem__, requires_grad=True)
        shardwise.reshard(x, after)  # connects the ranks
        begin = time.perf_counter()
        y = shardwise.reshard(x, after)
        took = time.perf_counter() - begin
        (y.full_tensor() ** 2).sum().backward()
        assert x.grad is not None
        is_right = torch.equal(y, values) and torch.equal(x.grad, 2 * values)
        return repr(y), took, is_right

    results = shardwise.run_local(move, 4)
    assert all(is_right for _, _, is_right in results)
    console.print("On rank 2, x is a ShardedTensor, and y = shardwise.reshard(x, after) is")
    console.print(f"  {results[2][0]}", highlight=False, markup=False)
    took = max(seconds for _, seconds, _ in results)
    console.print(
        f"Four local processes moved {plan.total_bytes:,} bytes in {1e3 * took:.0f} ms; the lower "
        f"bound is {plan.lower_bound:,}.\nEvery element is where it belongs, and the gradient "
        "that came back the other way is that of the full tensor.\n",
        highlight=False,
    )


if __name__ == "__main__":
    main()
