"""Importing the connector starts and opens nothing, with vLLM and without."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HAS_VLLM = find_spec("vllm") is not None
COST = """
import os, sys, threading
import vllm.distributed.kv_transfer.kv_connector.v1.base

def held():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))

before = held()
from kvferry.connector.vllm import KvferryConnector
assert held() == before, (before, held())
names = ("auto", "inproc", "nixl", "shm", "tcp", "ucx", "zeromq")
transports = {f"kvferry.transports.{name}" for name in names}
assert not transports & sys.modules.keys(), transports & sys.modules.keys()
"""
ABSENT = """
import sys
import kvferry.connector.vllm
from kvferry.transports.errors import BackendUnavailableError
try:
    kvferry.connector.vllm.KvferryConnector
except BackendUnavailableError as error:
    assert "pip install vllm" in str(error), error
else:
    sys.exit("it was found")
"""
DYNAMO = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from dynamo.vllm.kv_connector_protocols import KV_CONNECTOR_PROTOCOLS
assert "KvferryConnector" in KV_CONNECTOR_PROTOCOLS, KV_CONNECTOR_PROTOCOLS
"""
#: Where `make build/dynamo` puts Dynamo's package.
BUILT_DYNAMO = Path(__file__).parents[2] / "build" / "dynamo"


def _run(code: str, *folders: Path) -> None:
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_the_module_imports_neither_vllm_nor_torch():
    _run("import sys, kvferry.connector.vllm; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)")


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install():
    _run(ABSENT)


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_class_starts_and_opens_nothing():
    """vLLM's front end imports the class for its metrics, and never creates an instance."""
    _run(COST)


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.skipif(
    not BUILT_DYNAMO.is_dir(), reason="Dynamo is not installed; `make build/dynamo` gets its package"
)
def test_vllms_plugin_loader_registers_the_connector_with_dynamo():
    _run(DYNAMO, BUILT_DYNAMO)
