"""Every row of the table of gradients, by its name, on real ranks.

The one rule: the gradient of a tensor of layout L has the layout `L.bar`, and every entry holds the
whole gradient of its box. A row computes a loss from tensors that require grad, and says what their
gradients are. If it says that backward communicates nothing, simulated ranks count the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import OpError
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor import Shard, ShardedTensor, init_from_local_shards

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD_SIZE = 3
X = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
Y = torch.arange(12.0, 0.0, -1.0, dtype=torch.float64).view(4, 3) / 4
R = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
W = torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)  # weights of the elements in a loss


class Row(NamedTuple):
    """A loss, and the gradients that it has."""

    loss: Any
    gradients: list[tuple[Any, torch.Tensor]]


def leaf(full: torch.Tensor, spec: Any) -> Any:
    return shardwise.reshard(shardwise.as_replicated(full.clone()), spec).requires_grad_()


def cut(dim: int = 0) -> Any:
    return shardwise.chunk(dim, ranks=range(WORLD_SIZE))


def everywhere() -> Any:
    return shardwise.replicate(ranks=range(WORLD_SIZE))


def pending(op: Any = "sum") -> Any:
    return shardwise.partial(op, ranks=range(WORLD_SIZE))


def same(y: Any) -> Any:
    """A loss that is the same on all ranks: of a tensor that every rank has, or will have."""
    return (y.full_tensor() * W).sum()


def own(y: Any) -> Any:
    """Each rank's part of a loss: of its own boxes, of which no other rank has any."""
    state = y._state
    parts = [(s * W[b.slices()]).sum() for s, b in zip(state.shards, state.boxes, strict=True)]
    return sum(parts, state.carriers[0].sum() * 0)


def rank() -> int:
    return communicator().rank


def cut_to_replicated() -> Row:
    x = leaf(X, cut())
    return Row(same(shardwise.reshard(x, everywhere())), [(x, W)])


def replicated_to_cut() -> Row:
    x = leaf(X, everywhere())
    return Row(own(shardwise.reshard(x, cut())), [(x, W)])


def pending_to_replicated() -> Row:
    x = leaf(X, pending())
    return Row(same(shardwise.reshard(x, everywhere())), [(x, W)])


def pending_to_cut() -> Row:
    x = leaf(X, pending())
    return Row(own(shardwise.reshard(x, cut(1))), [(x, W)])


def replicated_to_pending() -> Row:
    """Not zero where forward gave zero."""
    x = leaf(X, everywhere())
    return Row(same(shardwise.reshard(x, pending())), [(x, W)])


def cut_to_other_cut() -> Row:
    x = leaf(X, cut())
    return Row(own(shardwise.reshard(x, cut(1))), [(x, W)])


def cut_to_other_ranks() -> Row:
    x = leaf(X, cut())
    turned = shardwise.chunk(0, ranks=[1, 2, 0])
    return Row(own(shardwise.reshard(x, turned)), [(x, W)])


def pending_avg() -> Row:
    x = leaf(X, pending("avg"))
    return Row(same(shardwise.reshard(x, everywhere())), [(x, W / WORLD_SIZE)])


def pending_max() -> Row:
    """Only detached tensors may be so pending."""
    x = leaf(X, cut())
    for op in ("max", "min", "product"):
        with pytest.raises(OpError, match=f"pending {op}"):
            shardwise.reshard(x, pending(op))
        assert torch.equal(shardwise.reshard(x.detach(), pending(op)).full_tensor(), X)
    return Row(same(x), [(x, W)])


def enter() -> Row:
    x, r = leaf(X, cut()), leaf(R, everywhere())
    return Row(own(x * r), [(x, R * W), (r, (X * W).sum(0))])


def enter_same_work() -> Row:
    """Ranks 0 and 1 do the same work, which counts once."""
    halves = [Box((0, 0), (2, 3)), Box((0, 0), (2, 3)), Box((2, 0), (4, 3))]
    x, r = leaf(X, Layout((4, 3), halves, [0, 1, 2])), leaf(R, everywhere())
    return Row(same(x * r), [(x, R * W), (r, (X * W).sum(0))])


def gather_and_enter() -> Row:
    x, r = leaf(X, cut()), leaf(R, cut())
    return Row(own(x * r), [(x, R * W), (r, (X * W).sum(0))])


def number_times_pending() -> Row:
    x = leaf(X, pending())
    y = 3 * x
    assert y.shard_layout == x.shard_layout
    return Row(same(y), [(x, 3 * W)])


def pending_plus_pending() -> Row:
    x, y = leaf(X, pending()), leaf(Y, pending())
    z = x - y
    assert z.shard_layout == x.shard_layout
    return Row(same(z), [(x, W), (y, -W)])


