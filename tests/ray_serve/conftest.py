"""Tests with Ray Serve, which need a venv of their own: `make test-ray`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.ray_serving import Serving

if find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> None:
    """Look for no leaks: Ray keeps threads and connections of this process until it is shut down."""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    # Not above, because only this venv has Ray.
    from tests.support.ray_serving import serving_here

    with serving_here() as serving:
        yield serving
