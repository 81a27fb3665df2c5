"""Reshards that cannot be: errors name what was passed, on every rank, before anything moves."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import sharded_tensor
from shardwise.comm import execute
from shardwise.comm.simulate import simulate
from shardwise.errors import (
    AgreementError,
    ArgumentTypeError,
    ArgumentValueError,
    LayoutError,
    SpecError,
)
from shardwise.sharding_spec import ChunkShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.sharded_tensor import ShardedTensor

COLUMNS = shardwise.chunk(1, ranks=[0, 1])


class Pair(NamedTuple):
    """Two tensors by name."""

    a: Any
    b: Any


def rows() -> ShardedTensor:
    return sharded_tensor.ones(shardwise.chunk(0), 6, 4)


# -- what holds the tensors --------------------------------------------------------------------


def test_one_tensor_in_place_of_many_is_refused() -> None:
    def run(rank: int) -> None:
        many: Any = shardwise.reshard_all
        text = (
            r"^tensors of reshard_all: expected a list, tuple or dict of ShardedTensors, got one "
            r"ShardedTensor. Use shardwise.reshard\(x, spec\).$"
        )
        with pytest.raises(ArgumentTypeError, match=text):
            many(rows(), COLUMNS)
        with pytest.raises(ArgumentTypeError, match="got one Parameter"):
            many(torch.nn.Parameter(torch.ones(2)), COLUMNS)

    simulate(run, 2)


WRONG_TYPES: dict[str, Callable[[Any], Any]] = {
    r"got generator\. Pass list\(": lambda x: (one for one in [x]),
    r"got list_iterator\. Pass list\(": lambda x: iter([x]),
    r"got dict_values\. Pass list\(": lambda x: {"a": x}.values(),
    r"got map\. Pass list\(": lambda x: map(lambda one: one, [x]),
    r"got defaultdict\. Pass dict\(": lambda x: defaultdict(list, a=x),
}


@pytest.mark.parametrize("text", WRONG_TYPES)
def test_what_cannot_be_made_again_is_refused_before_anything_moves(text: str) -> None:
    def run(rank: int) -> None:
        x = rows()
        with pytest.raises(ArgumentTypeError, match=f"list, tuple or dict of .*{text}"):
            shardwise.reshard_all(WRONG_TYPES[text](x), COLUMNS, free_source=True)
        assert torch.equal(x.full_tensor(), torch.ones(6, 4))

    simulate(run, 2)


def test_many_tensors_come_back_in_what_they_came_in() -> None:
    def run(rank: int) -> None:
        x, y = rows(), rows()
        for held in ([x, y], (x, y), Pair(x, y), deque([x, y])):
            found = shardwise.reshard_all(held, COLUMNS)
            assert type(found) is type(held)
            assert [one.local_tensor().shape for one in found] == [(6, 2)] * 2
        pair = shardwise.reshard_all(Pair(x, y), Pair(COLUMNS, shardwise.chunk(0)))
        assert pair.a.local_tensor().shape == (6, 2)
        assert pair.b.local_tensor().shape == (3, 4)
        named = shardwise.reshard_all(OrderedDict(a=x), COLUMNS)
        assert type(named) is OrderedDict
        assert named["a"].local_tensor().shape == (6, 2)

    simulate(run, 2)


def test_a_plain_tensor_in_a_list_gets_a_hint() -> None:
    def run(rank: int) -> None:
        plain = torch.nn.Parameter(torch.ones(2))
        text = r"tensors\[1\] of reshard_all: .*got Parameter.*distribute.*dict\(model.named_para"
        with pytest.raises(ArgumentTypeError, match=text):
            shardwise.reshard_all([rows(), plain], COLUMNS)
        assert shardwise.reshard_all({"x": rows(), "w": plain}, COLUMNS)["w"] is plain

    simulate(run, 2)


# -- where they are to go ----------------------------------------------------------------------

WRONG_TARGETS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (SpecError, "^reshard_all of 'w': ChunkShardingSpec: Invalid sharding dim", lambda: COLUMNS),
    (
        ArgumentTypeError,
        r"^\[rank \d\] reshard_all of 'w': its target: expected a spec.* got str",
        lambda: {"w": "rows"},
    ),
    (
        ArgumentValueError,
        r"^\[rank \d\] reshard_all of 'w': its target: expected .*shape \(7,\)",
        lambda: {"x": COLUMNS, "w": rows()},
    ),
    (
        LayoutError,
        r"^\[rank \d\] reshard_all of 'w': its target: Global rank 9 does not exist in input "
        r"process group: .*got rank 9. .*process_group=",
        lambda: {"x": COLUMNS, "w": shardwise.on_rank(9)},
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG_TARGETS)))
def test_of_many_tensors_the_wrong_one_is_named(number: int) -> None:
    kind, text, specs = WRONG_TARGETS[number]

    def run(rank: int) -> None:
        tensors: Any = {"x": rows(), "w": sharded_tensor.ones(shardwise.chunk(0), 7)}
        with pytest.raises(kind, match=text):
            shardwise.reshard_all(tensors, specs())

    simulate(run, 2)


def test_a_spec_that_is_not_ours_raises_what_it_does_with_the_name_as_a_note() -> None:
    class Mine(ChunkShardingSpec):
        def layout(self, shape: Any) -> Any:
            raise KeyError("mine")

    def run(rank: int) -> None:
        spec = Mine(0, ["rank:0/cpu", "rank:1/cpu"])
        with pytest.raises(KeyError, match="mine") as caught:
            shardwise.reshard_all({"w": rows()}, spec)
        assert "in reshard_all of 'w'" in caught.value.__notes__

    simulate(run, 2)


def _unknown_ranks(rank: int) -> None:
    to = shardwise.chunk(1, ranks=[0, 1, 9])
    text = (
        rf"^\[rank {rank}\] to of reshard: Global rank 9 does not exist in input process group: "
        r"expected only ranks of its group \(ranks 0, 1\), got rank 9. .*process_group="
    )
    x = rows()
    calls: list[Callable[[], object]] = [
        lambda: shardwise.reshard(x, to),
        lambda: shardwise.reshard(x, to, async_op=True),
        lambda: shardwise.reshard(x, to, process_group=dist.group.WORLD),
        lambda: x.reshard(to),
    ]
    for mode in ("always", "debug"):
        with shardwise.set_check(mode, timeout=10):
            for call in calls:
                with pytest.raises(LayoutError, match=text):
                    call()
    with (
        shardwise.set_check("debug", timeout=10),
        pytest.raises(ValueError, match="Global rank 9 does not exist in input process group"),
    ):
        shardwise.reshard(x, to if rank else COLUMNS)
    assert torch.equal(x.full_tensor(), torch.ones(6, 4))  # the ranks are still together


def test_ranks_outside_of_the_group_are_named_with_what_was_passed() -> None:
    shardwise.run_local(_unknown_ranks, 2, timeout=60)


# -- caps --------------------------------------------------------------------------------------


def _wrong_caps(rank: int) -> None:
    x, whole = rows(), sharded_tensor.ones(shardwise.replicate(), 3)
    here = shardwise.chunk(0)
    calls: dict[str, Callable[[Any], object]] = {
        "reshard": lambda cap: shardwise.reshard(x, here, max_bytes=cap),
        "reshard_all": lambda cap: shardwise.reshard_all([x], here, max_bytes=cap),
        "full_tensor": lambda cap: whole.full_tensor(max_bytes=cap),
        "gather": lambda cap: whole.gather(0, max_bytes=cap),
    }
    wrong: list[tuple[Any, type[Exception], str]] = [
        ("lots", ArgumentTypeError, "expected a whole number, got str: 'lots'"),
        (True, ArgumentTypeError, "expected a whole number, got bool"),
        (0, ArgumentValueError, "expected a whole number >= 1, got 0"),
    ]
    for name, call in calls.items():
        for cap, kind, text in wrong:
            with pytest.raises(kind, match=f"^max_bytes of {name}: {text}"):
                call(cap)
    with pytest.raises(ArgumentValueError, match="max_bytes of reshard_all"):
        shardwise.reshard_all([], here, max_bytes=0)
    with (
        shardwise.set_check("debug", timeout=10),
        pytest.raises(ValueError, match=r"max_bytes of reshard: expected a whole number >= 1"),
    ):
        shardwise.reshard(x, COLUMNS, max_bytes=0 if rank else None)
    assert shardwise.reshard(x, here, max_bytes=1) is x
    assert torch.equal(x.full_tensor(max_bytes=1 << 20), torch.ones(6, 4))


def test_a_wrong_cap_is_refused_where_nothing_moves_too() -> None:
    shardwise.run_local(_wrong_caps, 2, timeout=60)


def _caps_of_other_types(rank: int) -> None:
    x, columns = rows(), shardwise.chunk(1)
    plan = shardwise.plan_reshard(x.shard_layout, columns.layout((6, 4)), 4)
    mine = x.local_tensor()
    for cap in (torch.tensor(16), np.int64(16), np.array(16)):
        untyped: Any = cap
        for moved in (
            shardwise.reshard(x, columns, max_bytes=untyped).local_tensor(),
            shardwise.reshard_all([x], columns, max_bytes=untyped)[0].local_tensor(),
            execute(plan, [mine], max_bytes=untyped)[0],
        ):
            assert torch.equal(moved, torch.ones(6, 2))
        whole = x.gather(0, max_bytes=untyped)
        assert (whole is None) == (rank > 0)
        assert whole is None or torch.equal(whole, torch.ones(6, 4))


def test_a_cap_may_be_any_whole_number() -> None:
    """Of messages and ranks alike: a tensor of torch's is hashed by where it is."""
    shardwise.run_local(_caps_of_other_types, 2)


