"""Every private name of torch that shardwise uses, and what differs between its versions.

Supported: torch 2.11 to 2.13. When a release moves a name, this is the file to change.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from inspect import getclosurevars, unwrap
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import getweakrefs

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions as _AllgatherOptions
from torch._C._distributed_c10d import HashStore, Store
from torch.autograd import forward_ad
from torch.autograd.grad_mode import (
    _force_original_view_tracking,
    _unsafe_preserve_version_counter,
)
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.distributed.remote_device import _remote_device
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _utils_foreach_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

__all__ = [
    "CheckpointedRun",
    "GradientHooks",
    "HashStore",
    "MeshPlacementTypes",
    "RandomMarks",
    "StopRecomputation",
    "Store",
    "TorchDispatchMode",
    "TorchShardedTensorTypes",
    "active_transform",
    "all_gather_single",
    "allow_foreach",
    "assert_async",
    "autocast_dtype",
    "can_swap",
    "checkpointed_runs",
    "current_backward",
    "dcp_metadata",
    "elementwise_kernel",
    "fan_of",
    "foreach_copy",
    "forward_ad",
    "gradient_hooks",
    "group_store",
    "has_default_shard_order",
    "has_functorch",
    "has_modes",
    "has_run_rpc",
    "has_saving_hooks",
    "ignore_in_ddp",
    "is_staged_by_dcp",
    "is_tracing",
    "is_written_for_hugging_face",
    "kept_version",
    "mesh_placement_types",
    "parse_to",
    "reduce_scatter_single",
    "refuse_address",
    "remote_device",
    "replayed_views",
    "rpc_rank",
    "rpc_worker_ranks",
    "run_backward",
    "shares_memory",
    "start_all_gather",
    "storage_key",
    "swap_impl",
    "torch_name",
    "torch_sharded_tensor_types",
    "tree_leaves",
    "tree_map",
    "unbind_copy",
    "wait_for_local",
]

remote_device = _remote_device  # torch's `rank:1/cuda:0`: a worker and a device

# Whether torch.func runs. To look at its stack instead would make one for this thread, which
# autograd then copies in every backward.
has_functorch: Any = torch._C._are_functorch_transforms_active
has_modes: Any = torch._C._is_torch_function_mode_enabled  # whether a user's mode sees calls
is_tracing: Any = torch._C._is_tracing  # whether torch.jit traces
# What `torch.autograd.backward` calls once it has looked at its arguments, which takes as long as
# some ops do: tensors, their gradients, retain_graph, create_graph, inputs.
run_backward: Any = torch.autograd.graph._engine_run_backward
# `with replayed_views(True):` views made there are, once written, followed by what made them.
replayed_views: Any = _force_original_view_tracking
# `with kept_version(tensor):` what is written into it there is not counted.
kept_version: Any = _unsafe_preserve_version_counter
assert_async: Any = torch._assert_async  # a check of values that does not wait for the device

# Has torch raise where code in C asks the tensor for its memory, as `torch.utils.dlpack.to_dlpack`
# does; a tensor made of others has none, and such code would read from address 0.
refuse_address: Any = torch._C._set_throw_on_mutable_data_ptr

# torch 2.13 has new names for the next two, and warns of the old ones.
_dist: Any = dist
# An all-gather of flat tensors, by its name in this version of torch.
all_gather_single = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
# A reduce-scatter of flat tensors, likewise.
reduce_scatter_single = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


def active_transform() -> str | None:
    """What torch does to the functions that run now, beyond calling them; mostly None."""
    if has_functorch():
        return "torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode AD"
    return "torch.jit.trace" if is_tracing() else None


_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks: Any = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks: Any = torch._C._autograd._push_saved_tensors_default_hooks


def has_saving_hooks() -> bool:
    """Whether what autograd saves goes through hooks, as those of checkpointing."""
    return _top_hooks(True) is not None


class CheckpointedRun(NamedTuple):
    """A run of a function under `torch.utils.checkpoint`, as code inside of it finds it."""

    call: Any  # the same object whenever this call of the function runs; can be weakly referenced
    again: Any  # None the first time; in backward an object that stands for this run


def checkpointed_runs() -> list[CheckpointedRun]:
    """The runs of non-reentrantly checkpointed functions that this code is in, innermost first.

    torch marks them by hooks on saved tensors and shows only those on top, so all are taken off and
    put back.
    """
    found: list[Any] = []
    try:
        while (hooks := _top_hooks(True)) is not None:
            _pop_hooks()
            found.append(hooks)
    finally:
        for hooks in reversed(found):
            _push_hooks(*hooks)
    runs = [_run_of(pack) for pack, _ in found]
    return [run for run in runs if run is not None]


def _run_of(pack: Any) -> CheckpointedRun | None:
    inner = unwrap(pack)
    if getattr(inner, "__module__", None) != "torch.utils.checkpoint":
        return None
    names = getclosurevars(inner).nonlocals
    if "frame" in names:
        return CheckpointedRun(names["frame"], None)
    if "target_frame_ref" in names:
        return CheckpointedRun(names["target_frame_ref"](), inner)
    raise RuntimeError(f"torch {torch.__version__} checkpoints in a way that is not known: {inner}")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on this kind of device; None where it is off.

    torch raises about the meta device, which has none.
    """
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def allow_foreach(cls: type) -> None:
    """Has optimizers and `torch.nn.utils` take list functions by default for this class, too."""
    lists: list[Any] = [_optim_foreach_types, _utils_foreach_types]
    for known in lists:
        if cls not in known:
            known.append(cls)


