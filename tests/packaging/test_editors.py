"""Editors and type checkers find every module right after a clone, before anything is built or installed."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cli", "connector", "lab", "router", "runner_mixin", "transports")
FOLDERS = (*PACKAGES, "src", "examples", "tests")


def _only_imports(source: str) -> str:
    """Return a file's imports, wherever they stand: pyright resolves these in seconds, all of the code in a
    minute.
    """
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(ast.unparse(node) for node in found)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / "clone"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, clone / folder, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", clone)
    for path in clone.rglob("*.py"):
        path.write_text(_only_imports(path.read_text()))
    return clone


@pytest.mark.slow
def test_pyright_resolves_every_import_between_our_packages(clone: Path, tmp_path: Path) -> None:
    (clone / "examples" / "planted.py").write_text("import kvferry.connector.there_is_no_such_module\n")
    # An interpreter that has no packages: with this one's, pyright would find an installed kvferry.
    venv.create(tmp_path / "venv", symlinks=True)
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(tmp_path / "venv/bin/python")],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=110,
    )
    report = json.loads(done.stdout)
    ours = {path.stem for path in (clone / "examples").iterdir()} | set(FOLDERS) | {"kvferry", ""}
    unresolved = {
        (Path(diagnostic["file"]).relative_to(clone).as_posix(), name)
        for diagnostic in report["generalDiagnostics"]
        if diagnostic.get("rule") == "reportMissingImports"
        for name in re.findall(r'Import "(.+?)" could not be resolved', diagnostic["message"])
        if name.split(".")[0] in ours
    }
    assert unresolved == {("examples/planted.py", "kvferry.connector.there_is_no_such_module")}
    assert report["summary"]["filesAnalyzed"] > 100
