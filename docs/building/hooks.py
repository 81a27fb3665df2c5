"""What mkdocs calls while it builds the site: pages made from the source, and pages from elsewhere.

- `reference/`: one page per package, from docstrings (mkdocstrings) and `module_map.py`;
- `keywords.md`: one index of all names and all headings;
- pages of the repository that stand outside of docs/, with their links.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from markdown.extensions.toc import slugify
from mkdocs.structure.files import File

from docs.building.docstrings import as_markdown
from docs.building.module_map import covering_tests, read_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

    from docs.building.module_map import Module

ROOT = Path(__file__).parents[2]
# Files of the repository -> the page of the site that shows them.
OUTSIDE = {
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
MOST_TESTS = 6  # files that a module's table names


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the nav: new pages at the end of the how-to pages, decisions, the reference."""
    docs = Path(config.docs_dir)
    sections = {title: pages for entry in config.nav or [] for title, pages in entry.items()}
    named = set(_named(config.nav))
    sections["How to"] += sorted(path.name for path in docs.glob("*.md") if path.name not in named)
    sections["Design"] += sorted(f"design/{path.name}" for path in docs.glob("design/*.md"))
    sections["Reference"] += sorted({page_of(name) for name in _modules()})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file in docs/ has."""
    modules = _modules()
    tests = covering_tests(modules, ROOT / "tests")
    for uri, text in reference_pages(modules, tests).items():
        files.append(File.generated(config, uri, content=text))
    for source, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    index = keyword_page(modules, pages)
    files.append(File.generated(config, "keywords.md", content=index))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Brings links to files of the repository to the pages that show them."""
    return with_links_inside(markdown, page.file.src_uri)


@cache
def _modules() -> dict[str, Module]:
    return read_modules(ROOT / "src" / "shardwise")


def _named(nav: object) -> Iterable[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from _named(value)
    elif isinstance(nav, list):
        for value in nav:
            yield from _named(value)


# -- links -----------------------------------------------------------------------------------------


def with_links_inside(markdown: str, uri: str) -> str:
    """The same page with links to `OUTSIDE` files, and of such a file to docs/, put right."""
    shown = {page: source for source, page in OUTSIDE.items()}
    folder = posixpath.dirname(shown.get(uri, f"docs/{uri}"))

    def replaced(match: re.Match[str]) -> str:
        path, anchor = match["path"], match["anchor"] or ""
        target = posixpath.normpath(posixpath.join(folder, path))
        is_shown = target in OUTSIDE or target.startswith("docs/")
        if not is_shown or re.match(r"[a-z]+:|/", path):
            return match[0]
        found = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(found, posixpath.dirname(uri) or '.')}{anchor})"

    return re.sub(r"\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)", replaced, markdown)


# -- the reference ---------------------------------------------------------------------------------


def reference_pages(
    modules: Mapping[str, Module], tests: Mapping[str, list[str]]
) -> dict[str, str]:
    """Address -> text: a page for each package, or module at the root, and one that lists them."""
    by_page: dict[str, list[Module]] = defaultdict(list)
    for module in modules.values():
        by_page[page_of(module.name)].append(module)
    pages = {uri: _reference_page(listed, tests) for uri, listed in by_page.items()}
    pages["reference/index.md"] = _overview(by_page, pages)
    return pages


def page_of(module: str) -> str:
    """The address of the page on which a module stands."""
    parts = module.split(".")
    return f"reference/{parts[1] if len(parts) > 1 else 'root'}.md"


def _overview(by_page: Mapping[str, list[Module]], pages: Mapping[str, str]) -> str:
    lines = ["# Reference", "", "| package | purpose | modules |", "|---|---|---|"]
    for uri, listed in sorted(by_page.items()):
        first = listed[0]
        link = f"[`{first.name}`]({posixpath.basename(uri)})"
        lines.append(f"| {link} | {_first_line(first.purpose)} | {len(listed)} |")
    lines += ["", "[Every name and heading](../keywords.md) in one index.", ""]
    return "\n".join(lines)


