"""What a rank has of a sharded tensor: the layout, its own pieces, the group it belongs to.

All verbs of this package work on `State`; the tensor class wraps one. Maps and finalizers hang on
it, never on the tensor object, because `Module.to` swaps tensors and may not if they are weakly
referenced.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.comm.differentiable import carriers_of, shards_of
from shardwise.comm.process_group import communicator
from shardwise.errors import NotInitializedError, OpError
from shardwise.sharding_spec.describing import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.differentiable import Carriers
    from shardwise.geometry import Box, Layout
    from shardwise.sharded_tensor.kinds import Kind
    from shardwise.sharding_spec.spec import ShardingSpec

__all__ = ["LooseState", "Seen", "State", "check_requires_grad", "make_state", "only_layout"]


class Seen(NamedTuple):
    """Local tensors, and how often they had been written when somebody looked.

    [Note: lost views] A view that a gathering function gives (`st[0]`) shows a copy. Writing into
    it would not reach the tensor, nor does it show what is written into the tensor later: the one
    is refused, and so is any use of the view after the other.
    """

    carriers: Carriers
    version: int

    @classmethod
    def now(cls, carriers: Carriers) -> Seen:
        """The carriers as they are at this moment."""
        return cls(carriers, _version(carriers))

    @property
    def has_changed(self) -> bool:
        """Whether one of them was written since."""
        return _version(self.carriers) != self.version


def _version(carriers: Carriers) -> int:
    """How often they were written; inference tensors do not count it."""
    return sum(carrier._version for carrier in carriers if not carrier.is_inference())


class _Kept:
    """Attributes that a copy shares: a process group cannot be copied, nor need a layout be."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self


