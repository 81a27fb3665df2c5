"""Placing: every element once, no gaps, and replicas share the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.placing import Wanted, before, place
from shardwise.geometry import Box, Layout
from shardwise.testing.strategies import layouts

if TYPE_CHECKING:
    from shardwise.checkpoint.placing import Placing

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.bool)


def wanted_lists() -> st.SearchStrategy[list[Wanted]]:
    one = st.tuples(layouts(addends=False), st.sampled_from(DTYPES))
    return st.lists(one, min_size=1, max_size=5).map(
        lambda found: [Wanted(f"t{k}", *each) for k, each in enumerate(found)]
    )


def ranges_of(placing: Placing) -> dict[int, list[tuple[int, int]]]:
    """The bytes that each file gets, in the order in which its writer writes them."""
    return {
        number: [(piece.start, piece.start + piece.nbytes) for piece in placing.pieces_of(number)]
        for number in range(len(placing.files))
    }


@given(wanted_lists())
def test_each_element_is_written_once_by_a_rank_that_has_it(wanted: list[Wanted]) -> None:
    placing = place(wanted, range(4))
    by_name = {one.name: one for one in wanted}
    written = {one.name: np.zeros(one.layout.shape, int) for one in wanted}
    seen = set()
    for number, file in enumerate(placing.files):
        keys = []
        for piece in placing.pieces_of(number):
            layout = by_name[piece.tensor.name].layout
            written[piece.tensor.name][piece.box.slices()] += 1
            seen.add(piece.tensor.name)
            keys.append(piece.key)
            if not piece.box.is_empty:
                assert layout.owners[piece.row] == file.rank
                assert layout.boxes[piece.row] == piece.box
        assert len(set(keys)) == len(keys)  # a safetensors file has a name once
    assert seen == by_name.keys()
    assert all((count == 1).all() for count in written.values())


@given(wanted_lists())
def test_files_have_no_gaps_and_aligned_tensors(wanted: list[Wanted]) -> None:
    placing = place(wanted, range(4))
    for number, ranges in ranges_of(placing).items():
        ends = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == ends[:-1]
        assert ends[-1] == placing.files[number].nbytes
        for piece in placing.pieces_of(number):
            assert piece.start % piece.tensor.dtype.itemsize == 0
    counts = [len(ranges) for ranges in ranges_of(placing).values()]
    assert placing.num_pieces.tolist() == counts


@given(wanted_lists(), st.randoms())
def test_the_order_of_the_state_does_not_matter(wanted: list[Wanted], random: object) -> None:
    shuffled = list(wanted)
    getattr(random, "shuffle")(shuffled)  # noqa: B009  # hypothesis has no type for it
    one, other = (place(each, range(4)) for each in (wanted, shuffled))
    assert (one.files, one.file_names) == (other.files, other.file_names)
    assert ranges_of(one) == ranges_of(other)


def test_replicas_share_the_work() -> None:
    same = [Wanted(f"t{k}", Layout.replicated((8,), range(4)), torch.float32) for k in range(8)]
    assert [file.nbytes for file in place(same, range(4)).files] == [64, 64, 64, 64]
    # A rank that has much to write already is left alone.
    alone = Wanted("large", Layout.replicated((24,), [1]), torch.float32)
    sizes = {file.rank: file.nbytes for file in place([alone, *same], range(4)).files}
    assert sizes == {0: 96, 1: 96, 2: 96, 3: 64}


def test_many_boxes_of_a_rank_go_into_many_files_but_not_without_end() -> None:
    boxes = [Box((k,), (k + 1,)) for k in range(70)]
    layout = Layout((70,), boxes, [3] * 70)
    placing = place([Wanted("w", layout, torch.int32)], [1, 3])
    assert [file.rank for file in placing.files] == [3] * 64
    assert [file.nbytes for file in placing.files] == [4] * 63 + [28]
    assert [piece.key for piece in placing.pieces_of(63)] == [
        "w",
        *(f"w#{k}" for k in range(64, 70)),
    ]
    assert placing.file_names[63] == "shard-00004-model-00064-of-00064.safetensors"


@pytest.mark.parametrize("num_files", [1, 2])
def test_unsharded_tensors_get_the_names_of_a_hugging_face_folder(num_files: int) -> None:
    wanted = [
        Wanted(f"t{k}", Layout.replicated((4,), range(num_files)), torch.float32) for k in range(2)
    ]
    one, two = ("model.safetensors",), tuple(f"model-0000{k}-of-00002.safetensors" for k in (1, 2))
    assert place(wanted, range(num_files)).file_names == (one if num_files == 1 else two)


def test_an_empty_tensor_without_entries_is_in_a_file_all_the_same() -> None:
    placing = place([Wanted("none", Layout((0, 3), [], []), torch.float32)], [2, 5])
    (piece,) = placing.pieces_of(0)
    assert (placing.files[0].rank, piece.box.shape, piece.nbytes) == (2, (0, 3), 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=20))
def test_before_sums_what_stands_before(pairs: list[tuple[int, int]]) -> None:
    keys, amounts = np.array(pairs, np.int64).T
    expected = [sum(a for k, a in pairs[:at] if k == key) for at, (key, _) in enumerate(pairs)]
    assert before(keys, amounts).tolist() == expected