def _reference_page(modules: list[Module], tests: Mapping[str, list[str]]) -> str:
    parts = [f"# {modules[0].name}", ""]
    for module in modules:
        parts += [_heading(module), "", as_markdown(module.purpose), "", _facts(module, tests), ""]
        for one in module.definitions:
            parts += [f"::: {module.name}.{one.name}", ""]
            if one.kind == "value" and one.doc:
                parts += [one.doc, ""]
    return "\n".join(parts)


def _heading(module: Module) -> str:
    return f"## {module.name} {{ #{anchor_of(module.name)} }}"


def anchor_of(module: str) -> str:
    """The address of a module's section on its page."""
    return f"module-{module}"


def _facts(module: Module, tests: Mapping[str, list[str]]) -> str:
    rows = [("imports", _links(module.imports, module) + _plain(module.outside))]
    rows.append(("imported by", _links(module.imported_by, module)))
    rows.append(
        ("hands on", [_home_link(name, home, module) for name, home in module.homes.items()])
    )
    listed = [f"`{path}`" for path in tests[module.name]]
    more = [f"and {len(listed) - MOST_TESTS} more"] if len(listed) > MOST_TESTS else []
    rows.append(("tests", listed[:MOST_TESTS] + more))
    shown = [f"| {what} | {', '.join(items)} |" for what, items in rows if items]
    return "\n".join(["| | |", "|---|---|", *shown])


def _links(names: Iterable[str], module: Module) -> list[str]:
    return [f"[`{_short(name)}`]({_address(name, module)})" for name in names]


def _home_link(name: str, home: str, module: Module) -> str:
    return f"[`{name}`]({_address(home, module)})"


def _address(name: str, module: Module) -> str:
    page = "" if page_of(name) == page_of(module.name) else posixpath.basename(page_of(name))
    return f"{page}#{anchor_of(name)}"


def _plain(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _short(name: str) -> str:
    return name.removeprefix("shardwise.")


def _first_line(text: str) -> str:
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


# -- the index -------------------------------------------------------------------------------------


def keyword_page(modules: Mapping[str, Module], pages: Mapping[str, str]) -> str:
    """All names of the package and all headings of the documents, by letter."""
    entries = [*_names(modules), *_headings(pages)]
    letters: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for word, line in sorted(set(entries), key=lambda entry: (entry[0].lower(), entry[1])):
        letter = word.lstrip("_")[:1].upper()
        letters[letter if letter.isalpha() else "0-9"].append((word, line))
    parts = [
        "# Keyword index",
        "",
        "Every class, function, method and value of the package, and every section of these pages.",
        "",
    ]
    for letter, listed in sorted(letters.items()):
        parts += [f"## {letter}", "", *(line for _, line in listed), ""]
    return "\n".join(parts)


def _names(modules: Mapping[str, Module]) -> Iterable[tuple[str, str]]:
    for module in modules.values():
        page = page_of(module.name)
        yield module.name, f"- [`{module.name}`]({page}#{anchor_of(module.name)}), module"
        for one in module.definitions:
            address = f"{page}#{module.name}.{one.name}"
            yield one.name, f"- [`{one.name}`]({address}), {one.kind} in `{_short(module.name)}`"
            for method in one.methods:
                yield method.name, f"- [`{one.name}.{method.name}`]({address}.{method.name})"


def _headings(pages: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for uri, text in pages.items():
        if uri.startswith("reference/"):
            continue
        used: dict[str, int] = defaultdict(int)
        title = uri
        for level, heading in _headings_of(text):
            words = re.sub(r"[`*]", "", heading)
            slug = slugify(words, "-")
            anchor = slug if not used[slug] else f"{slug}_{used[slug]}"
            used[slug] += 1
            title = words if level == 1 else title
            where = "" if level == 1 else f", in *{title}*"
            yield words, f"- [{words}]({uri}#{anchor}){where}"


def _headings_of(text: str) -> list[tuple[int, str]]:
    bare = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [(len(m[1]), m[2]) for m in re.finditer(r"^(#{1,3}) (.+?)\s*$", bare, re.MULTILINE)]