# -- ranks that differ -------------------------------------------------------------------------


def _what_is_no_list(rank: int, text: str) -> str:
    x = rows()
    wrong: Any = {
        "a plain tensor": [x, torch.ones(3)],
        "one tensor": x,
    }[text]
    caught = ""
    with shardwise.set_check("always", timeout=20):
        try:
            shardwise.reshard_all(wrong if rank == 1 else [x], shardwise.chunk(1))
        except (ArgumentTypeError, AgreementError) as error:
            caught = f"{type(error).__name__}: {error}"
        assert torch.equal(shardwise.reshard(x, shardwise.chunk(1)).full_tensor(), torch.ones(6, 4))
    return caught


@pytest.mark.parametrize("text", ["a plain tensor", "one tensor"])
def test_what_is_no_list_of_tensors_on_one_rank_raises_on_all(text: str) -> None:
    """They compare which tensors they move, and would wait a minute for one that raises alone."""
    found = shardwise.run_local(_what_is_no_list, 3, text, timeout=60)
    assert found[1].startswith("ArgumentTypeError: tensors")
    for one in (found[0], found[2]):
        assert one.startswith("AgreementError: ")
        assert "rank 1" in one
        assert "of reshard_all: expected a" in one


def _in_a_larger_group(rank: int, how: str) -> str:
    owners = dist.new_group([1, 3])
    spec, columns = shardwise.chunk(0, ranks=[1, 3]), shardwise.chunk(1)
    x: Any = shardwise.absent(spec.layout((8, 4)), torch.float32)
    if rank in (1, 3):
        x = sharded_tensor.ones(spec, 8, 4, process_group=owners)
    everybody: Any = dist.group.WORLD
    wrong: Any = torch.ones(8, 4) if how == "a plain tensor" and rank == 1 else x
    cap = None if how == "a plain tensor" else 64 if rank == 1 else 128
    with shardwise.set_check("always", timeout=20):
        with pytest.raises((ArgumentTypeError, AgreementError)) as caught:
            shardwise.reshard(wrong, columns, max_bytes=cap, process_group=everybody)
        moved = shardwise.reshard(x, columns, process_group=everybody)
        assert torch.equal(moved.full_tensor(), torch.ones(8, 4))
    return str(caught.value)


