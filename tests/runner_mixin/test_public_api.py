"""The package exports exactly the names that it lists."""

from __future__ import annotations

import types

from kvferry import runner_mixin


def test_all_lists_the_exported_names():
    public = {
        name
        for name, value in vars(runner_mixin).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert public == set(runner_mixin.__all__)
