"""Dropout and other random functions: no layout and no world size changes what they draw."""

from __future__ import annotations

import gc
import math
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.process_group import communicator
from shardwise.comm.simulate import simulate
from shardwise.errors import AgreementError, OpError, RankFailure
from shardwise.geometry import Box, Layout
from shardwise.sharded_tensor import seeds
from shardwise.sharded_tensor.state import make_state
from shardwise.sharded_tensor.tensor import ShardedTensor, wrap
from shardwise.testing.op_check import layout_kinds, shards_of_full

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = (4, 3, 5)
ROWS = (4, 6)
NUMBERS = torch.linspace(0.02, 0.98, 60, dtype=torch.float64).reshape(SHAPE)
CHANCES = torch.linspace(0.1, 1.0, 24, dtype=torch.float64).reshape(ROWS)

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of float32": lambda x: F.dropout(x.float(), 0.4),
    "dropout of bfloat16": lambda x: F.dropout(torch.ones_like(x, dtype=torch.bfloat16), 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "torch.dropout_": lambda x: torch.dropout_(x.clone(), 0.4, True),
    "module": lambda x: torch.nn.Dropout(0.3)(x),
    "module in eval": lambda x: torch.nn.Dropout(0.3).eval()(x),
    "all dropped": lambda x: F.dropout(x, 1.0),
    "all dropped in place": lambda x: F.dropout(x.clone(), 1.0, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x, 0.4),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "feature_dropout_": lambda x: torch.feature_dropout_(x.clone(), 0.4, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha_dropout in place": lambda x: F.alpha_dropout(x.clone(), 0.4, True, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu in eval": lambda x: F.rrelu(x - 0.5),
    "rrelu in place": lambda x: F.rrelu(x - 0.5, training=True, inplace=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "bernoulli": torch.bernoulli,
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: torch.zeros_like(x).bernoulli_(x),
    "bernoulli_ of a plain tensor": lambda x: torch.zeros_like(x).bernoulli_(NUMBERS[0]),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of stds": lambda x: torch.normal(1.0, x),
    "normal of both": lambda x: torch.normal(x, x.sum(0)),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5, dim=1),
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, hard=True),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "geometric_": lambda x: x.clone().geometric_(0.2),
    "log_normal_": lambda x: x.clone().log_normal_(0.5, 0.7),
    "cauchy_": lambda x: x.clone().cauchy_(1.0, 2.0),
    "random_": lambda x: x.clone().random_(7),
}
ON_ROWS: dict[str, Callable[[Any], Any]] = {
    "multinomial": lambda x: torch.multinomial(x, 4),
    "multinomial with replacement": lambda x: torch.multinomial(x, 9, replacement=True),
}


def _sharded(full: torch.Tensor, layout: Layout, *, requires_grad: bool = False) -> ShardedTensor:
    members = communicator()
    shards = [
        shard.requires_grad_(requires_grad)
        for shard in shards_of_full(full, layout).get(members.rank, [])
    ]
    state = make_state(layout, shards, group=members, dtype=full.dtype, requires_grad=requires_grad)
    return wrap(state)


