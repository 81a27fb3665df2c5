"""Rules of `map`: what a tensor is made of, as boxes of saved tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.mapping import fuse, part, sources_of, transpose
from shardwise.errors import ArgumentTypeError, ArgumentValueError, CheckpointError

if TYPE_CHECKING:
    from shardwise.checkpoint.mapping import Source


def made(source: Source, saved: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the windows of a source show, each element once."""
    mosaic = source.mosaic({name: tuple(tensor.shape) for name, tensor in saved.items()})
    out = torch.full(mosaic.shape, -1.0)
    for window in mosaic.windows:
        region = saved[window.name][window.source_of(window.into).slices()].permute(window.dims)
        assert (out[window.into.slices()] == -1).all()
        out[window.into.slices()] = region
    assert not (out == -1).any()
    return out


def counted(*shape: int, start: int = 0) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).view(shape)


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    groups=st.integers(1, 3),
    dim=st.integers(0, 1),
)
def test_parts_of_what_is_fused_are_what_it_was_made_of(
    sizes: list[int], groups: int, dim: int
) -> None:
    lengths = [size * groups for size in sizes]
    saved = {}
    for number, length in enumerate(lengths):
        one = counted(length, 2, start=100 * number)
        saved[str(number)] = one if dim == 0 else one.t()
    fused = fuse(*saved, dim=dim, groups=groups)
    chunks = [tensor.tensor_split(groups, dim=dim) for tensor in saved.values()]
    expected = torch.cat([chunk[g] for g in range(groups) for chunk in chunks], dim=dim)
    assert torch.equal(made(fused, saved), expected)
    for number, name in enumerate(saved):
        again = part(fused, number, lengths, dim=dim, groups=groups)
        assert torch.equal(made(again, saved), saved[name])
        assert torch.equal(made(transpose(again), saved), saved[name].t())


def test_equal_parts_are_counted() -> None:
    saved = {"gate_up": counted(6, 2)}
    assert torch.equal(made(part("gate_up", 1, 2), saved), saved["gate_up"][3:])
    assert torch.equal(made(part("gate_up", -0, 2, dim=-1), saved), saved["gate_up"][:, :1])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (fuse("a", "b"), r"sources of fuse\(\): expected shapes that join along dim 0, got a"),
        (fuse("a", "a", groups=4), "each in 4 equal groups"),
        (part("a", 0, [2, 2]), r"sizes of part\(\) of a: expected parts of dim 0 of \(6, 2\)"),
        (part("a", 0, 4), r"sizes of part\(\) of a"),
        (part("a", 0, 2, dim=2), r"dim of a rule of map: expected a dim of \(6, 2\), got 2"),
    ],
)
def test_rules_that_do_not_fit_the_shapes_say_so(source: Source, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        source.mosaic({"a": (6, 2), "b": (4, 3)})


def test_rules_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ArgumentValueError, match=r"fuse\(\): expected names"):
        fuse()
    with pytest.raises(ArgumentValueError, match="expected one of 2 parts, got 2"):
        part("a", 2, 2)
    with pytest.raises(ArgumentTypeError, match=r"transpose\(\): expected the name"):
        transpose(3)  # type: ignore[arg-type]  # which is the point
    with pytest.raises(ArgumentTypeError, match="map: expected a dict"):
        sources_of(["a"], 3)  # type: ignore[arg-type]  # which is the point


def names_of(targets: list[str], rules: Any) -> dict[str, tuple[str, ...] | None]:
    found = sources_of(targets, rules)
    return {name: None if source is None else source.names for name, source in found.items()}


def test_stars_stand_for_the_same_text() -> None:
    rules = {
        "layers.*.attn.*": "model.*.self.*",
        "layers.0.attn.bias": "special",
        "*.norm": fuse("*.a", "*.b"),
        "buffer": None,
    }
    targets = ["layers.0.attn.w", "layers.0.attn.bias", "x.y.norm", "buffer", "other"]
    assert names_of(targets, rules) == {
        "layers.0.attn.w": ("model.0.self.w",),
        "layers.0.attn.bias": ("special",),
        "x.y.norm": ("x.y.a", "x.y.b"),
        "buffer": None,
        "other": ("other",),
    }
    assert names_of(["a"], lambda name: transpose(name.upper())) == {"a": ("A",)}


def test_all_problems_of_a_map_come_in_one_error() -> None:
    rules = {"lin.weigth": "a", "lin.*": "b.*.*", "*.weight": "c.*", 3: "d", "lin.bias": 5}
    with pytest.raises(CheckpointError) as caught:
        sources_of(["lin.weight", "lin.bias"], rules)  # type: ignore[arg-type]  # which is the point
    text = str(caught.value)
    assert "map, 5 problems:" in text
    assert "'lin.weigth' fits nothing in the state. Nearest: 'lin.weight'" in text
    assert "'b.*.*' has more * than the pattern" in text
    assert "'lin.weight' fits 2 patterns: 'lin.*', '*.weight'" in text
    assert "3: expected a name, got int" in text
    assert "'lin.bias': expected a saved name or fuse(...), got int" in text
