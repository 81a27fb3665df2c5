"""torch's own samples of its ops, as calls of a function with tensors that can be cut."""

from __future__ import annotations

import random
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise._torch_compat import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["OpCall", "calls_of", "dtype_of", "ops", "seeded"]

# What an op is tried with: the first that it supports.
_DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
_MOST_LISTED = 300  # samples of an op that are looked at; some have a thousand
_MOST_OF_VARIANTS = 2  # samples on which a method, an operator, an alias or out= is tried
_FEW = 8  # that are looked at for the first one
_MOST_ELEMENTS = 5000  # of a tensor
# Variants that in torch itself give something else than the function.
_TORCH_IS_WRONG = {("fft.ihfft2", "out="), ("fft.ihfftn", "out=")}  # writes nothing


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op: `function(*args, **kwargs)`, with tensors anywhere in the arguments."""

    op: str
    variant: str  # "" for the function itself, else "method", "in place", "out=", ...
    number: int  # of the sample
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_grad: bool  # whether tensors that require grad keep it
    processed: Callable[[Any], Any]  # what of the result has a well-defined gradient

    @property
    def writes(self) -> bool:
        """Whether it writes into its first tensor."""
        return "in place" in self.variant

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return _tensors((self.args, self.kwargs))

    def __call__(self, tensors: list[Any]) -> Any:
        """What the function gives with other tensors in place of its own."""
        rest = iter(tensors)

        def other(value: Any) -> Any:
            return next(rest) if isinstance(value, torch.Tensor) else value

        args, kwargs = tree_map(other, (self.args, self.kwargs))
        return self.function(*args, **kwargs)

    def __str__(self) -> str:
        shown = [_shown(arg) for arg in self.args]
        shown += [f"{name}={_shown(value)}" for name, value in self.kwargs.items()]
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.op}{variant} sample {self.number}: ({', '.join(shown)})"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if type(value) in (list, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


@cache
def ops() -> dict[str, Any]:
    """torch's own table of its ops, by name."""
    # The import takes seconds, and forbids to set flags such as torch.backends.cudnn.enabled.
    allows_flags = "__allow_nonbracketed_mutation_flag"
    before = getattr(torch.backends, allows_flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as torchs
        from torch.testing._internal import common_utils
        from torch.testing._internal.opinfo import core
    setattr(torch.backends, allows_flags, before)
    # By this torch's samples hide that a function is random, ...
    torchs.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # type: ignore[attr-defined]  # not exported
    # ... and by this each looks through the whole stack for a test of torch's own.
    for module in (common_utils, core):
        module.extract_test_fn = lambda: None  # type: ignore[attr-defined]  # a name of these two
    return {op.full_name: op for op in torchs.op_db}


def dtype_of(op: Any) -> torch.dtype | None:
    """The dtype that an op is tried with; None if torch has no sample of it for the CPU."""
    supported = op.supported_dtypes("cpu")
    return next((dtype for dtype in _DTYPES if dtype in supported), None)


@contextmanager
def seeded() -> Iterator[None]:
    """A block in which random numbers are the same every time; afterwards they go on as before."""
    of_random, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(of_random)
            np.random.set_state(of_numpy)


def calls_of(op: Any, most: int, *, has_variants: bool = True) -> list[OpCall]:
    """At most `most` calls of the function on samples of torch's list, and its variants on two.

    Without samples that have no tensor or one that cannot be cut. Fewer are a part of more.
    """
    samples = _samples(op, most)
    if not samples:
        return []
    first, *rest = samples
    random.Random(op.full_name).shuffle(rest)  # arguments come in turns, which a stride would keep
    chosen = [first, *rest][:most]
    found = [_call(op, "", op.op, sample) for sample in chosen]
    for variant, function in _variants(op) if has_variants else []:
        for numbered in chosen[:_MOST_OF_VARIANTS]:
            sample = numbered[1]
            is_too_small = "in place" in variant and sample.broadcasts_input
            if isinstance(sample.input, torch.Tensor) and not is_too_small:
                found.append(_call(op, variant, function, numbered))
    return found


def _samples(op: Any, most: int) -> list[tuple[int, Any]]:
    """Number and sample, of those that can be cut; if one is wanted, it may be the first alone."""
    dtype = dtype_of(op)
    if dtype is None:
        return []
    has_grad = bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")
    if most == 1 and (early := _small(_cuttable(_listed(op, dtype, has_grad, _FEW)))):
        return early[:1]
    listed = _listed(op, dtype, has_grad, _MOST_LISTED)
    if has_grad:  # of some ops torch differentiates fewer samples than it has
        without = _listed(op, dtype, False, _MOST_LISTED)
        listed += without if len(without) > len(listed) else []
    cuttable = _cuttable(listed)
    return _small(cuttable) or cuttable[:1]


def _listed(op: Any, dtype: torch.dtype, has_grad: bool, most: int) -> list[Any]:
    with seeded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(islice(op.sample_inputs("cpu", dtype, has_grad), most))


def _held(sample: Any) -> list[torch.Tensor]:
    return _tensors((sample.input, sample.args, sample.kwargs))


def _cuttable(listed: list[Any]) -> list[tuple[int, Any]]:
    return [
        (number, sample)
        for number, sample in enumerate(listed)
        if (held := _held(sample)) and all(tensor.layout is torch.strided for tensor in held)
    ]


def _small(numbered: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    return [
        (number, sample)
        for number, sample in numbered
        if all(tensor.numel() <= _MOST_ELEMENTS for tensor in _held(sample))
    ]


def _call(op: Any, variant: str, function: Any, numbered: tuple[int, Any]) -> OpCall:
    number, sample = numbered
    return OpCall(
        op.full_name,
        variant,
        number,
        function,
        (sample.input, *sample.args),
        dict(sample.kwargs),
        has_grad=variant != "out=",
        processed=sample.output_process_fn_grad,
    )


def _variants(op: Any) -> list[tuple[str, Any]]:
    """Other ways to write the op, with a word for each."""
    found = [
        ("method", op.method_variant),
        ("operator", op.operator_variant),
        ("in place", _on_a_copy(op.inplace_variant)),
        ("operator in place", _on_a_copy(op.inplace_operator_variant)),
        ("out=", _into_out(op.op) if op.supports_out else None),
    ]
    for alias in op.aliases:
        found += [
            (alias.name, alias.op),
            (f"method {alias.name}", alias.method_variant),
            (f"{alias.name} in place", _on_a_copy(alias.inplace_variant)),
        ]
    return [
        (variant, function)
        for variant, function in found
        if function is not None and (op.full_name, variant) not in _TORCH_IS_WRONG
    ]


def _on_a_copy(function: Any) -> Any:
    """The in-place function on a copy: torch refuses to write into leaves that require grad."""
    if function is None:
        return None
    return lambda x, *args, **kwargs: function(x.clone(), *args, **kwargs)


def _into_out(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            made = function(*args, **kwargs)
            out = tree_map(torch.empty_like, made)
            return function(*args, **kwargs, out=out)

    return call
