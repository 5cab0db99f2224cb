"""Settings of the tests of the command."""

from __future__ import annotations

from multiprocessing import forkserver
from pathlib import Path

import pytest

from kvferry.lab.moving import processes  # noqa: F401 - it sets what the server imports


@pytest.fixture(autouse=True, scope="session")
def _one_server_forks_for_all_tests() -> None:
    """Start the server that forks the ends of paths.

    It stays until this process ends, and is no leak of one test.
    """
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _no_configuration_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KVFERRY_CONFIG", raising=False)
