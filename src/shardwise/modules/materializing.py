"""`materialize`: memory and first values for a model that was sharded on the meta device.

[Note: stand-ins] What `reset_parameters` draws for a sharded tensor depends on the seed, the call
and the global index. For a plain one torch's own generator would be asked, which differs from rank
to rank; so while values are made, a replicated tensor on the same memory stands in for it.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.comm.agreement import agree, heard_by_all
from shardwise.errors import ArgumentValueError
from shardwise.modules.group import group_of
from shardwise.modules.replacing import put_in_place
from shardwise.modules.state_trees import joined
from shardwise.sharded_tensor.distributing import as_replicated
from shardwise.sharded_tensor.seeds import get_rng_state
from shardwise.sharded_tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator

__all__ = ["materialize"]

_END = "the end of materialize"  # where ranks meet again, whatever happened on some of them
_FIX = (
    "Write them in the module's reset_parameters(), or pass init=, a function of a module that "
    "does; or compute them on a real device in __init__: with torch.device('cpu'): ..."
)


def materialize(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    init: Callable[[nn.Module], None] | None = None,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Gives the tensors of `model` that are on the meta device memory and first values.

    All ranks call it. Each makes its own pieces, on `device` (default: where the group sends
    from), and every module that had such a tensor runs its `reset_parameters`, or with `init`
    every module is passed to that, children first, as by `model.apply(init)`. The random numbers
    are those of sharded tensors (see `shardwise.manual_seed`), for plain parameters too: the same
    for every plan and world size. A tied tensor is written by the first of its modules. Tensors
    that have data keep it, unless they are in a module that is reset.

    A tensor that nobody writes raises on all ranks. That is so for buffers that `__init__`
    computes, since on the meta device nothing is computed. What raises on one rank while values
    are made raises on all.
    """
    members = group_of(model, process_group)
    bare = _on_meta(model)
    problem: Exception | None = None
    try:
        if init is None:
            _check_resettable(bare, members.rank)
    except ArgumentValueError as error:
        problem = error
    values = {"tensors on the meta device": [one.name for one in bare], "device": device}
    agree("materialize", values, group=members, problem=problem)
    home = members.wire_device if device is None else torch.device(device)
    _make_room(model, bare, home)
    if bare:
        get_rng_state(process_group=members)  # so that the seed is not exchanged half-way
    marks = [mark for one in bare for mark in _marked(one)]
    with heard_by_all(_END, members, hot=False), _stand_ins(bare, members):
        if init is not None:
            model.apply(init)
        else:
            _reset_all(bare)
    _check_written(marks, members)
    return model


class _Bare(NamedTuple):
    """A parameter or buffer that has no memory yet."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.module, self.attribute)
        return found


def _on_meta(model: nn.Module) -> list[_Bare]:
    found = []
    for path, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if tensor.is_meta:
                found.append(_Bare(joined(path, name), module, name))
    return found


def _make_room(model: nn.Module, bare: Sequence[_Bare], home: torch.device) -> None:
    """Uninitialised memory; Parameters stay the same objects, and tied."""
    plain: dict[int, list[_Bare]] = {}
    for one in bare:
        if not isinstance(one.tensor, ShardedTensor):
            plain.setdefault(id(one.tensor), []).append(one)
    for tied in plain.values():  # of which `Module._apply` would make new, separate ones
        old = tied[0].tensor
        made = torch.empty_like(old, device=home, requires_grad=False)
        put_in_place(old, made, [(one.module, one.attribute) for one in tied])
    model._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t)


def _reset_of(module: nn.Module) -> Any:
    """What gives a module its first values; torch's attention has it under another name."""
    found = getattr(module, "reset_parameters", None)
    return getattr(module, "_reset_parameters", None) if found is None else found


