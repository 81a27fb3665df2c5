"""What every module is: purpose, names, imports, importers, tests. From the source alone.

Nothing is imported: files are parsed, so the map is made in about a second, without torch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["Definition", "Method", "Module", "covering_tests", "read_modules", "undocumented"]

_PACKAGE = "shardwise"


@dataclass(frozen=True, slots=True)
class Method:
    """A public method or property of a class."""

    name: str
    doc: str | None


@dataclass(frozen=True, slots=True)
class Definition:
    """A name that a module defines and lists in `__all__`."""

    name: str
    kind: str  # class, function or value
    doc: str | None  # of a value also the comment beside it
    bases: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ()


@dataclass(slots=True)
class Module:
    """A file of the package."""

    name: str  # dotted
    purpose: str  # its docstring
    definitions: tuple[Definition, ...]
    homes: dict[str, str]  # name in `__all__` that comes from elsewhere -> the module it is from
    imports: tuple[str, ...]  # modules of the package
    outside: tuple[str, ...]  # packages of others
    imported_by: list[str] = field(default_factory=list)


def read_modules(source: Path) -> dict[str, Module]:
    """All modules under `source` (the folder of the package) by name, in order of name."""
    texts = {_module_name(path, source): path.read_text() for path in source.rglob("*.py")}
    trees = {name: ast.parse(texts[name]) for name in sorted(texts)}
    found = {name: _module(name, texts[name].splitlines(), trees) for name in trees}
    for name, module in found.items():
        for other in module.imports:
            found[other].imported_by.append(name)
    return found


def covering_tests(modules: Mapping[str, Module], tests: Path) -> dict[str, list[str]]:
    """Module -> test files that use it, or else those of the nearest modules that import it."""
    direct: dict[str, set[str]] = defaultdict(set)
    for path in sorted(tests.rglob("test_*.py")):
        for name in _used(path, modules, tests):
            direct[name].add(path.relative_to(tests.parent).as_posix())
    return {name: _ordered(name, _tests_of(name, direct, modules, tests)) for name in modules}


def undocumented(modules: Mapping[str, Module]) -> list[str]:
    """Names without a word about them. A method may have it from its base or its protocol."""
    classes = {one.name: one for m in modules.values() for one in m.definitions}
    protocols: dict[str, set[str]] = defaultdict(set)  # package -> documented methods
    for module in modules.values():
        for one in module.definitions:
            if "Protocol" in one.bases:
                protocols[_package_of(module)] |= {m.name for m in one.methods if m.doc}
    found = []
    for module in modules.values():
        for one in module.definitions:
            if not one.doc:
                found.append(f"{module.name}.{one.name}")
            inherited = _documented_in_bases(one, classes) | protocols[_package_of(module)]
            found += [
                f"{module.name}.{one.name}.{method.name}"
                for method in one.methods
                if not method.doc and method.name not in inherited
            ]
    return found


def _package_of(module: Module) -> str:
    return module.name.rpartition(".")[0]


# -- files -----------------------------------------------------------------------------------------


def _module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _module(name: str, lines: Sequence[str], trees: Mapping[str, ast.Module]) -> Module:
    tree = trees[name]
    exported = _exported(tree)
    own = [one for one in _definitions(tree, lines) if one.name in exported]
    homes = {
        public: home
        for public in exported
        if public not in {one.name for one in own}
        and (home := _home(f"{name}.{public}", trees)) is not None
    }
    imported = list(_imported(tree))
    inside = {_module_of(target, trees) for target in imported if target.startswith(_PACKAGE)}
    outside = {target.split(".")[0] for target in imported}
    return Module(
        name,
        ast.get_docstring(tree) or "",
        tuple(own),
        homes,
        tuple(sorted(inside - {name, _PACKAGE})),
        tuple(sorted(outside - {_PACKAGE, *sys.stdlib_module_names})),
    )


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


# -- definitions -----------------------------------------------------------------------------------


def _definitions(tree: ast.Module, lines: Sequence[str]) -> Iterator[Definition]:
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base).split("[")[0] for base in node.bases)
            doc = ast.get_docstring(node)
            yield Definition(node.name, "class", doc, bases, tuple(_methods(node)))
        elif isinstance(node, ast.FunctionDef) and not _is_overload(node):
            yield Definition(node.name, "function", ast.get_docstring(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in _targets(node):
                yield Definition(name, "value", _text_after(following) or _comment(node, lines))


def _defined(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found.update(_targets(node))
    return found


def _text_after(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return None


def _comment(node: ast.stmt, lines: Sequence[str]) -> str | None:
    """The comment at the end of the statement's first or last line, or above it or its block."""
    for number in (node.lineno, node.end_lineno or node.lineno):
        beside = re.search(r"\s{2}# (?!type: )(.+)$", lines[number - 1])
        if beside:
            return beside[1]
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        is_comment = line.startswith("# ") and not line.startswith("# --")
        if not line or (above and not is_comment):
            break
        if is_comment:
            above.append(line.removeprefix("# "))
    return " ".join(reversed(above)) or None


