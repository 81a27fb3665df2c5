"""Products of tensors: a table of torch functions and their einsum forms."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from shardwise.errors import OpError
from shardwise.ops.call_arguments import arguments_of, operands_named, place_of
from shardwise.ops.contraction import decide_product
from shardwise.ops.forms import Factor, Form
from shardwise.ops.names import functions_named
from shardwise.ops.pattern import aligned, names_of
from shardwise.ops.phantoms import as_tie
from shardwise.ops.rule import Call, Operand, Rule, composite, register

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from shardwise.geometry import Box
    from shardwise.ops.forms import Run
    from shardwise.ops.rule import Decision, Invoke

__all__: list[str] = []

Shape = tuple[int, ...]


class _Names(NamedTuple):
    """A product in names of dims: one per dim of each factor and of the output."""

    factors: tuple[tuple[Hashable, ...], ...]
    output: tuple[Hashable, ...]
    # Dims of these names may be of size 1 in a factor, and are broadcast.
    broadcast: frozenset[Hashable] = frozenset()


Describe: TypeAlias = "Callable[[Call, Sequence[Shape]], _Names | None]"


# -- forms -----------------------------------------------------------------------------------------


def _fixed(*factors: str, output: str) -> Describe:
    """The names of a function whose operands have fixed numbers of dims."""

    def describe(call: Call, shapes: Sequence[Shape]) -> _Names | None:
        if any(len(shape) != len(names) for shape, names in zip(shapes, factors, strict=True)):
            return None
        return _Names(tuple(map(tuple, factors)), tuple(output))

    return describe


def _matmul(call: Call, shapes: Sequence[Shape]) -> _Names | None:
    left, right = map(len, shapes)
    if not left or not right:
        return None
    of_left = (*aligned(left - 2), "m", "k") if left > 1 else ("k",)
    of_right = (*aligned(right - 2), "k", "n") if right > 1 else ("k",)
    batch = aligned(max(left, right) - 2)
    output = (*batch, *(["m"] if left > 1 else []), *(["n"] if right > 1 else []))
    return _Names((of_left, of_right), output, frozenset(batch))


def _linear(call: Call, shapes: Sequence[Shape]) -> _Names | None:
    left, right = map(len, shapes)
    if not left or right not in (1, 2):
        return None
    rows = aligned(left - 1)
    out = ("n",) if right > 1 else ()
    return _Names(((*rows, "k"), (*out, "k")), (*rows, *out))


def _bilinear(call: Call, shapes: Sequence[Shape]) -> _Names | None:
    left, right, weight = map(len, shapes)
    if left != right or not left or weight != 3:
        return None
    rows = aligned(left - 1)
    return _Names(((*rows, "i"), (*rows, "j"), ("n", "i", "j")), (*rows, "n"))


def _inner(call: Call, shapes: Sequence[Shape]) -> _Names:
    left, right = shapes
    ends = ("k",) if left and right else ()
    of_left = tuple(("a", dim) for dim in range(len(left) - len(ends)))
    of_right = tuple(("b", dim) for dim in range(len(right) - len(ends)))
    return _Names(((*of_left, *ends), (*of_right, *ends)), (*of_left, *of_right))


def _tensordot(call: Call, shapes: Sequence[Shape]) -> _Names | None:
    left, right = map(len, shapes)
    pairs = _pairs_of_dims(arguments_of(call, "a b dims").get("dims", 2), left, right)
    if pairs is None:
        return None
    of_left: list[Hashable] = [("a", dim) for dim in range(left)]
    of_right: list[Hashable] = [("b", dim) for dim in range(right)]
    for a, b in pairs:
        of_right[b] = of_left[a]
    summed = {of_left[a] for a, _ in pairs}
    output = [name for name in (*of_left, *of_right) if name not in summed]
    return _Names((tuple(of_left), tuple(of_right)), tuple(output), frozenset(summed))


def _pairs_of_dims(dims: Any, left: int, right: int) -> list[tuple[int, int]] | None:
    """The dims that tensordot sums over, in both operands; None if there are no such dims."""
    if isinstance(dims, int):
        if not 0 <= dims <= min(left, right):
            return None
        return [(left - dims + k, k) for k in range(dims)]
    of_left, of_right = ((one,) if isinstance(one, int) else one for one in dims)
    if len(of_left) != len(of_right):
        return None
    if not all(-left <= dim < left for dim in of_left):
        return None
    if not all(-right <= dim < right for dim in of_right):
        return None
    return [(a % left, b % right) for a, b in zip(of_left, of_right, strict=True)]


def _vecdot(call: Call, shapes: Sequence[Shape]) -> _Names | None:
    most = max(map(len, shapes))
    dim = call.kwargs.get("dim", -1)
    if not most or not -most <= dim < most:
        return None
    names = aligned(most)
    factors = tuple(names[most - len(shape) :] for shape in shapes)
    output = tuple(name for name in names if name != names[dim])
    return _Names(factors, output, frozenset(names))


# -- einsum ----------------------------------------------------------------------------------------


def _einsum_names(equation: str, shapes: Sequence[Shape]) -> _Names | None:
    """What an equation says of operands of these shapes; None if it does not fit them."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(shapes):
        return None
    factors = [names_of(term, len(shape)) for term, shape in zip(terms, shapes, strict=True)]
    if any(names is None for names in factors):
        return None
    found = [names for names in factors if names is not None]
    count = Counter(itertools.chain(*found))
    hidden = sorted(name for name in count if isinstance(name, int))
    if arrow:
        output = names_of(result, len(result.replace("...", "")) + len(hidden) * ("..." in result))
    else:
        once = sorted(name for name, times in count.items() if times == 1 and name not in hidden)
        output = (*hidden, *once)
    if output is None or len(set(output)) < len(output) or not set(output) <= set(count):
        return None
    return _Names(tuple(found), output, frozenset(count))


