"""Whether a torch function on sharded tensors gives what it gives on full ones, gradients too.

    check_op(Sample(lambda x, w: F.linear(x, w), ((4, 6), (5, 6))), [rows, columns], world_size=2)

runs the call on simulated ranks and compares with plain torch: every local piece of every output,
and every local piece of every gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch

from shardwise._torch_compat import tree_leaves
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.comm.tracing import trace
from shardwise.errors import ArgumentValueError
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor.entering import inputs_behind
from shardwise.sharded_tensor.implicit import implicit_comm
from shardwise.sharded_tensor.plain_inputs import plain_inputs
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from shardwise.sharded_tensor.implicit import ImplicitComm

__all__ = ["Sample", "Values", "check_op", "check_op_here", "layout_kinds", "shards_of_full"]

Shape = tuple[int, ...]
# What the numbers of a sample are like.
Values = Literal[
    "real", "positive", "unit", "distinct", "ties", "complex", "whole", "bits", "truth"
]


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of a torch function: `call(*tensors)` on tensors of `shapes`.

    `values` says what numbers the tensors have, for all or one each: "real" normal ones,
    "positive", "unit" in (0, 1), "distinct" no two alike, "ties" many alike, "complex", "whole"
    floats without fraction, "bits" integers, "truth" booleans.

    `keeps` are specs, one per operand, on which the function must work without moving operands
    (`implicit_comm("error")`), sending at most `most_bytes` between 4 ranks, forward.
    """

    call: Callable[..., Any]
    shapes: tuple[Shape, ...]
    values: Values | tuple[Values, ...] = "real"
    has_grad: bool = True  # whether torch has gradients of it
    keeps: tuple[str, ...] = ()
    most_bytes: int = 0
    dtype: torch.dtype = torch.float64

    def tensors(self, seed: int = 0) -> list[torch.Tensor]:
        """The full tensors of the call."""
        generator = torch.Generator().manual_seed(seed)
        kinds = (self.values,) * len(self.shapes) if isinstance(self.values, str) else self.values
        return [
            _numbers(kind, shape, self.dtype, generator)
            for kind, shape in zip(kinds, self.shapes, strict=True)
        ]


def check_op(
    sample: Sample,
    layouts: Sequence[Layout],
    *,
    world_size: int = 4,
    plain: Collection[int] = (),
    policy: ImplicitComm = "allow",
    seed: int = 0,
) -> int:
    """Bytes sent forward; raises a RankFailure unless the call is right on simulated ranks.

    Its cause is an AssertionError that says which piece of what is wrong. Operands in `plain` are
    given as plain tensors, the same on all ranks.
    """

    def on_rank(rank: int) -> int:
        return check_op_here(sample, layouts, plain=plain, policy=policy, seed=seed)

    return max(simulate(on_rank, world_size).results)


def check_op_here(
    sample: Sample,
    layouts: Sequence[Layout],
    *,
    plain: Collection[int] = (),
    policy: ImplicitComm = "allow",
    seed: int = 0,
) -> int:
    """The same on one rank of a group, all of which call it; raises the AssertionError itself."""
    if len(layouts) != len(sample.shapes):
        raise ArgumentValueError("layouts", expected=f"{len(sample.shapes)}", got=len(layouts))
    full = [_leaf(tensor, sample.has_grad) for tensor in sample.tensors(seed)]
    given: list[Any] = [
        _leaf(tensor.detach().clone(), sample.has_grad)
        if k in plain
        else _sharded(tensor.detach(), layout, sample.has_grad)
        for k, (tensor, layout) in enumerate(zip(full, layouts, strict=True))
    ]
    expected = sample.call(*full)
    with trace(show=False) as sent, implicit_comm(policy), plain_inputs("replicated"):
        found = sample.call(*given)
    pairs = list(zip(tree_leaves(found), tree_leaves(expected), strict=True))
    for number, (one, reference) in enumerate(pairs):
        _check_value(f"output {number}", one, reference)
    if sample.has_grad:
        for number, (one, _) in enumerate(pairs):
            _check_graph(f"output {number}", one, given)
        _check_gradients(pairs, given, full)
    return sent.total_bytes


