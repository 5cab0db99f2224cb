"""The built-in transports as parameters of a test."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import pytest

from ..registry import BUILT_IN


def built_in(*, without: Collection[str] = ()) -> list[Any]:
    """Return one `pytest.param` per built-in transport.

    Tests skip a transport whose Python package is missing.
    """
    return [_param(scheme) for scheme in BUILT_IN if scheme not in without]


def _param(scheme: str) -> Any:
    package = BUILT_IN[scheme].package
    is_missing = bool(package) and find_spec(package) is None
    return pytest.param(scheme, marks=pytest.mark.skipif(is_missing, reason=f"{package} is not installed"))
