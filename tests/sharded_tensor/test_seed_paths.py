"""The seed's paths below `sharded_tensor`: its names, their parameters, and what they do."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import warnings
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import run_local, set_check
from shardwise.errors import ArgumentTypeError, LayoutError, OpError
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import parse_placement
from shardwise.sharded_tensor import (
    Shard,
    ShardedTensor,
    _ops,
    _sharded_op_impl,
    custom_sharded_op_impl,
    ones,
)
from shardwise.sharded_tensor.dispatch import CUSTOM, HANDLERS
from shardwise.sharded_tensor.factories import FactoryOptions
from shardwise.sharded_tensor.logger import _get_or_create_logger
from shardwise.sharded_tensor.logging_handlers import _log_handlers
from shardwise.sharded_tensor.reshard import (
    build_reshard_metadata,
    get_idx_from_placements,
    reshard_local_shard,
    reshuffle_local_shard,
)
from shardwise.sharded_tensor.utils import (
    _flatten_tensor_size,
    _parse_and_validate_remote_device,
    build_global_metadata,
    build_metadata_from_local_shards,
    recalc_global_sharded_tensor_metadata,
)
from shardwise.sharding_spec import ChunkShardingSpec, ShardingSpec

# ---- names ----

NAMES = {
    "sharded_tensor": [
        "Shard",
        "ShardMetadata",
        "ShardedTensor",
        "ShardedTensorBase",
        "ShardedTensorMetadata",
        "TensorProperties",
        "_sharded_op_impl",
        "custom_sharded_op_impl",
        "empty",
        "full",
        "init_from_local_shards",
        "ones",
        "pre_load_state_dict_hook",
        "rand",
        "randn",
        "state_dict_hook",
        "zeros",
    ],
    "sharded_tensor.api": [
        "Shard",
        "ShardedTensor",
        "ShardedTensorBase",
        "ShardedTensorMetadata",
        "TensorProperties",
        "_create_tensor_from_params",
        "_register_remote_shards",
        "_sharded_tensor_map",
    ],
    "sharded_tensor.metadata": [
        "MEM_FORMAT_ENCODING",
        "ShardMetadata",
        "ShardedTensorMetadata",
        "TensorProperties",
    ],
    "sharded_tensor.shard": ["Shard"],
    "sharded_tensor.reshard": [
        "build_reshard_metadata",
        "get_idx_from_placements",
        "reshard_local_shard",
        "reshuffle_local_shard",
    ],
    "sharded_tensor.utils": [
        "_flatten_tensor_size",
        "_parse_and_validate_remote_device",
        "build_global_metadata",
        "build_metadata_from_local_shards",
    ],
    "sharded_tensor.logger": ["_get_logging_handler", "_get_or_create_logger"],
    "sharded_tensor.logging_handlers": ["_log_handlers"],
    "sharded_tensor._ops": [
        "allclose",
        "constant_",
        "equal",
        "kaiming_uniform_",
        "normal_",
        "sharded_embedding",
        "sharded_embedding_bag",
        "uniform_",
    ],
}
# Of which nothing is here: torch's DCP, and modules without a public name.
ELSEWHERE = [".checkpoint", ".common_op_utils", ".op_registry_utils"]
METHODS = [
    "_init_from_local_shards",
    "_init_from_local_shards_and_global_metadata",
    "_init_from_local_tensor",
    "gather",
    "local_shards",
    "local_tensor",
    "metadata",
    "remote_shards",
    "reshard",
    "sharding_spec",
]


def _parameters(thing: Any) -> list[str]:
    """Names of parameters; options that are typed as a dict are listed one by one."""
    found = []
    for name, parameter in inspect.signature(thing).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found += list(FactoryOptions.__annotations__)
        else:
            found.append(name)
    return found


def _pairs() -> list[Any]:
    return [
        pytest.param(path, name, id=f"{path}.{name}")
        for path, names in NAMES.items()
        for name in names
    ]


@pytest.mark.parametrize(("path", "name"), _pairs())
def test_every_name_of_the_seed_is_here_with_its_parameters(path: str, name: str) -> None:
    theirs = getattr(importlib.import_module(f"torch.distributed._shard.{path}"), name)
    module = importlib.import_module(f"shardwise.{path}")
    ours = getattr(module, name)
    if callable(theirs) and name not in (
        "MEM_FORMAT_ENCODING",
        "ShardedTensor",
        "ShardedTensorBase",
    ):
        mine, seeds = _parameters(ours), _parameters(theirs)
        assert mine[: len(seeds)] == seeds


def _public_names() -> dict[str, list[str]]:
    """Module -> the public names it defines; of packages and `api` modules, all of the seed's."""
    seed: Any = importlib.import_module("torch.distributed._shard")
    found = {}
    with warnings.catch_warnings(record=True):  # torch says of one that it is old, filters or not
        paths = [info.name for info in pkgutil.walk_packages(seed.__path__, f"{seed.__name__}.")]
    for path in [seed.__name__, *paths]:
        own = path.removeprefix(seed.__name__)
        if own.startswith(ELSEWHERE[0]) or "._" in own:
            continue
        module = importlib.import_module(path)
        home = seed.__name__ if hasattr(module, "__path__") or own.endswith("api") else path
        found[own] = [
            name
            for name, value in vars(module).items()
            if str(getattr(value, "__module__", "")).startswith(home) and not name.startswith("_")
        ]
    return found


