"""The op table: torch's own op samples on sharded tensors, and the docs page made of it.

    python -m tests.ops.op_table > docs/op-table.md     # or: make op-table

`calls.py` has torch's samples, `trying.py` runs one on simulated ranks and compares it with plain
torch, `page.py` says per op how it works, `names.py` which ops must have a rule.
"""
