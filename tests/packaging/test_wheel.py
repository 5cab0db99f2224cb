"""The wheel carries every package, the type marker and the entry points, and imports from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "*.so", "__pycache__", ".*cache")
    shutil.copytree(ROOT, source, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("kvferry-*.whl"))


@pytest.mark.slow
def test_wheel_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("connector", "transports", "runner_mixin"):
        sources = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert {f"kvferry/{source}" for source in sources} <= names
        assert f"kvferry/{package}/py.typed" in names
    assert any(name.startswith("kvferry/transports/_native") and name.endswith(".so") for name in names)
    assert not any(name.startswith(("examples/", "tests/")) for name in names)


@pytest.mark.slow
def test_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import kvferry.connector, kvferry.transports._native as native; print(native.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert str(tmp_path) in done.stdout, done.stderr
