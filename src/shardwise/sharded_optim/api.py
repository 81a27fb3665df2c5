"""The seed's optimizer: any optimizer class on named parameters, with state dicts by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import ArgumentTypeError, ArgumentValueError, LoadError
from shardwise.sharded_optim.incompatible_keys import IncompatibleKeys
from shardwise.sharded_optim.state_tensors import follow_parameters
from shardwise.sharded_tensor.tensor import ShardedTensor  # noqa: F401  # the seed hands it on

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of the given class on named parameters, sharded or plain.

    A `torch.optim` class on `model.parameters()` does the same; here parameters have names, and so
    have the entries of `state_dict()`, which can be loaded whatever their order and layouts are.

    >>> import shardwise
    >>> def names(rank):
    ...     model = torch.nn.Linear(4, 6)
    ...     rows = shardwise.distribute(model.weight.detach(), shardwise.chunk(0))
    ...     model.weight = torch.nn.Parameter(rows)
    ...     named = dict(named_params_with_sharded_tensor(model))
    ...     optimizer = ShardedOptimizer(named, torch.optim.SGD, lr=0.1)
    ...     return optimizer.state_dict()["param_groups"][0]["params"]
    >>> from shardwise.sharded_optim import named_params_with_sharded_tensor
    >>> shardwise.run_local(lambda rank: names(rank), 2)
    [['weight', 'bias'], ['weight', 'bias']]
    """

    named_params: dict[str, torch.Tensor]
    _optim: torch.optim.Optimizer  # has the same groups and the same state

    def __init__(
        self,
        named_params: Mapping[str, torch.Tensor],
        optimizer_class: type[torch.optim.Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        if not isinstance(named_params, Mapping):
            raise ArgumentTypeError(
                "named_params of ShardedOptimizer",
                expected="a dict of names and tensors",
                got=type(named_params).__name__,
                fix="Pass dict(named_params_with_sharded_tensor(model)).",
            )
        self.named_params = dict(named_params)
        params = list(self.named_params.values())
        super().__init__(params, {})
        self._optim = optimizer_class(params, *optimizer_args, **optimizer_kwargs)
        self._share()

    def _share(self) -> None:
        self.defaults = self._optim.defaults
        self.param_groups = self._optim.param_groups
        self.state = self._optim.state

    def __getstate__(self) -> dict[str, Any]:
        own = {"named_params": self.named_params, "_optim": self._optim}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Which some optimizers complete in a way of their own.
        self._optim.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self._share()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the optimizer inside."""
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """A step of the optimizer inside; what `closure` returned, if there is one."""
        return self._optim.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its `params` may be a dict, or a list of tensors or of (name, tensor)."""
        if "_optim" not in vars(self):  # torch's own __init__ asks
            super().add_param_group(param_group)
            return
        pairs = self._named(param_group["params"])
        named = dict(pairs)
        counts = Counter([*self.named_params, *(name for name, _ in pairs)])
        taken = [name for name in named if counts[name] > 1]
        if taken:
            raise ArgumentValueError(
                "params of add_param_group",
                expected="names that the optimizer has not yet, each once",
                got=", ".join(taken[:5]),
            )
        self._optim.add_param_group({**param_group, "params": list(named.values())})
        self.named_params |= named

    def _named(self, params: Any) -> list[tuple[str, torch.Tensor]]:
        if isinstance(params, Mapping):
            return list(params.items())
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        number = len(self.param_groups)
        return [
            one if isinstance(one, tuple) else (f"param_groups.{number}.{k}", one)
            for k, one in enumerate(listed)
        ]

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with names in place of numbers. Nothing is gathered."""
        packed = super().state_dict()
        names = self._names()
        state = {names[number]: entry for number, entry in packed["state"].items()}
        groups = [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in packed["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    def _names(self) -> list[str]:
        """In the order of the groups, by which torch numbers parameters."""
        by_id = {id(tensor): name for name, tensor in self.named_params.items()}
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        return [by_id[id(param)] for param in params]

    def load_state_dict(  # type: ignore[override]  # torch's returns None
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> IncompatibleKeys:
        """Loads what `state_dict` gave, by name; all ranks call it.

        State in other layouts is moved to those of the parameters, and plain state, which all
        ranks have, is cut. Parameters of which there is no state, because none was made yet, are
        tolerated and returned as missing. With `strict`, other parameters than those saved raise.
        State dicts of torch's optimizers, which have numbers, are loaded in their order.
        """
        names = self._names()
        saved = _by_name(state_dict, names)
        known = list(chain.from_iterable(group["params"] for group in saved["param_groups"]))
        strangers = [name for name in (*known, *saved["state"]) if name not in self.named_params]
        absent = [name for name in names if name not in known]
        if strict and (strangers or absent):
            raise LoadError(
                "state dict for a ShardedOptimizer",
                expected=f"the parameters {', '.join(absent[:5]) or 'that it has'}",
                got=", ".join(map(str, strangers[:5])) or "none of them",
                fix="Pass strict=False to load what is there.",
            )
        numbers = {name: number for number, name in enumerate(names)}
        state = {numbers[n]: entry for n, entry in saved["state"].items() if n in numbers}
        super().load_state_dict({"state": state, "param_groups": self._groups(saved, names)})
        follow_parameters(self, self.named_params)
        missing = [name for name in names if name not in saved["state"]] if state else absent
        return IncompatibleKeys(missing, list(dict.fromkeys(strangers)))

    def _groups(self, saved: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """The options of each own group: those saved with the first of its parameters known."""
        saved_with = {name: group for group in saved["param_groups"] for name in group["params"]}
        found, start = [], 0
        for group in self.param_groups:
            numbers = range(start, start + len(group["params"]))
            start = numbers.stop
            known = [names[number] for number in numbers if names[number] in saved_with]
            options = saved_with[known[0]] if known else group
            found.append({**options, "params": list(numbers)})
        return found


def _by_name(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The same with names, where it has the numbers of torch's own optimizers."""
    groups = state_dict["param_groups"]
    keys = list(chain.from_iterable(group["params"] for group in groups))
    if all(isinstance(key, str) for key in keys):
        return dict(state_dict)
    if len(keys) != len(names):
        raise LoadError(
            "state dict with numbered parameters for a ShardedOptimizer",
            expected=f"{len(names)} parameters",
            got=len(keys),
        )
    name_of = dict(zip(keys, names, strict=True))
    return {
        "state": {name_of.get(key, str(key)): entry for key, entry in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[key] for key in group["params"]]} for group in groups
        ],
    }
