"""An engine checks its block counts when it ends."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_block_that_is_held_and_free_is_reported(make_node: Any, caplog: pytest.LogCaptureFixture) -> None:
    node = make_node()
    node.add("a", range(8))
    node.step()
    (block, _) = node.core.parts.manager.get_block_ids("a-1")[0]
    pool = node.core.parts.manager._pool
    pool._free.append(pool.blocks[block])
    node.core.close()
    assert "lost track of its blocks: block pool is inconsistent: held or free, not both: " in caplog.text
    assert f"block_id={block}," in caplog.text
