"""Sharded tensors from local shards: every layout, every check of the seed, on every rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise
from shardwise import Layout, run_local, set_check
from shardwise.errors import (
    AbsentRanksError,
    AgreementError,
    MetadataError,
    ShardCountError,
    TilingError,
)
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import rank_of
from shardwise.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    init_from_local_shards,
)
from shardwise.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
)
from shardwise.testing.strategies import layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _full(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(tuple(shape)) + 1


def _shards(layout: Layout, rank: int, *, requires_grad: bool = False) -> list[Shard]:
    """This rank's shards of `_full`, in the reverse of the layout's order."""
    full = _full(layout.shape)
    return [
        Shard.from_tensor_and_offsets(
            full[box.slices()].clone().requires_grad_(requires_grad), box.start, rank
        )
        for box in reversed(layout.boxes_of(rank))
    ]


def _entries(metadata: ShardedTensorMetadata) -> list[tuple[Any, int]]:
    return sorted((m.box, rank_of(m.placement)) for m in metadata.shards_metadata)


# ---- what comes out ----


def _rebuild(rank: int, cases: list[Layout], ranks: list[int] | None = None) -> None:
    group = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and rank not in ranks:
        return
    for layout in cases:
        full = _full(layout.shape)
        shards = _shards(layout, rank, requires_grad=True)
        kept = list(shards)
        given = [shard.metadata for shard in shards]
        st = init_from_local_shards(shards, layout.shape, process_group=group)
        assert st.shard_layout == layout
        assert st.shape == full.shape
        assert st.dtype == torch.float64
        assert st.requires_grad
        assert _entries(st.metadata()) == sorted((e.box, e.rank) for e in layout)
        # the very tensors, by their boxes; the caller's list and metadata are left alone
        assert shards == kept
        assert all(shard.metadata is m for shard, m in zip(shards, given, strict=True))
        by_box = {shard.metadata.box: shard.tensor for shard in shards}
        for shard in st.local_shards():
            assert shard.tensor is by_box[shard.metadata.box] or not shard.tensor.numel()
        whole = st.full_tensor()
        assert torch.equal(whole, full)
        # ranks without shards are in the graph too, or this would wait for ever
        (whole * full).sum().backward()
        for shard in shards:
            assert shard.tensor.grad is not None
            assert torch.equal(shard.tensor.grad, full[shard.metadata.box.slices()])


@settings(max_examples=4)
@given(st.lists(layouts(world_size=4, replicas=False, addends=False), min_size=8, max_size=8))
def test_every_layout_is_rebuilt_from_its_shards(cases: list[Layout]) -> None:
    run_local(_rebuild, 4, cases)


@pytest.mark.parametrize(("world_size", "ranks"), [(1, None), (2, None), (3, None), (4, [1, 3])])
def test_shards_of_chunks_grids_and_uneven_cuts_on_every_group(
    world_size: int, ranks: list[int] | None
) -> None:
    on = ranks or list(range(world_size))
    cases = [
        shardwise.chunk(0, ranks=on).layout((5, 3)),
        shardwise.chunk(-1, ranks=on[::-1]).layout((2, 9)),
        shardwise.chunk(0, ranks=on).layout((1, 3)),  # fewer rows than ranks
        shardwise.chunk(0, ranks=on).layout((0, 3)),
        shardwise.chunk(0, ranks=[*on, *on]).layout((7, 2)),  # several shards per rank
        shardwise.on_rank(on[-1]).layout((4, 4)),  # ranks without shards
        shardwise.on_rank(on[0]).layout(()),
        shardwise.block_cyclic(0, 1, ranks=on).layout((6, 2)),
    ]
    run_local(_rebuild, world_size, cases, ranks)


def _rows_of_unknown_size(rank: int) -> dict[str, Any]:
    rows = torch.full((rank + 1, 2), float(rank))
    shard = Shard.from_tensor_and_offsets(rows, [0, 0], rank)
    found: dict[str, Any] = {}
    for name, size in {"star": (None, 2), "list": ([None, None],)}.items():
        st = init_from_local_shards([shard], *size)
        found[name] = (tuple(st.shape), st.full_tensor()[:, 0].tolist())
    # several shards on a rank, and a rank without
    pair = [] if rank == 1 else [shard, Shard.from_tensor_and_offsets(rows + 10, [0, 0], rank)]
    st = init_from_local_shards(pair, None, 2)
    found["pairs"] = (tuple(st.shape), st.full_tensor()[:, 0].tolist())
    found["kept"] = shard.metadata.shard_offsets
    with pytest.raises(MetadataError, match="expected numbers of \\(6, 2\\)"):
        init_from_local_shards([shard], None, 3)
    odd = Shard.from_tensor_and_offsets(torch.zeros(1, rank + 1), [0, 0], rank)
    with pytest.raises(MetadataError, match="shards that differ in dim 0 only"):
        init_from_local_shards([odd], None, None)
    return found


def test_a_size_with_none_is_computed_from_rows_in_rank_order() -> None:
    for found in run_local(_rows_of_unknown_size, 3):
        assert found["star"] == found["list"] == ((6, 2), [0, 1, 1, 2, 2, 2])
        assert found["pairs"] == ((8, 2), [0, 10, 2, 2, 2, 12, 12, 12])
        assert found["kept"] == [0, 0]


def _five_rows_by_the_seeds_arithmetic(rank: int) -> Any:
    """torch.chunk of 5 rows over 4 ranks: the seed puts the empty chunk at row 6 of 5."""
    length = max(min(5, 2 * (rank + 1)) - 2 * rank, 0)
    tensor = torch.ones(length, 3)
    st: Any = init_from_local_shards(
        [Shard.from_tensor_and_offsets(tensor, [2 * rank, 0], rank)], 5, 3
    )
    spec = st.sharding_spec()
    return type(spec).__name__, st.full_tensor().sum().item(), st.clone().local_tensor().shape[0]


def test_an_empty_chunk_past_the_end_stands_at_the_end() -> None:
    found = run_local(_five_rows_by_the_seeds_arithmetic, 4)
    assert found == [("ChunkShardingSpec", 15.0, n) for n in (2, 2, 1, 0)]


def _metadata_is_a_view(rank: int) -> None:
    layout = shardwise.chunk(0, ranks=[1, 0]).layout((5, 3))
    st = init_from_local_shards(_shards(layout, rank), 5, 3)
    held = st.metadata()
    before = list(held.shards_metadata)
    st.reshard(shardwise.chunk(1))
    assert held.shards_metadata == before
    assert held.size == (5, 3)
    now = st.metadata()
    now.shards_metadata.sort(key=lambda m: m.shard_offsets, reverse=True)
    now.shards_metadata.clear()
    assert len(st.metadata().shards_metadata) == 2
    shards = st.local_shards()
    shards.clear()
    assert len(st.local_shards()) == 1


def test_metadata_that_someone_holds_does_not_change_and_changes_nothing() -> None:
    run_local(_metadata_is_a_view, 2)


# ---- what is refused ----


class _Pinned(torch.Tensor):
    """A tensor that says that it is in pinned memory, for machines without a GPU."""

    def is_pinned(self, *_: Any) -> bool:
        return True


def _row(rank: int, tensor: torch.Tensor | None = None, *, at: int | None = None) -> Shard:
    """Rows [2 * rank, 2 * rank + 2) of a tensor of 3 columns."""
    given = torch.zeros(2, 3) if tensor is None else tensor
    return Shard.from_tensor_and_offsets(given, [2 * rank if at is None else at, 0], rank)


def _with_tensor(shard: Shard, tensor: torch.Tensor) -> Shard:
    shard.tensor = tensor  # which nobody checks
    return shard


def _placed(placement: str | None) -> Shard:
    return Shard(torch.zeros(2, 3), ShardMetadata([2, 0], [2, 3], placement))


def _small(rank: int, **options: Any) -> Shard:
    return _row(rank, torch.zeros(1, 3, **options), at=2 * rank)


def _pair(rank: int, one: torch.Tensor, other: torch.Tensor) -> list[Shard]:
    return [_row(rank, one, at=2 * rank), _row(rank, other, at=2 * rank + 1)]


# Name -> (phrase in the message, what rank 1 passes, sizes that ranks pass). Rank 0 passes
# rows 0 and 1 of a (4, 3) tensor.
Case = tuple[str, "Callable[[], Any]", "Callable[[int], Any]"]
_SIZE: Callable[[int], Any] = lambda rank: (4, 3)  # noqa: E731
LOCAL: dict[str, Case] = {
    "layout": (
        "Only torch.strided layout is currently supported",
        lambda: [_row(1, torch.zeros(2, 3).to_sparse())],
        _SIZE,
    ),
    "strides": (
        "Only torch.contiguous_format memory_format is currently supported",
        lambda: [_row(1, torch.zeros(3, 2).t())],
        _SIZE,
    ),
    "other rank": (
        "Local shard metadata's rank does not match with the rank in its process group",
        lambda: [_placed("rank:0/cpu")],
        _SIZE,
    ),
    "no rank": (
        "Local shard metadata's rank does not match with the rank in its process group",
        lambda: [_placed("cpu")],
        _SIZE,
    ),
    "no placement": ("remote device is None", lambda: [_placed(None)], _SIZE),
    "stranger": (
        "Global rank 5 does not exist in input process group",
        lambda: [_placed("rank:5/cpu")],
        _SIZE,
    ),
    "worker": ("RPC Framework needs to be initialized", lambda: [_placed("me/cpu")], _SIZE),
    "device": (
        "Local shard tensor device does not match with local Shard's placement",
        lambda: [_with_tensor(_row(1), torch.zeros(2, 3, device="meta"))],
        _SIZE,
    ),
    "size": (
        "Local shards' tensor size property need to be the same on rank:1",
        lambda: [_with_tensor(_row(1), torch.zeros(2, 4))],
        _SIZE,
    ),
    "dtypes": (
        "Local shards' tensor dtype property need to be the same on rank:1",
        lambda: _pair(1, torch.zeros(1, 3), torch.zeros(1, 3).double()),
        _SIZE,
    ),
    "grads": (
        "Local shards' tensor requires_grad property need to be the same on rank:1",
        lambda: _pair(1, torch.zeros(1, 3), torch.zeros(1, 3, requires_grad=True)),
        _SIZE,
    ),
    "pins": (
        "Local shards' tensor pin_memory property need to be the same on rank:1",
        lambda: _pair(1, torch.zeros(1, 3), torch.zeros(1, 3).as_subclass(_Pinned)),
        _SIZE,
    ),
    "not a list": ("local_shards: expected a list of Shard", lambda: None, _SIZE),
    "not shards": ("local_shards[0]: expected a Shard", lambda: [torch.zeros(2, 3)], _SIZE),
    "not a size": (
        "size has to be a sequence of ints",
        lambda: [_row(1)],
        lambda rank: (4, 3.5 if rank else 3),
    ),
}
GLOBAL: dict[str, Case] = {
    "global_size": (
        "ShardedTensor global_size property does not match from different ranks!",
        lambda: [_row(1)],
        lambda rank: (4 + rank, 3),
    ),
    "global_size of a rank without shards": (
        "ShardedTensor global_size property does not match from different ranks!",
        lambda: [],
        lambda rank: (2 + rank, 3),
    ),
    "dtype": (
        "ShardedTensor dtype property does not match from different ranks! Found "
        "dtype=torch.float32 on rank 0, and dtype=torch.float64 on rank 1",
        lambda: [_row(1, torch.zeros(2, 3).double())],
        _SIZE,
    ),
    "requires_grad": (
        "ShardedTensor requires_grad property does not match from different ranks!",
        lambda: [_row(1, torch.zeros(2, 3, requires_grad=True))],
        _SIZE,
    ),
    "pin_memory": (
        "ShardedTensor pin_memory property does not match from different ranks!",
        lambda: [_row(1, torch.zeros(2, 3).as_subclass(_Pinned))],
        _SIZE,
    ),
    "overlap": ("overlap", lambda: [_row(1, at=1)], lambda rank: (3, 3)),
    "the same box": ("overlap", lambda: [_row(1, at=0)], lambda rank: (2, 3)),
    "volume": ("does not match tensor volume", lambda: [_small(1)], _SIZE),
    "cover": ("do not cover the entire tensor", lambda: [], _SIZE),
    "beyond": ("exceeds tensor dim", lambda: [_row(1, at=3)], _SIZE),
    "dims": ("Rank of tensor is 3, but shards rank is 2", lambda: [_row(1)], lambda r: (4, 3, 1)),
}


def _refusals(rank: int, mode: Any) -> dict[str, tuple[str, bool, float]]:
    found = {}
    for name, (_, make, size) in (LOCAL | GLOBAL).items():
        shards = make() if rank == 1 else [_row(rank)]
        start = time.monotonic()
        with set_check(mode, timeout=5):
            try:
                init_from_local_shards(shards, *size(rank))
            except (ValueError, TypeError, RuntimeError) as error:
                is_ours = isinstance(error, shardwise.ShardwiseError)
                found[name] = (str(error), is_ours, time.monotonic() - start)
    return found


@pytest.mark.parametrize("mode", ["always", "never"])
def test_what_is_wrong_on_one_rank_raises_on_all_and_says_what(mode: str) -> None:
    zero, one = run_local(_refusals, 2, mode)
    for name, (phrase, _, _) in (LOCAL | GLOBAL).items():
        for found in (zero, one):
            message, is_ours, seconds = found[name]
            assert phrase in message, (name, message)
            assert is_ours
            assert seconds < 5, name  # nobody waited for anybody
        if name in LOCAL:
            assert "init_from_local_shards failed on other ranks: rank 1: " in zero[name][0]
        else:
            assert zero[name][0] == one[name][0]


def _nobody_and_absent(rank: int) -> tuple[str, ...]:
    with pytest.raises(ValueError, match="have no local shards on all ranks") as nothing:
        init_from_local_shards([], 4, 3)
    if rank == 1:
        with pytest.raises(MetadataError, match="Shard tensor size does not match"):
            Shard(torch.zeros(2, 2), ShardMetadata([2, 0], [2, 3], "rank:1/cpu"))
        return (str(nothing.value),)
    with set_check("always", timeout=1), pytest.raises(AbsentRanksError) as absent:
        init_from_local_shards([_row(0)], 4, 3)
    assert absent.value.ranks == (1,)
    return str(nothing.value), *absent.value.__notes__


def test_no_shards_anywhere_and_a_rank_that_does_not_come() -> None:
    (nothing, note), (same,) = run_local(_nobody_and_absent, 2)
    assert nothing == same
    assert note == "Compared were the arguments of init_from_local_shards."


# ---- with metadata that all know ----


def _metadata(layout: Layout, /, **properties: Any) -> ShardedTensorMetadata:
    shards = [ShardMetadata(e.box.start, e.box.shape, f"rank:{e.rank}/cpu") for e in layout]
    return ShardedTensorMetadata(
        shards[::-1], torch.Size(layout.shape), TensorProperties(torch.float64, **properties)
    )


def _from_metadata(rank: int, ranks: list[int], cases: list[Layout]) -> None:
    group = dist.new_group(ranks)
    if rank not in ranks:
        return
    for layout in cases:
        shards = _shards(layout, rank, requires_grad=True)
        metadata = _metadata(layout, requires_grad=True)
        st = ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, group)
        assert st.shard_layout == layout
        assert _entries(st.metadata()) == _entries(metadata)
        full = _full(layout.shape)
        whole = st.full_tensor()
        assert torch.equal(whole, full)
        (whole * full).sum().backward()
        for shard in shards:
            assert torch.equal(shard.tensor.grad, full[shard.metadata.box.slices()])  # type: ignore[arg-type]


def test_metadata_of_any_layout_makes_the_tensor_on_any_group() -> None:
    cases = [
        shardwise.chunk(0, ranks=[3, 1]).layout((5, 3)),
        shardwise.chunk(1, ranks=[1, 3, 1]).layout((2, 4)),
        shardwise.on_rank(3).layout((4, 2)),
        shardwise.grid([2, 2], ranks=[1, 3, 3, 1]).layout((5, 5)),
        shardwise.chunk(0, ranks=[1, 3]).layout((0, 2)),
    ]
    run_local(_from_metadata, 4, [1, 3], cases)


def _alone_with_metadata(rank: int) -> list[str]:
    """Rank 1 does nothing: it must not be waited for."""
    if rank == 1:
        return []
    layout = shardwise.chunk(0, ranks=[0, 1]).layout((5, 3))
    make = ShardedTensor._init_from_local_shards_and_global_metadata
    shards = _shards(layout, rank)
    assert make(shards, _metadata(layout)).local_tensor() is shards[0].tensor
    replicas = ReplicatedShardingSpec(["rank:0/cpu", "rank:1/cpu"])
    both = _metadata(replicas.layout((5, 3)))
    st = make(_shards(replicas.layout((5, 3)), rank), both, sharding_spec=replicas)
    assert st.shard_layout.is_replicated
    found = []

    def refused(error: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(error) as caught:
            call()
        found.append(str(caught.value))

    plain = _metadata(layout)
    refused(RuntimeError, lambda: make([], plain))
    refused(ShardCountError, lambda: make([*shards, *shards], plain))
    stranger = _metadata(shardwise.chunk(0, ranks=[0, 5]).layout((5, 3)))
    refused(ValueError, lambda: make(shards, stranger))
    refused(ValueError, lambda: make([], ShardedTensorMetadata()))
    refused(ValueError, lambda: make(shards, _metadata(layout, layout=torch.sparse_coo)))
    refused(ValueError, lambda: make(shards, _metadata(layout, requires_grad=True)))
    refused(ValueError, lambda: make(shards, _metadata(layout, pin_memory=True)))
    single = [_row(0, torch.zeros(3, 3))]
    refused(ValueError, lambda: make(single, plain))
    sparse = [_row(0, torch.zeros(3, 3, dtype=torch.float64).to_sparse())]
    refused(ValueError, lambda: make(sparse, plain))
    turned = [_row(0, torch.zeros(3, 3, dtype=torch.float64).t())]
    assert turned[0].tensor.is_contiguous() is False
    refused(ValueError, lambda: make(turned, plain))
    elsewhere = [_row(0, torch.zeros(3, 3, dtype=torch.float64), at=1)]
    refused(MetadataError, lambda: make(elsewhere, plain))
    half = ShardedTensorMetadata(plain.shards_metadata[1:], plain.size, plain.tensor_properties)
    refused(TilingError, lambda: make(shards, half))
    refused(TilingError, lambda: make(_shards(replicas.layout((5, 3)), rank), both))
    columns = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])
    refused(MetadataError, lambda: make(shards, plain, sharding_spec=columns))
    refused(TypeError, lambda: make(shards, {"size": (5, 3)}))  # type: ignore[arg-type]
    return found


def test_with_metadata_nothing_is_sent_and_errors_stay_local() -> None:
    messages, _ = run_local(_alone_with_metadata, 2)
    phrases = [
        "Number of local shards (0) does not match number of local shards metadata",
        "Number of local shards (2) does not match number of local shards metadata",
        "Global rank 5 does not exist in input process group",
        "shards_metadata must not be empty!",
        "Only torch.strided layout is currently supported",
        "Local shards' tensor requires_grad property is incompatible with tensor property",
        "Local shards' tensor pin_memory property is incompatible with tensor property",
        "Local shards' tensor dtype property is incompatible with tensor property on rank 0",
        "Local shards' tensor layout property is incompatible with tensor property",
        "Only torch.contiguous_format memory_format is currently supported",
        "expected the boxes of this rank: [0:3, 0:3], got [1:4, 0:3]",
        "do not cover the entire tensor",
        "overlap",
        "does not match with sharding_spec",
        "expected a ShardedTensorMetadata",
    ]
    assert len(messages) == len(phrases)
    for message, phrase in zip(messages, phrases, strict=True):
        assert phrase in message


def test_a_tensor_of_no_group_holds_shards_of_any_ranks() -> None:
    layout = shardwise.chunk(0, ranks=[0, 1]).layout((4, 2))
    metadata = _metadata(layout)
    full = _full((4, 2))
    shards = [Shard(full[m.box.slices()], m) for m in metadata.shards_metadata]
    make = ShardedTensorBase._init_from_local_shards_and_global_metadata
    st = make(shards, metadata)
    assert isinstance(st, ShardedTensor)
    assert st.shape == (4, 2)
    held = [(s.metadata.box, s.metadata.placement, s.tensor) for s in st.local_shards()]
    assert [placement.rank() for _, placement, _ in held if placement] == [0, 1]
    assert all(tensor is s.tensor for (_, _, tensor), s in zip(held, shards[::-1], strict=True))
    assert _entries(st.metadata()) == _entries(metadata)
    assert st._process_group is None
    copy: Any = st.clone()
    assert copy.local_shards()[1].metadata == st.local_shards()[1].metadata
    with pytest.raises(RuntimeError, match="belongs to no process group"):
        st.full_tensor()
    nothing = make([], metadata)
    assert nothing.local_shards() == []
    assert nothing.dtype == torch.float64
    st._local_shards = shards[:1]
    assert [s.tensor is shards[0].tensor for s in st.local_shards()] == [True]
    with pytest.raises(MetadataError, match="one of the metadata's shards"):
        make([Shard.from_tensor_and_offsets(full[:1], [1, 0], 0)], metadata)
    # columns of a tensor, which are not contiguous, will do here
    columns = _metadata(shardwise.chunk(1, ranks=[0, 1]).layout((4, 2)))
    make([Shard(full[m.box.slices()], m) for m in columns.shards_metadata], columns)


# ---- from one local tensor ----


def _from_one_tensor(rank: int, ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if rank not in ranks:
        return
    make = ShardedTensor._init_from_local_tensor
    on = [f"rank:{r}/cpu" for r in ranks]
    boxes = [([0, 0], [5, 1], on[1]), ([0, 1], [5, 2], on[0])]
    cases: dict[tuple[int, ...], list[ShardingSpec]] = {
        (5, 3): [
            ChunkShardingSpec(0, on),
            ChunkShardingSpec(-1, on[::-1]),
            EnumerableShardingSpec([ShardMetadata(*box) for box in boxes]),
            shardwise.grid([1, 2], ranks=ranks),
            ReplicatedShardingSpec(on),
            shardwise.on_rank(ranks[1]),
        ],
        (1, 3): [ChunkShardingSpec(0, on)],
    }
    for size, specs in cases.items():
        for spec in specs:
            full = _full(size)
            held = spec.layout(size).boxes_of(rank)
            local = full[held[0].slices()].clone() if held else torch.zeros(9).double()
            local.requires_grad_()
            st = make(local, spec, size, process_group=group)
            assert st.sharding_spec() is spec
            whole = st.full_tensor()
            assert torch.equal(whole, full)
            (whole * full).sum().backward()
            if held:
                assert st.local_tensor() is local
                assert torch.equal(local.grad, full[held[0].slices()])  # type: ignore[arg-type]


def test_one_local_tensor_makes_the_tensor_for_every_spec() -> None:
    run_local(_from_one_tensor, 4, [1, 3])


def _wrong_tensors(rank: int) -> list[str]:
    make = ShardedTensor._init_from_local_tensor
    rows, twice = shardwise.chunk(0), shardwise.chunk(0, ranks=[0, 1, 1])
    good = torch.zeros(2, 3)
    cases: list[tuple[Any, Any]] = [
        (torch.zeros(3, 2).t(), rows),
        (torch.zeros(2, 4), rows),
        (good.double(), rows),
        (good, "chunk"),
        (good, shardwise.chunk(0, ranks=[1, 0])),
        (torch.zeros(1, 3), twice),
        (good, shardwise.chunk(0, ranks=[0, 5])),
        (good.to_sparse(), rows),
    ]
    found = []
    for tensor, spec in cases:
        with set_check("always", timeout=5), pytest.raises((ValueError, TypeError)) as caught:
            make(*((tensor, spec) if rank else (good, rows)), 4, 3)
        found.append(str(caught.value))
    return found


def test_a_wrong_local_tensor_raises_on_all_ranks() -> None:
    phrases = [
        "local_tensor is not a contiguous Tensor",
        "Shard tensor size does not match with metadata.shard_lengths",
        "ranks differ in dtype",
        "Expecting ShardingSpec but got",
        "ranks differ in sharding_spec",
        "one tensor for a rank that has several shards",
        "Global rank 5 does not exist in input process group",
        "Only torch.strided layout is currently supported",
    ]
    for found in run_local(_wrong_tensors, 2):
        for message, phrase in zip(found, phrases, strict=True):
            assert phrase in message


def _with_the_seed(rank: int) -> list[tuple[str, str]]:
    """Metadata and spec kind that the seed and we say of the same shards."""
    import warnings

    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata as SeedMetadata

    seed: Any = sharded_tensor
    found = []
    for offsets, sizes in (
        ([3 * rank, 0], [3 - rank, 4]),
        ([0, rank], [5, 1 + 2 * rank]),
    ):
        place = f"rank:{rank}/cpu"
        shard = Shard(torch.zeros(sizes), ShardMetadata(offsets, sizes, place))
        theirs = seed.Shard(torch.zeros(sizes), SeedMetadata(offsets, sizes, place))
        ours = init_from_local_shards([shard], 5, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = seed.init_from_local_shards([theirs], 5, 4)
            for st in (ours, other):
                found.append((str(st._metadata), type(st._sharding_spec).__name__))
    return found


def test_metadata_and_spec_are_the_seeds() -> None:
    for found in run_local(_with_the_seed, 2):
        for ours, theirs in zip(found[::2], found[1::2], strict=True):
            assert ours == theirs


def test_errors_that_ranks_share_are_agreement_errors() -> None:
    def call(rank: int) -> str:
        with pytest.raises(AgreementError) as caught:
            init_from_local_shards([_row(rank)], 4 + rank, 3)
        return str(caught.value)

    one, other = run_local(call, 2)
    assert one == other
    assert "global_size=(4, 3) on rank 0, and global_size=(5, 3) on rank 1" in one
