"""`ucx` with `library="nixl"`: over the UCX inside NIXL's wheel. Each test has a process of its own, which loads one UCX."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")

needs_nixl = pytest.mark.skipif(
    find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None, reason="NIXL is not installed"
)


def said_by(code: str) -> str:
    """Run code in a process of its own; return what it printed, also to standard error."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).strip()


READ = """
import os
from kvferry.transports.registry import create_transport
from kvferry.transports.testing.harness import HELD, PAGE, World, pairs_of

def read(scheme, options):
    world = World(lambda: create_transport(scheme, options))
    link = world.pair(512 * PAGE)
    link.producer.transport.guards.set(HELD.index, HELD.value)
    ended = world.read(link, pairs_of((0, 0, 512 * PAGE)), HELD)
    is_right = bool((link.consumer.memory() == link.producer.memory()).all())
    print(ended.mechanism, ended.error, is_right)
    return world

before = dict(os.environ)
"""

LIBRARIES = """
with open("/proc/self/maps") as maps:
    loaded = {line.split()[-1] for line in maps if "/libucp" in line and "(deleted)" not in line}
print(len(loaded), all(".libs/libucp-" in path for path in loaded), dict(os.environ) == before)
"""


@needs_nixl
def test_one_ucx_is_loaded_and_shared_with_nixl_and_the_environment_is_unchanged() -> None:
    reads = """
worlds = [read("ucx", {"library": "nixl"}), read("nixl", {"refuse_tcp": False, "tls": "tcp"}), read("ucx", {})]
for world in worlds:
    world.close()
"""
    assert said_by(READ + reads + LIBRARIES).splitlines() == [
        "ucx:tcp None True",
        "nixl:UCX:tcp None True",
        "ucx:tcp None True",
        "1 True True",
    ]


@needs_nixl
def test_a_choice_that_comes_too_late_is_refused() -> None:
    code = """
from kvferry.transports.registry import create_transport
create_transport("ucx", {}).close()
create_transport("ucx", {"library": "nixl"})
"""
    assert "ConfigurationError: library='nixl': this process has already loaded another" in said_by(code)


def test_a_missing_wheel_is_named_with_the_command_that_installs_it() -> None:
    code = """
import sys
sys.modules["nixl_cu12"] = sys.modules["nixl_cu13"] = None
from kvferry.transports.registry import create_transport
create_transport("ucx", {"library": "nixl"})
"""
    said = said_by(code)
    assert "BackendUnavailableError: library='nixl' needs NIXL's wheel" in said
    assert "pip install nixl-cu12" in said
