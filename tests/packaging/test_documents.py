"""What the documents promise: code that runs, figures that were measured, and links that lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import kvferry.connector
import kvferry.connector.testing
from kvferry.connector.handoff.messages import OLDEST_VERSION, PROTOCOL_VERSION
from kvferry.connector.planning.compatibility import DESCRIPTION_VERSION
from kvferry.transports.nixl import wire as nixl_wire
from kvferry.transports.shm import hello as shm_hello
from kvferry.transports.tcp import wire as tcp_wire
from kvferry.transports.ucx import wire as ucx_wire
from kvferry.transports.zeromq import wire as zeromq_wire

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docker").glob("*.md")])


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def _anchors(path: Path) -> set[str]:
    """Return the anchors that a Markdown viewer makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readmes_python_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "5 blocks arrived as they were sent\n", done.stderr


def test_the_readmes_figures_are_those_of_the_benchmarks() -> None:
    figures = set(re.findall(r"(\d\.\d\d) ×", README.replace("**", "")))
    assert len(figures) >= 10
    benchmarks = re.findall(r"\d\.\d\d", (ROOT / "docs" / "benchmarks.md").read_text())
    assert figures <= set(benchmarks)


def test_the_page_about_upgrades_names_the_versions_of_today() -> None:
    page = (ROOT / "docs" / "upgrades.md").read_text()
    assert f"| handoff protocol | {PROTOCOL_VERSION}, and still {OLDEST_VERSION} " in page
    transports = {
        "shm": shm_hello.VERSION,
        **{name: wire.PROTOCOL_VERSION for name, wire in (("zeromq", zeromq_wire), ("ucx", ucx_wire))},
        **{name: wire.PROTOCOL_VERSION for name, wire in (("tcp", tcp_wire), ("nixl", nixl_wire))},
    }
    named = ", ".join(f"`{name}` {version}" for name, version in transports.items())
    assert f"| wire format of a transport ({named}) |" in page
    assert f"(the field `protocol`) | {DESCRIPTION_VERSION} |" in page


def test_the_changelog_has_one_line_per_change() -> None:
    _, _, entries = (ROOT / "CHANGELOG.md").read_text().partition("## Unreleased\n")
    for line in filter(None, entries.splitlines()):
        assert line.startswith(("- ", "## ", "### ")), line
        assert len(line) <= 160, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(document.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (document.parent / path) if path else document
        if not found.exists() or (anchor and anchor not in _anchors(found)):
            dead.append(target)
    assert not dead


class TestWritingAConnector:
    """The guide's code, as an author would use it."""

    BLOCKS = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "writing-a-connector.md").read_text(), flags=re.DOTALL
    )

    def block(self, beginning: str) -> str:
        (found,) = (block for block in self.BLOCKS if block.startswith(beginning))
        return found

    def test_figures_are_reported_as_shown(self) -> None:
        names: dict[str, Any] = {"time": time, **vars(kvferry.connector)}
        exec(self.block("class MyWorker"), names)  # noqa: S102 - the guide's own code
        worker = names["MyWorker"]()
        assert worker.get_kv_connector_stats() is None
        worker.start_load_kv(None)
        (record,) = worker.get_kv_connector_stats().transfers
        assert (record.transport, record.mechanism, record.num_bytes) == ("file", "read", 4096)

    def test_two_nodes_of_a_test_are_a_handoff(self) -> None:
        names: dict[str, Any] = {"torch": torch, **vars(kvferry.connector.testing)}
        names["config"] = kvferry.connector.testing.engine_config("shm")
        exec(self.block("with ModelFreeNode"), names)  # noqa: S102 - likewise

    def test_the_suite_runs_as_shown(self, tmp_path: Path) -> None:
        code = self.block("class TestMine")
        code = code.replace("MyConnector", "FileConnector").replace(
            "my_package.my_module", "custom_connector"
        )
        header = "import pytest\nfrom kvferry.connector.testing import ConnectorConformance\n\n"
        (tmp_path / "test_mine.py").write_text(header + code)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "test_mine.py", "-k", "damaged or unknown_option"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout
        assert " passed" in done.stdout
        assert "skipped" not in done.stdout


def test_each_file_of_the_reading_guide_begins_with_its_promises() -> None:
    rows = re.findall(
        r"^\| \d+ \| `(.*?)` \|", (ROOT / "docs" / "reading-guide.md").read_text(), flags=re.MULTILINE
    )
    assert len(rows) == 14
    for name in rows:
        documented = ast.get_docstring(ast.parse((ROOT / name).read_text())) or ""
        assert len(documented.splitlines()) > 3, name
