"""What is published: the sdist gives a wheel that works with its dependencies alone, and that wins over a
clone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

import kvferry
from tests.support.tiny_models import write_tiny_model

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(".venv*", ".git", "build", "*.egg-info", "*.so", "__pycache__", ".*cache")

#: Prints where kvferry came from, and whether with its compiled part.
WHERE = "import kvferry, kvferry.transports.copying as copy; print(kvferry.__file__, copy.IS_COMPILED)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist, and a wheel from that sdist alone. Return the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=IGNORED)
    _python("-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    (sdist,) = folder.glob("kvferry-*.tar.gz")
    (wheel,) = folder.glob("kvferry-*.whl")
    assert sdist.name == f"kvferry-{kvferry.__version__}.tar.gz"
    return wheel


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose folder has the name of the package, as `git clone` makes it; nothing is built in it."""
    return Path(shutil.copytree(ROOT, tmp_path / "kvferry", symlinks=True, ignore=IGNORED))


@pytest.fixture
def fresh_python(tmp_path: Path) -> str:
    """An interpreter without kvferry, which finds what kvferry depends on where this one has it."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return str(tmp_path / "venv" / "bin" / "python")


def _python(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def _pip(*arguments: str) -> None:
    _python("-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def _run(python: str, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code with the current folder first on the path, as an interactive Python has it."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", code], cwd=cwd, env=without, capture_output=True, text=True, timeout=60
    )


@pytest.mark.slow
def test_wheel_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"kvferry/__init__.py", "kvferry/py.typed"} <= names
    links = [path for path in (ROOT / "src" / "kvferry").iterdir() if path.is_symlink()]
    assert links
    for package in (link.name for link in links):
        folder = (ROOT / "src" / "kvferry" / package).resolve()
        sources = {str(path.relative_to(folder.parent)) for path in folder.rglob("*.py")}
        assert sources
        assert {f"kvferry/{source}" for source in sources} <= names
        assert f"kvferry/{package}/py.typed" in names
    assert {"kvferry/transports/_native.abi3.so", "kvferry/router/seen/page.html"} <= names
    assert "-cp311-abi3-" in wheel.name
    assert not any(name.startswith(("examples/", "tests/")) or name.endswith(".c") for name in names)


@pytest.mark.full
def test_wheel_imports_without_the_checkout(wheel: Path, fresh_python: str, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    done = _run(fresh_python, f"import kvferry.connector; {WHERE}", cwd=tmp_path / "unpacked")
    file, is_compiled = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path / "unpacked")
    assert is_compiled == "True"


@pytest.mark.slow
def test_the_wheel_works_with_its_dependencies_alone(wheel: Path, tmp_path: Path) -> None:
    """In a venv with nothing else, so without PyTorch. The dependencies are links, which needs no network."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    _pip("--python", python, "install", "--no-deps", "--no-index", str(wheel))
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in (requirement.partition(">=")[0] for requirement in project["dependencies"]):
        found = distribution(name)
        for part in {file.parts[0] for file in found.files or ()} - {".."}:
            (site_packages / part).symlink_to(Path(str(found.locate_file(part))))
    done = _run(python, (ROOT / "tools" / "release" / "check_install.py").read_text(), cwd=tmp_path)
    assert done.stdout.startswith(f"kvferry {kvferry.__version__} works"), done.stderr


@pytest.mark.full
def test_the_demo_runs_from_the_wheel_in_an_empty_folder(
    wheel: Path, fresh_python: str, tmp_path: Path
) -> None:
    """It starts `kvferry serve` and `kvferry router`. The connector's module lies in the current folder."""
    _pip("--python", fresh_python, "install", "--no-deps", "--no-index", str(wheel))
    write_tiny_model(tmp_path / "model")
    folder = tmp_path / "empty"
    folder.mkdir()
    shutil.copy(ROOT / "examples" / "layer_store.py", folder / "a_connector.py")
    # Nodes must not import this one instead of Python's.
    (folder / "queue.py").write_text("raise ImportError('the queue of the current folder')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [
            *(str(Path(fresh_python).with_name("kvferry")), "demo", "--model", "../model"),
            *("--prompt", "a prompt of some blocks, so that there is something to load", "--max-tokens", "2"),
            *("--connector", "LayerStoreConnector", "--connector-module", "a_connector"),
            *("--connector-option", "folder=store", "--json", "out.json"),
            *("--serve-args", "--threads 1 --num-blocks 64"),
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = json.loads((folder / "out.json").read_text())["requests"]
    assert record["identical"]
    assert record["loaded_tokens"] > 0


@pytest.mark.full
def test_an_installed_wheel_wins_over_a_clone_in_the_current_folder(
    wheel: Path, clone: Path, fresh_python: str
) -> None:
    _pip("--python", fresh_python, "install", "--no-deps", "--no-index", str(wheel))
    done = _run(fresh_python, WHERE, cwd=clone.parent)
    file, is_compiled = done.stdout.split()
    assert "site-packages" in file
    assert is_compiled == "True"
    assert done.stderr == ""


@pytest.mark.full
def test_an_editable_install_wins_over_the_folder_of_its_clone(clone: Path, fresh_python: str) -> None:
    _pip("--python", fresh_python, "install", "--no-deps", "--no-build-isolation", "--editable", str(clone))
    done = _run(fresh_python, WHERE, cwd=clone.parent)
    assert done.stdout.split() == [str(clone / "src" / "kvferry" / "__init__.py"), "True"]
    assert done.stderr == ""
    done = _run(fresh_python, "import connector", cwd=clone.parent)
    assert "No module named 'connector'" in done.stderr


@pytest.mark.full
def test_a_clone_that_is_imported_by_accident_says_how_to_install_it(clone: Path, fresh_python: str) -> None:
    done = _run(fresh_python, WHERE, cwd=clone.parent)
    assert done.stdout.split() == ["None", "False"]
    assert str(clone / "transports") in done.stderr
    assert "not an installed kvferry: run `pip install .` in the clone" in done.stderr
