"""Random programs: a few functions in a row on tensors of any layouts give what torch gives.

A function is added to the programs by a line in `OPS`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

import shardwise
from shardwise.sharded_tensor import ShardedTensor
from shardwise.testing import Sample, check_op
from shardwise.testing.op_check import check_op_here, layout_kinds
from shardwise.testing.strategies import examples, layouts, shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.geometry import Layout

Shape = tuple[int, ...]


def _broadcast(*given: Shape) -> Shape | None:
    """The shape of functions of elements; None where they do not fit together."""
    try:
        return tuple(torch.broadcast_shapes(*given))
    except RuntimeError:
        return None


def _first(*given: Shape) -> Shape | None:
    """The shape of functions that write into their first operand."""
    return given[0] if _broadcast(*given) == given[0] else None


def _sequences(*given: Shape) -> Shape | None:
    """The shape of attention, of one size for keys and queries."""
    return given[0] if len(given[0]) > 1 and len(set(given)) == 1 else None


def _same(*given: Shape) -> Shape | None:
    return given[0] if len(set(given)) == 1 else None


def _rows(given: Shape) -> Shape | None:
    """The shape of functions of rows, of which there is one."""
    return given if given and given[0] else None


def _alike(*given: Shape) -> Shape | None:
    """The shape of functions of rows of two tensors that are alike."""
    return given[0] if given[0] == given[1] and given[0] and given[0][0] else None


def _backwards(x: Any) -> torch.Tensor:
    """The number of each row from the end."""
    return torch.arange(x.shape[0]).flip(0)


def _spread(rows: torch.Tensor, like: Any) -> torch.Tensor:
    """What is one per row, for every element."""
    return rows.view(-1, *[1] * (like.dim() - 1)).expand(like.shape)


def _plus_in_place(x: Any, y: Any) -> Any:
    copy = x.clone()
    copy += y
    return copy.mul_(0.5)


def _into(x: Any, y: Any) -> Any:
    made = x + y
    return made.copy_(y.sin())


def _turned(shape: Shape) -> Shape:
    return shape[::-1]


def _halved(shape: Shape) -> Shape:
    """Of the last dim every second."""
    return (*shape[:-1], -(-shape[-1] // 2)) if shape else shape


def _write_row(x: Any, y: Any) -> Any:
    made = (x * 0.5).contiguous()
    made[..., :1] = y.sum()
    made.view(-1)[1:].mul_(0.5)
    return made


def _joined(x: Shape, y: Shape) -> Shape | None:
    """The shape of what is put together along dim 0, as long as it stays small."""
    fit = len(x) == len(y) and x[1:] == y[1:] and len(x) > 0 and x[0] + y[0] < 9
    return (x[0] + y[0], *x[1:]) if fit else None


def _picture(x: Shape) -> Shape | None:
    """The shape of functions of pictures of one dim, with or without a batch."""
    return x if len(x) in (2, 3) and 0 not in x else None


def _with_dims(least: int) -> Callable[[Shape], Shape | None]:
    """The shape of functions of tensors with `least` dims and some elements in each."""
    return lambda x: x if len(x) >= least and 0 not in x else None


class Op(NamedTuple):
    """A step that a program may take."""

    name: str
    arity: int
    run: Callable[..., Any]
    shape: Callable[..., Shape | None] = _broadcast  # of the result; None: it does not apply


# They keep numbers small, so that programs of any length can be compared.
OPS = [
    Op("add", 2, torch.add),
    Op("sub", 2, lambda x, y: 2 * x - y),
    Op("mul", 2, torch.mul),
    Op("div", 2, lambda x, y: x / (y.abs() + 1)),
    Op("neg", 1, torch.neg),
    Op("scale", 1, lambda x: x * 0.5),
    Op("shift", 1, lambda x: 1 - x),
    Op("tanh", 1, torch.tanh),
    Op("gelu", 1, F.gelu),
    Op("relu in place", 1, lambda x: F.relu(x.clone(), inplace=True)),
    Op("square", 1, lambda x: x.sigmoid() ** 2),
    Op("maximum", 2, torch.maximum),
    Op("where", 3, lambda x, y, z: torch.where(x > 0, y, z)),
    Op("addcmul", 3, lambda x, y, z: torch.addcmul(x, y, z, value=0.5)),
    Op("lerp", 3, lambda x, y, z: torch.lerp(x, y, z.sigmoid())),
    Op("add in place", 2, _plus_in_place, _first),
    Op("copy", 2, _into),
    Op("clamp", 2, lambda x, y: x.clamp(min=y - 1)),
    Op("attention", 3, F.scaled_dot_product_attention, _sequences),
    Op("pool", 1, lambda x: F.max_pool1d(x, 1), _picture),
    Op("detach", 2, lambda x, y: x * y.detach()),
    Op("turn", 1, lambda x: x.permute(tuple(range(x.dim()))[::-1]), _turned),
    Op("halve", 1, lambda x: x[..., ::2] if x.dim() else x * 1, _halved),
    Op("flatten", 1, lambda x: x.reshape(-1), lambda shape: (math.prod(shape),)),
    Op("lift", 1, lambda x: x.unsqueeze(0).expand(2, *x.shape).sum(0) * 0.5),
    Op("write", 2, _write_row, lambda x, y: x if x else None),
    Op("cat", 2, lambda x, y: torch.cat([x, y]), _joined),
    Op("stack", 2, lambda x, y: torch.stack([x, y], -1).sum(-1), _same),
    Op("flip", 1, lambda x: x.flip(tuple(range(x.dim())))),
    Op("roll", 1, lambda x: x.roll(1, -1), _with_dims(1)),
    Op("pad", 1, lambda x: F.pad(x, (1, -1), value=0.5), _with_dims(1)),
    Op("tril", 1, torch.tril, _with_dims(2)),
    Op("softmax", 1, lambda x: x.softmax(-1)),
    Op("log_softmax", 1, lambda x: F.log_softmax(x, 0)),
    Op("layer_norm", 1, lambda x: F.layer_norm(x, x.shape[-1:], eps=1.0), _with_dims(1)),
    Op("rms_norm", 1, lambda x: F.rms_norm(x, x.shape, eps=1.0), _with_dims(1)),
    Op("mse_loss", 2, lambda x, y: F.mse_loss(x, y, reduction="none"), _same),
    Op("look up", 1, lambda x: x[[-1] * len(x)], _rows),
    Op("add rows", 2, lambda x, y: x.index_add(0, _backwards(x), y), _alike),
    Op("scatter", 2, lambda x, y: x.scatter(0, _spread(_backwards(x), x), y), _alike),
]
_BY_NAME = {op.name: op for op in OPS}


class Step(NamedTuple):
    """One line of a program: an op on earlier values, or a reshard of one."""

    op: str  # "" for a reshard
    operands: tuple[int, ...]
    layout: Layout | None = None

    def run(self, values: list[Any]) -> Any:
        operands = [values[k] for k in self.operands]
        if self.layout is None:
            return _BY_NAME[self.op].run(*operands)
        (x,) = operands
        return shardwise.reshard(x, self.layout) if isinstance(x, ShardedTensor) else x


class Program(NamedTuple):
    """Tensors of some layouts, plain ones among them, and what is done to them."""

    inputs: tuple[Layout, ...]
    plain: frozenset[int]
    steps: tuple[Step, ...]
    world_size: int

    def run(self, *tensors: Any) -> tuple[Any, ...]:
        """The values that no later step takes."""
        values = list(tensors)
        for step in self.steps:
            values.append(step.run(values))
        taken = {k for step in self.steps for k in step.operands}
        made = range(len(tensors), len(values))
        return tuple(values[k] for k in made if k not in taken)

    @property
    def sample(self) -> Sample:
        return Sample(self.run, tuple(layout.shape for layout in self.inputs))


def _summed(layout: Layout) -> bool:
    """Whether the gradient of a leaf of this layout is that of the full tensor."""
    return layout.pending in (None, "sum")


def _differentiable(layout: Layout) -> bool:
    return layout.pending in (None, "sum", "avg")


@st.composite
def _narrowed(draw: st.DrawFn, shape: Shape) -> Shape:
    """A shape that broadcasts to `shape`."""
    sizes = [draw(st.sampled_from([n, n, 1])) for n in shape]
    return tuple(sizes[draw(st.integers(0, len(shape))) :])


@st.composite
def programs(draw: st.DrawFn, *, world_size: int | None = None) -> Program:
    ranks = draw(st.integers(1, 4)) if world_size is None else world_size
    shape = draw(shapes(max_size=4))
    more = draw(st.lists(_narrowed(shape), max_size=2))
    known = [shape, *more]
    inputs = tuple(
        draw(layouts(shape=one, world_size=ranks, max_boxes=6).filter(_summed)) for one in known
    )
    plain = frozenset(draw(st.sets(st.integers(1, 2), max_size=1)))
    steps: list[Step] = []
    for _ in range(draw(st.integers(3, 6))):
        step, result = draw(_steps(known, ranks))
        steps.append(step)
        known.append(result)
    return Program(inputs, plain & set(range(len(inputs))), tuple(steps), ranks)


@st.composite
def _steps(draw: st.DrawFn, known: list[Shape], world_size: int) -> tuple[Step, Shape]:
    """A step on values of `known` shapes, and the shape of its result."""
    # The latest values more often: else most of a program would be idle.
    picks = [*range(len(known)), len(known) - 1, len(known) - 1]
    if draw(st.integers(0, 3)) == 0:
        k = draw(st.sampled_from(picks))
        to = layouts(shape=known[k], world_size=world_size, max_boxes=6).filter(_differentiable)
        return Step("", (k,), draw(to)), known[k]
    op = draw(st.sampled_from(OPS))
    operands = tuple(draw(st.sampled_from(picks)) for _ in range(op.arity))
    result = op.shape(*[known[k] for k in operands])
    if result is None:  # of any op, operands that are one value fit together
        operands = operands[:1] * op.arity
        result = op.shape(*[known[k] for k in operands])
    if result is None:
        return Step("neg", operands[:1]), known[operands[0]]
    return Step(op.name, operands), result


@given(programs())
def test_programs_give_what_torch_gives(program: Program) -> None:
    check_op(program.sample, program.inputs, world_size=program.world_size, plain=program.plain)


def _squared(outputs: tuple[Any, ...]) -> Any:
    """A loss whose gradient depends on the inputs, whatever made the outputs."""
    full = [one.full_tensor() if isinstance(one, ShardedTensor) else one for one in outputs]
    weights = [torch.arange(1.0, one.numel() + 1).view(one.shape).cos() + 1.5 for one in full]
    return sum((one * weight).sum() for one, weight in zip(full, weights, strict=True)) ** 2


@given(programs())
def test_gradients_of_gradients_of_programs_are_those_of_torch(program: Program) -> None:
    assume("attention" not in {step.op for step in program.steps})  # torch's has none

    def gradients(*tensors: Any) -> tuple[Any, ...]:
        loss = _squared((*program.run(*tensors), tensors[0].sin()))
        return torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)

    sample = Sample(gradients, program.sample.shapes)
    check_op(sample, program.inputs, world_size=program.world_size, plain=program.plain)


def _on_rank(_: int, listed: list[Program]) -> None:
    for number, program in enumerate(listed):
        try:
            check_op_here(program.sample, program.inputs, plain=program.plain)
        except AssertionError as error:
            raise AssertionError(f"program {number}: {program}") from error


def test_programs_on_real_ranks() -> None:
    shardwise.run_local(_on_rank, 3, examples(programs(world_size=3), 20))


@pytest.mark.long
def test_programs_are_not_idle() -> None:
    """The strategy takes every step, several ranks, broadcasting and reshards."""
    found = examples(programs(), 400)
    names = {step.op for program in found for step in program.steps}
    assert len({"", *_BY_NAME} - names) <= 2  # some ask for shapes that are seldom there
    assert {program.world_size for program in found} == {1, 2, 3, 4}
    assert any(program.plain for program in found)
    assert any(layout.pending for program in found for layout in program.inputs)


_ROWS_TURNED = torch.arange(4, -1, -1).unsqueeze(1).expand(5, 3)
# Functions of which the gradient of one tensor follows from others, but not from all.
PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[Shape, ...]]] = {
    "mul": (torch.mul, ((5, 3), (5, 3))),
    "addcmul": (torch.addcmul, ((5, 3), (5, 3), (5, 3))),
    "addmm": (torch.addmm, ((5, 4), (5, 3), (3, 4))),
    "linear": (F.linear, ((5, 3), (4, 3), (4,))),
    "bilinear": (F.bilinear, ((5, 3), (5, 2), (4, 3, 2), (4,))),
    "conv1d": (F.conv1d, ((5, 3, 4), (4, 3, 2), (4,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b, 0.1), ((5, 4), (4,), (4,))),
    "cat": (lambda x, y: torch.cat([x, y]) ** 2, ((5, 3), (4, 3))),
    "solve": (torch.linalg.solve, ((5, 3, 3), (5, 3, 2))),
    "det": (torch.linalg.det, ((5, 3, 3),)),
    "scatter_reduce": (
        lambda x, src: x.scatter_reduce(0, _ROWS_TURNED, src, "prod"),
        ((5, 3), (5, 3)),
    ),
}
_HELD_BY_FEW = (
    "on the last rank",
    "dim 0 on one rank, in pieces",
    "dim 0 uneven, permuted, one empty",
)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("turn", range(3))
def test_gradients_of_one_gradient_meet_the_same_exchanges_on_all_ranks(
    name: str, turn: int
) -> None:
    """As a penalty has them: ranks without elements go backward through what the others do."""
    call, given = PRODUCTS[name]

    def penalized(number: int) -> Callable[..., torch.Tensor]:
        def gradient(*tensors: Any) -> torch.Tensor:
            found = call(*tensors)
            full = found.full_tensor() if isinstance(found, ShardedTensor) else found
            weight = torch.arange(1.0, full.numel() + 1).view(full.shape).cos()
            loss = (full * weight).sum()
            return torch.autograd.grad(loss, [tensors[number]], create_graph=True)[0]

        return gradient

    held = [
        layout_kinds(shape, world_size=3)[_HELD_BY_FEW[(k + turn) % 3]]
        for k, shape in enumerate(given)
    ]
    number = int(name.startswith("add"))  # of what is added the gradient follows from nothing
    check_op(Sample(penalized(number), given), held, world_size=3)