def _outcome(call: Callable[[Any], Any], full: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """What a function gives as the second random call of its seed, in full."""
    shardwise.manual_seed(5)
    with shardwise.implicit_comm("allow"):
        F.dropout(_sharded(full, layout), 0.5)
        made = call(_sharded(full, layout))
    return [one.full_tensor() for one in (made if isinstance(made, tuple) else [made])]


def _alone(call: Callable[[Any], Any], full: torch.Tensor) -> list[torch.Tensor]:
    whole = Layout(tuple(full.shape), [Box.whole(tuple(full.shape))], [0])
    return simulate(lambda _: _outcome(call, full, whole), 1).results[0]


@pytest.mark.parametrize("name", [*FUNCTIONS, *ON_ROWS])
def test_every_layout_and_world_size_gives_the_same(name: str) -> None:
    call, full = (FUNCTIONS[name], NUMBERS) if name in FUNCTIONS else (ON_ROWS[name], CHANCES)
    if name == "dropout2d":
        full = full[None]
    expected = _alone(call, full)
    plain = call(full.clone())
    for one, wanted in zip(plain if isinstance(plain, tuple) else [plain], expected, strict=True):
        assert (one.shape, one.dtype) == (wanted.shape, wanted.dtype)
    cases = [
        (world_size, *named)
        for world_size in (1, 2, 3, 4)
        for named in layout_kinds(tuple(full.shape), world_size=world_size).items()
    ]
    if name != "dropout":  # which sees all of them
        cases = random.Random(name).sample(cases, 8)
    for world_size, kind, layout in cases:

        def run(_: int, layout: Layout = layout) -> list[torch.Tensor]:
            return _outcome(call, full, layout)

        for found in simulate(run, world_size).results:
            torch.testing.assert_close(found, expected, msg=f"{kind} of {world_size} ranks")


def test_irregular_tilings_replicas_and_addends_have_one_mask() -> None:
    boxes = [Box((0, 0), (3, 2)), Box((0, 2), (2, 6)), Box((2, 2), (4, 6)), Box((3, 0), (4, 2))]
    layouts = [
        Layout(ROWS, [*boxes, boxes[0], boxes[2]], [2, 0, 1, 1, 0, 3]),
        Layout(ROWS, [Box.whole(ROWS)] * 4, [0, 0, 1, 2], terms=[0, 1, 1, 2], pending="avg"),
    ]
    expected = _alone(lambda x: F.dropout(x, 0.4), CHANCES)
    for layout in layouts:

        def run(_: int, layout: Layout = layout) -> list[torch.Tensor]:
            shardwise.manual_seed(5)
            F.dropout(_sharded(CHANCES, layout), 0.5)
            with shardwise.implicit_comm("error"):
                made = F.dropout(_sharded(CHANCES, layout), 0.4)
            assert made.shard_layout == layout
            return [made.full_tensor()]

        for found in simulate(run, 4).results:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["dropout", "dropout1d", "alpha_dropout", "rrelu"])
def test_gradients_have_the_mask(name: str, in_place: bool) -> None:
    function = getattr(F, name)
    options = {} if name == "rrelu" else {"p": 0.4}
    weights = NUMBERS.cos()

    def run(_: int, layout: Layout) -> list[torch.Tensor]:
        shardwise.manual_seed(5)
        leaf = _sharded(NUMBERS - 0.5, layout, requires_grad=True)
        with shardwise.implicit_comm("allow"):
            x = leaf * 1.0
            y = function(x, training=True, inplace=in_place, **options)
            assert (y is x) == in_place
            (y * weights).sum().backward()
        return [y.detach().full_tensor(), leaf.grad.full_tensor()]

    whole = Layout(SHAPE, [Box.whole(SHAPE)], [0])
    value, grad = simulate(run, 1, whole).results[0]
    moved = name == "alpha_dropout"
    slope = grad / weights
    if not moved:
        torch.testing.assert_close(slope * (NUMBERS - 0.5), value)
    assert slope.unique().numel() > 1
    for layout in layout_kinds(SHAPE).values():
        for found in simulate(run, 4, layout).results:
            torch.testing.assert_close(found, [value, grad])


def test_gradients_of_what_was_drawn_are_zeros() -> None:
    def run(_: int) -> None:
        layout = layout_kinds(SHAPE)["dim 0 uneven, permuted, one empty"]
        for call in (torch.bernoulli, lambda x: torch.normal(x, 1.0)):
            x = _sharded(NUMBERS, layout, requires_grad=True)
            call(x).sum().backward()
            assert x.grad is not None
            assert not x.grad.full_tensor().any()

    simulate(run, 4)


def test_dropout_that_drops_nothing_is_the_tensor_itself() -> None:
    def run(_: int) -> None:
        x = _sharded(NUMBERS, layout_kinds(SHAPE, world_size=2)["pending"])
        before = shardwise.get_rng_state()
        assert F.dropout(x, 0.0) is x
        assert F.dropout(x, 0.5, training=False) is x
        assert torch.alpha_dropout(x, 0.5, False) is x
        assert shardwise.get_rng_state() == before
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5)
        with pytest.raises(OpError, match="floating-point"):
            F.dropout(torch.zeros_like(x, dtype=torch.int64), 0.5)
        with pytest.raises(OpError, match="at least 2 dimensions"):
            torch.feature_dropout(shardwise.as_replicated(torch.ones(3)), 0.5, True)

    simulate(run, 2)


