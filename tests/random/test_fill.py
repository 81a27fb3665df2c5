from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtr

from shardwise.errors import ArgumentTypeError, ArgumentValueError, GeometryError
from shardwise.geometry import Box
from shardwise.random import (
    Key,
    fill_bernoulli_,
    fill_cauchy_,
    fill_exponential_,
    fill_geometric_,
    fill_integers_,
    fill_log_normal_,
    fill_normal_,
    fill_trunc_normal_,
    fill_uniform_,
)
from shardwise.testing.strategies import shapes, tilings

if TYPE_CHECKING:
    from collections.abc import Callable

Fill = tuple["Callable[..., torch.Tensor]", dict[str, Any]]
REAL = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FILLS: list[Fill] = [
    (fill_uniform_, {}),
    (fill_normal_, {"mean": 1.0, "std": 2.0}),
    (fill_trunc_normal_, {"a": -1.0, "b": 3.0}),
    (fill_bernoulli_, {"p": 0.3}),
    (fill_bernoulli_, {"p": 0.3, "value": 1.7}),
    (fill_exponential_, {"rate": 2.0}),
    (fill_geometric_, {"p": 0.2}),
    (fill_log_normal_, {"mean": 0.5, "std": 0.8}),
    (fill_cauchy_, {"median": 1.0, "sigma": 0.1}),
]
LARGE = 1 << 18


def _full(
    fill: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    key: Key | None = None,
    **parameters: Any,
) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    return fill(tensor, Box.whole(shape), shape, key or Key(17, 5), **parameters)


def _shapes_and_tilings() -> st.SearchStrategy[tuple[tuple[int, ...], list[Box]]]:
    return shapes(max_size=9).flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape)))


# -- the same numbers however they are cut ---------------------------------------------------


@given(
    _shapes_and_tilings(),
    st.sampled_from(FILLS),
    st.sampled_from(REAL),
    st.builds(Key, st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**64 - 1)),
)
def test_boxes_of_any_tiling_are_the_parts_of_the_whole(
    cut: tuple[tuple[int, ...], list[Box]], chosen: Fill, dtype: torch.dtype, key: Key
) -> None:
    (shape, boxes), (fill, parameters) = cut, chosen
    whole = _full(fill, shape, dtype, key, **parameters)
    for box in boxes:
        part = fill(torch.empty(box.shape, dtype=dtype), box, shape, key, **parameters)
        assert torch.equal(part, whole[box.slices()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((400, 5000), Box((100, 0), (200, 5000))),  # one long run
        ((400, 5000), Box((0, 1250), (400, 2500))),  # long runs
        ((300, 9001), Box((3, 5), (299, 1000))),  # that begin anywhere in a block
        ((20_000, 7), Box((0, 2), (20_000, 5))),  # short runs, close together
        ((150, 9, 1003), Box((1, 2, 3), (150, 9, 6))),  # and far apart
        ((40, 9, 50, 11), Box((1, 2, 3, 0), (39, 8, 40, 11))),
    ],
)
def test_every_way_to_cut_a_large_tensor_gives_its_numbers(
    shape: tuple[int, ...], box: Box, dtype: torch.dtype
) -> None:
    whole = _full(fill_normal_, shape, dtype)
    part = torch.empty(box.shape, dtype=dtype)
    assert torch.equal(fill_normal_(part, box, shape, Key(17, 5)), whole[box.slices()])


def test_indices_beyond_32_bits_count() -> None:
    """A row far out in a huge tensor is the same by rows, by columns and element by element."""
    shape = (2**31, 2**31)
    boxes = [
        Box((2**31 - 2, 2**31 - 100), (2**31, 2**31)),
        Box((2**31 - 2, 2**31 - 100), (2**31, 2**31 - 90)),
        Box((2**31 - 1, 2**31 - 97), (2**31, 2**31 - 96)),
    ]
    first, *others = (fill_uniform_(torch.empty(box.shape), box, shape, Key(1)) for box in boxes)
    assert torch.equal(others[0], first[:, :10])
    assert torch.equal(others[1], first[1:, 3:4])
    flat = Box((2**62 - 97,), (2**62 - 96,))
    found = fill_uniform_(torch.empty(1), flat, (2**62,), Key(1))
    assert torch.equal(found, first[1, 3:4])
    low = Box((0, 2**31 - 97), (1, 2**31 - 96))
    assert not torch.equal(fill_uniform_(torch.empty(1, 1), low, shape, Key(1)), first[1:, 3:4])