def _is_overload(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith("overload") for one in node.decorator_list)


def _is_setter(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith(".setter") for one in node.decorator_list)


def _methods(node: ast.ClassDef) -> Iterator[Method]:
    for item in node.body:
        if not isinstance(item, ast.FunctionDef) or item.name.startswith("_"):
            continue
        if not _is_overload(item) and not _is_setter(item):
            yield Method(item.name, ast.get_docstring(item))


def _documented_in_bases(one: Definition, classes: Mapping[str, Definition]) -> set[str]:
    """Methods of which a base class says what they do."""
    found: set[str] = set()
    for base in one.bases:
        known = classes.get(base.rpartition(".")[2])
        if known is not None:
            found |= {method.name for method in known.methods if method.doc}
            found |= _documented_in_bases(known, classes)
    return found


# -- imports ---------------------------------------------------------------------------------------


def _imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that is imported, inside of functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_of(target: str, known: Mapping[str, object]) -> str:
    """The module that a dotted name of the package is, or is a name of."""
    while target not in known:
        target = target.rpartition(".")[0]
    return target


def _home(target: str, trees: Mapping[str, ast.Module]) -> str | None:
    """The module that defines a name, however often it is handed on; None if it is not ours."""
    module, _, name = target.rpartition(".")
    if target in trees:
        return target
    if module not in trees:
        return None
    tree = trees[module]
    if name in _defined(tree):
        return module
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _home(f"{node.module}.{alias.name}", trees)
    return None


# -- tests -----------------------------------------------------------------------------------------


def _used(path: Path, modules: Mapping[str, Module], tests: Path) -> set[str]:
    """Modules whose names a test file uses, by itself or through helpers of the tests."""
    found: set[str] = set()
    seen: set[Path] = set()
    files = [path]
    while files:
        file = files.pop()
        if file in seen:
            continue
        seen.add(file)
        tree = ast.parse(file.read_text())
        for target in [*_imported(tree), *_attributes(tree)]:
            if target.startswith("tests."):
                files += _helpers(target, tests)
            elif target.startswith(_PACKAGE):
                found |= _homes_of(target, modules)
    return found


def _attributes(tree: ast.AST) -> Iterator[str]:
    """`shardwise.a.b` as it stands in code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.startswith(f"{_PACKAGE}.") and "(" not in text and "[" not in text:
                yield text


def _helpers(target: str, tests: Path) -> list[Path]:
    stem = tests.parent.joinpath(*target.split("."))
    tried = [stem.with_suffix(".py"), stem / "__init__.py", stem.parent.with_suffix(".py")]
    return [path for path in tried if path.exists() and not path.name.startswith("test_")]


def _homes_of(target: str, modules: Mapping[str, Module]) -> set[str]:
    """The module that the name is from; of a name at the root, where it lives."""
    parts = target.split(".")
    for size in range(len(parts), 0, -1):
        module = modules.get(".".join(parts[:size]))
        if module is None:
            continue
        name = parts[size] if size < len(parts) else None
        home = module.homes.get(name) if name else None
        return {home or module.name} - {_PACKAGE}
    return set()


def _tests_of(
    name: str, direct: Mapping[str, set[str]], modules: Mapping[str, Module], tests: Path
) -> set[str]:
    """Tests of the module, or of those importers that are the fewest imports away.

    Where no code imports it (a package that hands names on, say), those in the folder of its name.
    """
    seen, layer = {name}, [name]
    while layer:
        found = set().union(*(direct.get(one, set()) for one in layer))
        if found:
            return found
        importers = {up for one in layer for up in modules[one].imported_by}
        layer = sorted(importers - seen)
        seen.update(layer)
    parts = name.split(".")[1:]
    for size in range(len(parts), -1, -1):
        beside = list(tests.joinpath(*parts[:size]).glob("test_*.py"))
        if beside:
            return {path.relative_to(tests.parent).as_posix() for path in beside}
    return set()


def _ordered(name: str, found: Iterable[str]) -> list[str]:
    """Those that are named like the module first, then those in its package's folder."""
    parts = name.split(".")

    def distance(path: str) -> tuple[bool, bool, str]:
        stem, folders = Path(path).stem.removeprefix("test_"), Path(path).parts[1:-1]
        return stem != parts[-1], list(folders) != parts[1:-1], path

    return sorted(found, key=distance)
