"""TLS of the `tcp` transport: which nodes are admitted, what is wrong with which file, and files that
change.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.transports import Connected, PeerLost
from kvferry.transports.errors import ConfigurationError, PeerLostError, PeerRefusedError
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.tcp.options import Address
from kvferry.transports.testing import World, pairs_of
from kvferry.transports.testing.certificates import Authority
from kvferry.transports.testing.harness import HELD, PAGE, Node

ON = {"tls": "on"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The options of a node with another CA."""
    return Authority.make(tmp_path_factory.mktemp("other"), "other").issue("stranger")


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> dict[str, str]:
    return authority.issue("node", "IP:127.0.0.1", "DNS:localhost", "DNS:n1.nodes.example")


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    """`(**options)` → a node."""
    with ExitStack() as stack:

        def make(**options: Any) -> Node:
            world = World(lambda: TcpTransport(options))
            stack.callback(world.close)
            return world.node(PAGE)

        yield make


def connect(listener: Node, node: Node) -> list[Any]:
    """Connect a node to a listener. Returns the first event of each, if there is one."""
    world = World(TcpTransport, [listener, node])
    node.endpoint.start_connect(listener.endpoint.listen(""), timeout_s=10)
    world.serve(lambda: bool(node.history))
    world.serve_quietly()
    return [events[0] if events else None for events in (listener.history, node.history)]


# -- who is admitted ---------------------------------------------------------------------------------


def test_two_nodes_with_the_same_ca_exchange_bytes(
    make_node: Callable[..., Node], certificate: dict[str, str]
) -> None:
    one, other = (make_node(**ON, **certificate) for _ in range(2))
    world = World(TcpTransport, [one, other])
    link = world.link(one, other)
    one.transport.guards.set(HELD.index, HELD.value)
    ended = world.read(link, pairs_of((0, 0, PAGE)), HELD)
    assert ended.error is None
    assert ended.mechanism == "tcp+tls"


@pytest.mark.parametrize("strange_side", ["listener", "node"])
def test_a_certificate_of_another_ca_is_refused(
    make_node: Callable[..., Node],
    certificate: dict[str, str],
    stranger: dict[str, str],
    strange_side: str,
) -> None:
    options = {"listener": certificate, "node": certificate, strange_side: stranger}
    seen = connect(make_node(**ON, **options["listener"]), make_node(**ON, **options["node"]))
    assert not any(isinstance(event, Connected) for event in seen)
    assert isinstance(seen[1], PeerLost)
    assert isinstance(seen[1].error, PeerRefusedError | PeerLostError)
    if strange_side == "listener":
        assert "tls_ca" in str(seen[1].error)


