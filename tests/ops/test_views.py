"""Views of sharded tensors: boxes are mapped, and what is written on one side is on the other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.geometry import Box, Layout
from shardwise.testing import Sample, check_op
from shardwise.testing.op_check import layout_kinds
from shardwise.testing.strategies import layouts, shapes

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = (4, 3)
FULL = torch.arange(12.0).view(SHAPE) - 6
WORLD_SIZE = 3
KINDS = layout_kinds(SHAPE, world_size=WORLD_SIZE)
SETTLED = {name: layout for name, layout in KINDS.items() if layout.pending is None}


def at(layout: Any, full: torch.Tensor = FULL) -> Any:
    return shardwise.reshard(shardwise.as_replicated(full.clone()), layout)


def on_ranks(fn: Callable[[], Any], world_size: int = WORLD_SIZE) -> list[Any]:
    def run(_: int) -> Any:
        with shardwise.implicit_comm("error"):
            return fn()

    return list(simulate(run, world_size).results)


# -- any view of any layout ------------------------------------------------------------------------


class View(NamedTuple):
    """A method and its arguments, for a tensor of some shape."""

    name: str
    args: tuple[Any, ...]

    def __call__(self, x: Any) -> Any:
        return getattr(x, self.name)(*self.args)


def _indices(size: int) -> st.SearchStrategy[Any]:
    ends = st.none() | st.integers(-size - 1, size + 1)
    found: st.SearchStrategy[Any] = st.builds(slice, ends, ends, st.none() | st.integers(1, 3))
    return found | st.integers(-size, size - 1) if size else found


@st.composite
def _index(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    index = [draw(_indices(size)) for size in shape[: draw(st.integers(0, len(shape)))]]
    has_all = len(index) == len(shape)  # else what follows `...` would be of the last dims
    for extra in draw(st.lists(st.sampled_from([None, ...]), max_size=2, unique=True)):
        is_free = extra is None or has_all
        index.insert(draw(st.integers(0, len(index))) if is_free else len(index), extra)
    return tuple(index)


@st.composite
def _sizes(draw: st.DrawFn, numel: int) -> tuple[int, ...]:
    """Sizes of any shape of `numel` elements."""
    sizes: list[int] = []
    while numel > 1 and draw(st.integers(0, 4)):
        sizes.append(draw(st.sampled_from([n for n in range(1, numel + 1) if numel % n == 0])))
        numel //= sizes[-1]
    return (*sizes, numel)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> View:
    dims = st.integers(0, max(len(shape) - 1, 0))
    kinds = ["index", "permute", "unsqueeze", "expand", "reshape", "view"]
    match draw(st.sampled_from(kinds + ["split", "tensor_split", "diagonal"] * bool(shape))):
        case "permute":
            return View("permute", (tuple(draw(st.permutations(range(len(shape))))),))
        case "unsqueeze":
            return View("unsqueeze", (draw(st.integers(0, len(shape))),))
        case "expand":
            wide = [draw(st.integers(1, 3)) if size == 1 else size for size in shape]
            return View("expand", (draw(st.integers(1, 2)), *wide))
        case "reshape" | "view" as name:
            sizes = draw(_sizes(math.prod(shape))) if 0 not in shape else (*shape[::-1], 1)
            return View(name, sizes)
        case "split":
            return View("split", (draw(st.integers(1, 3)), draw(dims)))
        case "tensor_split":
            return View("tensor_split", (draw(st.integers(1, 3)), draw(dims)))
        case "diagonal" if len(shape) > 1:
            one, other = draw(st.permutations(range(len(shape))))[:2]
            return View("diagonal", (draw(st.integers(-3, 3)), one, other))
    return View("__getitem__", (draw(_index(shape)),))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, View]:
    shape = draw(shapes(max_ndim=3, max_size=4))  # of which no reshape has too many parts
    found = draw(
        layouts(shape=shape, world_size=3).filter(lambda one: one.pending in (None, "sum"))
    )
    return found, draw(views(shape))


@given(cases())
def test_a_view_of_any_layout_moves_nothing(case: tuple[Layout, View]) -> None:
    layout, view = case
    sample = Sample(lambda x: view(x * 1), (layout.shape,))
    assert check_op(sample, [layout], world_size=3, policy="error") == 0


@given(cases(), st.data())
def test_writes_reach_the_base_and_the_view_with_gradients(
    case: tuple[Layout, View], data: st.DataObject
) -> None:
    layout, view = case
    if view.name in ("expand", "split", "tensor_split"):  # which torch does not write into
        view = View("unsqueeze", (0,))
    name = data.draw(st.sampled_from(["add_", "copy_", "sub_"]))
    number = data.draw(st.floats(-1, 1))

    def call(x: Any, y: Any) -> Any:
        base = x * 1
        shown = view(base)
        if not math.prod(shown.shape):
            return base, shown
        getattr(shown, name)(shown.detach().cos() * y)
        base.sub_(number)
        return base, shown * 2

    other = Layout((), [Box((), ())] * 2, [0, 2])
    check_op(Sample(call, (layout.shape, ())), [layout, other], world_size=3)


@pytest.mark.parametrize("kind", SETTLED)
@pytest.mark.parametrize("written", ["view", "base"])
@pytest.mark.parametrize("shape", ["unsqueeze", "transpose", "slice", "reshape", "view_as"])
def test_gradients_of_gradients_follow_written_views_on_every_rank(
    shape: str, written: str, kind: str
) -> None:
    """Also where a rank has no elements: it meets the others in each exchange."""

    def call(x: Any) -> Any:
        views = {
            "unsqueeze": lambda base: base.unsqueeze(0),
            "transpose": lambda base: base.T,
            "slice": lambda base: base[:, 1:][1:],
            "reshape": lambda base: base.view(-1),
            "view_as": lambda base: base.view_as(base),
        }
        base = x.clone()
        view = views[shape](base)
        (view if written == "view" else base).mul_(2)
        made = view * view.cos() if written == "view" else view * 1
        full = made.full_tensor() if isinstance(made, shardwise.ShardedTensor) else made
        loss = (full * (full.detach() + 1)).sum() ** 2
        (found,) = torch.autograd.grad(loss, [x], create_graph=True)
        return found

    check_op(Sample(call, (SHAPE,)), [KINDS[kind]], world_size=WORLD_SIZE)


@pytest.mark.parametrize("name", ["relu_", "exp_", "tanh_", "sigmoid_", "sqrt_"])
@pytest.mark.parametrize("view", ["unsqueeze", "transpose", "slice"])
def test_functions_that_save_what_they_write_may_write_views_of_several_pieces(
    view: str, name: str
) -> None:
    views = {
        "unsqueeze": lambda base: base.unsqueeze(0),
        "transpose": lambda base: base.T,
        "slice": lambda base: base[:, 1:],
    }

    def call(x: Any) -> Any:
        base = x * 1
        shown = views[view](base)
        getattr(shown, name)()
        return base, shown * 2

    sample = Sample(call, (SHAPE,), "positive")
    for layout in SETTLED.values():
        check_op(sample, [layout], world_size=WORLD_SIZE)


SPLITS: dict[str, Callable[[Any], Any]] = {
    "split": lambda x: x.split(1),
    "chunk": lambda x: x.chunk(4),
    "unbind": lambda x: x.unbind(),
    "tensor_split": lambda x: x.tensor_split(4),
    "iter": list,
}


@pytest.mark.parametrize("name", SPLITS)
def test_each_of_several_views_may_be_written(name: str) -> None:
    """torch refuses that, so the oracle takes them one by one."""

    def parts_of(base: Any) -> Any:
        if isinstance(base, shardwise.ShardedTensor):
            return SPLITS[name](base)
        places: list[Any] = list(range(4))
        if name not in ("unbind", "iter"):
            places = [slice(k, k + 1) for k in places]
        return [base[place] for place in places]

    def write(x: Any) -> Any:
        base = x * 1
        first, _, third, last = parts_of(base)
        last.mul_(first.detach() + 2)
        third[..., 1:].copy_(first[..., 1:])
        base.mul_(1.5)
        first.square_()
        return base * base, last * 3

    def gradient(x: Any) -> Any:
        is_sharded = isinstance(x, shardwise.ShardedTensor)
        full = [one.full_tensor() if is_sharded else one for one in write(x)]
        loss = sum((one * (one.detach() + 1)).sum() for one in full) ** 2
        return torch.autograd.grad(loss, [x], create_graph=True)[0]

    for layout in SETTLED.values():
        check_op(Sample(write, (SHAPE,)), [layout], world_size=WORLD_SIZE)
        check_op(Sample(gradient, (SHAPE,)), [layout], world_size=WORLD_SIZE)


def test_what_autograd_saved_of_a_tensor_may_not_be_written_by_a_view_of_any_piece() -> None:
    """Pieces that the view leaves out count the write, as all of a plain tensor does."""
    boxes = [Box((row, 0), (row + 1, 3)) for row in range(4)]
    layout = Layout(SHAPE, boxes, [0, 0, 1, 2])

    def run() -> None:
        base = at(layout).requires_grad_() * 1
        squares = base.square()
        base[:1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()

    on_ranks(run)


def test_a_write_into_a_view_of_a_view_reaches_all_pieces_of_the_base() -> None:
    """Rank 0 writes one of its pieces, rank 1 none; both then go on with others."""
    boxes = [Box((row, 0), (row + 1, 2)) for row in range(4)]
    layout = Layout((4, 2), boxes, [0, 0, 1, 1])

    def call(x: Any, y: Any) -> Any:
        found = []
        for base in (x * 1, x * 2):  # the second takes the quick way
            part = base[:1][:, 1:]
            part.add_(y.sum())
            found += [base, base[1:3]]
        return found

    other = Layout((3,), [Box((0,), (1,)), Box((1,), (3,))], [1, 2])
    check_op(Sample(call, ((4, 2), (3,))), [layout, other], world_size=3)


# -- writing ---------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[1],
    "columns": lambda x: x[:, 1:],
    "transposed": lambda x: x.T,
    "element": lambda x: x[2, 0],
    "every second": lambda x: x[::2],
    "flat": lambda x: x.view(-1),
    "reshaped": lambda x: x.reshape(2, 6),
    "chunk": lambda x: x.chunk(2)[1],
    "of a view": lambda x: x.t()[1:].unsqueeze(0),
    "detached": lambda x: x[0].detach(),
    "data": lambda x: x[1:].data,
    "diagonal": lambda x: x.diagonal(),
    "bits": lambda x: x.view(torch.int32),
    "row of rows": lambda x: next(iter(x)),
}


@pytest.mark.parametrize("kind", SETTLED)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_shows_what_is_written_into_its_base_and_the_other_way(name: str, kind: str) -> None:
    def run() -> None:
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                x, full = at(KINDS[kind]), FULL.clone()
                shown, expected = VIEWS[name](x), VIEWS[name](full)
                for write in (
                    lambda t: t.add_(1),
                    lambda t: t.fill_(2),
                    lambda t: t.copy_(torch.ones(())),
                    lambda t: torch._foreach_add_([t], 1),
                ):
                    write(shown)
                    write(expected)
                    with shardwise.implicit_comm("allow"):
                        assert torch.equal(x.full_tensor(), full)
                x.mul_(3)
                full.mul_(3)
                assert torch.equal(shown.full_tensor(), expected)

    on_ranks(run)


@pytest.mark.parametrize("kind", SETTLED)
def test_versions_of_a_view_and_its_base_are_one(kind: str) -> None:
    def run() -> None:
        x = at(KINDS[kind]).requires_grad_()
        base = x * 1
        saved = base * base
        base[0].add_(1)  # on ranks that hold nothing of the row, too
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(saved, torch.ones(SHAPE))
        with pytest.raises(RuntimeError, match="view of a leaf Variable that requires grad"):
            x[0].add_(1)

    on_ranks(run)


SETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "row": (1, (3,)),
    "rows broadcast": (slice(1, 3), (3,)),
    "column": ((slice(None), -1), (4,)),
    "all": (..., (4, 1)),
    "leading dims of size 1": (0, (1, 1, 3)),
    "an element": ((3, 2), ()),
    "steps": (slice(None, None, 2), (2, 3)),
    "numpy": (np.int64(2), (3,)),
    "nothing": (slice(2, 2), (3,)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_values_are_set_with_gradients(name: str, kind: str) -> None:
    index, shape = SETS[name]

    def call(x: Any, value: Any) -> Any:
        made = x * 1
        made[index] = value
        return made

    for value in list(layout_kinds(shape, world_size=WORLD_SIZE).values())[:5]:
        check_op(Sample(call, (SHAPE, shape)), [KINDS[kind], value], world_size=WORLD_SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_plain_tensors_and_other_dtypes_are_set(kind: str) -> None:
    def run() -> None:
        x, full = at(KINDS[kind]), FULL.clone()
        for one in (x, full):
            one[1:, 0] = 5
            one[0] = torch.arange(3)
            one[..., 2] = True
            one[3] *= 2
            one.T[1] = torch.tensor(0.5, dtype=torch.float64)
        assert torch.equal(x.full_tensor(), full)
        with pytest.raises(ValueError, match="broadcasts"):
            x[0] = torch.ones(2)
        plain = torch.zeros(SHAPE)
        with shardwise.implicit_comm("allow"):
            plain[0] = x[0]
        assert torch.equal(plain[0], full[0])

    on_ranks(run)


def test_a_tensor_requires_grad_once_a_value_that_does_is_set() -> None:
    def run() -> None:
        x = at(KINDS["replicated"])
        x[0] = at(KINDS["on the last rank"])[1].requires_grad_()
        assert x.requires_grad
        with torch._C.DisableTorchFunctionSubclass():
            assert x.requires_grad

    on_ranks(run)


# -- shapes in place -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_change_in_place(kind: str) -> None:
    def run() -> None:
        x, full = at(KINDS[kind]), FULL.clone()
        before = x
        for one in (x, full):
            one.t_().unsqueeze_(0).swapaxes_(0, 2).squeeze_().transpose_(0, 1)
        assert before is x
        assert x.shape == full.shape
        assert torch.equal(x.full_tensor(), full)
        leaf = at(KINDS["replicated"]).requires_grad_()
        with pytest.raises(OpError, match="leaf Variable that requires grad"):
            leaf.t_()
        with torch.no_grad():
            assert leaf.t_().requires_grad
        assert leaf.is_leaf
        assert leaf.shape == (3, 4)

    on_ranks(run)


# -- reshapes --------------------------------------------------------------------------------------


def _chunked(shape: tuple[int, ...], dim: int, world_size: int = 2) -> Layout:
    spec = shardwise.chunk(dim, ranks=range(world_size), device="cpu")
    return spec.layout(shape)


def _boxes(view: Callable[[Any], Any], layout: Layout, rank: int = 0) -> list[str]:
    def run() -> Any:
        return view(at(layout, torch.zeros(layout.shape))).shard_layout

    return [str(box) for box in on_ranks(run, 2)[0].boxes_of(rank)]


def test_a_cut_dim_that_is_split_at_its_cuts_stays_one_box() -> None:
    heads = _boxes(lambda x: x.view(2, 3, 4, 2), _chunked((2, 3, 8), 2))
    assert heads == ["[0:2, 0:3, 0:2, 0:2]"]
    back = _boxes(lambda x: x.flatten(2), _chunked((2, 3, 4, 2), 2))
    assert back == ["[0:2, 0:3, 0:4]"]


def test_a_box_that_is_not_one_range_becomes_a_few() -> None:
    assert _boxes(lambda x: x.view(-1), _chunked((3, 4), 1)) == ["[0:2]", "[4:6]", "[8:10]"]
    assert _boxes(lambda x: x.view(4, 12), _chunked((8, 6), 1)) == ["[0:4, 0:3]", "[0:4, 6:9]"]
    assert _boxes(lambda x: x.view(2, 3), _chunked((3, 2), 0)) == ["[0:1, 0:3]", "[1:2, 0:1]"]


@pytest.mark.parametrize("shape", [(100, 6), (5, 100, 6)])
def test_a_reshape_that_would_leave_crumbs_moves_and_says_so(shape: tuple[int, ...]) -> None:
    """[Note: too many parts] in `reshaping.py`"""
    full, flat = torch.randn(shape), (*shape[:-2], shape[-2] * shape[-1])
    layout = _chunked(shape, len(shape) - 1)

    def run() -> int:
        x = at(layout, full)
        with pytest.raises(OpError, match="moves its tensors"):
            x.view(flat)
        with shardwise.implicit_comm("allow"), shardwise.trace(show=False) as sent:
            shown = x.view(flat)
        assert torch.equal(shown.full_tensor(), full.view(flat))
        assert max(len(shown.shard_layout.boxes_of(rank)) for rank in range(2)) <= 3
        for again in (shown, shown[:1], shown.T if shown.dim() == 2 else shown.view(-1)):
            with pytest.raises(OpError, match="the tensor itself would not change"):
                again.add_(1)
        x.add_(1)
        with pytest.raises(OpError, match="written since"):
            shown.sin()
        return sent.total_bytes

    assert on_ranks(run, 2) == [full.numel() * 4 // 2] * 2
    assert check_op(Sample(lambda x: x.reshape(flat), (shape,)), [layout], world_size=2)


@pytest.mark.parametrize("name", layout_kinds((70, 2, 70)))
def test_reshapes_with_crumbs_are_right_for_every_layout(name: str) -> None:
    layout = layout_kinds((70, 2, 70))[name]
    for shape in ((-1,), (140, 70), (70, 140), (2, 35, 28, 5)):
        check_op(Sample(lambda x, shape=shape: x.reshape(shape), ((70, 2, 70),)), [layout])


@given(st.data())
def test_reshapes_that_move_are_right(data: st.DataObject) -> None:
    shape = data.draw(shapes(min_ndim=1, max_size=4).filter(math.prod))
    layout = data.draw(
        layouts(shape=shape, world_size=3).filter(lambda found: found.pending in (None, "sum"))
    )
    sizes = data.draw(_sizes(math.prod(shape)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.ops.reshaping._MOST_PARTS", data.draw(st.integers(5, 8)))
        check_op(Sample(lambda x: x.reshape(sizes), (shape,)), [layout], world_size=3)


@pytest.mark.parametrize("kind", SETTLED)
def test_reshape_copies_where_torch_copies_though_a_piece_is_one_row(kind: str) -> None:
    def run() -> None:
        x, full = at(KINDS[kind]), FULL.clone()
        for one in (x, full):
            one.T.reshape(-1).add_(1)
            one.reshape(-1).add_(2)
        assert torch.equal(x.full_tensor(), full)
        with pytest.raises(RuntimeError, match="not compatible with input tensor's"):
            at(KINDS["replicated"]).T.view(-1)

    on_ranks(run)


# -- indices that are no views ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "index", [[0, 2], ([0, 1], 2), torch.tensor([3, 0]), True, torch.tensor(1), np.array([1, 0])]
)
def test_other_indices_are_not_taken_for_basic_ones(index: Any) -> None:
    def run() -> None:
        x = at(KINDS["dim 0 uneven, permuted, one empty"])
        assert torch.equal(x[0, 2].full_tensor(), FULL[0, 2])  # which is not x[[0, 2]]
        with shardwise.implicit_comm("allow"):
            for _ in range(2):
                assert torch.equal(x[index].full_tensor(), FULL[index])
            x[index] = 7
        expected = FULL.clone()
        expected[index] = 7
        assert torch.equal(x.full_tensor(), expected)

    on_ranks(run)


def test_slices_with_numbers_of_other_types() -> None:
    def run() -> None:
        x = at(KINDS["dim 0 uneven, permuted, one empty"])
        two = torch.tensor(2)
        for _ in range(2):
            assert torch.equal(x[np.int64(1) : two].full_tensor(), FULL[1:2])
            assert torch.equal(x[1:3].full_tensor(), FULL[1:3])
        with pytest.raises(IndexError):
            x[4]
        with pytest.raises(IndexError):
            x[0, 0, 0]

    on_ranks(run)


def _write_and_show_other_pieces(_: int) -> None:
    """Rank 0 shows what was written, rank 1 a piece that was not: both answer in backward."""
    boxes = [Box((0, 0), (2, 2)), Box((2, 0), (4, 2)), Box((4, 0), (6, 2))]
    full = torch.arange(12.0).view(6, 2)
    rows = shardwise.chunk(0, ranks=[0, 1, 2])
    x: Any = shardwise.distribute(full, rows, src_rank=None).requires_grad_()
    v: Any = shardwise.distribute(full[1], shardwise.chunk(0, ranks=[1, 2]), src_rank=None)
    v.requires_grad_()
    y = shardwise.reshard(x, Layout((6, 2), boxes, [0, 1, 1])) * 2
    with shardwise.implicit_comm("allow"):
        y[0] = v
        y[::4].sum().backward()
    assert torch.equal(v.grad.full_tensor(), torch.ones(2))
    assert x.grad.full_tensor().sum() == 4


def test_pieces_that_are_not_shown_answer_in_backward() -> None:
    simulate(_write_and_show_other_pieces, 3)