def pending_times_replicated() -> Row:
    x, r = leaf(X, pending()), leaf(R, everywhere())
    z = x * r
    assert z.shard_layout == x.shard_layout
    return Row(same(z), [(x, R * W), (r, (X * W).sum(0))])


def pending_plus_replicated() -> Row:
    x, y = leaf(X, pending()), leaf(Y, everywhere())
    z = x + y
    assert z.shard_layout == x.shard_layout
    return Row(same(z), [(x, W), (y, W)])


def contraction() -> Row:
    """Terms are blocks of the dim that is summed over."""
    x, y = leaf(X, cut(1)), leaf(Y.T, cut(0))
    weights = W @ W.T
    product: Any = torch.mm(x, y)
    loss = (product.full_tensor() * weights).sum()
    return Row(loss, [(x, weights @ Y), (y, X.T @ weights)])


def sum_to_scalar() -> Row:
    x = leaf(X, cut())
    total = torch.sum(x)
    assert total.item() == X.sum()
    return Row(total, [(x, torch.ones_like(X))])


def mean_to_scalar() -> Row:
    x = leaf(X, cut(1))
    return Row(torch.mean(x), [(x, torch.full_like(X, 1 / 12))])


def norm_to_scalar() -> Row:
    x = leaf(X, cut())
    return Row(torch.linalg.vector_norm(x), [(x, X / X.norm())])


def loss_to_scalar() -> Row:
    x, y = leaf(X, cut()), leaf(Y, cut())
    loss = torch.nn.functional.mse_loss(x, y)
    return Row(loss, [(x, (X - Y) / 6), (y, (Y - X) / 6)])


def full_tensor() -> Row:
    x = leaf(X, cut())
    return Row(same(x), [(x, W)])


def full_tensor_of_own_parts() -> Row:
    x = leaf(X, cut())
    return Row(((rank() + 1) * x.full_tensor(grad="sum") * W).sum(), [(x, 6 * W)])


def local_of_cut() -> Row:
    x = leaf(X, cut())
    return Row(own(x), [(x, W)])


def local_of_replicated() -> Row:
    x = leaf(X, everywhere())
    return Row((x.local_tensor() * W).sum(), [(x, W)])


def local_of_replicated_own_parts() -> Row:
    x = leaf(X, everywhere())
    return Row(((rank() + 1) * x.local_tensor(grad="sum") * W).sum(), [(x, 6 * W)])


def local_of_pending() -> Row:
    x = leaf(X, pending())
    assert not x.local_tensor().requires_grad
    return Row(same(x), [(x, W)])


def gathered() -> Row:
    x = leaf(X, cut())
    found = x.gather(1)
    assert found is None or not found.requires_grad
    moved = shardwise.reshard(x, shardwise.on_rank(1))  # what has a gradient
    return Row(own(moved), [(x, W)])


def wrapped_replicas() -> Row:
    x: Any = X.clone().requires_grad_()
    return Row(same(shardwise.as_replicated(x)), [(x, W)])


def wrapped_rows() -> Row:
    k = rank()
    mine: Any = X[k : k + 1].clone().requires_grad_()
    rows = shardwise.as_local_rows(mine, sizes=[1, 1, 1])
    loss = (shardwise.reshard(rows, cut(1)).full_tensor() * W[:3]).sum()
    return Row(loss, [(mine, W[k : k + 1])])


def wrapped_shards() -> Row:
    k = rank()
    mine: Any = X[k : k + 1].clone().requires_grad_()
    x = init_from_local_shards([Shard.from_tensor_and_offsets(mine, [k, 0], k)], 3, 3)
    return Row((x.full_tensor() * W[:3]).sum(), [(mine, W[k : k + 1])])


def backward_of_one_element() -> Row:
    x = leaf(X[:1, :1], shardwise.on_rank(1))
    y = shardwise.reshard(x, pending("avg"))
    return Row(y, [(x, torch.ones(1, 1, dtype=torch.float64))])


def second_derivative() -> Row:
    x = leaf(X, cut())
    y = shardwise.reshard(x, pending()) * leaf(R, everywhere())
    full = shardwise.reshard(y, cut(1)).full_tensor()
    (grad,) = torch.autograd.grad((full**3).sum(), x, create_graph=True)
    return Row(same(grad), [(x, 6 * X * R**3 * W)])


def own_rows_into_embedding() -> Row:
    """Each rank's own ids, of which rank 1 has none: the owners add up what all of them use."""
    x = leaf(X, cut())
    ids = ([3, 0, 3], [], [3])[rank()]
    found: Any = torch.nn.functional.embedding(torch.tensor(ids, dtype=torch.int64), x)
    assert type(found) is torch.Tensor
    counts = torch.tensor([1, 0, 0, 3], dtype=X.dtype)
    return Row((found * R).sum(), [(x, counts[:, None] * R)])


