"""Counts, ranks and long texts as people read them."""

from __future__ import annotations

from shardwise.words import plural, ranks_text, shortened


def test_counts_have_their_noun_in_the_right_number() -> None:
    assert [plural(count, "rank") for count in (0, 1, 4000)] == ["0 ranks", "1 rank", "4,000 ranks"]


def test_long_texts_are_cut() -> None:
    assert shortened("a" * 80) == "a" * 80
    assert shortened("a" * 81) == "a" * 77 + "..."
    assert shortened("abcdefgh", most=6) == "abc..."


def test_long_lists_of_ranks_are_shortened() -> None:
    assert ranks_text([]) == "no ranks"
    assert ranks_text([5]) == "rank 5"
    assert ranks_text(range(64)) == "ranks 0-63"
    assert ranks_text([4, 3, 9]) == "ranks 3, 4, 9"
    odd = ranks_text(range(1, 99, 2))
    assert odd == "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 41 more"