# -- what the numbers are like ---------------------------------------------------------------


def test_dropout_keeps_the_share_and_the_mean_and_calls_are_independent() -> None:
    count, p = 400_000, 0.3

    def run(_: int) -> list[torch.Tensor]:
        shardwise.manual_seed(1)
        x = shardwise.as_replicated(torch.ones(count))
        return [F.dropout(x, p).local_tensor() for _ in range(3)]

    drawn = simulate(run, 1).results[0]
    sigma = math.sqrt(p * (1 - p) / count)
    for one in drawn:
        kept = one != 0
        assert abs(kept.double().mean() - (1 - p)) < 4 * sigma
        assert torch.all(one[kept] == 1 / (1 - p))
        # Neighbours, and elements that are far apart, know nothing of each other.
        for step in (1, 2, 8, 1000):
            both = (kept[step:] & kept[:-step]).double().mean()
            assert abs(both - (1 - p) ** 2) < 5 * sigma
    for a, b in ((0, 1), (0, 2), (1, 2)):
        both = ((drawn[a] != 0) & (drawn[b] != 0)).double().mean()
        assert abs(both - (1 - p) ** 2) < 5 * sigma


def test_multinomial_draws_by_the_chances() -> None:
    chances = torch.tensor([0.1, 0.0, 0.4, 0.5])
    rows = 20_000

    def run(_: int) -> list[torch.Tensor]:
        shardwise.manual_seed(2)
        x = shardwise.as_replicated(chances.repeat(rows, 1))
        single = torch.multinomial(x, 1)
        pair = torch.multinomial(x, 2)
        again = torch.multinomial(x, 3, replacement=True)
        return [one.full_tensor() for one in (single, pair, again)]

    single, pair, again = simulate(run, 1).results[0]
    for drawn in (single, pair[:, :1], again):
        shares = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
        torch.testing.assert_close(shares, chances, atol=0.015, rtol=0)
        assert shares[1] == 0
    assert not (pair[:, 0] == pair[:, 1]).any()
    second = torch.bincount(pair[pair[:, 0] == 3][:, 1], minlength=4).float()
    torch.testing.assert_close(
        second / second.sum(), chances * 2 * (chances < 0.5), atol=0.02, rtol=0
    )
    assert abs((again[:, 0] == again[:, 1]).float().mean() - chances.square().sum()) < 0.015


# -- checkpointing ---------------------------------------------------------------------------


def _block(x: Any, w: Any) -> Any:
    hidden = F.dropout(torch.relu(F.linear(x, w)), 0.4)
    return F.dropout(hidden * 2.0, 0.3) * torch.rand_like(hidden)


def _nested(x: Any, w: Any) -> Any:
    first = F.dropout(x, 0.2)
    inner = checkpoint(lambda: _block(first, w), use_reentrant=False)
    return F.dropout(inner, 0.1)


def _trained(call: Callable[..., Any], layout: Layout, *, again: bool, **options: Any) -> list[Any]:
    """Loss and gradients of two blocks, and what is drawn after them."""
    shardwise.manual_seed(9)
    x = _sharded(CHANCES, layout, requires_grad=True)
    w = shardwise.as_replicated(torch.eye(6, dtype=torch.float64) + 0.1).requires_grad_()
    y: Any = x
    with shardwise.implicit_comm("allow"):
        for _ in range(2):
            y = checkpoint(call, y, w, use_reentrant=False, **options) if again else call(y, w)
        between = torch.rand_like(y).full_tensor()
        loss = (y * y).sum()
        loss.backward()
        after = torch.rand_like(y).full_tensor()
    grads = [x.grad.full_tensor(), w.grad.full_tensor()]
    return [loss.item(), *grads, between, after]


@pytest.mark.parametrize("call", [_block, _nested])
def test_checkpointed_functions_draw_the_same_again(call: Callable[..., Any]) -> None:
    for number, layout in enumerate(layout_kinds(ROWS).values()):

        def run(_: int, layout: Any = layout, **options: Any) -> list[Any]:
            return _trained(call, layout, **options)

        wanted = simulate(partial(run, again=False), 4).results[0]
        every: list[dict[str, Any]] = [{}, {"preserve_rng_state": False}, {"early_stop": False}]
        # They do not depend on layouts: one for each in brief.
        chosen = every if settings().max_examples > 15 else [every[number % 3]]
        for options in chosen:
            for found in simulate(partial(run, again=True, **options), 4).results:
                torch.testing.assert_close(found, wanted)