def current_backward() -> int:
    """A number for the backward that runs now, another for each; -1 outside of any."""
    private: Any = torch._C
    return int(private._current_graph_task_id())


def elementwise_kernel(code: str, *, num_outputs: int, **numbers: int) -> Any:
    """A function of CUDA tensors from the C++ code for one element, compiled when it is called.

    `numbers` are arguments that are no tensors, and their defaults.
    """
    return torch.cuda.jiterator._create_multi_output_jit_fn(code, num_outputs, **numbers)


def fan_of(tensor: torch.Tensor, mode: str) -> int:
    """The fan of a weight, "fan_in" or "fan_out", as `torch.nn.init` has it."""
    private: Any = torch.nn.init
    return int(private._calculate_correct_fan(tensor, mode))


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies every source into its target; one kernel where the device has one."""
    torch._foreach_copy_(targets, sources)


def unbind_copy(stack: torch.Tensor) -> Sequence[torch.Tensor]:
    """Copies of the tensors of a stack, each in memory of its own; a kernel for each."""
    copies: Any = torch.unbind_copy  # torch's own annotation says that it returns None
    found: Sequence[torch.Tensor] = copies(stack)
    return found


class GradientHooks(NamedTuple):
    """A user's hooks on the gradient of a tensor: on its way, and once it is accumulated."""

    on_gradient: list[Any]
    when_accumulated: list[Any]


