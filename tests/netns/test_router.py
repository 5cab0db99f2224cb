"""Real nodes and a router on two hosts in miniature: one host is lost, and comes back."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvferry.lab.demo.near_tie import Expectation, assert_same_answer
from kvferry.lab.servers import LaunchedProcess, Launcher
from tests.support.client import DO_REMOTE_DECODE, Client, Reply, ask_alone, wait_until
from tests.support.tiny_models import write_tiny_model
from tests.support.zygote import EXAMPLES, Zygote

T = TypeVar("T")

INSIDE = Path(__file__).parent / "children" / "inside.py"
START_TIMEOUT_S = 110.0
LEASE_S = 6.0
MAX_TOKENS = 6
#: Seconds to recover. A connection attempt to a lost host takes 5 s, in addition to the lease.
MISSED_S = 30.0

#: What a router does about a lost host is tested in `tests/routing`; that hosts are lost, in
#: `test_two_hosts`.
pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]


class Host:
    """Starts processes on a host, and runs their clients in threads that are in the host's namespace."""

    def __init__(self, network: Any, host: str, launcher: Launcher, resources: ExitStack) -> None:
        self.address: str = network.address[host]
        self._namespace = network.namespace(host)
        self._launcher = launcher
        enter: Callable[[str], None] = runpy.run_path(str(INSIDE))["enter"]
        self._threads = resources.enter_context(
            ThreadPoolExecutor(4, initializer=enter, initargs=(self._namespace,))
        )

    def start(self, script: str, *arguments: str) -> LaunchedProcess:
        """Start one of the examples. Returns at once."""
        place = (self._namespace, str(EXAMPLES / script))
        return self._launcher.start(
            script, str(INSIDE), *place, "--host", "0.0.0.0", "--insecure-http", "--port", "0", *arguments
        )

    def url_of(self, node: LaunchedProcess) -> str:
        return f"http://{self.address}:{node.port}"

    def call(self, function: Callable[[], T]) -> T:
        return self._threads.submit(function).result()

    def call_all(self, functions: list[Callable[[], T]]) -> list[T]:
        """Call all functions concurrently."""
        return [future.result() for future in [self._threads.submit(function) for function in functions]]


@dataclass(frozen=True)
class Town:
    """A prefill node on the host `p`.

    On the host `d`: another one, the decode node, the router, and a single node.
    """

    p: Host
    d: Host
    far: Client
    near: Client
    decode: Client
    router: Client
    single: Client

    def ask(self, prompts: list[str]) -> list[Reply]:
        """Send all prompts to the router concurrently. Check that the answers are the single node's."""
        expected = [self.complete(self.single, prompt).token_ids for prompt in prompts]
        replies = self.d.call_all([lambda p=prompt: complete(self.router, p) for prompt in prompts])
        for prompt, reply, reference in zip(prompts, replies, expected, strict=True):
            assert_same_answer(prompt, reply.token_ids, reference, self.ask_alone)
        return replies

    def complete(self, client: Client, prompt: str, **fields: Any) -> Reply:
        host = self.p if client is self.far else self.d
        return host.call(lambda: complete(client, prompt, **fields))

    def ask_alone(self, prompt: str | Sequence[int], max_tokens: int) -> Expectation:
        return self.d.call(lambda: ask_alone(self.single)(prompt, max_tokens))

    def sees_far_node(self) -> bool:
        """Whether the router considers the prefill node on the other host healthy."""
        labels = f'{{role="prefill",url="{self.p.url_of(self.far.process)}"}}'
        return self.d.call(lambda: self.router.metric(f"kvferry_router_node_healthy{labels}")) == 1.0

    def wait_until_whole(self) -> None:
        """Wait until all blocks of all nodes are free. This takes a lease at most, and a reserve."""
        for host, client in ((self.p, self.far), (self.d, self.near), (self.d, self.decode)):
            wait_until(lambda host=host, client=client: host.call(client.is_whole), MISSED_S)


