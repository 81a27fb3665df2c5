from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.packaging.try_package import dependencies, requirements

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*build, str(folder)], check=True, cwd=ROOT, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = [path for path in (source / "shardwise").rglob("*") if path.is_file()]
    ours = {path.relative_to(source).as_posix() for path in files if path.suffix != ".pyc"}
    assert packed == ours
    assert "shardwise/py.typed" in packed


def _metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as packed:
        (found,) = [path for path in packed.namelist() if path.endswith(f".dist-info/{name}")]
        return packed.read(found).decode()


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    said = Parser().parsestr(_metadata(wheel, "METADATA"))
    assert {"test", "testing", "docs", "dev"} <= set(said.get_all("Provides-Extra") or ())
    always = [line for line in requirements(wheel) if "extra ==" not in line]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(map(Requirement, always)) == set(map(Requirement, project["dependencies"]))
    assert "shardwise = shardwise.cli:main" in _metadata(wheel, "entry_points.txt")
    assert "Apache" in _metadata(wheel, "licenses/LICENSE")


def test_no_tool_of_development_is_needed_to_run(wheel: Path) -> None:
    names = {one.metadata["Name"].lower() for one in dependencies(wheel)}
    assert {"torch", "numpy", "typer"} <= names
    assert not names & {"pytest", "mypy", "ruff", "hypothesis", "mkdocs", "build", "hatchling"}
