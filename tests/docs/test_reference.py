"""What the reference is made of: every name has its words, every module its tests."""

from __future__ import annotations

from pathlib import Path

from docs.building.docstrings import as_markdown
from docs.building.hooks import keyword_page, page_of, with_links_inside
from docs.building.module_map import covering_tests, read_modules, undocumented

ROOT = Path(__file__).parents[2]


def test_no_public_name_is_undocumented() -> None:
    modules = read_modules(ROOT / "src" / "shardwise")
    assert undocumented(modules) == []
    assert [module.name for module in modules.values() if not module.purpose] == []


def test_every_module_is_covered_by_tests() -> None:
    modules = read_modules(ROOT / "src" / "shardwise")
    tests = covering_tests(modules, ROOT / "tests")
    assert [name for name, found in tests.items() if not found] == []
    assert tests["shardwise.geometry.box"][0] == "tests/geometry/test_box.py"
    assert "tests/cli/test_plan.py" in tests["shardwise.cli.rehearsal"]


def _package(folder: Path, **files: str) -> Path:
    source = folder / "shardwise"
    source.mkdir()
    for name, text in {"__init__": '"""Root."""\n', **files}.items():
        (source / f"{name}.py").write_text(text)
    return source


def test_the_map_finds_names_homes_and_what_is_missing(tmp_path: Path) -> None:
    source = _package(
        tmp_path,
        low='"""Low."""\nimport numpy as np\n__all__ = ["A", "B", "f"]\n'
        'A = 1  # one\nB = 2\n\n\ndef f():\n    """F."""\n',
        high='"""High."""\nfrom shardwise.low import A, f\n__all__ = ["C", "f"]\n\n\n'
        'class C:\n    """C."""\n\n    def g(self): ...\n',
    )
    modules = read_modules(source)
    low, high = modules["shardwise.low"], modules["shardwise.high"]
    assert [(one.name, one.kind, one.doc) for one in low.definitions] == [
        ("A", "value", "one"),
        ("B", "value", None),
        ("f", "function", "F."),
    ]
    assert (low.outside, low.imported_by) == (("numpy",), ["shardwise.high"])
    assert (high.imports, high.homes) == (("shardwise.low",), {"f": "shardwise.low"})
    assert undocumented(modules) == ["shardwise.high.C.g", "shardwise.low.B"]


def test_a_module_without_tests_has_those_of_its_importers(tmp_path: Path) -> None:
    source = _package(
        tmp_path,
        low='"""Low."""\n__all__ = []\n',
        high='"""High."""\nimport shardwise.low\n__all__ = []\n',
    )
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_some.py").write_text("import shardwise.high\n")
    found = covering_tests(read_modules(source), tests)
    assert found["shardwise.low"] == found["shardwise.high"] == ["tests/test_some.py"]


def test_code_in_docstrings_becomes_blocks() -> None:
    text = "What it is.\n>>> f(1)\n2\n\nMore.\n\nA\n├── B"
    assert as_markdown(text) == (
        "What it is.\n\n```pycon\n>>> f(1)\n2\n```\n\nMore.\n\n```text\nA\n├── B\n```"
    )


def test_links_out_of_the_documents_lead_to_the_pages_of_the_site() -> None:
    page = "[a](../benchmarks/README.md#tilingpy) [b](layouts.md) [c](https://pytorch.org)"
    assert with_links_inside(page, "performance.md") == (
        "[a](benchmarks.md#tilingpy) [b](layouts.md) [c](https://pytorch.org)"
    )
    assert with_links_inside("[a](docs/ops.md)", "contributing.md") == "[a](ops.md)"
    assert with_links_inside("[a](../layouts.md)", "design/boxes.md") == "[a](../layouts.md)"


def test_the_index_has_names_methods_and_headings(tmp_path: Path) -> None:
    source = _package(
        tmp_path,
        low='"""Low."""\n__all__ = ["C"]\n\n\nclass C:\n    """C."""\n\n'
        '    def go(self):\n        """Goes."""\n',
    )
    pages = {"a.md": "# Title\n\n## Two `words`\n\n```\n# no heading\n```\n\n## Two words\n"}
    page = keyword_page(read_modules(source), pages)
    assert page_of("shardwise.low") == "reference/low.md"
    assert "- [`C`](reference/low.md#shardwise.low.C), class in `low`" in page
    assert "- [`C.go`](reference/low.md#shardwise.low.C.go)" in page
    assert "- [Two words](a.md#two-words), in *Title*" in page
    assert "- [Two words](a.md#two-words_1), in *Title*" in page
    assert "no heading" not in page
