"""Tensors cut into boxes and spread over ranks: any cut, any owner.

Names are imported when they are first used, so `import shardwise` loads neither torch nor rich.
In docstrings, *the seed* is `torch.distributed._shard`, whose names keep their sub-paths here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.api import _shard_tensor, load_with_process_group
    from shardwise.comm.checks import set_check
    from shardwise.comm.single import init_single
    from shardwise.comm.tracing import trace
    from shardwise.errors import ShardwiseError
    from shardwise.geometry import Box, Layout
    from shardwise.interop import (
        from_dtensor,
        from_torch_sharded_tensor,
        to_dtensor,
        to_torch_sharded_tensor,
    )
    from shardwise.modules.data_parallel import ddp_ignore
    from shardwise.modules.full_state import full_state_dict
    from shardwise.modules.loading import load_full_state_dict
    from shardwise.modules.materializing import materialize
    from shardwise.modules.resharding import reshard_module
    from shardwise.modules.sharding import shard_module, shard_parameter
    from shardwise.sharded_tensor import (
        ShardedTensor,
        as_local_rows,
        as_replicated,
        distribute,
        from_callback,
    )
    from shardwise.sharded_tensor.implicit import implicit_comm
    from shardwise.sharded_tensor.local_map import local_map
    from shardwise.sharded_tensor.plain_inputs import plain_inputs
    from shardwise.sharded_tensor.seeds import get_rng_state, manual_seed, set_rng_state
    from shardwise.sharded_tensor.to_layout import absent, reshard
    from shardwise.sharded_tensor.to_layouts import reshard_all
    from shardwise.sharder import Sharder
    from shardwise.sharders import from_tp_plan
    from shardwise.sharding_plan import ShardingPlan
    from shardwise.sharding_spec.short import (
        block_cyclic,
        chunk,
        flat,
        fused,
        grid,
        on_rank,
        parse_spec,
        partial,
        replicate,
    )
    from shardwise.testing.local_run import run_local
    from shardwise.transfer import TransferPlan, plan_reshard, relabel
    from shardwise.viz import print_layout, print_plan

__version__ = "0.1.0"

__all__ = [
    "Box",
    "Layout",
    "ShardedTensor",
    "Sharder",
    "ShardingPlan",
    "ShardwiseError",
    "TransferPlan",
    "_shard_tensor",
    "absent",
    "as_local_rows",
    "as_replicated",
    "block_cyclic",
    "chunk",
    "ddp_ignore",
    "distribute",
    "flat",
    "from_callback",
    "from_dtensor",
    "from_torch_sharded_tensor",
    "from_tp_plan",
    "full_state_dict",
    "fused",
    "get_rng_state",
    "grid",
    "implicit_comm",
    "init_single",
    "load_full_state_dict",
    "load_with_process_group",
    "local_map",
    "manual_seed",
    "materialize",
    "on_rank",
    "parse_spec",
    "partial",
    "plain_inputs",
    "plan_reshard",
    "print_layout",
    "print_plan",
    "relabel",
    "replicate",
    "reshard",
    "reshard_all",
    "reshard_module",
    "run_local",
    "set_check",
    "set_rng_state",
    "shard_module",
    "shard_parameter",
    "to_dtensor",
    "to_torch_sharded_tensor",
    "trace",
]

_HOMES = {
    "shardwise.api": ["_shard_tensor", "load_with_process_group"],
    "shardwise.comm.checks": ["set_check"],
    "shardwise.comm.single": ["init_single"],
    "shardwise.comm.tracing": ["trace"],
    "shardwise.errors": ["ShardwiseError"],
    "shardwise.geometry": ["Box", "Layout"],
    "shardwise.interop": [
        "from_dtensor",
        "from_torch_sharded_tensor",
        "to_dtensor",
        "to_torch_sharded_tensor",
    ],
    "shardwise.modules.data_parallel": ["ddp_ignore"],
    "shardwise.modules.full_state": ["full_state_dict"],
    "shardwise.modules.loading": ["load_full_state_dict"],
    "shardwise.modules.materializing": ["materialize"],
    "shardwise.modules.resharding": ["reshard_module"],
    "shardwise.modules.sharding": ["shard_module", "shard_parameter"],
    "shardwise.sharded_tensor": [
        "ShardedTensor",
        "as_local_rows",
        "as_replicated",
        "distribute",
        "from_callback",
    ],
    "shardwise.sharded_tensor.implicit": ["implicit_comm"],
    "shardwise.sharded_tensor.local_map": ["local_map"],
    "shardwise.sharded_tensor.plain_inputs": ["plain_inputs"],
    "shardwise.sharded_tensor.seeds": ["get_rng_state", "manual_seed", "set_rng_state"],
    "shardwise.sharded_tensor.to_layout": ["absent", "reshard"],
    "shardwise.sharded_tensor.to_layouts": ["reshard_all"],
    "shardwise.sharder": ["Sharder"],
    "shardwise.sharders": ["from_tp_plan"],
    "shardwise.sharding_plan": ["ShardingPlan"],
    "shardwise.sharding_spec.short": [
        "block_cyclic",
        "chunk",
        "flat",
        "fused",
        "grid",
        "on_rank",
        "parse_spec",
        "partial",
        "replicate",
    ],
    "shardwise.testing.local_run": ["run_local"],
    "shardwise.transfer": ["TransferPlan", "plan_reshard", "relabel"],
    "shardwise.viz": ["print_layout", "print_plan"],
}
_PACKAGES = {
    "checkpoint",
    "comm",
    "errors",
    "geometry",
    "interop",
    "ops",
    "sharded_optim",
    "sharded_tensor",
    "sharders",
    "sharding_plan",
    "sharding_spec",
    "testing",
    "transfer",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"shardwise.{name}")  # which sets the attribute
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