def test_a_client_without_a_certificate_is_refused(
    make_node: Callable[..., Node], certificate: dict[str, str]
) -> None:
    listener = make_node(**ON, **certificate)
    address = Address.parse(listener.endpoint.listen(""))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificate["tls_ca"])

    def talk() -> bytes:
        with (
            socket.create_connection((address.host, address.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(b"hello")
            return client.recv(1)

    with ThreadPoolExecutor(1) as thread:
        said = thread.submit(talk)
        World(TcpTransport, [listener]).serve(said.done)
    assert isinstance(said.exception(), OSError)
    assert not listener.history


def test_a_plaintext_stranger_gets_nothing(
    make_node: Callable[..., Node], certificate: dict[str, str]
) -> None:
    listener = make_node(**ON, **certificate)
    address = Address.parse(listener.endpoint.listen(""))
    with socket.create_connection((address.host, address.port)) as client:
        client.sendall(b"kvferry-tcp, please")
        client.settimeout(0.01)
        heard = b""
        for _ in range(1000):
            listener.endpoint.wait_events(0.01)
            try:
                data = client.recv(4096)
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
            if not data:
                break
            heard += data
    assert b"kvferry" not in heard


def test_the_certificate_must_name_the_host(make_node: Callable[..., Node], authority: Authority) -> None:
    elsewhere = authority.issue("elsewhere", "IP:192.0.2.1")
    listener = make_node(**ON, **elsewhere)
    seen = connect(listener, make_node(**ON, **elsewhere))
    assert isinstance(seen[1], PeerLost)
    assert isinstance(seen[1].error, PeerRefusedError)
    assert "127.0.0.1" in str(seen[1].error)
    lenient = make_node(**ON, **elsewhere, tls_verify_host=False)
    assert isinstance(connect(listener, lenient)[1], Connected)


@pytest.mark.parametrize(
    ("names", "is_admitted"),
    [("n1.nodes.example", True), ("*.nodes.example, other", True), ("*.example", False), ("n2", False)],
)
@pytest.mark.parametrize("strict_side", ["listener", "node"])
def test_peer_names_narrow_down_who_is_admitted(
    make_node: Callable[..., Node],
    certificate: dict[str, str],
    strict_side: str,
    names: str,
    is_admitted: bool,
) -> None:
    strict = {"tls_peer_names": names}
    listener, node = (
        make_node(**ON, **certificate, **(strict if side == strict_side else {}))
        for side in ("listener", "node")
    )
    seen = connect(listener, node)
    assert isinstance(seen[1], Connected if is_admitted else PeerLost)
    assert (seen[0] is not None) == is_admitted


# -- when TLS is needed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"), [({}, "tls"), ({"tls": "off"}, "tls"), ({"allow_plaintext": True}, "tls")]
)
def test_plaintext_beyond_loopback_is_refused(
    make_node: Callable[..., Node], options: dict[str, Any], key: str
) -> None:
    node = make_node(bind_host="0.0.0.0", advertise_host="h", **options)
    with pytest.raises(ConfigurationError, match="allow_plaintext") as caught:
        node.endpoint.listen("")
    assert caught.value.key == key


def test_plaintext_beyond_loopback_can_be_allowed(make_node: Callable[..., Node]) -> None:
    node = make_node(bind_host="0.0.0.0", advertise_host="h", tls="off", allow_plaintext=True)
    assert node.endpoint.listen("").startswith("tcp://h:")


def test_a_listener_beyond_loopback_uses_tls(
    make_node: Callable[..., Node], certificate: dict[str, str]
) -> None:
    node = make_node(bind_host="0.0.0.0", advertise_host="h", **certificate)
    assert node.endpoint.listen("").endswith("?tls=on")
    assert not make_node(**certificate).endpoint.listen("").endswith("?tls=on"), "on loopback auto means off"


@pytest.mark.parametrize(
    ("address", "options"),
    [
        ("tcp://192.0.2.1:4", {}),
        ("tcp://192.0.2.1:4", {"tls": "off"}),
        ("tcp://127.0.0.1:4?tls=on", {}),
        ("tcp://127.0.0.1:4", ON),
    ],
)
def test_a_node_that_needs_tls_does_not_connect_without(
    make_node: Callable[..., Node], certificate: dict[str, str], address: str, options: dict[str, Any]
) -> None:
    node = make_node(**(certificate if options == ON else {}), **options)
    node.endpoint.start_connect(address, timeout_s=10)
    World(TcpTransport, [node]).serve(lambda: bool(node.history))
    (lost,) = node.history
    assert isinstance(lost, PeerLost)
    assert isinstance(lost.error, PeerRefusedError)
    assert "tls" in str(lost.error)


# -- files -------------------------------------------------------------------------------------------


def refused(options: dict[str, str]) -> ConfigurationError:
    """Return the error of a node with these options."""
    with pytest.raises(ConfigurationError) as caught:
        TcpTransport(options).close()
    return caught.value


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_the_three_files_go_together(certificate: dict[str, str], missing: str) -> None:
    error = refused({key: value for key, value in certificate.items() if key != missing})
    assert error.key == missing
    assert missing in str(error)
    assert refused(dict(ON)).key == "tls_cert"


@pytest.mark.parametrize("key", ["tls_cert", "tls_key", "tls_ca"])
def test_a_file_that_cannot_be_used_is_named(certificate: dict[str, str], key: str, tmp_path: Path) -> None:
    truncated = Path(certificate[key]).read_bytes()[:150]
    for name, content in (
        *(("missing", None), ("a\0path", None), ("empty", b""), ("garbage", b"no certificate")),
        *(("binary", bytes(range(256))), ("truncated", truncated)),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        error = refused({**certificate, key: str(path)})
        assert (error.key, error.value) == (key, str(path))
        assert key in str(error)
        assert repr(name)[1:-1] in str(error)
    assert refused({**certificate, key: str(tmp_path)}).key == key, "a folder"


def test_a_key_that_needs_a_password_is_refused(certificate: dict[str, str], tmp_path: Path) -> None:
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", certificate["tls_key"], "-aes256", "-passout", "pass:secret"]
    subprocess.run([*command, "-out", encrypted], check=True)
    error = refused({**certificate, "tls_key": str(encrypted)})
    assert (error.key, error.value) == ("tls_key", str(encrypted))
    assert "not encrypted" in str(error)


def test_a_certificate_with_a_weak_key_is_named(certificate: dict[str, str], tmp_path: Path) -> None:
    key, pem = str(tmp_path / "weak.key"), str(tmp_path / "weak.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:512", "-nodes", "-subj", "/CN=weak"]
    subprocess.run([*command, "-keyout", key, "-out", pem], check=True, capture_output=True)
    error = refused({"tls_cert": pem, "tls_key": key, "tls_ca": certificate["tls_ca"]})
    assert (error.key, error.value) == ("tls_cert", pem)
    assert "too small" in str(error)


@pytest.mark.parametrize("names", ["*", "node 7", "a.example,*.*.example", "10.0.0.7:5600"])
def test_a_peer_name_that_no_certificate_can_have_is_refused(names: str) -> None:
    error = refused({"tls_peer_names": names})
    assert (error.key, error.value) == ("tls_peer_names", names)
    assert "*.nodes.example" in str(error)


def test_a_key_of_another_certificate_is_refused(authority: Authority, certificate: dict[str, str]) -> None:
    error = refused({**certificate, "tls_key": authority.issue("other-node")["tls_key"]})
    assert error.key == "tls_key"
    assert "is not the key of the certificate" in str(error)


@pytest.mark.parametrize(
    ("days", "usage", "why"),
    [(-1, "", "expired"), (1, "serverAuth", "purpose"), (1, "clientAuth", "purpose")],
)
def test_a_certificate_that_no_peer_would_accept_is_refused(
    authority: Authority, days: int, usage: str, why: str
) -> None:
    error = refused(authority.issue(f"bad{days}{usage}", days=days, usage=usage))
    assert error.key == "tls_cert"
    assert why in str(error)


def test_a_certificate_of_another_ca_than_ours_is_refused(
    certificate: dict[str, str], stranger: dict[str, str]
) -> None:
    error = refused({**certificate, "tls_ca": stranger["tls_ca"]})
    assert error.key == "tls_cert"
    assert "does not verify" in str(error)


# -- files that change -------------------------------------------------------------------------------


def replace_file(target: str, source: str) -> None:
    """Replace a file as a well-behaved tool does, in one step."""
    shutil.copyfile(source, f"{target}.new")
    os.replace(f"{target}.new", target)


def test_changed_files_count_from_the_next_connection(
    make_node: Callable[..., Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A listener moves to another CA while it runs. Connections that exist live on."""
    before, after = (Authority.make(tmp_path, name).issue(f"{name}-node") for name in ("old", "new"))
    files = {key: str(tmp_path / key) for key in before}
    for key, name in files.items():
        shutil.copyfile(before[key], name)
    listener, early = make_node(**ON, **files), make_node(**ON, **before)
    link = World(TcpTransport, [listener, early]).link(listener, early)
    listener.transport.guards.set(HELD.index, HELD.value)

    replace_file(files["tls_key"], after["tls_key"])
    assert isinstance(connect(listener, make_node(**ON, **before))[1], Connected)
    assert "the old ones stay in use" in caplog.text, "the key does not match the old certificate"
    for key in ("tls_cert", "tls_ca"):
        replace_file(files[key], after[key])

    assert isinstance(connect(listener, make_node(**ON, **after))[1], Connected)
    assert isinstance(connect(listener, make_node(**ON, **before))[1], PeerLost)
    world = World(TcpTransport, [listener, early])
    assert world.read(link, pairs_of((0, 0, PAGE)), HELD).error is None
