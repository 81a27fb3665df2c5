from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise.errors import NotInitializedError, SpecError
from shardwise.sharding_spec import ChunkShardingSpec, GridShardingSpec, ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

loose: Any = shardwise  # for calls that are wrong on purpose


def _default_specs(rank: int) -> list[tuple[ShardingSpec, tuple[int, ...]]]:
    specs: list[ShardingSpec] = [
        shardwise.chunk(0),
        shardwise.chunk(-1, sizes=[1, 4, 1]),
        shardwise.grid([3, 1]),
        shardwise.replicate(),
        shardwise.on_rank(2),
        shardwise.partial("max"),
        shardwise.fused(0, [4, 2]),
        shardwise.block_cyclic(1, 2),
        shardwise.flat(),
        shardwise.parse_spec("chunk(0)"),
    ]
    return [(spec, spec.layout((6, 6)).ranks) for spec in specs]


def test_ranks_and_device_are_those_of_the_default_process_group() -> None:
    answers = shardwise.run_local(_default_specs, 3)
    assert answers[0] == answers[1] == answers[2]
    found = [ranks for _, ranks in answers[0]]
    assert found == [(0, 1, 2)] * 4 + [(2,)] + [(0, 1, 2)] * 5
    spec = answers[0][0][0]
    assert spec == ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(3)])


def test_ranks_and_devices_can_be_given() -> None:
    spec = shardwise.chunk(0, ranks=[2, 0], device="meta")
    assert spec == ChunkShardingSpec(0, ["rank:2/meta", "rank:0/meta"])
    cells = shardwise.grid([1, 2], ranks=[[0, 1], 2], device=torch.device("cpu"))
    assert cells == GridShardingSpec([1, 2], [["rank:0/cpu", "rank:1/cpu"], "rank:2/cpu"])
    assert shardwise.on_rank(5).layout((3,)).ranks == (5,)


@pytest.mark.parametrize("make", [shardwise.chunk, shardwise.block_cyclic])
def test_without_a_process_group_the_error_says_what_to_do(make: Any) -> None:
    with pytest.raises(NotInitializedError, match=r"pass ranks=.*torchrun.*shardwise\.run_local"):
        make(0, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chunk(0)", shardwise.chunk(0, ranks=[0, 1])),
        (" chunk(dim=-1, sizes=[5, 3]) ", shardwise.chunk(-1, [5, 3], ranks=[0, 1])),
        ("chunk(0, ranks=[4, 5, 6])", shardwise.chunk(0, ranks=[4, 5, 6])),
        ("grid([1, 2])", shardwise.grid([1, 2], ranks=[0, 1])),
        ("on_rank(3)", shardwise.on_rank(3)),
        ("on_rank(3, 'meta')", shardwise.on_rank(3, "meta")),
        ("replicate([2, 3])", shardwise.replicate([2, 3])),
        ("chunk(0, [5, 3], [1, 0])", shardwise.chunk(0, [5, 3], [1, 0])),
        ("partial('avg', device='meta')", shardwise.partial("avg", ranks=[0, 1], device="meta")),
    ],
)
def test_specs_are_read_from_text(text: str, expected: ShardingSpec) -> None:
    assert shardwise.parse_spec(text, ranks=[0, 1]) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk(0", "expected a call with plain values, got 'chunk.0'"),
        ("chunk", "expected a call"),
        ("os.remove('x')", "expected a call"),
        ("chunk(open('x'))", "expected a call"),
        ("chonk(0)", "expected one of block_cyclic, chunk, .*got chonk"),
        ("chunk()", r"missing a required argument: 'dim'.*E\.g\."),
        ("chunk(0, size=[1])", "unexpected keyword argument 'size'"),
        ("chunk(0, **{})", "expected a call|None"),
        ("chunk(" + "-" * 5000 + "1)", "expected a call"),
    ],
)
def test_text_that_is_no_spec_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        shardwise.parse_spec(text, ranks=[0, 1])


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: loose.on_rank(-1), ValueError, "rank: expected a whole number >= 0, got -1"),
        (lambda: loose.on_rank(True), TypeError, "rank: expected a whole number, got bool"),
        (lambda: loose.chunk(0, ranks=["a"]), TypeError, "ranks: expected whole numbers"),
        (lambda: loose.chunk(0, ranks="0123"), TypeError, "ranks: expected a list of whole"),
        (lambda: loose.replicate(2), TypeError, "ranks: expected a list of whole numbers"),
        (lambda: loose.grid([2], ranks=5), TypeError, "ranks: expected a list of one rank per"),
        (
            lambda: loose.chunk(0, ranks=[0], device="gpu"),
            ValueError,
            "device: expected .*'gpu'",
        ),
        (lambda: loose.chunk(0, ranks=[0], device=5.5), ValueError, "device: expected"),
        (lambda: loose.chunk(0, sizes=4, ranks=[0]), TypeError, "sizes: expected a list of"),
        (lambda: loose.parse_spec(None), ValueError, "expected a call"),
        (lambda: loose.chunk(0, ranks=[0]).layout(4), TypeError, "shape: expected a list"),
    ],
)
def test_wrong_ranks_devices_and_sizes_are_named(
    make: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        make()
    assert isinstance(caught.value, shardwise.ShardwiseError)


def test_a_shape_of_floats_is_refused_also_when_its_layout_is_known() -> None:
    spec = shardwise.chunk(0, ranks=[0, 1])
    spec.layout((4, 3))
    wrong: Any = (4.0, 3.0)
    with pytest.raises(TypeError, match="shape: expected whole numbers"):
        spec.layout(wrong)


def test_whole_numbers_of_numpy_and_torch_will_do_everywhere() -> None:
    number: Any = np.int64
    sizes: Any = np.array([1, 3])
    ranks: Any = torch.arange(2)
    plain = shardwise.grid([2, [1, 3]], ranks=[0, 1, [2, 3], 4])
    cells: Any = [number(0), torch.tensor(1), np.array([2, 3]), number(4)]
    assert shardwise.grid([number(2), sizes], ranks=cells) == plain
    assert shardwise.chunk(number(0), sizes, ranks) == shardwise.chunk(0, [1, 3], [0, 1])
    blocks = shardwise.block_cyclic(number(0), number(2), range(2))
    assert blocks == shardwise.block_cyclic(0, 2, [0, 1])
    sections: Any = np.array([4, 2])
    assert shardwise.fused(0, sections, [0, 1]) == shardwise.fused(0, [4, 2], [0, 1])