def _reset_all(bare: Sequence[_Bare]) -> None:
    """Every module's `reset_parameters`; a tied tensor has the value of the first module's.

    So it is in a model on one device, where tensors are tied once they have values.
    """
    owned: dict[nn.Module, list[torch.Tensor]] = {}
    for one in bare:
        owned.setdefault(one.module, []).append(one.tensor)
    written: set[int] = set()
    for module, tensors in owned.items():
        tied = [tensor for tensor in tensors if id(tensor) in written]
        if len(tied) == len(tensors):
            continue
        kept = [tensor.detach().clone() for tensor in tied]
        _reset_of(module)()
        with torch.no_grad():
            for tensor, value in zip(tied, kept, strict=True):
                tensor.copy_(value)
        written.update(map(id, tensors))


def _check_resettable(bare: Sequence[_Bare], rank: int) -> None:
    stuck = [one for one in bare if _reset_of(one.module) is None]
    if stuck:
        kinds = sorted({type(one.module).__name__ for one in stuck})
        raise ArgumentValueError(
            f"materialize: {', '.join(repr(one.name) for one in stuck[:5])} on the meta device",
            rank=rank,
            expected="modules with a method reset_parameters",
            got=f"{', '.join(kinds)} without",
            fix=_FIX,
        )


@contextmanager
def _stand_ins(bare: Sequence[_Bare], members: Communicator) -> Iterator[None]:
    """[Note: stand-ins]; what was assigned instead of written is copied at the end."""
    real = [(one, one.tensor) for one in bare]
    shown: dict[int, torch.Tensor] = {}  # by the real tensor: tied ones have one stand-in
    for one, tensor in real:
        if id(tensor) not in shown:
            shown[id(tensor)] = _stand_in(tensor, members)
        _assign(one, shown[id(tensor)])
    try:
        yield
        with torch.no_grad():
            for one, tensor in real:
                if one.tensor is not shown[id(tensor)]:
                    _copy_into(tensor, one.tensor)
    finally:
        for one, tensor in real:
            _assign(one, tensor)


def _stand_in(tensor: torch.Tensor, members: Communicator) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return tensor
    made = as_replicated(tensor.detach(), process_group=members)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _assign(one: _Bare, tensor: torch.Tensor) -> None:
    # Not by setattr: a module may have a __setattr__ that takes part in this.
    own: Any = one.module._parameters if one.attribute in one.module._parameters else None
    (one.module._buffers if own is None else own)[one.attribute] = tensor


def _copy_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(value, ShardedTensor) and not isinstance(tensor, ShardedTensor):
        value = value.full_tensor()
    tensor.copy_(value)


class _Mark(NamedTuple):
    """A local tensor, and how it looked before anybody wrote it."""

    name: str
    local: torch.Tensor
    value: float | None  # of the first element; None: every value may be meant
    version: int

    @property
    def is_untouched(self) -> bool:
        if self.local._version != self.version:
            return False
        now = _first(self.local).item()
        return self.value is None or now == self.value or (now != now and self.value != self.value)


def _first(local: torch.Tensor) -> torch.Tensor:
    """The first element, as a view."""
    return local.detach()[(0,) * local.dim()]


def _marked(one: _Bare) -> list[_Mark]:
    """Marks the local tensors, so that it is seen whether they are written.

    Versions alone do not show it: what is written by `.data` does not count.
    """
    tensor = one.tensor
    found = []
    for local in tensor._state.shards if isinstance(tensor, ShardedTensor) else [tensor]:
        if not local.numel():
            continue
        value: float | None = None
        if local.is_floating_point() or local.is_complex():
            value = math.nan
        elif local.dtype != torch.bool:
            value = torch.iinfo(local.dtype).min
        if value is not None:
            _first(local).fill_(value)
        found.append(_Mark(one.name, local, value, local._version))
    return found


def _check_written(marks: Sequence[_Mark], members: Communicator) -> None:
    names = list(dict.fromkeys(mark.name for mark in marks if mark.is_untouched))
    problem = None
    if names:
        problem = ArgumentValueError(
            f"materialize: {', '.join(map(repr, names[:5]))} without values",
            rank=members.rank,
            expected="every tensor that was on the meta device to be written",
            got=f"{len(names)} that neither reset_parameters nor init has written",
            fix=_FIX,
        )
    agree(_END, {}, group=members, problem=problem)
