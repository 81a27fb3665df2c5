"""Builds the sdist, from it the wheel, and tries the wheel in a fresh environment: `make package`.

The fresh environment has the package, its dependencies and nothing else: no tool of development.
The dependencies are links to those of this environment, so that nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["dependencies", "main", "requirements"]

ROOT = Path(__file__).parents[2]

SMOKE = """
import importlib.resources, importlib.util
import torch
import shardwise

assert "site-packages" in shardwise.__file__, shardwise.__file__
assert importlib.resources.files("shardwise").joinpath("py.typed").is_file()
for tool in ("pytest", "mypy", "ruff", "hypothesis", "mkdocs"):
    assert importlib.util.find_spec(tool) is None, f"{tool} is here"


def work(rank):
    x = shardwise.distribute(torch.arange(35.0).view(5, 7), shardwise.chunk(0))
    y = shardwise.reshard(x, shardwise.chunk(1, sizes=[6, 1]))
    return torch.equal(y.full_tensor(), torch.arange(35.0).view(5, 7))


if __name__ == "__main__":
    assert shardwise.run_local(work, 2) == [True, True]
"""


def main() -> None:
    """Builds and tries; raises if something fails."""
    dist = ROOT / "dist"
    for old in dist.glob("shardwise-*"):
        old.unlink()
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT))
    (wheel,) = dist.glob("shardwise-*.whl")
    with tempfile.TemporaryDirectory() as folder:
        _try(wheel, Path(folder))
    print(f"{wheel.name}: installed into a fresh environment and tried")


def _try(wheel: Path, folder: Path) -> None:
    fresh = folder / "fresh"
    venv.create(fresh)
    python, command = fresh / "bin" / "python", fresh / "bin" / "shardwise"
    (site,) = fresh.glob("lib/python*/site-packages")
    _link(dependencies(wheel), site)
    pip = [sys.executable, "-m", "pip", "--python", str(python)]  # it has none of its own
    _run(*pip, "install", "--quiet", "--no-index", str(wheel))
    smoke = folder / "smoke.py"
    smoke.write_text(SMOKE)
    _run(str(python), "-W", "error", str(smoke), cwd=folder)
    for words in (["--version"], ["show", "--shape", "8,6", "--spec", "grid([2, 2])"], ["doctor"]):
        _run(str(command), *words, cwd=folder)


def dependencies(wheel: Path) -> list[metadata.Distribution]:
    """What the wheel needs to run, all the way down; of extras nothing."""
    found: dict[str, metadata.Distribution] = {}
    wanted = requirements(wheel)
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and name not in found:
            found[name] = metadata.distribution(name)
            wanted += found[name].requires or ()
    return list(found.values())


def requirements(wheel: Path) -> list[str]:
    """The lines of its metadata that say what it needs, extras included."""
    with zipfile.ZipFile(wheel) as packed:
        (path,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(packed.read(path).decode()).get_all("Requires-Dist") or []


def _link(distributions: list[metadata.Distribution], site: Path) -> None:
    """Links the files of the distributions into `site`."""
    for one in distributions:
        tops = {file.parts[0] for file in one.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            place = site / top
            if not place.exists():  # a folder that two distributions share is linked once
                place.symlink_to(Path(str(one.locate_file(top))).resolve())


def _run(*words: str, cwd: Path | None = None) -> None:
    subprocess.run(words, check=True, cwd=cwd, timeout=600)


if __name__ == "__main__":
    main()
