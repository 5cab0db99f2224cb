"""The options of `ucx`, settings that it refuses, and its errors for missing packages and networks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from kvferry.transports import Connected, Endpoint, PeerLost, Pool
from kvferry.transports.errors import BackendUnavailableError, ConfigurationError, PeerRefusedError
from kvferry.transports.ucx import UCXOptions, UCXTransport
from kvferry.transports.ucx.options import Address

needs_ucxx = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")

Make = Callable[..., Endpoint]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make endpoints. Their transports are closed after the test."""
    with ExitStack() as stack:

        def make_one(**options: object) -> Endpoint:
            transport = UCXTransport(options)
            stack.callback(transport.close)
            return transport.register(Pool([transport.allocate(4096).segment]))

        yield make_one


WITHOUT_UCXX = """
import sys
sys.modules["ucxx"] = None
from kvferry.transports.registry import create_transport
try:
    create_transport("ucx", {})
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_UCXX], capture_output=True, text=True, check=True)
    assert BackendUnavailableError.__name__ in done.stdout
    assert "`pip install ucxx-cu12`, or `ucxx-cu13` beside PyTorch for CUDA 13" in done.stdout


def test_importing_the_backend_does_not_import_ucxx() -> None:
    code = "import sys, kvferry.transports.ucx, kvferry.connector.p2p.connector; print('ucxx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@needs_ucxx
def test_the_environment_is_unchanged_and_nothing_is_printed() -> None:
    code = (
        "import os; before = dict(os.environ)\n"
        "from kvferry.transports.ucx import UCXTransport\n"
        "UCXTransport().close(); print(dict(os.environ) == before)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "True"
    assert done.stderr == ""


@needs_ucxx
def test_if_tcp_is_refused_a_machine_without_rdma_reports_it_at_the_start() -> None:
    if any(os.scandir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else False:
        pytest.skip("this machine has RDMA devices")
    with pytest.raises(ConfigurationError, match=r"tls=.*\^tcp") as caught:
        UCXTransport({"tls": "^tcp"})
    assert caught.value.key == "tls"


def connect(dialer: Endpoint, listener: Endpoint) -> Connected | PeerLost:
    """Connect, and return the first event of the connection."""
    dialer.start_connect(listener.listen(""), timeout_s=10)
    seen: list[object] = []
    while not seen:
        listener.wait_events(0.01)
        seen += dialer.wait_events(0.01)
    assert isinstance(seen[0], Connected | PeerLost)
    return seen[0]


@needs_ucxx
@pytest.mark.parametrize("refuses", ["listener", "dialer"])
def test_a_peer_that_only_tcp_reaches_is_refused_with_the_options_to_change(
    make: Make, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    nodes = {name: make() for name in ("listener", "dialer", "friend")}
    # There is no RDMA here. The node starts as if there were, and then finds that it cannot reach the peer
    # with it.
    monkeypatch.setattr("kvferry.transports.ucx.transport.require_network", lambda _: "ucx:rc_mlx5")
    nodes[refuses] = make(tls="^tcp")
    lost = connect(nodes["dialer"], nodes["listener"])
    assert isinstance(lost, PeerLost)
    assert isinstance(lost.error, PeerRefusedError)
    assert "change tls or net_devices" in str(lost.error)
    if refuses == "dialer":  # the listener still accepts others
        assert isinstance(connect(nodes["friend"], nodes["listener"]), Connected)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"slice_bytes": 1}, "slice_bytes"),
        ({"window_slices": 65}, "window_slices"),
        ({"slice_bytes": 64 << 20, "window_slices": 64}, "window_slices"),
        ({"port": 70000}, "port"),
        ({"port_range": "9-1"}, "port_range"),
        ({"peer_timeout_s": 0}, "peer_timeout_s"),
        ({"tls": 3}, "tls"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key) as caught:
        UCXOptions(**options)  # type: ignore[arg-type]
    assert caught.value.key == key


@needs_ucxx
@pytest.mark.parametrize("options", [{"tls": "nonsense"}, {"tls": "self,sm"}, {"net_devices": "nope"}])
def test_settings_that_leave_ucx_no_transport_are_refused_at_the_start(options: dict[str, object]) -> None:
    """Shared memory does not count, because with it UCX does not survive a peer's death."""
    with pytest.raises(ConfigurationError, match="UCX"):
        UCXTransport(options)


@needs_ucxx
def test_other_machines_need_allow_plaintext(make: Make) -> None:
    endpoint = make()
    for call in (
        lambda: endpoint.listen("ucx://0.0.0.0:0"),
        lambda: endpoint.start_connect("ucx://192.0.2.77:5600", timeout_s=1),
    ):
        with pytest.raises(ConfigurationError, match="allow_plaintext"):
            call()


@needs_ucxx
def test_a_wildcard_needs_an_advertised_host(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="advertise_host"):
        make(allow_plaintext=True, bind_host="0.0.0.0").listen("")
    address = make(allow_plaintext=True, bind_host="0.0.0.0", advertise_host="localhost").listen("")
    assert Address.parse(address).host == "localhost"


@needs_ucxx
@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_hosts_may_be_ipv6_or_names(make: Make, host: str) -> None:
    assert isinstance(connect(make(), make(bind_host=host)), Connected)
