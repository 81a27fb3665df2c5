"""The folder aside, and how it becomes the checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.checkpoint import committing
from shardwise.checkpoint.committing import Aside, Destination, remains_text
from shardwise.checkpoint.index import INDEX_NAME
from shardwise.errors import CheckpointError


def aside_with(destination: Destination, token: str, text: str) -> Aside:
    aside = Aside(destination, token)
    aside.make()
    (aside.path / INDEX_NAME).write_text(text)
    return aside


def committed(destination: Destination, token: str, text: str, old: set[str] | None = None) -> None:
    aside = aside_with(destination, token, text)
    aside.commit(old)
    aside.close()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_new_checkpoint_comes_by_a_rename_also_onto_an_empty_folder(tmp_path: Path) -> None:
    for name in ("new", "empty"):
        destination = Destination.at(tmp_path / name)
        if name == "empty":
            destination.path.mkdir()
        destination.check()
        committed(destination, "1", "first")
        assert (destination.path / INDEX_NAME).read_text() == "first"
    assert names(tmp_path) == ["empty", "new"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_older_checkpoint_is_replaced_and_what_others_put_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(committing, "_exchange", lambda one, other: False)
    destination = Destination.at(tmp_path / "ck")
    committed(destination, "1", "first")
    (destination.path / "old.safetensors").write_text("old")
    (destination.path / "config.json").write_text("mine")
    (destination.path / "notes").mkdir()
    (destination.path / "notes" / "one").write_text("mine, too")
    destination.check()
    committed(destination, "2", "second", {INDEX_NAME, "old.safetensors"})
    assert names(destination.path) == ["config.json", "notes", INDEX_NAME]
    assert (destination.path / INDEX_NAME).read_text() == "second"
    assert (destination.path / "notes" / "one").read_text() == "mine, too"
    assert len(names(tmp_path)) == 2
    destination.remove_remains()
    assert names(tmp_path) == ["ck"]


def test_a_save_under_way_is_neither_removed_nor_joined_by_another(tmp_path: Path) -> None:
    destination = Destination.at(tmp_path / "ck")
    first = aside_with(destination, "1", "first")
    destination.remove_remains()
    destination.check_nobody_saves(but="1")
    with pytest.raises(CheckpointError, match=r"another one under way, in '\.ck\.saving-1'"):
        destination.check_nobody_saves()
    second = aside_with(destination, "2", "second")
    with pytest.raises(CheckpointError, match="another one under way"):
        second.commit(None)
    second.remove()
    first.close()
    destination.check_nobody_saves()
    assert names(tmp_path) == [".ck.saving-1"]


def test_what_is_left_behind_is_told_and_then_removed(tmp_path: Path) -> None:
    destination = Destination.at(tmp_path / "ck")
    assert remains_text(destination.path) is None
    aside_with(destination, "1", "begun").close()
    (tmp_path / ".ck2.saving-1").mkdir()  # of another path
    text = remains_text(destination.path)
    assert text is not None
    assert ".ck.saving-1' is what a save that is under way, or was cut off" in text
    (tmp_path / ".ck.replaced-2").mkdir()
    text = remains_text(destination.path)
    assert text is not None
    assert f".ck.replaced-2'; rename it to {str(destination.path)!r}" in text
    destination.remove_remains()
    assert names(tmp_path) == [".ck2.saving-1"]


def test_files_that_the_first_rank_does_not_see_whole_are_named(tmp_path: Path) -> None:
    aside = aside_with(Destination.at(tmp_path / "ck"), "1", "1234")
    aside.check_sizes({INDEX_NAME: (0, 4)})
    with pytest.raises(CheckpointError, match=r"'x', which rank 3 wrote.*All ranks must see one"):
        aside.check_sizes({"x": (3, 4)})
    with pytest.raises(CheckpointError, match=r"of rank 1 .*expected 5 bytes, as written, got 4"):
        aside.check_sizes({INDEX_NAME: (1, 5)})


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    destination = Destination.at(tmp_path / "link")
    assert destination.path == Path(os.path.realpath(tmp_path)) / "disk"
    committed(destination, "1", "first")
    assert names(tmp_path / "link") == [INDEX_NAME]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no parent", r"expected a folder '.*none' to put it in"),
        ("a file", "expected nothing there.*got a file"),
        ("a folder", "got a folder with other things in it, such as 'mine'"),
    ],
)
def test_what_may_not_be_replaced_is_left_alone(tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "ck"
    if kind == "no parent":
        path = tmp_path / "none" / "ck"
    elif kind == "a file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").write_text("")
    with pytest.raises(CheckpointError, match=message):
        Destination.at(path).check()