def test_no_public_name_of_the_seed_is_missing() -> None:
    names = _public_names()
    for path, listed in names.items():
        if path in ELSEWHERE:
            assert listed == []
            continue
        module = importlib.import_module(f"shardwise{path}")
        assert [name for name in listed if not hasattr(module, name)] == [], path
    assert "equal" in names[".sharded_tensor"]
    assert "Sharder" in names[".sharding_plan.api"]
    assert names[".sharding_spec.chunk_sharding_spec_ops.embedding"] == ["sharded_embedding"]


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_the_seeds_parameters(name: str) -> None:
    theirs: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
    seeds = _parameters(getattr(theirs.ShardedTensor, name))
    assert _parameters(getattr(ShardedTensor, name))[: len(seeds)] == seeds
    constructor = inspect.signature(theirs.ShardedTensor.__init__)
    assert list(constructor.parameters)[1:] == _parameters(ShardedTensor)


def test_the_submodule_reshard_is_not_the_function() -> None:
    assert inspect.ismodule(shardwise.sharded_tensor.reshard)
    assert callable(shardwise.reshard)
    assert inspect.ismodule(shardwise.sharded_tensor.api)
    assert inspect.ismodule(shardwise.sharded_tensor.utils)


# ---- reshard ----


def _seed_chunk(spec: ChunkShardingSpec) -> Any:
    module: Any = importlib.import_module("torch.distributed._shard.sharding_spec")
    return module.ChunkShardingSpec(spec.dim, [str(p) for p in spec.placements])


def test_reshard_metadata_is_the_seeds_where_that_works() -> None:
    theirs: Any = importlib.import_module("torch.distributed._shard.sharded_tensor.reshard")
    for ranks in permutations(range(3)):
        for dim in (0, 1):
            spec = ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])
            mine, order = build_reshard_metadata(torch.Size([5, 7]), spec, 3)
            seeds, seed_order = theirs.build_reshard_metadata(
                torch.Size([5, 7]), _seed_chunk(spec), 3
            )
            assert order == seed_order == list(ranks)
            assert list(map(str, mine)) == list(map(str, seeds))


def test_reshard_metadata_of_a_subgroup_is_by_rank() -> None:
    spec = ChunkShardingSpec(0, ["rank:7/cpu", "rank:2/cpu", "rank:7/cpu"])
    metadata, order = build_reshard_metadata((5, 2), spec, 2)
    assert order == [7, 2, 7]
    assert [m.shard_offsets[0] for m in metadata] == [2, 0, 4]


def test_the_position_of_a_rank_in_placements() -> None:
    placements: list[Any] = ["rank:3/cpu", parse_placement("rank:1/cuda:0")]
    assert get_idx_from_placements(placements, 1) == 1
    with pytest.raises(RuntimeError, match=r"current_rank not in the placement\."):
        get_idx_from_placements(placements, 0)