def complete(client: Client, prompt: str, **fields: Any) -> Reply:
    return client.complete(prompt, **{"max_tokens": MAX_TOKENS, **fields})


def node_arguments(connector: str, network: Any, host: str, folder: Path) -> list[str]:
    security: dict[str, dict[str, Any]] = {
        "zeromq": {"shared_secret_file": str(folder / "secret")},
        "ucx": {"allow_plaintext": True, "tls": "tcp", "net_devices": "lo"},
    }
    transport = json.dumps({"bind_host": network.address[host], **security[connector]})
    options = (f"transport_options={transport}", f"lease_s={LEASE_S}", "connect_timeout_s=3")
    return [
        *("--model", str(folder / "model"), "--threads", "1", "--num-blocks", "64", "--log-level", "warning"),
        *("--connector", connector, *(word for option in options for word in ("--connector-option", option))),
    ]


@contextmanager
def town(connector: str, network: Any, folder: Path, launcher: Launcher) -> Iterator[Town]:
    write_tiny_model(folder / "model")
    (folder / "secret").write_text("a secret that both hosts hold\n")
    (folder / "secret").chmod(0o600)
    with ExitStack() as resources:
        p, d = (Host(network, host, launcher, resources) for host in ("p", "d"))
        at_p, at_d = (node_arguments(connector, network, host, folder) for host in ("p", "d"))
        far = p.start("serve.py", "--role", "prefill", *at_p)
        near, decode = (d.start("serve.py", "--role", role, *at_d) for role in ("prefill", "decode"))
        single = d.start("serve.py", *at_d[: at_d.index("--connector")])
        launcher.wait_ready([far, near, decode, single], START_TIMEOUT_S)
        prefills = ("--prefill", p.url_of(far), "--prefill", d.url_of(near))
        router = d.start("router.py", *prefills, "--decode", d.url_of(decode), "--check-interval-s", "0.5")
        launcher.wait_ready([router], START_TIMEOUT_S)
        made = Town(p, d, *map(Client, (far, near, decode, router, single)))
        wait_until(made.sees_far_node)
        yield made


@pytest.mark.parametrize("connector", ["zeromq", "ucx"])
def test_a_host_is_lost_and_comes_back(connector: str, network: Any, tmp_path: Path) -> None:
    if connector == "ucx":
        pytest.importorskip("ucxx", reason="ucxx is not installed")
    with (
        Zygote() as zygote,
        Launcher(zygote.spawn) as launcher,
        town(connector, network, tmp_path, launcher) as made,
    ):
        prompts = [f"{index}: a ferry between two hosts. " * 4 for index in range(12)]
        replies = made.ask(prompts[:4])
        assert all(reply.transfer["num_blocks"] > 0 and not reply.transfer["error"] for reply in replies)
        # How many each of them gets depends on which one ends first.
        assert 0 < num_prompts_of(made, made.far) == 4 - num_prompts_of(made, made.near) < 4

        offered = made.complete(made.far, prompts[4], max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
        network.cut()
        made.ask(prompts[5:9])  # two of them go to the lost host first
        params = offered.body["kv_transfer_params"]
        recomputed = made.complete(made.decode, prompts[4], kv_transfer_params=params)
        expected = made.complete(made.single, prompts[4]).token_ids
        assert_same_answer(prompts[4], recomputed.token_ids, expected, made.ask_alone)
        assert recomputed.transfer["error"]
        wait_until(lambda: not made.sees_far_node(), MISSED_S)
        made.wait_until_whole()  # while the link is still cut

        network.mend()
        wait_until(made.sees_far_node, MISSED_S)
        before = num_prompts_of(made, made.far)
        # On a busy machine a node may be late for a health check again, and then the other one gets its
        # prompts.
        wait_until(
            lambda: bool(made.ask(prompts[9:11])) and num_prompts_of(made, made.far) > before, MISSED_S
        )
        made.wait_until_whole()


def num_prompts_of(made: Town, client: Client) -> float:
    host = made.p if client is made.far else made.d
    return host.call(lambda: client.metric("kvferry_engine_output_tokens_total"))