def gradient_hooks(tensor: torch.Tensor) -> GradientHooks:
    """The hooks of a plain tensor."""
    found = [getattr(tensor, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    return GradientHooks(*[list((hooks or {}).values()) for hooks in found])


def ignore_in_ddp(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Has a DistributedDataParallel of `module` leave these parameters and buffers alone, too."""
    from torch.nn.parallel import DistributedDataParallel

    private: Any = DistributedDataParallel
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    # It looks for those of the module itself by "name" in some places and ".name" in others.
    own = [f".{name}" for name in names if "." not in name]
    listed = list(dict.fromkeys([*known, *names, *own]))
    private._set_params_and_buffers_to_ignore_for_model(module, listed)


def group_store(group: dist.ProcessGroup) -> Store:
    """The store of a process group, in which no other group sees its keys."""
    return _get_process_group_store(group)


def start_all_gather(
    group: dist.ProcessGroup,
    output: torch.Tensor,
    mine: torch.Tensor,
    *,
    timeout: float | None = None,
) -> dist.Work:
    """A started all-gather of flat tensors, with a timeout of its own if one is given."""
    options = _AllgatherOptions()
    options.asyncOp = True
    if timeout is not None:
        options.timeout = timedelta(seconds=timeout)
    return group._allgather_base(output, mine, options)


def parse_to(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, bool, torch.memory_format | None]:
    """Device, dtype, non_blocking and memory format that arguments of `Tensor.to` say."""
    private: Any = torch._C
    device, dtype, non_blocking, memory_format = private._nn._parse_to(*args, **kwargs)
    return device, dtype, non_blocking, memory_format


def can_swap(tensor: torch.Tensor) -> bool:
    """Whether only the object needs what it is: no graph that is alive, no weak reference."""
    private: Any = tensor
    return not getweakrefs(tensor) and private._use_count() == 1


def swap_impl(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Swaps what the two objects are in C++; their Python attributes stay."""
    private: Any = torch._C
    private._swap_tensor_impl(tensor, other)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one tensor is a view of the other, or both are of a third; meta tensors too."""
    private: Any = torch._C
    return bool(private._is_alias_of(one, other))


def storage_key(tensor: torch.Tensor) -> int:
    """A number of the memory that a tensor is in, also of one without elements."""
    private: Any = tensor.untyped_storage()
    return int(private._cdata)


class RandomMarks:
    """Where random generators stand: torch's own ones, and those among some arguments."""

    def __init__(self, arguments: Sequence[Any], device: torch.device) -> None:
        given = [value for value in arguments if isinstance(value, torch.Generator)]
        own = [torch.default_generator]
        if device.type == "cuda":
            own.append(torch.cuda.default_generators[device.index or 0])
        self._marks = [(generator, generator.get_state()) for generator in (*own, *given)]

    def have_moved(self) -> bool:
        """Whether numbers have been drawn since; if so the generators are put back."""
        moved = [(g, state) for g, state in self._marks if not torch.equal(g.get_state(), state)]
        for generator, state in moved:
            generator.set_state(state)
        return bool(moved)


def torch_name(function: Any) -> str | None:
    """What people call a function of torch; None for all others.

    As `torch.overrides.resolve_name`, which changes the filters of warnings for each question, by
    which Python forgets what it has warned of already.
    """
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(function)
    try:
        found: str | None = torch.overrides._get_overridable_functions()[1].get(function)
    except TypeError:  # a callable that has no hash
        return None
    own = getattr(function, "__name__", "")
    # Of functions that share their C code, such as mm and spmm, torch's table knows the last.
    if found and not found.endswith(f".{own}") and getattr(torch, own, None) == function:
        return f"torch.{own}"
    return found


class MeshPlacementTypes(NamedTuple):
    """DTensor's placement classes."""

    shard: type
    strided_shard: type
    replicate: type
    partial: type


def mesh_placement_types() -> MeshPlacementTypes:
    """DTensor's placement classes; imported here because they take a second to import."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    return MeshPlacementTypes(Shard, _StridedShard, Replicate, Partial)


def has_default_shard_order(dtensor: Any) -> bool:
    """Whether mesh axes that cut one dim of a DTensor do so from left to right."""
    spec = dtensor._spec
    order = getattr(spec, "shard_order", None)  # None: as its strided shards say
    return order is None or order == spec.compute_default_shard_order(spec.placements)


def wait_for_local(dtensor: Any) -> None:
    """Waits for the local tensor of a DTensor, if a collective still writes it."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(dtensor._local_tensor, AsyncCollectiveTensor):
        dtensor._local_tensor = dtensor._local_tensor.wait()


class TorchShardedTensorTypes(NamedTuple):
    """The classes of torch's own ShardedTensor, the seed's."""

    sharded_tensor: Any
    shard: Any
    shard_metadata: Any
    tensor_metadata: Any
    properties: Any


def torch_sharded_tensor_types() -> TorchShardedTensorTypes:
    """The classes of torch's own ShardedTensor, for those who have such tensors."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharded_tensor.shard import Shard

    return TorchShardedTensorTypes(
        ShardedTensor, Shard, ShardMetadata, ShardedTensorMetadata, TensorProperties
    )


def is_staged_by_dcp() -> bool:
    """Whether torch.distributed.checkpoint is copying a state dict, for an asynchronous save.

    It asks a tensor for its `data_ptr()`, and copies one that has none by what it is made of.
    """
    return any(frame.f_globals.get("__name__") in _STAGERS for frame in _frames(most=16))


_STAGERS = (
    "torch.distributed.checkpoint._state_dict_stager",
    "torch.distributed._state_dict_utils",
)


def is_written_for_hugging_face() -> bool:
    """Whether the checkpoint that is being saved goes through `HuggingFaceStorageWriter`."""
    loaded = sys.modules.get("torch.distributed.checkpoint.hf_storage")
    if loaded is None:
        return False
    saver = "torch.distributed.checkpoint.state_dict_saver"
    writers = [
        frame.f_locals.get("storage_writer")
        for frame in _frames(most=64)
        if frame.f_globals.get("__name__") == saver
    ]
    return any(isinstance(writer, loaded.HuggingFaceStorageWriter) for writer in writers)


def _frames(*, most: int) -> Iterator[FrameType]:
    """The callers of the function that asks, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and most > 0:
        yield frame
        frame, most = frame.f_back, most - 1


def has_run_rpc() -> bool:
    """Whether this process was an RPC worker: what torch counts for that is never set back."""
    from torch.distributed import rpc

    private: Any = rpc
    return rpc.is_available() and private._init_counter > 0


def rpc_rank() -> int:
    """This process's rank in RPC, which is running."""
    from torch.distributed import rpc

    return int(rpc.get_worker_info().id)


def rpc_worker_ranks() -> dict[str, int] | None:
    """RPC worker names and their ranks, or None where RPC is not running."""
    from torch.distributed import rpc

    if not rpc.is_available():
        return None
    private: Any = rpc
    if not private._is_current_rpc_agent_set():
        return None
    return {w.name: w.id for w in private._get_current_rpc_agent().get_worker_infos()}


def dcp_metadata(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    paths: Mapping[str, tuple[str | int, ...]],
    written: Mapping[str, Sequence[Any]],
) -> Any:
    """The metadata object of torch.distributed.checkpoint's `FileSystemReader`.

    `written` has for each name its archives: `box`, which is None for a plain value, `file`,
    `offset` and `length`.
    """
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for name, archives in written.items():
        if name not in tensors:
            described[name] = dcp.BytesStorageMetadata()
            key = dcp.MetadataIndex(name)
            storage[key] = _StorageInfo(archives[0].file, archives[0].offset, archives[0].length)
            continue
        shape, dtype = tensors[name]
        chunks = []
        for number, one in enumerate(archives):
            start = torch.Size(one.box.start)
            chunks.append(dcp.ChunkStorageMetadata(start, torch.Size(one.box.shape)))
            key = dcp.MetadataIndex(name, start, number)
            storage[key] = _StorageInfo(one.file, one.offset, one.length)
        properties = dcp.TensorProperties(dtype=dtype)
        described[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    return dcp.Metadata(
        described, dict(paths), storage, dcp.StorageMeta(), version=CURRENT_DCP_VERSION
    )