def test_a_shape_with_the_same_elements_has_the_same_numbers() -> None:
    assert torch.equal(_full(fill_normal_, (6, 20)).flatten(), _full(fill_normal_, (120,)))


@given(st.permutations(range(3)), st.integers(1, 3))
def test_strides_do_not_matter(order: list[int], gap: int) -> None:
    shape = (5, 6, 7)
    spread = torch.full([gap * shape[dim] for dim in order], -1.0)
    view = spread[tuple(slice(None, None, gap) for _ in order)].permute(
        [order.index(dim) for dim in range(3)]
    )
    assert fill_uniform_(view, Box.whole(shape), shape, Key(17, 5)) is view
    assert torch.equal(view, _full(fill_uniform_, shape))
    assert int((spread == -1).sum()) == spread.numel() - view.numel()


def test_parameters_are_filled_without_gradients() -> None:
    weight = torch.nn.Parameter(torch.empty(3, 4))
    assert fill_normal_(weight, Box.whole((3, 4)), (3, 4), Key(17, 5)) is weight
    assert weight.is_leaf
    assert weight.requires_grad
    assert torch.equal(weight.detach(), _full(fill_normal_, (3, 4)))
    on_meta = torch.empty(3, 4, device="meta")
    assert fill_normal_(on_meta, Box.whole((3, 4)), (3, 4), Key(17, 5)) is on_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_numbers_are_those_of_float32_rounded(dtype: torch.dtype) -> None:
    assert torch.equal(_full(fill_normal_, (999,), dtype), _full(fill_normal_, (999,)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    ("fill", "of_parts"), [(fill_uniform_, {}), (fill_normal_, {"std": math.sqrt(0.5)})]
)
def test_complex_numbers_are_pairs_of_real_ones(
    fill: Callable[..., torch.Tensor], of_parts: dict[str, Any], dtype: torch.dtype
) -> None:
    box, pairs = Box((1, 1), (3, 4)), _full(fill, (4, 5, 2), dtype.to_real(), **of_parts)
    assert torch.equal(torch.view_as_real(_full(fill, (4, 5), dtype)), pairs)
    part = fill(torch.empty(box.shape, dtype=dtype), box, (4, 5), Key(17, 5))
    assert torch.equal(part, torch.view_as_complex(pairs)[box.slices()])


def test_a_key_is_its_64_bits() -> None:
    assert Key(-1, 3) == Key(2**64 - 1, 3)
    assert torch.equal(
        _full(fill_uniform_, (9,), key=Key(-1)), _full(fill_uniform_, (9,), key=Key(2**64 - 1))
    )
    for seed, call in ((2**64, 0), (0, 2**64), (0, -1), (-(2**63) - 1, 0)):
        with pytest.raises(ArgumentValueError, match="Key"):
            Key(seed, call)


# -- distributions ---------------------------------------------------------------------------


def _is_distributed(values: torch.Tensor, cdf: Callable[..., Any]) -> bool:
    """Kolmogorov-Smirnov; keys are fixed, so this either holds for good or not."""
    ordered = torch.from_numpy(cdf(values.double().sort().values.numpy()))
    places = torch.arange(len(ordered) + 1) / len(ordered)
    distance = torch.max(ordered - places[:-1], places[1:] - ordered).max()
    return float(distance) * math.sqrt(len(ordered)) < 1.95  # one in a thousand is further away


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [LARGE, pytest.param(1 << 23, marks=pytest.mark.long)])
def test_distributions_are_those_of_scipy(dtype: torch.dtype, size: int) -> None:
    assert _is_distributed(_full(fill_uniform_, (size,), dtype), stats.uniform.cdf)
    assert _is_distributed(_full(fill_normal_, (size,), dtype), ndtr)
    scaled = _full(fill_uniform_, (size,), dtype, low=-3.0, high=5.0)
    assert _is_distributed(scaled, lambda x: (x + 3) / 8)
    scaled = _full(fill_normal_, (size,), dtype, mean=-3.0, std=0.5)
    assert _is_distributed(scaled, lambda x: ndtr((x + 3) / 0.5))
    assert _is_distributed(
        _full(fill_exponential_, (size,), dtype, rate=0.5), stats.expon(0, 2).cdf
    )
    scaled = _full(fill_log_normal_, (size,), dtype, mean=0.5, std=0.7)
    assert _is_distributed(scaled, stats.lognorm(0.7, scale=math.exp(0.5)).cdf)
    scaled = _full(fill_cauchy_, (size,), dtype, median=-1.0, sigma=3.0)
    assert _is_distributed(scaled, stats.cauchy(-1.0, 3.0).cdf)


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9])
def test_geometric_numbers_are_those_of_scipy(p: float) -> None:
    drawn = _full(fill_geometric_, (LARGE,), torch.int64, p=p)
    assert drawn.min() == 1
    most = int(drawn.max())
    shares = torch.bincount(drawn, minlength=most + 1)[1:] / LARGE
    wanted = torch.from_numpy(stats.geom(p).pmf(range(1, most + 1)))
    assert (shares - wanted).abs().max() < 5 * math.sqrt(p / LARGE)
    assert torch.equal(_full(fill_geometric_, (LARGE,), torch.float32, p=p), drawn.float())


