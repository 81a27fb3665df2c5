"""ShardedTensor: a torch.Tensor of the global size whose data are boxes on many ranks.

[Note: outer and inner] The object is a wrapper: its own size and dtype are the global ones, and it
has no data. What this rank holds is in its `State`, and autograd runs on those local tensors. The
outer tensor requires grad when they do, so that code that bypasses `__torch_function__` (a user's
autograd.Function) leaves a grad_fn on it, by which the next call notices; and if what it gives is
plain, its gradient comes to the outer tensor, where a hook notices.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import (
    active_transform,
    forward_ad,
    has_functorch,
    is_tracing,
    kept_version,
    refuse_address,
    replayed_views,
    swap_impl,
)
from shardwise.errors import OpError
from shardwise.sharded_tensor.assigning import Assigned
from shardwise.sharded_tensor.checkpointable import chunk_at, chunk_list, write_items
from shardwise.sharded_tensor.dispatch import (
    CUSTOM,
    HANDLERS,
    OUTER,
    call_plain,
    function_name,
    runner_of,
    sharded_arguments,
)
from shardwise.sharded_tensor.gathering import (
    full_tensor,
    gathered,
    refuse_options,
    takes_index,
    with_grad,
)
from shardwise.sharded_tensor.remote_shards import remote_shards
from shardwise.sharded_tensor.seed_views import local_shards_of, metadata_of, unwrapped
from shardwise.sharded_tensor.telling import raised_in
from shardwise.sharded_tensor.usable import check_usable, check_writable, live_state
from shardwise.sharding_spec.custom_ops import (
    CUSTOM_FUNCTIONS,
    _dispatch_custom_op,
    _has_custom_op,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardwise.geometry import Layout
    from shardwise.metadata import ShardedTensorMetadata
    from shardwise.sharded_tensor.gathering import GradOfPlain
    from shardwise.sharded_tensor.shard import Shard
    from shardwise.sharded_tensor.state import State
    from shardwise.sharding_spec.spec import ShardingSpec

_NoDispatch: Any = torch._C.DisableTorchFunctionSubclass
_Tensor: Any = torch.Tensor
_IS_COMPLEX = torch.is_complex  # which optimizers ask of every parameter at every step
# By which code in C copies a tensor that it was given as data.
_COPIED_IN_C = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
# torch's way to a tensor without memory. Arguments by position are parsed a third quicker: class,
# size, strides, offset, memory format, dtype, layout, device, pinned, requires_grad.
make_wrapper: Any = torch.Tensor._make_wrapper_subclass

__all__ = [
    "ASTRAY",
    "ShardedTensor",
    "ShardedTensorBase",
    "adopt",
    "check_usable",
    "check_writable",
    "compute_by_gathering",
    "each_tensor",
    "make_wrapper",
    "refuse_late_gradients",
    "register_fallback",
    "show_requires_grad",
    "show_written",
    "user_attributes",
    "wrap",
]


class ShardedTensorBase(torch.Tensor):
    """What a sharded tensor is without anything that communicates."""

    _state: State

    # What callers of the seed read and assign; what is assigned becomes the state.
    _metadata = Assigned(metadata_of)
    _local_shards = Assigned(local_shards_of)
    _sharding_spec = Assigned(lambda state: state.sharding_spec())
    _process_group = Assigned(lambda state: state.process_group)

    @property
    def shard_layout(self) -> Layout:
        """Who holds which box. (`layout` is torch's: always torch.strided.)"""
        return self._state.layout

    def sharding_spec(self) -> ShardingSpec:
        """The spec that the tensor was made with."""
        return self._state.sharding_spec()

    def metadata(self) -> ShardedTensorMetadata:
        """Offsets, sizes and placements of all shards: a view, made anew at each call."""
        return metadata_of(self._state)

    def local_shards(self, *, grad: GradOfPlain = "same") -> list[Shard]:
        """This rank's pieces, in the order of `shard_layout.boxes_of(rank)`; often one, or none.

        The tensors are those that autograd works on. Of a pending sum they are detached. `grad`
        says what the gradients of replicas are: the "same" on all of them, or each rank's own part,
        whose "sum" is the gradient; for the latter all ranks call it.
        """
        return local_shards_of(with_grad(live_state(self), grad))

    def local_tensor(self, *, grad: GradOfPlain = "same") -> torch.Tensor:
        """This rank's only piece; raises if it has none or several. `grad` as in `local_shards`."""
        state = with_grad(live_state(self), grad)
        if len(state.shards) != 1:
            raise OpError(
                "local_tensor: Only single local shard is supported",
                rank=state.rank,
                got=f"{len(state.shards)} local shards",
                fix="Use local_shards(), which lists all.",
            )
        return unwrapped(state)[0]

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """A tensor of no process group; the shards may be those of any ranks."""
        from shardwise.sharded_tensor.from_shards import loose_state

        return wrap(loose_state(local_shards, sharded_tensor_metadata, sharding_spec))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # mypy loses the keyword
        state = self._state
        held = ", ".join(
            f"{box} on {device}" for box, device in zip(state.boxes, state.devices, strict=True)
        )
        grad = ", requires_grad=True" if state.requires_grad else ""
        spec = "" if state.spec is None else f"{type(state.spec).__name__}: "
        return (
            f"{type(self).__name__}({tuple(state.layout.shape)}, {state.dtype}, "
            f"{spec}{state.layout}, rank {state.rank} holds {held or 'nothing'}{grad})"
        )

    def _repr_html_(self) -> str:
        """The repr and a small picture of the layout, for notebooks. Communicates nothing."""
        from shardwise.viz.notebook import layout_html  # no need of rich but in notebooks

        state = self._state
        return layout_html(state.layout, words=repr(self), itemsize=state.dtype.itemsize)

    def __hash__(self) -> int:
        return id(self)

    def __copy__(self) -> Any:
        """Another tensor object on the same memory, with the same attributes."""
        state = self._state
        made = wrap(
            state.alias(lambda local: local.detach().requires_grad_(local.requires_grad)),
            type(self),
        )
        for name, value in user_attributes(self).items():
            setattr(made, name, value)
        return made

    # What torch.distributed.checkpoint asks of a tensor that it is to save or load.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return write_items(live_state(self), fqn)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return chunk_list(live_state(self))

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return chunk_at(live_state(self), index)

    # By these two methods Module.to knows a tensor made of others, which it swaps. torch.compile
    # calls them: compiled code works on the outer tensor, and would train without gradients.

    def __tensor_flatten__(self) -> Any:
        raise OpError(
            "torch.compile of a function of ShardedTensors",
            rank=self._state.rank,
            fix="Compile what works on st.local_tensor(), and leave this function out: "
            "torch.compiler.disable(function).",
        )

    @staticmethod
    def __tensor_unflatten__(inner: Any, state: Any, outer_size: Any, outer_stride: Any) -> Any:
        raise OpError("torch.compile of a function of ShardedTensors")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reached only by what went past `__torch_function__`, which it explains.

        Where torch wants a number (`plain.add_(other, alpha=st)`), it reads the one element so.
        """
        if func is torch.ops.aten._local_scalar_dense.default:
            return HANDLERS[_Tensor.item](*args)
        if func in _COPIED_IN_C:
            raise OpError(
                f"{func} reached a ShardedTensor from C++, by torch.tensor(st) or torch.Tensor(st)",
                fix="Copy it by st.detach().clone(), or take the plain st.full_tensor(). In a "
                "user's autograd.Function or torch.func, work on st.local_shards().",
            )
        raise OpError(
            f"{func} reached a ShardedTensor from C++, past the sharded functions",
            fix="This happens in a user's autograd.Function, torch.func, vmap, forward-mode "
            "gradients and full backward hooks. Work on st.local_shards() there.",
        )


class ShardedTensor(ShardedTensorBase):
    """A tensor cut into boxes that are spread over the ranks of a process group.

    `ShardedTensor(spec, *size)` has uninitialised data, as `shardwise.sharded_tensor.empty`, whose
    options it takes. Every rank of the group holds the object, also those that hold no data; torch
    functions, methods and operators mean what they mean on the full tensor.
    """

    def __new__(cls, sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
        from shardwise.sharded_tensor.factories import empty_state

        return wrap(empty_state(sharding_spec, *size, **options), cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done in `__new__`."""

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: Sequence[Shard],
        *global_size: Any,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """As `shardwise.sharded_tensor.init_from_local_shards`."""
        from shardwise.sharded_tensor.from_shards import gathered_state

        state = gathered_state(
            local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
        )
        return wrap(state, cls)

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override]  # the seed's order
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """A tensor whose metadata every rank knows. Communicates nothing, so errors stay local."""
        from shardwise.sharded_tensor.from_shards import metadata_state

        state = metadata_state(
            local_shards,
            sharded_tensor_metadata,
            process_group=process_group,
            init_rrefs=init_rrefs,
            spec=sharding_spec,
        )
        return wrap(state, cls)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor of which each rank has one piece, `local_tensor`. All ranks call it.

        On a rank that the spec gives nothing, the tensor only says dtype and device.
        """
        from shardwise.sharded_tensor.from_shards import local_tensor_state

        state = local_tensor_state(
            local_tensor,
            sharding_spec,
            *global_size,
            process_group=process_group,
            init_rrefs=init_rrefs,
        )
        return wrap(state, cls)

    def full_tensor(
        self, *, grad: GradOfPlain = "same", max_bytes: int | None = None
    ) -> torch.Tensor:
        """The whole tensor, plain, on every rank of the group. All ranks call it.

        Differentiable: `grad` says what the gradients of the plain tensors are, the "same" on all
        ranks (each the whole gradient), or each rank's own part, whose "sum" is the gradient.
        Where every rank has all of it already, the result shares the tensor's memory.
        """
        return full_tensor(live_state(self), grad=grad, max_bytes=max_bytes)

    @takes_index
    def gather(  # type: ignore[override]  # the seed's, and torch's by its arguments
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
        *,
        max_bytes: int | None = None,
        dim: int | None = None,
        index: torch.Tensor | None = None,
        sparse_grad: bool = False,
    ) -> torch.Tensor | None:
        """The whole tensor, detached, on the rank at position `dst` of the group; None elsewhere.

        All ranks call it. Into `out`, given there only, without a second copy; if it raises, some
        of it may have been written. The values are cast to `dtype` if there is one; the seed's
        `enforce_dtype` changes nothing.

        `gather(dim, index)` is torch's, with an index of whole numbers, by position or by name. By
        position, whole numbers that could be an `out` of a tensor of whole numbers are one.
        """
        if index is not None or dim is not None:
            refuse_options(live_state(self), out, dtype, max_bytes)
            given: Any = index
            return torch.gather(self, dst if dim is None else dim, given, sparse_grad=sparse_grad)
        return gathered(live_state(self), dst, out=out, dtype=dtype, max_bytes=max_bytes)

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Changes the layout of this tensor in place and returns it. All ranks call it.

        Its gradient comes along. The function `shardwise.reshard` leaves the tensor as it is, and
        is differentiable.
        """
        from shardwise.sharded_tensor.to_layout import reshard_in_place

        return reshard_in_place(self, resharding_spec)

    # Optimizers read it for each parameter and step; so is `grad`, in `autograd.py`. Going through
    # torch each time would be most of what a small step costs.
    is_sparse = False

    # torch parses the arguments of its own methods before it asks `__torch_function__`, and would
    # refuse the seed's `process_group`.

    def cpu(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """On the CPU; takes `memory_format` and `process_group`, the group of the result."""
        return self.__torch_function__(torch.Tensor.cpu, (type(self),), (self, *args), kwargs)  # type: ignore[no-any-return]  # its handler gives one

    def cuda(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """On this process's GPU; arguments as of `Tensor.cuda`, and `process_group`."""
        return self.__torch_function__(torch.Tensor.cuda, (type(self),), (self, *args), kwargs)  # type: ignore[no-any-return]  # its handler gives one

    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """Of another device or dtype; arguments as of `Tensor.to`, and `process_group`."""
        return self.__torch_function__(torch.Tensor.to, (type(self),), (self, *args), kwargs)  # type: ignore[no-any-return]  # its handler gives one

    def remote_shards(self) -> dict[int, list[Any]]:
        """Rank -> RRefs of its `Shard`s over torch RPC, for all other ranks that hold some.

        Of tensors made with `init_rrefs=True`. A copy of such a tensor, or one that was loaded,
        gets its references at the first call, which all ranks make.
        """
        return remote_shards(self._state)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _IS_COMPLEX and len(args) == 1:
            return args[0]._state.carriers[0].is_complex()
        runner = runner_of(func)
        if runner is None and func in OUTER:
            with _NoDispatch():  # as `call_plain`
                return func(*args, **kwargs or {})
        # What remains below is the way of most calls, so it is kept short.
        try:
            if (
                runner is None
                or kwargs
                or CUSTOM
                or CUSTOM_FUNCTIONS
                or has_functorch()  # as `active_transform` says, without the call
                or forward_ad._current_level >= 0
                or is_tracing()
            ):
                return _dispatch(func, types, args, kwargs or {})
            quickly = runner.quickly
            made = quickly(args, {})
            return made if type(made) is ShardedTensor else runner.run(args, {}, made)
        except Exception as problem:
            raised_in(func, args, kwargs or {}, problem)
            raise


def _dispatch(
    func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a torch function does, by the first of the tables of `dispatch.py` that has it."""
    is_custom = func in CUSTOM or func in CUSTOM_FUNCTIONS
    if kwargs.get("out") is not None and not is_custom:
        from shardwise.sharded_tensor.out_argument import compute_into

        return compute_into(func, args, kwargs)
    if (transform := active_transform()) is not None:
        raise _transformed(func, transform)
    runner = runner_of(func)
    if is_custom or runner is None:
        for arg in args:
            if isinstance(arg, ShardedTensor):
                check_usable(arg)
    if is_custom and (custom := _custom(func, types, args, kwargs)) is not None:
        return custom()
    if runner is not None:
        quickly = runner.quickly
        made = quickly(args, kwargs)
        return made if type(made) is ShardedTensor else runner.run(args, kwargs, made)
    handler = HANDLERS.get(func)
    if handler is None:
        return compute_by_gathering(func, args, kwargs)
    return handler(*args, **kwargs)


def wrap(state: State, cls: type[Any] | None = None) -> ShardedTensor:
    """The tensor object of a state. [Note: outer and inner]"""
    carriers = state.carriers
    first = carriers[0]
    requires_grad = first.requires_grad if len(carriers) == 1 else state.requires_grad
    tensor: ShardedTensor = make_wrapper(
        ShardedTensor if cls is None else cls,
        state.layout.shape,
        None,
        None,
        None,
        first.dtype,
        torch.strided,
        first.device,
        False,
        requires_grad,
    )
    refuse_address(tensor)
    tensor._state = state
    if requires_grad:
        with _NoDispatch():  # as `_watch`
            tensor._backward_hooks = ASTRAY
    return tensor


def each_tensor(change: Callable[[ShardedTensor], Any], result: Any) -> Any:
    """What a torch function gave, with every sharded tensor of no subclass changed."""
    if type(result) is ShardedTensor:
        return change(result)
    if type(result) in (tuple, list):  # a torch.Size is none, and stays what it is
        return type(result)([each_tensor(change, one) for one in result])
    return result


def show_requires_grad(tensor: ShardedTensor) -> None:
    """Has the outer tensor require grad as the local ones do. [Note: outer and inner]"""
    requires_grad = tensor._state.requires_grad
    call_plain(_Tensor.requires_grad_, (tensor, requires_grad), {})
    if requires_grad:
        _watch(tensor)


def show_written(tensor: ShardedTensor) -> None:
    """Has the outer tensor, and what it is a view of, depend on what was written into it.

    Others may show pieces that were written where this rank shows one that was not, and would wait
    for it in backward. [Note: pieces of one graph] in `carrying_out.py`
    """
    state = tensor._state
    if state.beside and state.requires_grad and torch.is_grad_enabled():
        tie = state.carriers[0].reshape(-1)[:0].sum()
        written = {id(_shown_by(carrier)) for carrier in state.carriers}
        for piece in state.beside:
            with replayed_views(True):  # [Note: views of nothing] in `carrying_out.py`
                nothing = piece.unsqueeze(0)[:0]
            # A second count would part it from the result that autograd saved of `relu_`.
            is_counted = id(_shown_by(piece)) in written
            with kept_version(piece) if is_counted else nullcontext():
                nothing.add_(tie)
    show_requires_grad(tensor)


def _shown_by(tensor: torch.Tensor) -> torch.Tensor:
    """What the tensor is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def _watch(tensor: ShardedTensor) -> None:
    """Notices a gradient that reaches the outer tensor. [Note: outer and inner]"""
    with _NoDispatch():
        tensor._backward_hooks = ASTRAY


def _refuse_gradient(_: torch.Tensor) -> None:
    raise OpError(
        "a gradient went to a ShardedTensor past its local tensors, and would be lost",
        fix="A user's autograd.Function took it: call that on st.local_tensor() or "
        "st.full_tensor().",
    )


ASTRAY: Any = {0: _refuse_gradient}  # hooks, as torch keeps them on a tensor


def refuse_late_gradients(state: State, now: State) -> None:
    """Notices gradients of a graph that began at local tensors which a leaf no longer has.

    The hooks are on nodes of the graph, and gone with it: who else has the local tensors may use
    them. Moving the gradient there and then would have to be in step with backward on other ranks.
    """
    for carrier in state.carriers:
        if (
            carrier.requires_grad
            and carrier.is_leaf
            and all(carrier is not c for c in now.carriers)
        ):
            torch.autograd.graph.get_gradient_edge(carrier).node.register_prehook(_refuse_late)


def _refuse_late(_: Any) -> None:
    raise OpError(
        "a gradient came for the layout that a ShardedTensor had before it was resharded in place "
        "or converted, or got other data, and would be lost",
        fix="Call backward before that; or take new = shardwise.reshard(st, spec), through which "
        "gradients flow.",
    )


def _transformed(func: Any, transform: str | None) -> OpError:
    return OpError(
        f"{function_name(func)} of a ShardedTensor under {transform}, which does not know its "
        "local tensors",
        fix="Work on st.local_shards() or st.full_tensor() there, taken outside.",
    )


def user_attributes(tensor: ShardedTensorBase) -> dict[str, Any]:
    """The attributes that others have set on the tensor object."""
    return {name: value for name, value in vars(tensor).items() if name != "_state"}


def adopt(tensor: ShardedTensor, state: State) -> None:
    """Makes the tensor object stand for another state, in place."""
    fresh = wrap(state, type(tensor))
    swap_impl(tensor, fresh)  # which has the outer size, dtype and device
    tensor._state = state


def _custom(
    func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """What a user has registered for this function and these tensors."""
    if func in CUSTOM:
        (first, *_) = sharded_arguments(args, kwargs, ShardedTensor)
        group = first._state.process_group
        return lambda: CUSTOM[func](types, args, kwargs, group)
    for tensor in sharded_arguments(args, kwargs, ShardedTensor):
        spec, group = tensor.sharding_spec(), tensor._state.process_group
        if _has_custom_op(spec, func):
            return lambda: _dispatch_custom_op(spec, func, types, args, kwargs, group)
    return None


def compute_by_gathering(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch functions without a handler do, or without one for these arguments."""
    return _fallback[0](func, args, kwargs, sharded_arguments(args, kwargs, ShardedTensor))


_fallback: list[Callable[..., Any]] = []  # one function, which `fallback.py` registers


def register_fallback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `function(func, args, kwargs, tensors)` what torch functions without handler do."""
    _fallback[:] = [function]
    return function