ROWS: dict[str, Callable[[], Row]] = {
    "cut -> replicated": cut_to_replicated,
    "replicated -> cut": replicated_to_cut,
    "pending -> replicated": pending_to_replicated,
    "pending -> cut": pending_to_cut,
    "replicated -> pending": replicated_to_pending,
    "cut -> other cut": cut_to_other_cut,
    "cut -> other ranks": cut_to_other_ranks,
    "pending avg of t terms": pending_avg,
    "pending max, min, product": pending_max,
    "enter": enter,
    "enter: ranks that do the same work count once": enter_same_work,
    "gather and enter in one op": gather_and_enter,
    "pointwise, linear in a pending P: c*P": number_times_pending,
    "pointwise, linear in a pending P: P+Q": pending_plus_pending,
    "pointwise, linear in a pending P: P*R": pending_times_replicated,
    "pointwise, linear in a pending P: P+R": pending_plus_replicated,
    "contraction, terms = k blocks": contraction,
    "full reduction to 0-d: sum": sum_to_scalar,
    "full reduction to 0-d: mean": mean_to_scalar,
    "full reduction to 0-d: norm": norm_to_scalar,
    "full reduction to 0-d: loss": loss_to_scalar,
    "full_tensor()": full_tensor,
    'full_tensor(grad="sum")': full_tensor_of_own_parts,
    "local_tensor(), cut": local_of_cut,
    "the same, replicated": local_of_replicated,
    'the same, replicated, grad="sum"': local_of_replicated_own_parts,
    "the same, pending": local_of_pending,
    "gather(dst)": gathered,
    "as_replicated(x)": wrapped_replicas,
    "as_local_rows(x)": wrapped_rows,
    "init_from_local_shards": wrapped_shards,
    "plain rows straight into embedding": own_rows_into_embedding,
    "st.backward()": backward_of_one_element,
    "double backward": second_derivative,
}
# Those whose way back sends nothing.
SILENT = [
    "cut -> replicated",
    "pending -> replicated",
    "replicated -> pending",
    "pending avg of t terms",
    "pointwise, linear in a pending P: c*P",
    "pointwise, linear in a pending P: P+Q",
    "pointwise, linear in a pending P: P+R",
    "full reduction to 0-d: sum",
    "full reduction to 0-d: mean",
    "full_tensor()",
    "local_tensor(), cut",
    "the same, replicated",
    "as_replicated(x)",
]


def _check(row: Row) -> None:
    """Every local entry of every gradient, after backward."""
    for tensor, expected in row.gradients:
        found = tensor.grad
        if not isinstance(tensor, ShardedTensor):
            torch.testing.assert_close(found, expected)
            continue
        assert found.shard_layout == tensor.shard_layout.bar
        for box, shard in zip(found._state.boxes, found._state.shards, strict=True):
            torch.testing.assert_close(shard, expected[box.slices()])


def _all_rows(_: int) -> None:
    shardwise.implicit_comm("allow")
    for name, make in ROWS.items():
        try:
            row = make()
            row.loss.backward()
            _check(row)
        except Exception as error:
            raise AssertionError(f"row {name!r}") from error
        dist.barrier()


def test_every_row_on_real_ranks() -> None:
    shardwise.run_local(_all_rows, WORLD_SIZE)


def _bytes_of_backward(make: Callable[[], Row]) -> int:
    def on_rank(_: int) -> int:
        members: Any = communicator()
        with shardwise.implicit_comm("allow"):
            row = make()
            members.all_reduce(torch.zeros(1), "sum")  # all have sent what forward sends
            before = members.traffic.total_bytes
            row.loss.backward()
            members.all_reduce(torch.zeros(1), "sum")
            return int(members.traffic.total_bytes - before)

    return max(simulate(on_rank, WORLD_SIZE).results)


@pytest.mark.parametrize("name", SILENT)
def test_the_way_back_sends_nothing(name: str) -> None:
    assert _bytes_of_backward(ROWS[name]) <= _bytes_of_backward(_nothing)


def _nothing() -> Row:
    """Of which both ends are on one rank."""
    x = leaf(X, cut())
    return Row(own(x), [])


def test_gather_and_enter_is_one_reduce_scatter() -> None:
    """Each of 3 elements has an addend on 3 ranks, of which 2 travel; an all-reduce takes twice."""
    own_bytes = _bytes_of_backward(gather_and_enter) - _bytes_of_backward(_nothing)
    assert own_bytes == 2 * 3 * X.itemsize
    assert _bytes_of_backward(enter) - _bytes_of_backward(_nothing) == 2 * own_bytes