def test_what_is_too_large_for_a_dtype_is_its_end() -> None:
    assert _full(fill_geometric_, (4096,), torch.uint8, p=1e-4).max() == 255
    assert _full(fill_log_normal_, (4096,), torch.float16, mean=9.0).max() == math.inf
    assert _full(fill_exponential_, (LARGE,), torch.float16, rate=1e6).min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("mean", "std", "a", "b"), [(0, 1, -2, 2), (1, 2, 0, math.inf), (0, 1, 5, 7), (9, 0.5, -1, 1)]
)
def test_truncated_normal_numbers_are_those_of_scipy(
    dtype: torch.dtype, mean: float, std: float, a: float, b: float
) -> None:
    values = _full(fill_trunc_normal_, (1 << 16,), dtype, mean=mean, std=std, a=a, b=b)
    assert a <= values.min()
    assert values.max() <= b
    ends = ((a - mean) / std, (b - mean) / std)
    assert _is_distributed(values, stats.truncnorm(*ends, mean, std).cdf)


def test_moments_of_normal_numbers() -> None:
    for dtype in (torch.float32, torch.float64):
        values = _full(fill_normal_, (LARGE,), dtype).double()
        expected = {1: 0.0, 2: 1.0, 3: 0.0, 4: 3.0, 6: 15.0}
        variances = {1: 1.0, 2: 2.0, 3: 15.0, 4: 96.0, 6: 10170.0}
        for power, moment in expected.items():
            error = math.sqrt(variances[power] / LARGE)
            assert abs(float((values**power).mean()) - moment) < 4 * error


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_of_ten_million_normal_numbers_weigh_what_they_should(dtype: torch.dtype) -> None:
    size = _full(fill_normal_, (10_000_000,), dtype).abs()
    for limit in (3.0, 4.0, 4.5, 5.0):
        expected = 2 * stats.norm.sf(limit) * size.numel()
        assert abs(int((size > limit).sum()) - expected) < 4 * math.sqrt(expected) + 1


