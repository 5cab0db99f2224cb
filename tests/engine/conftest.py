"""Tiny models that the engine's tests share, and the engine on top of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.testing import write_tiny_model

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Family → folder of a tiny random model of it, written once."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        path: Path = root / family
        return path if path.exists() else write_tiny_model(path, family)

    return folder
