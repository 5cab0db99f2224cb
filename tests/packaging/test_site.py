"""The documentation site: its reference pages are what the code says, it has every page, and it fetches
nothing.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.transports.registry import BUILT_IN

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
BUILDER = ROOT / "build" / "docs-venv" / "bin" / "sphinx-build"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_pages_are_what_the_code_says() -> None:
    reference = load("reference")
    for path, text in reference.written():
        assert path.read_text() == text, f"{path.relative_to(ROOT)}: run `make format`"
    assert set(reference.TRANSPORTS) == set(BUILT_IN) - {"inproc"}


def test_the_navigation_has_every_page_once() -> None:
    conf = load("conf")
    shown = re.findall(r"^/(.+)$", conf.toctrees(), flags=re.MULTILINE)
    assert sorted([*shown, *conf.below("design")]) == sorted(conf.pages())


def test_no_document_has_a_sentence_of_more_than_30_words() -> None:
    check = load("sentences")
    assert check.too_long("| a | " + "`b c` d " * 15 + "e. |\n\n* " + "f " * 30) == ["Code d " * 15 + "e."]
    assert not [part for page in check.pages() for part in check.too_long(page.read_text())]


@pytest.mark.parametrize(
    ("link", "changed"),
    [
        ("[a](vllm.md#x)", "[a](vllm.md#x)"),
        ("[a](#x)", "[a](#x)"),
        ("[a](https://semver.org)", "[a](https://semver.org)"),
        ("![a](handoff.svg)", "![a](handoff.svg)"),
        ("[a](../examples/router.py)", "[a](REPOSITORY/blob/main/examples/router.py)"),
        ("[a](../CHANGELOG.md#x)", "[a](REPOSITORY/blob/main/CHANGELOG.md#x)"),
        ("[a](decisions)", "[a](REPOSITORY/blob/main/docs/decisions)"),
    ],
)
def test_links_out_of_the_pages_lead_to_the_repository(link: str, changed: str) -> None:
    conf = load("conf")
    assert conf.leave_docs("index", link) == changed.replace("REPOSITORY", conf.REPOSITORY)


@pytest.mark.slow
@pytest.mark.skipif(not BUILDER.exists(), reason="`make docs` creates the tools of the site")
def test_the_site_builds_without_a_dead_link_and_fetches_nothing(tmp_path: Path) -> None:
    command = [BUILDER, "-q", "-W", "--keep-going", "-d", tmp_path / "doctrees", "-c", SITE, ROOT / "docs"]
    done = subprocess.run([*command, tmp_path / "site"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    fetches = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["'](?:https?:)?//""")
    for page in (tmp_path / "site").rglob("*.html"):
        assert not fetches.search(page.read_text()), page
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"""url\(["']?(?:https?:)?//|@import ["']?http""", sheet.read_text()), sheet