def _check_graph(what: str, one: Any, given: Sequence[Any]) -> None:
    """All pieces of a rank follow from the same operands.

    [Note: pieces of one graph] in `sharded_tensor/carrying_out.py`
    """
    if isinstance(one, ShardedTensor) and one.requires_grad:
        inputs = [
            tensor._state.carriers if isinstance(tensor, ShardedTensor) else (tensor,)
            for tensor in given
        ]
        behind = {inputs_behind([piece], inputs) for piece in one._state.carriers}
        assert len(behind) == 1, f"{what}: pieces of {[sorted(found) for found in behind]}"


def _check_gradients(
    pairs: Sequence[tuple[Any, Any]], given: Sequence[Any], full: Sequence[torch.Tensor]
) -> None:
    differentiable = [
        (one, reference)
        for one, reference in pairs
        if isinstance(reference, torch.Tensor) and reference.requires_grad
    ]
    if not differentiable:
        raise ArgumentValueError(
            "has_grad of the Sample",
            expected="False, as no output has a gradient",
            got=True,
            fix="Write: Sample(..., has_grad=False).",
        )
    for one, _ in differentiable:
        assert one.requires_grad, "the result does not require grad"
    torch.autograd.backward([_weighed(reference) for _, reference in differentiable])
    torch.autograd.backward([_weighed(_full(one)) for one, _ in differentiable])
    for number, (one, reference) in enumerate(zip(given, full, strict=True)):
        if not reference.requires_grad:
            continue
        what = f"gradient {number}"
        if reference.grad is None:
            assert one.grad is None or not _full(one.grad).any(), what
        else:
            assert one.grad is not None, f"{what} is missing"
            _check_value(what, one.grad, reference.grad)


def _check_value(what: str, one: Any, reference: Any) -> None:
    """Every local piece is that of the full tensor."""
    if not isinstance(reference, torch.Tensor):
        assert one == reference, f"{what}: {one} is not {reference}"
        return
    reference = reference.detach()
    assert one.dtype == reference.dtype, f"{what}: {one.dtype} is not {reference.dtype}"
    assert one.shape == reference.shape, f"{what}: {one.shape} is not {reference.shape}"
    if not isinstance(one, ShardedTensor):
        torch.testing.assert_close(one.detach(), reference, msg=_about(what), equal_nan=True)
        return
    state = one._state
    if state.layout.pending is not None:
        _check_value(what, _full(one.detach()), reference)
        return
    for box, shard in zip(state.boxes, state.shards, strict=True):
        torch.testing.assert_close(
            shard.detach(),
            reference[box.slices()],
            msg=_about(f"{what}, {box} on rank {state.rank}"),
            equal_nan=True,
        )


def _about(what: str) -> Callable[[str], str]:
    return lambda message: f"{what}: {message}"


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def _weighed(tensor: torch.Tensor) -> torch.Tensor:
    """A loss in which every element has another weight."""
    weights = torch.arange(1, tensor.numel() + 1, dtype=torch.float64).reshape(tensor.shape)
    product = tensor * (weights.cos() + 1.5).to(tensor.dtype)
    return (torch.view_as_real(product) if product.is_complex() else product).sum()


def _leaf(tensor: torch.Tensor, has_grad: bool) -> torch.Tensor:
    return tensor.requires_grad_(has_grad and (tensor.is_floating_point() or tensor.is_complex()))


def _sharded(full: torch.Tensor, layout: Layout, has_grad: bool) -> ShardedTensor:
    members = communicator()
    shards = [
        _leaf(shard, has_grad) for shard in shards_of_full(full, layout).get(members.rank, [])
    ]
    requires_grad = has_grad and (full.is_floating_point() or full.is_complex())
    return wrap(
        make_state(layout, shards, group=members, dtype=full.dtype, requires_grad=requires_grad)
    )