def test_neighbours_keys_and_calls_are_independent() -> None:
    """No correlation of numbers nor of their squares, between lags, keys and calls."""
    values = _full(fill_normal_, (LARGE,)).double()
    others = [
        _full(fill_normal_, (LARGE,), key=key).double()
        for key in (Key(18, 5), Key(17, 6), Key(5, 17), Key(17 + 2**63, 5), Key(17, 5 + 2**63))
    ]
    pairs = [(values[:-lag], values[lag:]) for lag in (1, 2, 3, 4, 7, 8, 16, 64, 1024, 4096)]
    pairs += list(itertools.combinations([values, *others], 2))
    for one, other in pairs:
        for power in (1, 2):
            both = torch.stack([one**power, other**power])
            assert abs(float(torch.corrcoef(both)[0, 1])) < 4.5 / math.sqrt(LARGE)


def test_every_bit_of_uniform_numbers_is_even() -> None:
    for dtype, bits in ((torch.float32, 24), (torch.float64, 53)):
        integers = (_full(fill_uniform_, (1 << 15,), dtype).double() * 2.0**bits).long()
        shares = (integers[:, None] >> torch.arange(bits) & 1).double().mean(0)
        assert float((shares - 0.5).abs().max()) < 4.5 * 0.5 / math.sqrt(len(integers))