def _decide_einsum(call: Call) -> Decision | None:
    equation, *operands = call.args
    if call.kwargs or not isinstance(equation, str):
        return None
    if not all(isinstance(operand, Operand) for operand in operands):
        return None
    names = _einsum_names(equation, [operand.shape for operand in operands])
    if names is None:
        raise _mismatch(call, operands, f"einsum of {equation!r}")
    return decide_product(call, _form(call, names, operands, None))


# -- from names to a form --------------------------------------------------------------------------


def _form(call: Call, names: _Names, factors: Sequence[Operand], addend: Operand | None) -> Form:
    sizes: dict[Hashable, int] = {}
    for listed, factor in zip(names.factors, factors, strict=True):
        pairs = list(zip(listed, factor.shape, strict=True))
        if len(set(pairs)) > len(set(listed)):  # `ii` of (1, 3), which nothing broadcasts
            raise _mismatch(call, factors)
        for name, size in pairs:
            known = sizes.setdefault(name, size)
            if known != size and (name not in names.broadcast or 1 not in (known, size)):
                raise _mismatch(call, factors)
            if known == 1:
                sizes[name] = size
    label = {name: k for k, name in enumerate(sizes)}
    labelled = [
        Factor(
            place_of(call, factor),
            tuple(
                label[name] if size == sizes[name] else None
                for name, size in zip(listed, factor.shape, strict=True)
            ),
        )
        for listed, factor in zip(names.factors, factors, strict=True)
    ]
    output = tuple(label[name] for name in names.output)
    form = Form(tuple(sizes.values()), tuple(labelled), output)
    if addend is None:
        return form
    try:
        fits = torch.broadcast_shapes(addend.shape, form.shape) == form.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise _mismatch(call, [addend, *factors], expected=f"an addend that fits {form.shape}")
    return replace(form, addend=_added(call, form, addend))


def _added(call: Call, form: Form, addend: Operand) -> Factor:
    along = form.output[len(form.output) - len(addend.shape) :]
    pairs = zip(addend.shape, along, strict=True)
    return Factor(
        place_of(call, addend),
        tuple(label if size == form.sizes[label] else None for size, label in pairs),
    )


