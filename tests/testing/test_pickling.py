"""What crosses between `run_local` and its ranks: values, and code that ranks cannot import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from tests.testing.on_ranks import pid_of
from torch.utils.data import DataLoader, Dataset

from shardwise.testing.local_run import run_local

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class Point:
    x: int

    def shifted(self, by: int) -> Point:
        return Point(self.x + by)


def test_arguments_follow_the_rank() -> None:
    def joined(rank: int, word: str, points: list[Point]) -> str:
        return f"{rank}{word}{points[rank].x}"

    assert run_local(joined, 2, "-", [Point(5), Point(6)]) == ["0-5", "1-6"]


@dataclass
class _Model:
    config: int


def test_an_attribute_may_have_the_name_of_a_module_of_settings() -> None:
    """There is a torch.distributed.config, which the function's words seem to ask for."""
    importlib.import_module("torch.distributed.config")
    assert run_local(lambda rank, model: model.config + dist.get_rank(), 1, _Model(3)) == [3]


def test_classes_of_an_extension_module_are_accepted() -> None:
    def largest(rank: int, op: dist.ReduceOp.RedOpType) -> float:
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, op)
        return t.item()

    assert run_local(largest, 2, dist.ReduceOp.MAX) == [1.0, 1.0]


def test_tensors_of_new_dtypes_come_back() -> None:
    """torch can pickle these on its own, but not unpickle them."""
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        given = torch.arange(6).view(2, 3).to(dtype)
        (back,) = run_local(lambda rank, tensor: tensor[:, 1:], 1, given)
        assert torch.equal(back.to(torch.float32), given[:, 1:].to(torch.float32))
        assert back.dtype == dtype


def test_a_data_loader_has_workers_for_a_class_that_ranks_cannot_import() -> None:
    class Squares(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index**2

    def loaded(rank: int) -> list[int]:
        return [int(x) for x in DataLoader(Squares(), batch_size=None, num_workers=2)]

    assert run_local(loaded, 2) == [[0, 1, 4, 9]] * 2


# ---- code that ranks cannot import ----

MODULE = """
from dataclasses import dataclass

START = 100

@dataclass
class Mark:
    value: int

    def raised(self):
        return START + self.value

def mark(rank):
    return Mark(rank)

def is_imported(rank):
    import sys
    return __name__ in sys.modules
"""


def _module(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module loaded as pytest's importlib mode does: named, but on no path."""
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["elsewhere", "tests.testing.elsewhere", "os.elsewhere"])
def test_functions_of_unimportable_modules_travel_by_value(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _module(tmp_path / "elsewhere.py", name, monkeypatch)
    assert run_local(module.is_imported, 2) == [False, False]
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_functions_of_importable_modules_travel_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = _module(tmp_path / "within_reach.py", "within_reach", monkeypatch)
    assert run_local(module.is_imported, 2) == [True, True]


def test_ranks_run_an_edited_module_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_part.py").write_text("VALUE = 1")
    (tmp_path / "edited.py").write_text(
        "import edited_part\ndef value(rank): return edited_part.VALUE"
    )
    part = importlib.import_module("edited_part")
    module = importlib.import_module("edited")
    assert run_local(module.value, 2) == [1, 1]
    pids = run_local(pid_of, 2)
    assert run_local(pid_of, 2) == pids  # as long as nothing changes

    (tmp_path / "edited_part.py").write_text("VALUE = 1000")
    importlib.reload(part)
    assert run_local(module.value, 2) == [1000, 1000]


def test_what_a_module_sets_while_it_is_imported_stays_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in_double.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\n"
        "def dtype(rank): return torch.get_default_dtype()"
    )
    before = torch.get_default_dtype()
    module = importlib.import_module("in_double")
    torch.set_default_dtype(before)
    assert run_local(module.dtype, 1) == [torch.float64]
    assert run_local(module.dtype, 1) == [torch.float64]
    (tmp_path / "in_double.py").unlink()  # the ranks that imported it are replaced
    assert run_local(lambda rank: torch.get_default_dtype(), 1) == [before]


def test_results_are_instances_of_the_callers_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _module(tmp_path / "elsewhere.py", "elsewhere", monkeypatch)
    (mark,) = run_local(module.mark, 1)
    assert type(mark) is module.Mark
    # The class must not have been rebuilt on the way: its methods still see this module.
    monkeypatch.setattr(module, "START", 500)
    assert mark.raised() == 500
    assert run_local(lambda rank: Point(rank).shifted(1), 2) == [Point(1), Point(2)]


def test_a_class_made_inside_a_rank_comes_back_by_value() -> None:
    def made(rank: int) -> object:
        return type("Made", (), {"__module__": "__main__", "rank": rank})()

    (result,) = run_local(made, 1)
    assert getattr(result, "rank", None) == 0
