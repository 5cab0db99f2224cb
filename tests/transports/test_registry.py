"""The registry creates a transport from a scheme, and imports nothing before that."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.transports.errors import BackendUnavailableError, ConfigurationError
from kvferry.transports.inproc import InProcTransport
from kvferry.transports.registry import available_transports, create_transport


def test_known_schemes_are_sorted_and_read_only() -> None:
    known = available_transports()
    assert list(known) == sorted(known)
    assert {"inproc", "shm"} <= set(known)
    with pytest.raises(TypeError):
        known["inproc"] = "mine:Transport"  # type: ignore[index]


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
def test_a_transport_is_created_with_its_options(scheme: str) -> None:
    transport = create_transport(scheme, {"num_guards": 7})
    assert transport.scheme == scheme
    assert transport.guards.num_guards == 7
    transport.close()


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'pigeon'.*inproc.*shm") as caught:
        create_transport("pigeon", {})
    assert caught.value.key == "transport"


def test_a_built_in_scheme_creates_its_transport() -> None:
    transport = create_transport("inproc", {})
    assert isinstance(transport, InProcTransport)
    transport.close()


@pytest.mark.parametrize("key", ["num_guards", "max_queued_bytes"])
def test_wrong_options_of_inproc_are_named(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        create_transport("inproc", {key: -1})
    assert caught.value.key == key


THIRD_PARTY = """
import sys
from importlib.metadata import EntryPoint
from kvferry.transports import registry
group = registry.ENTRY_POINT_GROUP
registry.entry_points = lambda group: [EntryPoint(sys.argv[1], sys.argv[2], group)]
try:
    registry.create_transport(sys.argv[1], {})
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("target", "answer"),
    [
        ("no_such_module:Transport", BackendUnavailableError.__name__),
        ("json:NoSuchClass", BackendUnavailableError.__name__),
        ("builtins:dict", ConfigurationError.__name__),
    ],
)
def test_a_broken_entry_point_is_a_typed_error(target: str, answer: str) -> None:
    command = [sys.executable, "-c", THIRD_PARTY, "mine", target]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith(answer), result.stdout + result.stderr


def test_no_transport_is_imported_early() -> None:
    script = (
        "import sys, kvferry.transports.registry as r; r.available_transports();"
        "print([m for m in ('torch', 'zmq', 'pytest', 'kvferry.transports.shm') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
