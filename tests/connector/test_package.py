"""`import kvferry.connector` is quick, opens nothing, and provides every name that it lists."""

from __future__ import annotations

import subprocess
import sys

import kvferry.connector


def test_every_listed_name_exists() -> None:
    assert sorted(kvferry.connector.__all__) == list(kvferry.connector.__all__)
    for name in kvferry.connector.__all__:
        assert getattr(kvferry.connector, name).__module__.startswith("kvferry.connector.")


def test_importing_opens_nothing_and_does_not_import_torch() -> None:
    code = """
import os, sys, threading
before = set(os.listdir("/proc/self/fd"))
import kvferry.connector
assert set(os.listdir("/proc/self/fd")) == before, "a descriptor was opened"
assert threading.active_count() == 1, "a thread was started"
heavy = {"torch", "zmq", "socket", "msgpack"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_program_that_forgets_to_shut_its_node_down_still_ends() -> None:
    code = """
from kvferry.connector.testing import CacheShape, ModelFreeNode, engine_config
node = ModelFreeNode(engine_config("shm"), CacheShape())
node.prefill("p", 10)
node.step()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