def _mismatch(
    call: Call, operands: Sequence[Operand], what: str = "", *, expected: str = "shapes that fit"
) -> OpError:
    return OpError(
        what or call.name,
        rank=call.rank,
        expected=expected,
        got=" and ".join(str(operand.shape) for operand in operands),
        fix="Sizes are global ones: those of the full tensors.",
    )


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Product:
    """A torch function that multiplies tensors."""

    arguments: str  # names of the tensors, in order
    describe: Describe  # the factors' names of dims; None: they do not fit together
    addend: str | None = None  # the argument that is added
    takes_rows: int | None = None
    reads_numbers: bool = False
    phantom: Callable[..., torch.Tensor] | None = None  # see `Decision`
    widens: bool = False  # whether torch takes an addend for the result if there is nothing to sum

    def decide(self, call: Call) -> Decision | None:
        names = self.arguments.split()
        is_optional = self.addend == names[-1]  # a bias
        tensors = operands_named(call, self.arguments, least=len(names) - is_optional)
        if tensors is None:
            return None
        given = dict(zip(names, tensors, strict=False))
        addend = given.pop(self.addend, None) if self.addend else None
        factors = list(given.values())
        described = self.describe(call, [factor.shape for factor in factors])
        if described is None:
            raise _mismatch(call, factors)
        form = _form(call, described, factors, addend)
        if self.widens and addend is not None and addend.shape != form.shape:
            form = replace(form, run=_widened(form, place_of(call, addend)))
        found = decide_product(call, form)
        return found if self.phantom is None else replace(found, phantom=self.phantom)


def _widened(form: Form, place: int) -> Run:
    """The function on an addend that has the shape of the block's result."""

    def run(invoke: Invoke, tensors: Sequence[torch.Tensor], space: Box) -> Any:
        given = list(tensors)
        given[place] = given[place].expand([space.shape[label] for label in form.output])
        return invoke(*given)

    return run


def _empty_addmv(addend: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    product = torch.mv(matrix, vector)
    return product + as_tie(addend).to(product.dtype)


def _empty_bilinear(
    left: torch.Tensor,
    right: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What torch does not have for tensors without elements."""
    product = as_tie(left) * as_tie(right) * as_tie(weight)
    return product if bias is None else product + as_tie(bias)


_mm = _fixed("mk", "kn", output="mn")
_bmm = _fixed("bmk", "bkn", output="bmn")
_PRODUCTS = {
    "matmul __matmul__": _Product("input other", _matmul, takes_rows=0),
    "mm": _Product("input mat2", _mm, takes_rows=0),
    "bmm": _Product("input mat2", _bmm, takes_rows=0),
    "mv": _Product("input vec", _fixed("mk", "k", output="m")),
    "dot": _Product("input tensor", _fixed("k", "k", output="")),
    "vdot": _Product("input other", _fixed("k", "k", output="")),
    "outer ger": _Product("input vec2", _fixed("m", "n", output="mn")),
    "inner": _Product("input other", _inner),
    "tensordot": _Product("a b", _tensordot, reads_numbers=True),
    "vecdot": _Product("x y", _vecdot, reads_numbers=True),
    "linear": _Product("input weight bias", _linear, "bias", takes_rows=0),
    "bilinear": _Product("input1 input2 weight bias", _bilinear, "bias", phantom=_empty_bilinear),
    "addmm": _Product("input mat1 mat2", _mm, "input", takes_rows=1),
    "addmv": _Product(
        "input mat vec",
        _fixed("mk", "k", output="m"),
        "input",
        phantom=_empty_addmv,
        widens=True,
    ),
    "addr": _Product("input vec1 vec2", _fixed("m", "n", output="mn"), "input"),
    "addbmm": _Product("input batch1 batch2", _fixed("bmk", "bkn", output="mn"), "input"),
    "baddbmm": _Product("input batch1 batch2", _bmm, "input", takes_rows=1),
}


def _register() -> None:
    for listed, product in _PRODUCTS.items():
        names = listed.split()
        rows = product.takes_rows
        rule = Rule(
            names[0],
            product.decide,
            reads_numbers=product.reads_numbers,
            asks_torch=True,
            takes_rows=None if rows is None else (rows, product.arguments.split()[rows]),
        )
        register(rule, functions_named(names))
    register(Rule("einsum", _decide_einsum, asks_torch=True), functions_named(["einsum"]))


_register()


@composite("__rmatmul__", functions_named(["__rmatmul__"]))
def _rmatmul(tensor: Any, other: Any) -> Any:
    return torch.matmul(other, tensor)


def _inplace_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor.copy_(function(tensor, *args, **kwargs))

    return run


for _name in ("addmm", "addmv", "addr", "addbmm", "baddbmm"):
    composite(f"{_name}_", functions_named([f"{_name}_"]))(_inplace_of(getattr(torch, _name)))