def shards_of_full(full: torch.Tensor, layout: Layout) -> dict[int, list[torch.Tensor]]:
    """Every rank's shards of a full tensor, in any layout without a pending product.

    Addends of a sum or mean are random, but add up to it.
    """
    generator = torch.Generator().manual_seed(full.numel())
    terms: dict[tuple[Box, int], torch.Tensor] = {}
    found: dict[int, list[torch.Tensor]] = {rank: [] for rank in layout.ranks}
    numbers: dict[Box, set[int]] = {}
    for box, _, term in layout:
        numbers.setdefault(box, set()).add(term)
    for box, listed in numbers.items():
        _split(full[box.slices()], box, sorted(listed), layout, terms, generator)
    for box, rank, term in layout:
        found[rank].append(terms[box, term].clone())
    return found


def _split(
    part: torch.Tensor,
    box: Box,
    numbers: Sequence[int],
    layout: Layout,
    terms: dict[tuple[Box, int], torch.Tensor],
    generator: torch.Generator,
) -> None:
    if layout.pending in ("max", "min") or layout.pending is None or len(numbers) == 1:
        for number in numbers:
            terms[box, number] = part
        return
    if layout.pending == "product":
        raise ArgumentValueError("layout", expected="no pending product", got=str(layout))
    if part.dtype == torch.bool:  # whose sum is "or"
        for number in numbers:
            terms[box, number] = part if number == numbers[0] else torch.zeros_like(part)
        return
    rest = part * len(numbers) if layout.pending == "avg" else part.clone()
    for number in numbers[1:]:
        terms[box, number] = torch.randint(-2, 3, part.shape, generator=generator).to(part.dtype)
        rest = rest - terms[box, number]
    terms[box, numbers[0]] = rest


def layout_kinds(shape: Shape, *, world_size: int = 4) -> dict[str, Layout]:
    """Layouts of every kind that fits, by name: uneven, empty, permuted, subgroup, ..."""
    return dict(_layout_kinds(shape, world_size))


@lru_cache(maxsize=1024)
def _layout_kinds(shape: Shape, world_size: int) -> dict[str, Layout]:
    whole, last = Box.whole(shape), world_size - 1
    everybody = list(range(world_size))
    found = {
        "replicated": Layout(shape, [whole] * world_size, everybody),
        "on the last rank": Layout(shape, [whole], [last]),
        "pending": Layout(shape, [whole] * world_size, everybody, terms=everybody, pending="sum"),
    }
    if world_size > 1:
        found["replicated on a subgroup"] = Layout(shape, [whole] * 2, [0, last])
    for dim, size in enumerate(shape):
        cuts = [min(k, size) for k in (0, 1, 1, *range(3, size), size)][:world_size]
        bounds = [*cuts, size]
        boxes = [whole.with_range(dim, low, high) for low, high in pairwise(bounds)]
        turned = [(k + 1) % world_size for k in range(len(boxes))]
        found[f"dim {dim} uneven, permuted, one empty"] = Layout(shape, boxes, turned)
        found[f"dim {dim} on one rank, in pieces"] = Layout(shape, boxes, [0] * len(boxes))
    return found


def _numbers(
    kind: Values, shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    def normal() -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, generator=generator)

    match kind:
        case "positive":
            return normal().abs() + 0.1
        case "unit":
            return torch.rand(shape, dtype=dtype, generator=generator) * 0.98 + 0.01
        case "distinct":
            count = torch.Size(shape).numel()
            return torch.randperm(count, generator=generator).to(dtype).reshape(shape) - count / 2
        case "ties":
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        case "complex":
            return torch.complex(normal(), normal())
        case "whole":
            return torch.randint(1, 5, shape, generator=generator).to(dtype)
        case "bits":
            return torch.randint(0, 7, shape, generator=generator)
        case "truth":
            return torch.randint(0, 2, shape, generator=generator).bool()
    return normal()
