"""Samples of functions that show a tensor in another shape, or a part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.testing import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS, LAST = "chunk(0)", "chunk(1)", "chunk(2)"
GRID = "grid([2, 2])"


def _each(*calls: Callable[..., Any], shape: tuple[int, ...], **options: Any) -> list[Sample]:
    return [Sample(call, (shape,), **options) for call in calls]


SAMPLES: dict[str, list[Sample]] = {
    "transpose": _each(
        lambda x: x.transpose(0, 1),
        lambda x: torch.transpose(x, dim0=-1, dim1=0),
        shape=(4, 6),
        keeps=(COLUMNS,),
    ),
    "swapaxes": _each(lambda x: torch.swapaxes(x, 0, 2), shape=(4, 1, 5), keeps=(ROWS,)),
    "swapdims": _each(lambda x: x.swapdims(0, 1), shape=(4, 5), keeps=(ROWS,)),
    "permute": _each(
        lambda x: x.permute(2, 0, 1),
        lambda x: torch.permute(input=x, dims=(1, -1, 0)),
        shape=(4, 3, 5),
        keeps=(LAST,),
    ),
    "movedim": _each(lambda x: torch.movedim(x, (0, 1), (2, 0)), shape=(4, 3, 5), keeps=(LAST,)),
    "moveaxis": _each(lambda x: x.moveaxis(0, -1), shape=(4, 3, 5), keeps=(ROWS,)),
    "t": _each(torch.t, lambda x: x.t(), shape=(4, 6), keeps=(GRID,))
    + _each(torch.t, shape=(5,), keeps=(ROWS,)),
    "adjoint": _each(torch.adjoint, shape=(2, 4, 3), values="complex", keeps=(COLUMNS,)),
    "T": _each(lambda x: x.T, shape=(4, 6), keeps=(GRID,)),
    "mT": _each(lambda x: x.mT, shape=(2, 4, 3), keeps=(COLUMNS,)),
    "H": _each(lambda x: x.H, shape=(4, 3), values="complex", keeps=(ROWS,)),
    "mH": _each(lambda x: x.mH, shape=(2, 4, 3), values="complex", keeps=(COLUMNS,)),
    "squeeze": _each(
        lambda x: x.squeeze(),
        lambda x: torch.squeeze(x, 1),
        lambda x: x.squeeze(dim=(0, -1)),
        shape=(4, 1, 3, 1),
        keeps=(ROWS,),
    ),
    "unsqueeze": _each(
        lambda x: x.unsqueeze(1),
        lambda x: torch.unsqueeze(input=x, dim=-1),
        shape=(4, 3),
        keeps=(COLUMNS,),
    )
    + _each(lambda x: x.unsqueeze(0), shape=()),
    "expand": _each(
        lambda x: x.expand(2, 4, 3, -1),
        lambda x: x.expand((4, 5, 6)),
        shape=(4, 1, 6),
        keeps=(LAST,),
    )
    + _each(lambda x: x.expand(3, 0), shape=(1,)),
    "expand_as": [Sample(torch.Tensor.expand_as, ((4, 1), (2, 4, 3)), keeps=(ROWS, COLUMNS))],
    "broadcast_to": _each(lambda x: torch.broadcast_to(x, (3, 4)), shape=(4,), keeps=(ROWS,)),
    "broadcast_tensors": [
        Sample(torch.broadcast_tensors, ((4, 1), (3,)), keeps=(ROWS, ROWS)),
    ],
    "atleast_1d": [
        Sample(torch.atleast_1d, ((),)),
        Sample(torch.atleast_1d, ((3,),), keeps=(ROWS,)),
    ],
    "atleast_2d": [
        Sample(lambda *xs: torch.atleast_2d(xs), ((4,), ()), keeps=(ROWS, "on_rank(1)"))
    ],
    "atleast_3d": [
        Sample(torch.atleast_3d, ((4,), (4, 3), ()), keeps=(ROWS, COLUMNS, "replicate()"))
    ],
    "narrow": _each(
        lambda x: x.narrow(0, 1, 2),
        lambda x: torch.narrow(x, dim=1, start=-2, length=1),
        shape=(4, 6),
        keeps=(COLUMNS,),
    ),
    "narrow_copy": _each(  # torch 2.11 has no gradient of it
        lambda x: x.narrow_copy(0, 1, 2), shape=(4, 6), keeps=(ROWS,), has_grad=False
    ),
    "select": _each(
        lambda x: x.select(0, 1), lambda x: torch.select(x, -1, -1), shape=(4, 6), keeps=(GRID,)
    ),
    "__getitem__": _each(
        lambda x: x[1],
        lambda x: x[-3:, ::2],
        lambda x: x[..., 4, None],
        lambda x: x[2:3, None, 1:1],
        lambda x: x[:],
        lambda x: x[None][0, 1:, 5][1:],
        shape=(4, 6),
        keeps=(GRID,),
    )
    + _each(lambda x: x[...], lambda x: x[None], shape=()),
    "unbind": _each(
        lambda x: x.unbind(), lambda x: torch.unbind(x, 1), list, shape=(4, 3), keeps=(ROWS,)
    ),
    "split": _each(
        lambda x: x.split(4),
        lambda x: torch.split(x, [1, 0, 5], dim=0),
        shape=(6, 4),
        keeps=(COLUMNS,),
    ),
    "split_with_sizes": _each(
        lambda x: x.split_with_sizes([1, 3], 1), shape=(6, 4), keeps=(COLUMNS,)
    ),
    "tensor_split": _each(
        lambda x: x.tensor_split(4),
        lambda x: torch.tensor_split(x, (1, 3)),
        shape=(6, 4),
        keeps=(ROWS,),
    ),
    "chunk": _each(
        lambda x: x.chunk(4), lambda x: torch.chunk(x, 3, dim=-1), shape=(6, 5), keeps=(COLUMNS,)
    ),
    "hsplit": _each(lambda x: x.hsplit(2), shape=(3, 4), keeps=(ROWS,)),
    "vsplit": _each(lambda x: torch.vsplit(x, [1, 2]), shape=(4, 3), keeps=(ROWS,)),
    "dsplit": _each(lambda x: torch.dsplit(x, 2), shape=(2, 3, 4), keeps=(LAST,)),
    "unsafe_split": _each(lambda x: torch.unsafe_split(x, 2), shape=(5, 3), keeps=(ROWS,)),
    "unsafe_split_with_sizes": _each(
        lambda x: x.unsafe_split_with_sizes([2, 3]), shape=(5, 3), keeps=(ROWS,)
    ),
    "unsafe_chunk": _each(lambda x: x.unsafe_chunk(2), shape=(5, 3), keeps=(ROWS,)),
    "view": _each(
        lambda x: x.view(-1),
        lambda x: x.view(2, 2, 6),
        lambda x: x.view((8, 3)),
        lambda x: x.view(6, 4),
        lambda x: x.view(size=(4, 1, 6)),
        shape=(4, 6),
        keeps=(GRID,),
    )
    + _each(lambda x: x.view(3, 8), shape=(2, 3, 4), keeps=(COLUMNS,))
    + _each(lambda x: x.view(1, 1), shape=())
    + _each(
        lambda x: x.view(torch.int64), shape=(4, 3), values="whole", has_grad=False, keeps=(ROWS,)
    ),
    "reshape": _each(
        lambda x: x.reshape(4, 12),
        lambda x: torch.reshape(x.transpose(0, 1), (-1,)),
        shape=(8, 6),
        keeps=(ROWS,),
    )
    + _each(lambda x: x.reshape(0, 5), shape=(4, 0, 2)),
    "reshape_as": [Sample(torch.Tensor.reshape_as, ((4, 6), (3, 8)), keeps=(ROWS, COLUMNS))],
    "flatten": _each(
        lambda x: x.flatten(), lambda x: torch.flatten(x, 1), shape=(4, 2, 3), keeps=(ROWS,)
    )
    + _each(torch.flatten, shape=()),
    "ravel": _each(torch.ravel, shape=(4, 3), keeps=(COLUMNS,)),
    "unflatten": _each(
        lambda x: x.unflatten(1, (2, -1)),
        lambda x: torch.unflatten(x, 0, (2, 2)),
        shape=(4, 6),
        keeps=(GRID,),
    ),
    "diagonal": _each(
        lambda x: x.diagonal(), lambda x: torch.diagonal(x, 1, 0, 2), shape=(4, 3, 5), keeps=(ROWS,)
    )
    + _each(lambda x: torch.diagonal(x, offset=-2), shape=(4, 5), keeps=(GRID,)),
    "linalg.diagonal": _each(
        lambda x: torch.linalg.diagonal(x, offset=-1), shape=(2, 4, 3), keeps=(COLUMNS,)
    ),
    "unfold": _each(lambda x: x.unfold(1, 3, 2), shape=(4, 7), keeps=(ROWS,))
    + _each(lambda x: x.unfold(dimension=0, size=2, step=1), shape=(4, 3), keeps=(COLUMNS,)),
    "view_as_real": _each(torch.view_as_real, shape=(4, 3), values="complex", keeps=(GRID,)),
    "view_as_complex": _each(torch.view_as_complex, shape=(4, 2), keeps=(ROWS,)),
}