def _on_ranks(rank: int) -> None:
    layout = Layout(ROWS, [Box((0, 0), (3, 6)), Box((3, 0), (4, 6))], [2, 0])
    torch.manual_seed(rank)  # of which nothing here depends
    for call in (_block, _nested):
        wanted = _trained(call, layout, again=False)
        torch.rand(rank + 1)
        torch.testing.assert_close(_trained(call, layout, again=True), wanted)
    # With a generator too, of which torch itself does not remember the state.
    generator = torch.Generator().manual_seed(3)

    def noisy(x: Any) -> Any:
        noise = torch.empty_like(x).detach().normal_(generator=generator)
        drawn.append(noise.full_tensor())
        return x * x * noise

    drawn: list[torch.Tensor] = []
    x = _sharded(CHANCES, layout, requires_grad=True)
    checkpoint(noisy, x, use_reentrant=False, early_stop=False).sum().backward()
    assert len(drawn) == 2
    assert torch.equal(*drawn)


def test_checkpointed_functions_draw_the_same_again_on_real_ranks() -> None:
    shardwise.run_local(_on_ranks, 3)


def test_gradients_through_one_checkpoint_can_be_taken_twice() -> None:
    def run(_: int) -> None:
        x = _sharded(CHANCES, layout_kinds(ROWS, world_size=2)["replicated"], requires_grad=True)
        y: Any = checkpoint(lambda t: F.dropout(t * t, 0.5), x, use_reentrant=False)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
        second = torch.autograd.grad(y.sum(), x)[0]
        assert torch.equal(first.full_tensor(), second.full_tensor())

    simulate(run, 2)


def test_a_checkpointed_function_that_draws_more_in_backward_raises() -> None:
    def run(_: int) -> None:
        runs = []

        def fickle(x: Any) -> Any:
            runs.append(1)
            for _ in runs:
                torch.rand_like(x)
            return x * x

        x = _sharded(CHANCES, layout_kinds(ROWS, world_size=1)["replicated"], requires_grad=True)
        checkpoint(fickle, x, use_reentrant=False, early_stop=False).sum().backward()

    with pytest.raises(RankFailure, match="draws more random numbers in backward"):
        simulate(run, 1)


def test_what_checkpoints_kept_is_let_go() -> None:
    def run(_: int) -> None:
        x = _sharded(CHANCES, layout_kinds(ROWS, world_size=1)["replicated"], requires_grad=True)
        y: Any = checkpoint(lambda t: F.dropout(t * t, 0.5), x, use_reentrant=False)
        assert len(seeds._drawn) == before + 1
        y.sum().backward()

    gc.collect()
    before, taken = len(seeds._drawn), len(seeds._taken)
    simulate(run, 1)
    gc.collect()
    assert len(seeds._drawn) == before
    assert len(seeds._taken) == taken


# -- the state -------------------------------------------------------------------------------


def _states(rank: int) -> None:
    x = shardwise.as_replicated(torch.ones(64))

    def drawn() -> Any:
        return F.dropout(x, 0.5).local_tensor()

    shardwise.get_rng_state()  # before anything is drawn
    shardwise.manual_seed(-7)
    drawn()
    state = shardwise.get_rng_state()
    assert state == {"seed": -7, "calls": 1}
    first = [drawn(), drawn()]
    assert not torch.equal(*first)
    shardwise.set_rng_state(state)
    assert torch.equal(drawn(), first[0])
    assert torch.equal(drawn(), first[1])
    assert shardwise.get_rng_state()["calls"] == 3
    shardwise.manual_seed(-7)
    drawn()
    assert torch.equal(drawn(), first[0])
    with pytest.raises(TypeError, match="get_rng_state"):
        shardwise.set_rng_state({})
    with pytest.raises(AgreementError, match="calls"):
        shardwise.set_rng_state({"seed": 1, "calls": rank})


def test_the_state_of_random_numbers_can_be_kept() -> None:
    shardwise.run_local(_states, 2)
