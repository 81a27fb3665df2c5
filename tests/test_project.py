"""What holds for the whole package: light imports, exact exports, ignores explained, live docs."""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import os
import pkgutil
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import TypeVar, TypeVarTuple
from unittest.mock import patch

import pytest

import shardwise
from shardwise.sharded_tensor.dispatch import CUSTOM

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shardwise"
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(shardwise.__path__, prefix="shardwise.")
)

# -- imports ---------------------------------------------------------------------------------


def _loaded_after(statement: str, *names: str) -> list[str]:
    """Which of `names` a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        "import shardwise",
        "import shardwise.geometry",
        "from shardwise import Box, Layout",
        "import shardwise.transfer",
        "from shardwise import plan_reshard, relabel",
    ],
)
def test_the_pure_core_loads_no_torch(statement: str) -> None:
    heavy = ("torch", "scipy", "rich", "typer", "hypothesis", "safetensors")
    assert _loaded_after(statement, *heavy) == []


def test_pictures_load_no_torch() -> None:
    assert _loaded_after("import shardwise.viz", "torch", "scipy", "typer", "rich") == ["rich"]


def test_scipy_is_loaded_by_a_relabelling_that_has_something_to_gain() -> None:
    code = """
from shardwise import Box, Layout, plan_reshard, relabel
halves = [Box((0,), (2,)), Box((2,), (4,))]
one, other = Layout((4,), halves, [0, 1]), Layout((4,), halves, [1, 0])
plan_reshard(one, other, 4).explain()
assert relabel([(one, {target}, 4)]).bytes_after == 0
"""
    assert _loaded_after(code.format(target="one"), "torch", "scipy") == []
    assert _loaded_after(code.format(target="other"), "torch", "scipy") == ["scipy"]


def test_the_purity_test_can_fail() -> None:
    assert _loaded_after("import shardwise.placement", "torch") == ["torch"]


def test_specs_do_not_load_dtensor_which_takes_a_second() -> None:
    assert _loaded_after("import shardwise.sharding_spec", "torch.distributed.tensor") == []


@cache
def _imports(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return found


def _private_torch(path: Path) -> list[str]:
    return [
        f"{path.name}:{line} {name}"
        for line, name in _imports(path)
        if name.split(".")[0] == "torch" and any(p.startswith("_") for p in name.split("."))
    ]


def test_private_torch_names_are_imported_in_one_file() -> None:
    users = {path.name for path in SOURCE.rglob("*.py") if _private_torch(path)}
    assert users == {"_torch_compat.py"}


def test_nothing_stands_on_the_seeds_own_implementation() -> None:
    """Its classes are imported by one function, for the conversions in `interop` alone."""
    names = ("torch.distributed._shard.", "shardwise._torch_compat.torch_sharded_tensor_types")
    users = {
        path.name
        for path in SOURCE.rglob("*.py")
        for _, name in _imports(path)
        if name.startswith(names)
    }
    assert users == {"_torch_compat.py", "torch_sharded_tensor.py"}
    assert _loaded_after("import shardwise.interop", "torch.distributed._shard") == []


# -- names -----------------------------------------------------------------------------------


def test_every_name_at_the_root_is_there_and_listed_once_everywhere() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    typed = [
        a.name for node in guarded.body if isinstance(node, ast.ImportFrom) for a in node.names
    ]
    assert sorted(typed) == sorted(shardwise.__all__) == sorted(shardwise._HOME_OF)
    for name in shardwise.__all__:
        assert getattr(shardwise, name) is not None
    assert set(shardwise.__all__) <= set(dir(shardwise))
    with pytest.raises(AttributeError, match="has no attribute 'reshuffle'"):
        shardwise.reshuffle  # noqa: B018  # the access is the test


@pytest.mark.parametrize("name", MODULES)
def test_all_lists_exactly_what_a_module_offers(name: str) -> None:
    module = importlib.import_module(name)
    missing = [public for public in module.__all__ if not hasattr(module, public)]
    assert missing == []
    own = {
        public
        for public, value in vars(module).items()
        if not public.startswith("_")
        and getattr(value, "__module__", None) == name
        and not isinstance(value, TypeVar | TypeVarTuple)
    }
    assert own <= set(module.__all__)


# Sub-path -> names of the seed system; `sharded_tensor/test_seed_paths.py` has those below that.
SEED = {
    "metadata": ["ShardMetadata"],
    "sharding_spec": [
        "ChunkShardingSpec",
        "DevicePlacementSpec",
        "EnumerableShardingSpec",
        "PlacementSpec",
        "ShardMetadata",
        "ShardingSpec",
        "_infer_sharding_spec_from_shards_metadata",
    ],
    "sharding_spec.api": [
        "DevicePlacementSpec",
        "EnumerableShardingSpec",
        "PlacementSpec",
        "ShardingSpec",
        "_dispatch_custom_op",
        "_has_custom_op",
        "_infer_sharding_spec_from_shards_metadata",
        "custom_sharding_spec_op",
    ],
    "sharding_spec.chunk_sharding_spec": ["ChunkShardingSpec"],
    "sharding_spec._internals": [
        "check_tensor",
        "get_chunk_sharding_params",
        "get_chunked_dim_size",
        "get_split_size",
        "validate_non_overlapping_shards_metadata",
    ],
    "api": [
        "_collect_local_shard",
        "_get_current_process_group",
        "_reshard_output",
        "_shard_tensor",
        "load_with_process_group",
        "shard_module",
        "shard_parameter",
    ],
    "sharder": ["Sharder"],
    "sharding_plan": ["ShardingPlan", "ShardingPlanner"],
    "sharding_plan.api": ["ShardingPlan", "ShardingPlanner"],
    "sharded_optim": ["ShardedOptimizer", "named_params_with_sharded_tensor"],
    "sharded_optim.api": ["ShardedOptimizer"],
    "sharded_tensor": [
        "ShardedTensorMetadata",
        "TensorProperties",
        "pre_load_state_dict_hook",
        "state_dict_hook",
    ],
    "sharded_tensor.api": ["_register_remote_shards"],
    "sharded_tensor.metadata": [
        "MEM_FORMAT_ENCODING",
        "ShardedTensorMetadata",
        "TensorProperties",
    ],
}


@pytest.mark.parametrize("path", SEED)
def test_code_moves_from_the_seed_by_its_prefix(path: str) -> None:
    ours = importlib.import_module(f"shardwise.{path}")
    theirs = importlib.import_module(f"torch.distributed._shard.{path}")
    for name in SEED[path]:
        assert hasattr(theirs, name), "not a name of the seed"
        assert getattr(ours, name).__module__.startswith("shardwise.")


# -- ignores ---------------------------------------------------------------------------------

_IGNORES = re.compile(r"type:\s*ignore|noqa", re.IGNORECASE)
_CODED = r"type: ignore\[[a-z-]+(, [a-z-]+)*\]|noqa: [A-Z]+\d+(, [A-Z]+\d+)*"
# One or more with codes, and then words that are no such comment themselves.
_WITH_REASON = re.compile(rf"(# ({_CODED})  )+# (?!(isort|fmt|type|ruff|mypy):|noqa).*\w.*")


def _without_reason(program: str) -> list[tuple[int, str]]:
    """Lines and comments that silence a checker without a code and a reason."""
    if not _IGNORES.search(program):
        return []
    comments = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(program).readline)
        if token.type == tokenize.COMMENT
    ]
    return [
        (line, comment)
        for line, comment in comments
        if _IGNORES.search(comment) and not _WITH_REASON.fullmatch(comment)
    ]


def test_every_ignore_has_a_code_and_a_reason() -> None:
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line} {comment}"
        for path in paths
        for line, comment in _without_reason(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "comment",
    [
        "# type: ignore",
        "# type: ignore  # torch's",
        "# type: ignore[misc]",
        "# type: ignore[misc]  #",
        "# type: ignore[misc] torch's",
        "# type: ignore[misc]  # noqa: E501",
        "# type:ignore[misc]  # torch's",
        "# noqa",
        "# noqa  # torch's",
        "# NOQA: F401",
        "# noqa: F401  # isort: skip",
        "# ruff: noqa: F401  # of the whole file",
    ],
)
def test_the_test_of_ignores_can_fail(comment: str) -> None:
    assert _without_reason(f"x = 1\ny = x  {comment}\n") == [(2, comment)]


@pytest.mark.parametrize(
    "line",
    [
        "x = 1  # type: ignore[arg-type, misc]  # `x` is torch's",
        "x = 1  # noqa: F401, E501  # the seed's  # isort: skip",
        "x = 1  # type: ignore[misc]  # noqa: E501  # one reason for both",
        "x = '# type: ignore'  # in a string",
    ],
)
def test_the_test_of_ignores_can_pass(line: str) -> None:
    assert _without_reason(f"{line}\n") == []


# -- documents -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def _pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_in_documents_run(page: Path) -> None:
    """Every ```python block of a page, as one program; doctests are compared with their output."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    sessions = "\n".join(block for block in blocks if ">>>" in block)
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(sessions, {}, page.name, str(page), 0))
    assert runner.failures == 0
    program = "\n".join(block for block in blocks if ">>>" not in block)
    if program:
        # In this process, whose pool of ranks is there, under the name of a script.
        names: dict[str, object] = {"__name__": "__main__", "__file__": str(page)}
        with patch.dict(CUSTOM):  # an op of a page is not that of the tests that follow
            exec(compile(program, str(page), "exec"), names)


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text())
    local = [a or b for a, b in targets if not re.match(r"[a-z]+:", a or b)]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.long
def test_the_tour_shows_layouts_and_a_checked_tiling() -> None:
    environment = {**os.environ, "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tour.py")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment,
    )
    assert "overlap" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


# -- versions --------------------------------------------------------------------------------


def test_the_version_is_written_once_in_each_place() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{shardwise.__version__}"' in project
    assert f"## {shardwise.__version__}" in (ROOT / "CHANGELOG.md").read_text()
