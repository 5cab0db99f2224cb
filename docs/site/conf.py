"""How Sphinx builds the site from the pages of `docs/`. `make docs` runs it.

The pages are written for a code host. So links that leave `docs/` are turned into links to the repository
here, and the navigation is kept in this file instead of in directives that a code host would show as text.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"].rstrip("/")

#: The pages by topic, in the order in which the site shows them. A page that does not exist is left out, and
#: one that is not named here comes last, under "More".
NAVIGATION = {
    "Start": ["getting-started", "transports", "vllm", "benchmarks"],
    "Deploy": ["sizing", "behind-a-router", "router", "deploying"],
    "Operate": [
        "operations",
        "troubleshooting",
        "upgrades",
        "security",
        "observing",
        "openai-api",
        "reliability",
        "prove",
        "cuda",
    ],
    "Migrate": ["migrating"],
    "Reference": ["reference/configuration", "reference/command-line"],
    "Extend": ["embedding", "writing-a-connector", "connector-contract", "writing-a-transport"],
    "Design": ["design", "router-design", "for-reviewers"],
}

#: Pages that the navigation shows below another one: the beginning of their names, by that page.
BELOW = {"design": "decisions/"}

project = "kvferry"
copyright = "the kvferry authors"
version = release = re.search(
    r'__version__ = "(.+)"', (DOCS.parent / "src" / "kvferry" / "__init__.py").read_text()
)[1]  # type: ignore[index]

extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["site", "README.md"]
# Anchors as a code host makes them, so that a link works in both places.
myst_heading_anchors = 6
# A link to a page that does not exist, or to an anchor that its page does not have, fails the build.
nitpicky = True
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"kvferry {release}"
html_copy_source = False
html_show_sphinx = False
# Nothing is fetched from other hosts: furo uses the fonts of the reader's machine.
html_theme_options = {"navigation_with_keys": True}

# `make docs LINKS=1` looks at links to other hosts, but not at those to the repository and to examples:
# the repository has no public address yet, and no example host answers.
linkcheck_ignore = [re.escape(REPOSITORY), r"https?://(localhost|127\.0\.0\.1|10\.|[\w.-]+\.example)"]
linkcheck_timeout = 20
linkcheck_retries = 2


def pages() -> set[str]:
    """Return the names of all pages."""
    found = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    return {name for name in found if not name.startswith("site/")} - {"index", "README"}


def below(name: str) -> list[str]:
    """Return the names of the pages that the navigation shows below a page."""
    return sorted(page for page in pages() if name in BELOW and page.startswith(BELOW[name]))


def toctrees() -> str:
    """Return the navigation as Sphinx wants it: one table of contents per topic."""
    left = pages() - {page for name in BELOW for page in below(name)}
    parts = []
    for topic, names in NAVIGATION.items():
        parts.append(toctree([name for name in names if name in left], topic))
        left.difference_update(names)
    return "\n\n".join(filter(None, [*parts, toctree(sorted(left), "More")]))


def toctree(names: list[str], caption: str) -> str:
    """Return one table of contents, or nothing without a page."""
    lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *(f"/{name}" for name in names), "```"]
    return "\n".join(lines) if names else ""


def leave_docs(name: str, text: str) -> str:
    """Turn links from a page to files outside of `docs/` into links to the repository."""
    here = posixpath.join("docs", posixpath.dirname(name))

    def changed(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        path = posixpath.normpath(posixpath.join(here, target))
        is_page = path.startswith("docs/") and (path.endswith((".md", ".svg", ".png")))
        if not target or "://" in target or target.startswith("mailto:") or is_page:
            return match[0]
        return f"]({REPOSITORY}/blob/main/{path}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\(([^)\s]+)\)", changed, text)


def on_source(_: Sphinx, name: str, source: list[str]) -> None:
    source[0] = leave_docs(name, source[0])
    navigation = toctrees() if name == root_doc else toctree(below(name), "Decisions")
    source[0] += f"\n{navigation}\n"


def with_navigation(*_: Any) -> list[str]:
    """Name the pages that hold the navigation, so that each build reads them again: a new page
    changes them.
    """
    return [root_doc, *BELOW]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("env-get-outdated", with_navigation)
    app.connect("source-read", on_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
