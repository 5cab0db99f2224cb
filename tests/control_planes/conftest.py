"""Reference nodes with a tiny model, for the routers of other projects to stand in front of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.lab.servers import LaunchedProcess, Launcher, Spawn
from tests.support.answers import Answer
from tests.support.client import Client, assert_answers_like, wait_until
from tests.support.tiny_models import write_tiny_model
from tests.support.zygote import Zygote

START_TIMEOUT_S = 110.0
#: Offers that no node loads come free after this time.
LEASE_S = 4.0
#: Prompts and answers together have at most 512 tokens, one per byte.
NODE = (
    *("--threads", "1", "--num-blocks", "128", "--block-size", "16", "--max-num-batched-tokens", "64"),
    *("--connector", "shm", "--connector-option", f"lease_s={LEASE_S}"),
    # Longer than the routers take to notice it: they check every second.
    *("--drain-delay-s", "2.5", "--log-level", "warning"),
)  # fmt: skip


@dataclass
class Nodes:
    """Nodes by name.

    A name that begins with `p` is a prefill node, one that begins with `d` a decode node.
    """

    launcher: Launcher
    arguments: tuple[str, ...]
    clients: dict[str, Client]

    def __getitem__(self, name: str) -> Client:
        return self.clients[name]

    def start(self, *names: str, launcher: Launcher | None = None) -> Nodes:
        """Start those of these nodes that do not run, and wait until they serve. Returns this.

        Args:
            launcher: Starts them, each at the port that it had before. None: the launcher of the session.
        """
        started = {
            name: self._started(name, launcher or self.launcher)
            for name in names
            if name not in self.clients or not self.clients[name].process.is_running
        }
        self.launcher.wait_ready(started.values(), START_TIMEOUT_S)
        self.clients |= {name: Client(process) for name, process in started.items()}
        return self

    def _started(self, name: str, launcher: Launcher) -> LaunchedProcess:
        role = {"p": "prefill", "d": "decode"}[name[0]]
        before = self.clients.get(name)
        port = ("--port", str(before.process.port)) if before else ()
        return launcher.start_node(name, role, *self.arguments, *port)

    def assert_right(self, prompt: str, token_ids: Sequence[int], max_tokens: int, **fields: Any) -> None:
        """Fail unless this is the answer of a node that computed the prompt itself, apart from near-ties."""
        # The salt keeps the node from answering with blocks that came from another node.
        node = next(
            client for name, client in self.clients.items() if name[0] == "d" and client.process.is_running
        )
        answer = token_ids if isinstance(token_ids, Answer) else Answer(token_ids)
        assert_answers_like(node, prompt, answer, max_tokens, cache_salt="alone", **fields)

    def wait_whole(self) -> None:
        """Wait until no node has a request, an offer or a block in use."""
        for client in self.clients.values():
            if client.process.is_running:
                wait_until(client.is_whole)


@pytest.fixture(scope="session")
def spawn() -> Iterator[Spawn]:
    """Start processes without waiting for them to import PyTorch."""
    with Zygote() as zygote:
        yield zygote.spawn


@pytest.fixture(scope="session")
def launcher(spawn: Spawn) -> Iterator[Launcher]:
    with Launcher(spawn) as launcher:
        yield launcher


@pytest.fixture(scope="session")
def nodes(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    """The nodes that all tests here share; none of them runs yet."""
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return Nodes(launcher, ("--model", str(model), *NODE), {})