@pytest.mark.parametrize("dtype", REAL)
def test_uniform_numbers_stay_below_the_end_of_their_range(dtype: torch.dtype) -> None:
    for low, high in ((0.0, 1.0), (0.1, 0.3), (-1.0, 1.0), (100.0, 101.0), (1.0, 1.0 + 2**-6)):
        values = _full(fill_uniform_, (200_000,), dtype, low=low, high=high).double()
        assert low <= values.min()
        assert values.max() < high
        step = max(torch.finfo(dtype).eps * max(abs(low), abs(high)), (high - low) / 1e4)
        assert values.max() > high - 2 * step
        error = (high - low) / math.sqrt(12 * len(values))
        assert abs(float(values.mean()) - (low + high) / 2) < step / 4 + 4 * error


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.int8, -128, 128),
        (torch.uint8, 0, 256),
        (torch.int16, -7, 10),
        (torch.uint16, 65_000, 65_536),
        (torch.int32, 0, 1000),
        (torch.uint32, 2**32 - 3, 2**32),
        (torch.int64, -(2**40), 2**41),
        (torch.int64, -(2**63), 2**63),
        (torch.uint64, 2**63 - 5, 2**63 + 5),
        (torch.uint64, 0, 2**64),
        (torch.bool, 0, 2),
        (torch.bool, 1, 2),
    ],
)
def test_integers_of_a_range_are_all_alike(dtype: torch.dtype, low: int, high: int) -> None:
    shape, box = (1000, 100), Box((10, 7), (900, 57))
    whole = _full(fill_integers_, shape, dtype, low=low, high=high)
    part = fill_integers_(torch.empty(box.shape, dtype=dtype), box, shape, Key(17, 5), low, high)
    assert torch.equal(part, whole[box.slices()])
    values = [int(value) - low for value in whole.flatten().tolist()]
    assert min(values) >= 0
    assert max(values) < high - low
    num_bins = min(high - low, 64)
    counts = [0] * num_bins
    for value in values:
        counts[value * num_bins // (high - low)] += 1
    sizes = [0] * num_bins  # how many values share a bin
    for value in range(high - low if high - low < 10**4 else 0):
        sizes[value * num_bins // (high - low)] += 1
    shares = [size / (high - low) for size in sizes] if any(sizes) else [1 / num_bins] * num_bins
    expected = [share * len(values) for share in shares]
    assert num_bins == 1 or stats.chisquare(counts, expected).pvalue > 1e-3


def test_bernoulli_numbers_are_one_as_often_as_asked() -> None:
    for p in (0.0, 1e-3, 0.5, 0.9, 1.0):
        for dtype in (torch.float32, torch.bool, torch.bfloat16):
            values = _full(fill_bernoulli_, (LARGE,), dtype, p=p).float()
            assert bool(((values == 0) | (values == 1)).all())
            error = math.sqrt(p * (1 - p) / LARGE)
            assert abs(float(values.double().mean()) - p) <= 4 * error


def test_no_spread_gives_the_mean() -> None:
    assert set(_full(fill_normal_, (9,), mean=2.0, std=0.0).tolist()) == {2.0}
    assert set(_full(fill_trunc_normal_, (9,), mean=0.5, std=0.0).tolist()) == {0.5}


# -- what is refused -------------------------------------------------------------------------

SHAPE, BOX = (4, 6), Box((1, 2), (3, 5))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tensor": [1.0]}, ArgumentTypeError, "tensor: expected a Tensor"),
        ({"box": (1, 2)}, ArgumentTypeError, "box: expected a Box"),
        ({"key": 7}, ArgumentTypeError, "key: expected a Key"),
        ({"shape": (4, 4)}, GeometryError, r"inside the shape \(4, 4\)"),
        ({"shape": (4, 6, 1)}, GeometryError, "inside the shape"),
        ({"tensor": torch.empty(2, 4)}, GeometryError, r"the shape of its box, \(2, 3\)"),
        ({"tensor": torch.empty(2, 3, dtype=torch.int64)}, ArgumentTypeError, "one of bfloat16"),
        ({"low": 1.0, "high": 1.0}, ArgumentValueError, "low < high"),
        ({"low": math.nan}, ArgumentValueError, "low: expected a number"),
        ({"low": "0"}, ArgumentTypeError, "low: expected a number"),
        ({"low": -3e38, "high": 3e38}, ArgumentValueError, "finite in torch.float32"),
        ({"high": math.inf}, ArgumentValueError, "finite"),
        (
            {"tensor": torch.empty(2, 3, dtype=torch.float16), "high": 1e6},
            ArgumentValueError,
            "finite in torch.float16",
        ),
        (
            {"tensor": torch.empty(2, 3, dtype=torch.bfloat16), "low": 1.001, "high": 1.002},
            ArgumentValueError,
            "a range that holds a torch.bfloat16 number",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "tensor": torch.empty(2, 3),
        "box": BOX,
        "shape": SHAPE,
        "key": Key(0),
    }
    with pytest.raises(error, match=message):
        fill_uniform_(**(arguments | change))


@pytest.mark.parametrize(
    ("fill", "dtype", "parameters", "message"),
    [
        (fill_normal_, torch.float32, {"std": -1.0}, "std >= 0"),
        (fill_normal_, torch.float32, {"mean": math.inf}, "finite"),
        (
            fill_trunc_normal_,
            torch.float32,
            {"a": 2.0, "b": 1.0},
            "a and b: expected a < b, got 2.0",
        ),
        (fill_trunc_normal_, torch.float32, {"a": math.nan}, "a: expected a number"),
        (fill_trunc_normal_, torch.float32, {"a": 50.0, "b": 60.0}, "can be"),
        (fill_integers_, torch.int8, {"low": 0, "high": 129}, "high <= 128"),
        (fill_integers_, torch.uint8, {"low": -1, "high": 9}, "low: expected a whole number >= 0"),
        (fill_integers_, torch.int64, {"low": 3, "high": 3}, "low < high"),
        (fill_bernoulli_, torch.float32, {"p": 1.5}, "from 0 to 1"),
        (fill_exponential_, torch.float32, {"rate": 0.0}, "finite number > 0"),
        (fill_geometric_, torch.float32, {"p": 1.0}, "between 0 and 1"),
        (fill_cauchy_, torch.float32, {"sigma": -1.0}, "finite number > 0"),
        (fill_log_normal_, torch.float32, {"std": -1.0}, "std >= 0"),
    ],
)
def test_parameters_out_of_range_are_refused(
    fill: Callable[..., torch.Tensor], dtype: torch.dtype, parameters: Any, message: str
) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        _full(fill, (2, 3), dtype, **parameters)
