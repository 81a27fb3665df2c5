"""Prints the docs page of the op table: `python -m tests.ops.op_table > docs/op-table.md`."""

import multiprocessing
import sys

import torch
from tests.ops.op_table.calls import ops
from tests.ops.op_table.page import page_of, try_op


def main() -> None:
    """On all cores; what is wrong is told on the way."""
    rows = []
    with multiprocessing.get_context("spawn").Pool(
        initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for row, wrong in pool.imap(try_op, ops(), chunksize=4):
            rows.append(row)
            for one in wrong:
                print(f"wrong: {one}", file=sys.stderr, flush=True)
    print(page_of(rows), end="")


if __name__ == "__main__":
    main()