def test_ranks_of_a_larger_group_hear_of_a_wrong_tensor_of_one() -> None:
    found = shardwise.run_local(_in_a_larger_group, 4, "a plain tensor", timeout=60)
    for rank, text in enumerate(found):
        assert "x of reshard: expected a ShardedTensor, got Tensor" in text
        assert "rank 1" in text or rank == 1


def test_ranks_of_a_larger_group_have_one_cap() -> None:
    first, *others = shardwise.run_local(_in_a_larger_group, 4, "other caps", timeout=60)
    assert "ranks differ in max_bytes (ranks 0, 2, 3: 128; rank 1: 64)" in first
    assert others == [first] * 3


def _one_rank_has_nothing_to_move(rank: int, how: str) -> str:
    x: Any = sharded_tensor.ones(shardwise.chunk(0), 6, 4)
    to = shardwise.chunk(0 if rank == 1 else 1)
    calls: dict[str, Callable[[], object]] = {
        "reshard": lambda: shardwise.reshard(x, to),
        "with a cap": lambda: shardwise.reshard(x, to, max_bytes=1 << 20),
        "async": lambda: shardwise.reshard(x, to, async_op=True).wait(),
        "in place": lambda: x.reshard(to),
    }
    with shardwise.set_check("debug", timeout=10):
        with pytest.raises(AgreementError) as caught:
            calls[how]()
        assert shardwise.reshard(x, shardwise.chunk(0)) is x  # what all ask for is what it was
        assert torch.equal(shardwise.reshard(x, shardwise.chunk(1)).full_tensor(), torch.ones(6, 4))
    return str(caught.value)


@pytest.mark.parametrize("how", ["reshard", "with a cap", "async", "in place"])
def test_a_rank_with_nothing_to_move_is_compared_in_debug_mode(how: str) -> None:
    first, *others = shardwise.run_local(_one_rank_has_nothing_to_move, 3, how)
    assert others == [first, first]
    assert "ranks differ in 'tensor' target layout (ranks 0, 2: " in first
