"""Samples of functions that work element by element."""

import torch

from shardwise.testing import Sample

SAMPLES: dict[str, list[Sample]] = {
    "add": [
        Sample(torch.add, ((4, 6), (4, 6)), keeps=("chunk(0)", "chunk(0)")),
        Sample(torch.add, ((4, 6), (6,)), keeps=("chunk(0)", "replicate()")),
    ],
}
