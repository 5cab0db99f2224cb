"""The installed packages are those in the tree, have one name each, and are cheap to import."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import kvferry
from kvferry.connector import KVConnectorFactory, KVTransferConfig
from kvferry.connector.p2p.connector import connector_over
from kvferry.transports.registry import BUILT_IN

ROOT = Path(__file__).parents[2]
#: Where each package of `kvferry` lies in the tree.
PACKAGES = {
    "cli": ROOT / "cli",
    "connector": ROOT / "connector",
    "lab": ROOT / "lab",
    "router": ROOT / "router",
    "runner_mixin": ROOT / "runner_mixin",
    "transports": ROOT / "transports",
}


def _run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60)


def test_every_package_on_disk_is_listed() -> None:
    """An unlisted subpackage imports from a checkout and is missing from the wheel."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    on_disk = {
        "kvferry." + ".".join(init.parent.relative_to(folder.parent).parts)
        for folder in PACKAGES.values()
        for init in folder.rglob("__init__.py")
    }
    assert listed == on_disk | {"kvferry"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_linked_where_tools_look_for_it(package: str) -> None:
    assert (ROOT / "src" / "kvferry" / package).resolve() == PACKAGES[package]


def test_the_version_is_the_newest_of_the_changelog() -> None:
    """A release has a date there. What is not released yet is a `.dev` version, and is marked so."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest, status = re.findall(r"^## (\d+\.\d+\.\d+) (.+)$", changelog, flags=re.MULTILINE)[0]
    if status == "(unreleased)":
        assert kvferry.__version__ == f"{newest}.dev0"
    else:
        assert re.fullmatch(r"- \d{4}-\d\d-\d\d", status)
        assert kvferry.__version__ == newest


def test_the_entry_points_are_those_of_the_table_of_built_in_transports() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    targets = {scheme: f"kvferry.transports.{row.target}" for scheme, row in BUILT_IN.items()}
    assert points["kvferry.transports"] == targets
    names = {connector_over(scheme).__name__ for scheme in BUILT_IN}
    assert points["kvferry.connectors"].keys() == names
    for name, target in points["kvferry.connectors"].items():
        found = EntryPoint(name, target, "kvferry.connectors").load()
        assert found is KVConnectorFactory.get_connector_class(KVTransferConfig(name, "kv_both"))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_one_name(package: str) -> None:
    """Imported by its folder name it would be a second set of classes."""
    done = _run(f"import {package}", PACKAGES[package].parent)
    assert done.returncode != 0
    assert f"import kvferry.{package}, not {package}" in done.stderr


def test_importing_transports_does_not_import_torch(tmp_path: Path) -> None:
    done = _run(
        "import kvferry.transports, sys; print('torch' in sys.modules, 'zmq' in sys.modules)", tmp_path
    )
    assert done.stdout.strip() == "False False", done.stderr


def test_installing_kvferry_brings_small_packages_only() -> None:
    """PyTorch alone is gigabytes, and which of its builds is right is for the user to say
    (docs/decisions/0004).
    """
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {line.partition(">=")[0] for line in requirements} == {"msgpack", "numpy", "pyzmq", "xxhash"}


def test_transports_and_connectors_import_without_torch(tmp_path: Path) -> None:
    """Every module but those that need tensors, vLLM or Ray; `None` in `sys.modules` makes an import of torch
    fail.
    """
    code = (
        "import importlib, pkgutil, sys\n"
        "sys.modules['torch'] = None\n"
        "import kvferry.connector, kvferry.transports\n"
        "for package in (kvferry.transports, kvferry.connector):\n"
        "    errors = []\n"
        "    walk = pkgutil.walk_packages(package.__path__, package.__name__ + '.', onerror=errors.append)\n"
        "    for name in (module.name for module in walk):\n"
        "        if not name.startswith(tuple('kvferry.connector.' + each for each in ('ray', 'stores.', 'testing', 'vllm.'))):\n"
        "            importlib.import_module(name)\n"
        "    print(errors)"
    )
    done = _run(code, tmp_path)
    assert done.stdout.splitlines() == ["[]", "['kvferry.connector.testing']"], done.stdout + done.stderr


@pytest.mark.parametrize("package", ["kvferry.connector.testing", "kvferry.runner_mixin"])
def test_a_package_that_needs_torch_says_how_to_install_it(package: str, tmp_path: Path) -> None:
    done = _run(f"import sys; sys.modules['torch'] = None; import {package}", tmp_path)
    assert done.returncode != 0
    assert f"{package} cannot be imported: PyTorch is not installed" in done.stderr
    assert "pip install '.[torch]'" in done.stderr


def test_importing_the_connector_opens_nothing(tmp_path: Path) -> None:
    code = (
        "import os, threading\n"
        "before = set(os.listdir('/proc/self/fd'))\n"
        "import kvferry.connector\n"
        "after = set(os.listdir('/proc/self/fd'))\n"
        "import sys; print(len(after - before), threading.active_count(), 'torch' in sys.modules)"
    )
    done = _run(code, tmp_path)
    assert done.stdout.split() == ["0", "1", "False"], done.stdout + done.stderr