class State:
    """A sharded tensor on one rank. Changed by nobody: a tensor gets a new one.

    Every op makes one and reads several, and slots are what Python reads quickest.
    """

    __slots__ = (
        "__weakref__",
        "beside",
        "carriers",
        "converted_from",
        "entered",
        "hooks",
        "init_rrefs",
        "is_freed",
        "is_from_rows",
        "is_special",
        "kind",
        "layout",
        "members",
        "process_group",
        "rank",
        "remote",
        "reshaped_from",
        "shown_grad",
        "spec",
        "view_of",
    )

    layout: Layout
    carriers: Carriers  # the local shards in the order of `layout.boxes_of(rank)`, or a tie
    rank: int
    members: Communicator | None  # None: a tensor that nobody can move (the seed's base class)
    spec: ShardingSpec | None  # None: of no recipe; `sharding_spec` finds one
    # Held here, since torch lets go of a destroyed group, and a communicator holds it weakly.
    process_group: ProcessGroup | None

    init_rrefs: bool
    remote: Any  # `RemoteShards`, where `init_rrefs` asked for them
    reshaped_from: Any  # the tensor of which it shows all elements, so that it can be set
    hooks: tuple[Any, ...]  # `Hook`s, which follow an in-place reshard
    beside: Carriers  # of a view: all pieces of what it shows a part of, if there are several
    is_freed: bool  # whether `reshard_all(free_source=True)` has given the data up
    view_of: tuple[Seen, ...]  # what it shows a gathered copy of. [Note: lost views]
    is_from_rows: bool  # whether a plain tensor, taken as each rank's rows, is in it
    is_special: bool  # whether any of the last three is set, so that ops need to ask once
    converted_from: Any  # the parameter that is to become this. [Note: Module.to]
    shown_grad: Any  # the tensor object that stands for the carriers' gradients
    entered: Any  # `Entered`: the carriers as they have entered work
    kind: Kind | None  # once an op has asked for it. [Note: kinds] in `kinds.py`

    def __init__(
        self,
        layout: Layout,
        carriers: Carriers,
        rank: int,
        members: Communicator | None,
        spec: ShardingSpec | None = None,
        process_group: ProcessGroup | None = None,
        kind: Kind | None = None,
    ) -> None:
        self.layout = layout
        self.carriers = carriers
        self.rank = rank
        self.members = members
        self.spec = spec
        self.process_group = process_group
        self.kind = kind
        self.init_rrefs = self.is_freed = self.is_from_rows = self.is_special = False
        self.remote = self.reshaped_from = self.converted_from = self.shown_grad = None
        self.entered = None
        self.hooks = self.beside = self.view_of = ()

    @property
    def shards(self) -> Carriers:
        """The local tensors; none on a rank that holds nothing."""
        return shards_of(self.carriers, self.layout, self.rank)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """This rank's boxes."""
        return self.layout.boxes_of(self.rank)

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank of each local shard: this one."""
        return (self.rank,) * len(self.boxes)

    @property
    def dtype(self) -> torch.dtype:
        """That of all shards."""
        return self.carriers[0].dtype

    @property
    def device(self) -> torch.device:
        """That of the first shard, or of the placeholder."""
        return self.carriers[0].device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """One per local shard."""
        return tuple([shard.device for shard in self.shards])

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are asked of a shard."""
        return any([carrier.requires_grad for carrier in self.carriers])

    @property
    def comm(self) -> Communicator:
        """The communicator; raises if the tensor belongs to no group."""
        if self.members is None:
            raise NotInitializedError(
                f"sharded tensor of shape {self.layout.shape} belongs to no process group",
                rank=self.rank,
                fix="Make it with ShardedTensor._init_from_local_shards_and_global_metadata(..., "
                "process_group=...).",
            )
        return self.members

    def sharding_spec(self) -> ShardingSpec:
        """The spec that the tensor was made with, or one that gives its layout."""
        if self.spec is None:
            self.spec = spec_of(self.layout, self.device.type)
        return self.spec

    def with_carriers(self, carriers: Sequence[torch.Tensor], **changes: Any) -> State:
        """The same, holding other tensors; hooks, views and remote references stay behind."""
        made = type(self)(
            self.layout, tuple(carriers), self.rank, self.members, self.spec, self.process_group
        )
        made.is_freed, made.is_from_rows = self.is_freed, self.is_from_rows
        for name, value in changes.items():
            setattr(made, name, value)
        made.is_special = bool(made.is_freed or made.view_of or made.is_from_rows)
        return made

    def __getstate__(self) -> tuple[Carriers, _Kept]:
        """Tensors to copy, and all else: so torch.distributed.checkpoint stages a tensor.

        Pickles of a tensor have no State: `pickling.py`.
        """
        return self.carriers, _Kept({name: getattr(self, name) for name in _STAGED})

    def __setstate__(self, saved: tuple[Carriers, _Kept]) -> None:
        carriers, kept = saved
        State.__init__(self, kept.values["layout"], carriers, kept.values["rank"], None)
        for name, value in kept.values.items():
            setattr(self, name, value)

    def alias(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> State:
        """The same, holding views of the same memory, to which remote references lead as before."""
        return self.map(
            fn,
            init_rrefs=self.init_rrefs,
            remote=self.remote,
            view_of=self.view_of,
            beside=self.beside,
        )

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> State:
        """The same, holding `fn` of each local tensor, ties included."""
        return self.with_carriers([fn(carrier) for carrier in self.carriers], **changes)


# Of the attributes, those that a staged copy has too.
_STAGED = (
    "layout",
    "rank",
    "members",
    "spec",
    "process_group",
    "is_freed",
    "is_from_rows",
    "is_special",
)


class LooseState(State):
    """A tensor of no group, of which this process holds any shards, also of several ranks."""

    __slots__ = ("held",)

    held: tuple[tuple[int, Box], ...]  # rank and box of each carrier; none: there is a tie

    @property
    def shards(self) -> Carriers:
        return self.carriers if self.held else ()

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Those that this rank says it holds."""
        return tuple(box for _, box in self.held)

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.held)

    def with_carriers(self, carriers: Sequence[torch.Tensor], **changes: Any) -> State:
        return super().with_carriers(carriers, **{"held": self.held} | changes)

    def __getstate__(self) -> tuple[Carriers, _Kept]:
        carriers, kept = super().__getstate__()
        return carriers, _Kept(kept.values | {"held": self.held})


def check_requires_grad(layout: Layout, dtype: torch.dtype, rank: int) -> None:
    """Raises if tensors of this dtype and pending reduction cannot require grad."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise OpError(
            "requires_grad of a ShardedTensor: only Tensors of floating point and complex dtype "
            "can require gradients",
            rank=rank,
            got=dtype,
        )
    if layout.pending not in (None, "sum", "avg"):
        raise OpError(
            f"requires_grad of a ShardedTensor with a pending {layout.pending}",
            rank=rank,
            expected="nothing, or a sum or avg, to be pending",
            fix="Reduce it first: shardwise.reshard(st, shardwise.replicate()).",
        )


@lru_cache(maxsize=1024)
def only_layout(layout: Layout) -> Layout:
    """The same object for equal layouts, so that what is kept by identity is found again.

    `reshard(x, chunk(1))` in a loop makes a spec and its layout at each turn.
    """
    return layout


def make_state(
    layout: Layout,
    shards: Sequence[torch.Tensor],
    *,
    group: ProcessGroup | Communicator | None,
    spec: ShardingSpec | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    requires_grad: bool = False,
    init_rrefs: bool = False,
) -> State:
    """State of the shards of this rank; `dtype`, `device`, `requires_grad` for a rank with none."""
    members = communicator(group)
    if not shards:
        assert dtype is not None
        device = members.wire_device if device is None else device
        carriers = carriers_of((), dtype=dtype, device=device)
        carriers[0].requires_grad_(requires_grad)
    else:
        carriers = tuple(shards)
    process_group = getattr(members, "process_group", None)
    made = State(only_layout(layout), carriers, members.rank, members, spec, process_group)
    made.init_rrefs = init_rrefs
    return made
