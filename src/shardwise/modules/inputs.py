"""Hooks on what modules take: `input_plan`, by which plain inputs become sharded tensors."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from shardwise.comm.agreement import agreed_numbers
from shardwise.comm.communicator import simulated_rank
from shardwise.comm.process_group import communicator
from shardwise.modules.nested import map_tensors, tensors_in
from shardwise.sharded_tensor.distributing import as_local_rows, as_replicated
from shardwise.sharded_tensor.pickling import _get_current_process_group
from shardwise.sharded_tensor.plain_inputs import plain_inputs
from shardwise.sharded_tensor.tensor import ShardedTensor
from shardwise.sharded_tensor.to_layout import reshard
from shardwise.sharding_spec.spec import ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from shardwise.comm.communicator import Communicator
    from shardwise.settings import Change
    from shardwise.sharding_plan.api import Meaning

__all__ = ["InputHook", "add_input_hook"]

# The modules with an input plan that run now, and how each ends what it has set.
_running: ContextVar[tuple[tuple[nn.Module, Change[Any]], ...]]
_running = ContextVar("shardwise_input_plans", default=())


def add_input_hook(
    module: nn.Module, name: str, meaning: Meaning, members: Communicator
) -> tuple[RemovableHandle, RemovableHandle]:
    """Has `module` take its plain inputs as `meaning` says, and run under "replicated"."""
    before = module.register_forward_pre_hook(InputHook(name, meaning, members), with_kwargs=True)
    return before, module.register_forward_hook(_leave, always_call=True)


class InputHook:
    """Sets what plain tensors mean while the module runs, and promotes its inputs."""

    def __init__(self, name: str, meaning: Meaning, members: Communicator) -> None:
        self.name, self.meaning = name, meaning
        self._members = members

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Entered before anything can raise: `_leave` is called in any case.
        change = plain_inputs("replicated")
        change.__enter__()
        _running.set((*_running.get(), (module, change)))
        given = (args, kwargs)
        plain = [t for t in tensors_in(given) if not isinstance(t, ShardedTensor) and t.dim()]
        made = {id(old): new for old, new in zip(plain, self._promoted(plain), strict=True)}
        changed: tuple[Any, Any] = map_tensors(lambda t: made.get(id(t), t), given)
        return changed

    def _promoted(self, plain: Sequence[torch.Tensor]) -> list[ShardedTensor]:
        if self.meaning == "local_rows":
            return self._as_rows(plain)
        whole = [as_replicated(one, process_group=self._members) for one in plain]
        if not isinstance(self.meaning, ShardingSpec):
            return whole
        try:
            return [reshard(one, self.meaning) for one in whole]
        except Exception as error:
            error.add_note(
                f"while cutting the inputs of {self.name!r}, of shapes "
                f"{[tuple(one.shape) for one in plain]}, by its input_plan"
            )
            raise

    def _as_rows(self, plain: Sequence[torch.Tensor]) -> list[ShardedTensor]:
        """Each rank's rows; of all inputs together the counts are exchanged once."""
        if not plain:
            return []
        members, rows = self._members, [one.shape[0] for one in plain]
        values: dict[str, object] = {"number of plain inputs": len(plain)}
        for number, one in enumerate(plain):
            kind = (tuple(one.shape[1:]), one.dtype, one.requires_grad)
            values[f"row, dtype and requires_grad of plain input {number}"] = kind
        differ = len(set(rows)) > 1
        shared = agreed_numbers(
            f"inputs of {self.name!r} (local_rows)",
            values,
            2 * rows[0] + differ,
            group=members,
            doing="exchange row counts",
        )
        counts = [tuple(number // 2 for number in shared)] * len(plain)
        if any(number % 2 for number in shared):
            listed: list[Any] = members.gather_objects(rows)
            counts = list(zip(*listed, strict=True))
        return [
            as_local_rows(one, count, process_group=members)
            for one, count in zip(plain, counts, strict=True)
        ]

    # A group cannot be copied or saved: a copy has the same, and a loaded one that of the loader.

    def __deepcopy__(self, memo: dict[int, Any]) -> InputHook:
        return InputHook(self.name, self.meaning, self._members)

    def __getstate__(self) -> tuple[str, Meaning]:
        return self.name, self.meaning

    def __setstate__(self, state: tuple[str, Meaning]) -> None:
        self.name, self.meaning = state
        self._members = simulated_rank.get() or communicator(_get_current_process_group())


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    """Ends what `InputHook` has set, also if the module has raised."""
    running = _running.get()
    if running and running[-1][0] is module:  # not so if a hook before ours has raised
        running[-1][1].__exit__()
        _running.set(running[:-1])
