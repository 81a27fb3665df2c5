"""A text to learn, and a step of training as everybody writes it; knows nothing of sharding."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Text", "Trainer"]

_TALE = Path(__file__).with_name("tale.txt")


class Text:
    """A text as numbers, one per letter: a tale that comes with the package, or another one."""

    def __init__(self, path: Path = _TALE) -> None:
        text = path.read_text()
        self.letters = sorted(set(text))
        self.ids = torch.tensor([self.letters.index(letter) for letter in text])

    def batch(
        self, size: int, length: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pieces of the text, and the same one letter on: the same for the same generator."""
        starts = torch.randint(len(self.ids) - length, (size,), generator=generator)
        pieces = torch.stack([self.ids[start : start + length + 1] for start in starts.tolist()])
        return pieces[:, :-1], pieces[:, 1:]

    def words(self, ids: Sequence[int]) -> str:
        """The letters of numbers."""
        return "".join(self.letters[number] for number in ids)


class Trainer:
    """A model and its optimizer; knows nothing of sharding."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
        self.is_mixed = dtype == "bfloat16"
        self.device = next(model.parameters()).device

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> float:
        """One step of training; its loss."""
        mixed = torch.autocast(self.device.type, torch.bfloat16)
        with mixed if self.is_mixed else nullcontext():
            loss = self.model(ids.to(self.device), targets.to(self.device))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value: float = loss.item()
        return value

    def state(self, step: int, generator: torch.Generator) -> dict[str, Any]:
        """What a checkpoint has to hold, so that a run goes on as if it had not ended."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "step": step,
            "generator": generator.get_state(),
        }