def _reshard_values(rank: int, ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if rank not in ranks:
        return
    rotated = [*ranks[1:], ranks[0]]
    specs: list[ShardingSpec] = [
        shardwise.chunk(0, ranks=ranks),
        shardwise.chunk(0, ranks=rotated),
        shardwise.chunk(-1, ranks=rotated),
        shardwise.on_rank(ranks[-1]),
        shardwise.replicate(ranks=[ranks[0], ranks[-1]]),
    ]
    size = (5, 7)
    full = torch.arange(35.0).view(size)
    for source in specs:
        for target in [*specs, shardwise.block_cyclic(0, 1, ranks=ranks)]:
            held = source.layout(size).boxes_of(rank)
            local = full[held[0].slices()].clone() if held else torch.zeros(1)
            call = reshuffle_local_shard if source is specs[0] else reshard_local_shard
            shards, metadata = call(local, torch.Size(size), source, target, group)
            assert tuple(s.metadata.box for s in shards) == target.layout(size).boxes_of(rank)
            assert len(metadata) == len(target.layout(size))
            for shard in shards:
                assert torch.equal(shard.tensor, full[shard.metadata.box.slices()])


def _reshard_with_gradient(rank: int) -> None:
    """A rotation of three ranks, and rows to columns: the gradient takes the same way back."""
    size = (5, 7)
    full = torch.arange(35.0).view(size)
    rows, turned = shardwise.chunk(0), shardwise.chunk(0, ranks=[1, 2, 0])
    columns = shardwise.chunk(1, ranks=[2, 0, 1])
    for source, target in ((rows, turned), (turned, columns), (columns, rows)):
        (box,) = source.layout(size).boxes_of(rank)
        local = full[box.slices()].clone().requires_grad_()
        (shard,), _ = reshard_local_shard(local, torch.Size(size), source, target, None)
        assert torch.equal(shard.tensor, full[shard.metadata.box.slices()])
        shard.tensor.backward(full[shard.metadata.box.slices()] * 2)
        assert local.grad is not None
        assert torch.equal(local.grad, full[box.slices()] * 2)
    wrong = torch.zeros(1, 1) if rank == 1 else full[rows.layout(size).boxes_of(rank)[0].slices()]
    with set_check("debug", timeout=5), pytest.raises(ValueError, match="Shard tensor size does"):
        reshard_local_shard(wrong, size, rows, columns, None)


def test_local_shards_are_resharded_between_all_specs() -> None:
    run_local(_reshard_values, 3, [0, 1, 2])
    run_local(_reshard_values, 4, [1, 3])


def test_rotations_and_other_dims_are_differentiable() -> None:
    run_local(_reshard_with_gradient, 3)


# ---- utils ----


def _devices(rank: int) -> None:
    parse = _parse_and_validate_remote_device
    world, pair, other = dist.group.WORLD, dist.new_group([1, 3]), dist.new_group([0, 2])
    assert parse(world, parse_placement("rank:1/cpu")) == (1, torch.device("cpu"))
    assert parse(world, parse_placement("cuda:1")) == (None, torch.device("cuda:1"))
    with pytest.raises(ValueError, match="remote device is None"):
        parse(world, None)
    with pytest.raises(LayoutError, match="Global rank 5 does not exist in input process group"):
        parse(world, parse_placement("rank:5/cpu"))
    with pytest.raises(RuntimeError, match="RPC Framework needs to be initialized"):
        parse(world, parse_placement("trainer/cpu"))
    mine, others = (pair, other) if rank in (1, 3) else (other, pair)
    assert parse(mine, parse_placement(f"rank:{rank}/cpu"))[0] == rank
    with pytest.raises(ValueError, match="does not exist in input process group"):
        parse(mine, parse_placement(f"rank:{(rank + 1) % 4}/cpu"))
    assert parse(others, parse_placement("rank:9/cpu"))[0] == 9  # who is not in it cannot tell
    shard = Shard.from_tensor_and_offsets(torch.zeros(2, 3), [2 * rank, 0], rank)
    metadata = build_metadata_from_local_shards([shard], torch.Size([8, 3]), rank, world)
    assert metadata.shards_metadata == [shard.metadata]
    assert metadata.tensor_properties == TensorProperties(torch.float32)
    with pytest.raises(ValueError, match="must have local shards!"):
        build_metadata_from_local_shards([], torch.Size([8, 3]), rank, world)
    with pytest.raises(ValueError, match="current_rank: expected"):
        build_metadata_from_local_shards([shard], torch.Size([8, 3]), rank + 1, world)


def test_placements_and_local_shards_are_checked_against_the_group() -> None:
    run_local(_devices, 4)


def _rank_metadata(
    rank: int, rows: int, dtype: torch.dtype = torch.float32
) -> ShardedTensorMetadata:
    shard = ShardMetadata([2 * rank, 0], [rows, 3], f"rank:{rank}/cpu")
    return ShardedTensorMetadata([shard], torch.Size([4, 3]), TensorProperties(dtype))


def test_global_metadata_is_joined_and_checked() -> None:
    one, other = _rank_metadata(0, 2), _rank_metadata(1, 2)
    joined = build_global_metadata([one, None, other])
    assert joined.size == (4, 3)
    assert joined.shards_metadata == [*one.shards_metadata, *other.shards_metadata]
    assert len(one.shards_metadata) == 1  # the caller's are left alone
    rows = build_global_metadata([_rank_metadata(0, 5), _rank_metadata(1, 1)], recalc_metadata=True)
    assert rows.size == (6, 3)
    assert [m.shard_offsets for m in rows.shards_metadata] == [[0, 0], [5, 0]]
    with pytest.raises(ValueError, match="have no local shards on all ranks"):
        build_global_metadata([None, None])
    with pytest.raises(ValueError, match="dtype property does not match from different ranks!"):
        build_global_metadata([one, _rank_metadata(1, 2, torch.float64)])
    with pytest.raises(ValueError, match="do not cover the entire tensor"):
        build_global_metadata([one])


def test_metadata_are_recalculated_along_a_dim() -> None:
    """As the seed's, which is right where the shards come in rank order."""
    theirs: Any = importlib.import_module("torch.distributed._shard.sharded_tensor.utils")
    seeds: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
    meta: Any = importlib.import_module("torch.distributed._shard.metadata")
    for dim, sizes in ((0, [[2, 3], [0, 3], [4, 3]]), (1, [[2, 1], [2, 5]])):
        mine = ShardedTensorMetadata(
            [ShardMetadata([7, 7], s, f"rank:{i}/cpu") for i, s in enumerate(sizes)]
        )
        other = seeds.ShardedTensorMetadata(
            [meta.ShardMetadata([7, 7], list(s), f"rank:{i}/cpu") for i, s in enumerate(sizes)]
        )
        recalc_global_sharded_tensor_metadata(mine, dim)
        theirs.recalc_global_sharded_tensor_metadata(other, dim)
        assert mine.size == other.size
        assert list(map(str, mine.shards_metadata)) == list(map(str, other.shards_metadata))
    turned = ShardedTensorMetadata(
        [ShardMetadata([0, 0], [2, 3], "rank:1/cpu"), ShardMetadata([0, 0], [5, 3], "rank:0/cpu")]
    )
    recalc_global_sharded_tensor_metadata(turned, 0)
    assert [m.shard_offsets for m in turned.shards_metadata] == [[5, 0], [0, 0]]
    assert turned.size == (7, 3)
    with pytest.raises(ValueError, match="sharded_dim"):
        recalc_global_sharded_tensor_metadata(turned, 2)


def test_sizes_are_flattened() -> None:
    assert _flatten_tensor_size([4, 6]) == torch.Size([4, 6])
    assert _flatten_tensor_size([(4, 6)]) == torch.Size([4, 6])
    assert _flatten_tensor_size([]) == torch.Size([])
    with pytest.raises(TypeError, match="size has to be a sequence of ints"):
        _flatten_tensor_size([4, 2.5])


def test_a_tensor_is_made_from_properties() -> None:
    properties = TensorProperties(torch.float64, requires_grad=True)
    make = shardwise.sharded_tensor.api._create_tensor_from_params
    for made in (
        make(2, 3, local_device="cpu", tensor_properties=properties),
        make([2, 3], local_device=torch.device("cpu"), tensor_properties=properties),
    ):
        assert (made.shape, made.dtype, made.requires_grad) == ((2, 3), torch.float64, True)


def test_the_logger_is_the_packages_and_silent(capsys: pytest.CaptureFixture[str]) -> None:
    logger = _get_or_create_logger()
    assert logger.name == "shardwise.sharded_tensor"
    assert logger is _get_or_create_logger()
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert logger.handlers == [_log_handlers["default"]]
    logger.warning("nobody hears this")
    assert capsys.readouterr().err == ""


# ---- ops in the seed's convention ----


def _seed_ops(rank: int) -> list[str]:
    st = ones(shardwise.chunk(0), 5, 3)
    assert _ops.equal((ShardedTensor,), (st, st.clone()), None, None)
    assert _ops.allclose((ShardedTensor,), (st, st), {"rtol": 0.0}, None)
    calls = []

    @_sharded_op_impl(torch.special.erfcx)
    def by_default(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        calls.append(f"default of {[t.__name__ for t in types]}")
        assert process_group is dist.group.WORLD
        return args[0]

    assert torch.special.erfcx(st) is st

    @custom_sharded_op_impl(torch.special.erfcx)
    def custom(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        calls.append("custom")
        return args[0]

    assert torch.special.erfcx(st) is st
    del CUSTOM[torch.special.erfcx], HANDLERS[torch.special.erfcx]
    strict = shardwise.implicit_comm("error")
    with strict, pytest.raises(OpError, match=r"torch.special.erfcx gathers"):
        torch.special.erfcx(st)
    for decorator in (_sharded_op_impl, custom_sharded_op_impl):
        with pytest.raises(ArgumentTypeError, match="expects signature"):
            decorator(torch.special.erfcx)(lambda types, args: None)
    return calls


def test_ops_in_the_seeds_convention() -> None:
    assert run_local(_seed_ops, 2) == [["default of ['ShardedTensor']", "custom"]] * 2
