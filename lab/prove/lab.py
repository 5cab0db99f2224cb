"""The servers under test: a pair with the connector, a single server without one, and what can be done to
them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvferry.lab.client import served_model
from kvferry.lab.demo.near_tie import Expectation
from kvferry.lab.servers import VLLM_ENVIRONMENT, VLLM_SERVE, LaunchedProcess, Launcher, free_port, start_vllm
from kvferry.transports.errors import ConfigurationError

from .client import ENCODER_USAGE, LOADED, LOADED_IMAGES, USAGE, Asking, Client, Form
from .models import TOKENS, write_other_weights
from .outcomes import Expected, Outcome, Reply, Rest, Verdict, judge
from .presets import SERVERS, Connector, Places, with_places

#: Arguments of every server that the kit starts. The pool is small, so that blocks are soon used again.
ARGUMENTS: Final = ("--num-gpu-blocks-override", "96", "--max-model-len", "2048", "--max-num-seqs", "8")
#: The same for the tiny models, on CPUs and GPUs.
TINY_ARGUMENTS: Final = ("--dtype", "float32", "--block-size", "32", "--enforce-eager")
TINY_TEXT_ARGUMENTS: Final = (*TINY_ARGUMENTS, "--skip-tokenizer-init")
#: vLLM remembers as many encoder outputs as one step has tokens. So other images soon take their place.
TINY_IMAGE_ARGUMENTS: Final = (*TINY_ARGUMENTS, "--max-num-batched-tokens", "256")
#: Variables of every server. The user's environment overrides them.
ENVIRONMENT: Final[Mapping[str, str]] = {
    **VLLM_ENVIRONMENT,
    "VLLM_SERVER_DEV_MODE": "1",  # POST /collective_rpc and /reset_prefix_cache, for weights that change in memory
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
}

SERVED_NAME: Final = "model"
#: Tokens of a prompt under test: a few blocks, which a load moves in one piece.
PROMPT_TOKENS: Final = 300
ANSWER_TOKENS: Final = 8
#: More images than the 255 blocks of the presets' encoder pool hold, one per block with the tiny model, and
#: than a decode server remembers; and the tokens beside each.
OTHER_IMAGES: Final = 260
OTHER_IMAGE_TOKENS: Final = 30
#: Seconds between two looks at a pool that has not come back.
POLL_S: Final = 0.25
#: Seconds that a pool gets beyond the lease.
SLACK_S: Final = 10.0
#: A file in which vLLM's OffloadingConnector keeps its memory, in `/proc/PID/maps`.
_OFFLOADED: Final = re.compile(r"/dev/shm/vllm_offload_.*\.mmap$", re.MULTILINE)


class SingleServerError(Exception):
    """The single server, which no fault touches, does not answer. So nothing can be judged any more."""


class NotApplicableError(Exception):
    """A row makes no sense here. The message says why."""


@dataclass(frozen=True)
class Settings:
    """What the options say.

    Attributes:
        urls: Side, or `alone` → a server that runs already; empty: the kit starts all of them.
        serve_arguments: Further arguments of every server.
        environments: Side, or `alone` → further variables.
        model: A folder or a name; `tiny` has been replaced by a folder.
        router_url: A router or proxy in front of the pair; empty: `kvferry router` is started.
        folder: Where logs, models and shared files go.
        deadline_s: An answer that takes longer is a hang.
        start_s: Seconds that a server may take to start.
        tolerance: Two logits that differ by less are a near-tie.
    """

    connector: Connector
    policy: str
    model: str
    is_tiny: bool
    folder: Path
    urls: Mapping[str, str] = field(default_factory=dict)
    serve_arguments: Sequence[str] = ()
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    router_url: str = ""
    deadline_s: float = 40.0
    start_s: float = 600.0
    tolerance: float = 2e-4


@dataclass
class Server:
    """One server: its client, and its process if the kit started it.

    Attributes:
        side_port: What `{port}` stands for in its configuration.
        num_starts: How often it was started.
    """

    name: str
    client: Client
    launched: LaunchedProcess | None = None
    side_port: int = 0
    num_starts: int = 1

    @property
    def process(self) -> LaunchedProcess:
        """Its process. Raises NotApplicableError: the kit did not start it."""
        if self.launched is None:
            raise NotApplicableError(
                f"needs the process of the {self.name} server, which the kit did not start"
            )
        return self.launched

    def trouble(self) -> str:
        """Say what is wrong with it; empty if nothing is."""
        if self.launched is not None and not self.launched.is_running:
            return (
                self.launched.describe_end(1.0)
                .partition("\n")[0]
                .rstrip(":; ")
                .removesuffix("the end of its log")
            )
        try:
            self.client.get("/health")
        except OSError as error:
            return f"/health: {error}"
        return ""


def _take_names_of_memory(process: LaunchedProcess) -> None:
    """Unlink the files in which vLLM's OffloadingConnector keeps its memory, as soon as a server has mapped
    them.

    vLLM unlinks them when its engine ends in good order. After `kill -9` they would stay in `/dev/shm`, with
    all of their memory; without a name the kernel frees them with the last process.
    """
    for pid in process.pids:
        with contextlib.suppress(OSError):  # a process may end in between
            for path in set(_OFFLOADED.findall(Path(f"/proc/{pid}/maps").read_text())):
                os.unlink(path)


class Lab:
    """The servers of one connector, and the steps that faults are made of.

    Args:
        say: Reports progress, one line at a time.
        seed: Decides prompts, and the moments of faults.
    """

    def __init__(self, settings: Settings, launcher: Launcher, say: Callable[[str], None], seed: int) -> None:
        self.settings, self._launcher, self.say = settings, launcher, say
        self.chance = random.Random(seed)
        self._expected: dict[tuple[tuple[int, ...], int], Expected] = {}
        self._next_id = 0
        self._stranger: Server | None = None
        self._router: LaunchedProcess | None = None
        self._router_numbers = itertools.count(1)
        self._other: Path | None = None
        self._model_name = SERVED_NAME
        if settings.urls:
            self._model_name = str(served_model(settings.urls["alone"]).get("id"))
        self._beside_port = self._start_beside()  # first: the servers connect to it when they start
        self.alone = self._server("alone")
        self.prefill = self._server("prefill")
        self.decode = self._server("decode")
        self._wait_ready(self.alone, self.prefill, self.decode)
        num_blocks, block_size = self.prefill.client.pool()
        #: Tokens that fill the pool of a node.
        self.pool_tokens = num_blocks * block_size or 4096

    # -- servers -------------------------------------------------------------------------------------

    @property
    def pair(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    @property
    def stranger(self) -> Server:
        """A prefill server whose model has other weights under the same name.

        It is started when it is first needed.
        """
        if self._stranger is None:
            if self.settings.urls:
                raise NotApplicableError(
                    "needs a prefill server with other weights, which only the kit can start"
                )
            self._stranger = self._server("stranger", str(self.other_model))
            self._wait_ready(self._stranger)
        return self._stranger

    @property
    def router(self) -> Client:
        """A router in front of the pair: the user's, or `kvferry router`, which is started when a row needs
        it.
        """
        url = self.settings.router_url
        if not url:
            if self.settings.connector.encodes or self.settings.connector.load:
                raise NotApplicableError(
                    "needs a router or proxy that asks such servers, which `kvferry router` does not: give --url router=URL"
                )
            if self._router is None:
                self.say("starting kvferry router")
                nodes = [server.process for server in self.pair]
                # It knows the nodes by their URLs, so it finds them again after a restart.
                self._router = self._launcher.start_router(
                    f"router-{next(self._router_numbers)}", nodes[:1], nodes[1:], "--log-level", "warning"
                )
                self._router.wait_ready(self.settings.start_s)
            url = self._router.url
        return self._client("router", url)

    def end_router(self) -> None:
        """End our router, if it runs.

        It sends requests of its own to learn what a server is, and with some connectors such a request ends
        the engine.
        """
        if self._router is not None:
            self._router.stop()
            self._router = None

    @property
    def other_model(self) -> Path:
        """A model with other weights, and the same files otherwise."""
        if self._other is None:
            model = Path(self.settings.model)
            folder = self.settings.folder / "other" / model.name
            folder.parent.mkdir(exist_ok=True)
            write_other_weights(model, folder, is_encoder=self.settings.connector.encodes)
            self._other = folder
        return self._other

    def _server(self, name: str, model: str = "") -> Server:
        settings = self.settings
        if settings.urls:
            return Server(name, self._client(name, settings.urls[name]))
        self.say(f"starting the {name} server")
        port, side_port = free_port(), free_port()
        folder = settings.folder / "shared"
        folder.mkdir(exist_ok=True)
        places: Places = {
            "side": name,
            "port": side_port,
            "folder": str(folder),
            "beside_port": self._beside_port,
        }
        launched = self._launch(name, model or settings.model, port, places)
        return Server(name, self._client(name, f"http://127.0.0.1:{port}"), launched, side_port)

    def _launch(self, side: str, model: str, port: int, places: Places) -> LaunchedProcess:
        settings = self.settings
        command = [sys.executable, "-P", *VLLM_SERVE[1:]]
        if Path(model).is_dir():
            # Some connectors compare the model's path. So servers with other weights know them by the same
            # one.
            command = ["env", "-C", str(Path(model).absolute().parent), *command]
            model = Path(model).name
        arguments = list(ARGUMENTS)
        if settings.is_tiny:
            arguments += TINY_IMAGE_ARGUMENTS if settings.connector.encodes else TINY_TEXT_ARGUMENTS
        arguments += settings.serve_arguments
        environment: dict[str, str] = {}
        if side != "alone":
            transfer = settings.connector.transfer_of(places, settings.policy)
            arguments += [settings.connector.option, json.dumps(transfer)]
            environment |= settings.connector.environment_of(places)
        environment |= settings.environments.get(side, {})
        return start_vllm(
            self._launcher,
            f"{settings.connector.name}-{side}-1",
            model,
            arguments,
            None,  # the arguments have it
            command=command,
            port=port,
            defaults=ENVIRONMENT,
            environment=environment,
        )

    def _wait_ready(self, *servers: Server) -> None:
        """Wait for starts. Raises LaunchError: one failed, or took too long."""
        for server in servers:
            if server.launched is not None:
                server.launched.wait_ready(self.settings.start_s)
                _take_names_of_memory(server.launched)

    def restart(self, *servers: Server) -> None:
        """Start servers again at the same ports, and wait until they are ready."""
        for server in servers:
            server.num_starts += 1
            server.process.restart(f"{self.settings.connector.name}-{server.name}-{server.num_starts}")
        self._wait_ready(*servers)

    def _start_beside(self) -> int:
        """Start the connector's own server, if it has one, and wait for it. Returns its port, or 0."""
        connector, beside = self.settings.connector, self.settings.connector.beside
        if beside is None or self.settings.urls:
            return 0
        self.say("starting the connector's own server")
        port, http_port = free_port(), free_port()
        command = with_places(beside.command, {"port": port, "http_port": http_port})
        process = self._launcher.start_server(
            f"{connector.name}-beside",
            [sys.executable, *map(str, command)],
            http_port,
            beside.ready_path,
            environment=connector.environment_of({}),
        )
        process.wait_ready(self.settings.start_s)
        return port

    def _client(self, name: str, url: str) -> Client:
        form = Form.TEXT
        if self.settings.connector.encodes:
            form = Form.ENCODED if name in ("prefill", "stranger") else Form.ILLUSTRATED
        return Client(url, self._model_name, self.settings.deadline_s, form)

    def heal(self) -> None:
        """Start again whatever of ours may have been harmed."""
        servers = [server for server in (*self.pair, self._stranger) if server is not None]
        ours = [server for server in servers if server.launched is not None]
        if ours:
            self.say(f"starting these servers again: {', '.join(server.name for server in ours)}")
            self.restart(*ours)

    # -- requests ------------------------------------------------------------------------------------

    def prompt(self, num_tokens: int = PROMPT_TOKENS) -> list[int]:
        """Return a prompt that no server has seen."""
        return self.chance.choices(TOKENS, k=num_tokens)

    def request_id(self) -> str:
        self._next_id += 1
        return f"prove-{os.getpid()}-{self._next_id}"

    def expected(self, prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Expected:
        """Return the single server's answer. Raises SingleServerError: it has none."""
        key = (tuple(prompt), max_tokens)
        if key not in self._expected:
            reply = self.alone.client.ask(prompt, max_tokens, self.request_id())
            if not reply.is_whole:
                raise SingleServerError(
                    f"the single server did not answer: {reply.error or reply.status}; see its log in {self.settings.folder}"
                )
            self._expected[key] = Expected(list(prompt), reply.token_ids, reply.logprobs)
        return self._expected[key]

    def _ask_alone(self, prompt: str | Sequence[int], max_tokens: int) -> Expectation:
        """For `near_tie.compare`; log probabilities differ by as much as logits."""
        tokens = [int(token) for token in prompt]
        if self.settings.connector.encodes:
            return Expectation(tokens, [], [])  # a text cannot be continued by token ids
        asking = self.alone.client.start(tokens, max_tokens, self.request_id(), top=2)
        reply = asking.reply()
        return Expectation(tokens, reply.token_ids, asking.likeliest, reply.logprobs)

    def judge(self, reply: Reply, prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Verdict:
        """Compare a reply with the single server's answer."""
        return judge(reply, self.expected(prompt, max_tokens), self._ask_alone, self.settings.tolerance)

    def judge_offer(self, reply: Reply, prompt: Sequence[int]) -> Verdict:
        """Compare the reply of the prefill server, of one token, with the single server's.

        An encoder answers with no token.
        """
        if self.settings.connector.encodes and reply.is_whole:
            return Verdict(Outcome.RIGHT, seconds=round(reply.seconds, 3))
        return self.judge(reply, prompt, 1)

    def start_offer(
        self, prompt: Sequence[int], request_id: str, server: Server | None = None, salt: str = ""
    ) -> Asking:
        """Have a prefill server compute a prompt."""
        client, connector = (server or self.prefill).client, self.settings.connector
        is_asked = connector.takes_params and not connector.encodes  # an encoder offers whatever it computes
        params = with_places(connector.offer, {"request_id": request_id}) if is_asked else None
        return client.start(prompt, 1, request_id, params, salt=salt)

    def offer(
        self, prompt: Sequence[int], request_id: str, server: Server | None = None, salt: str = ""
    ) -> Any:
        """Have a prefill server compute a prompt, and return the params for the decode server.

        Raises:
            OfferError: it did not.
        """
        server, connector = server or self.prefill, self.settings.connector
        reply = self.start_offer(prompt, request_id, server, salt).reply()
        places: Places = {"request_id": request_id, "prefill_port": server.side_port}
        params = with_places(connector.load, places) or reply.params
        if not reply.is_whole or (connector.takes_params and params is None):
            raise OfferError(reply)
        return params

    def hand_over(self, prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Verdict:
        """Hand one prompt over and judge the answer. Nothing else may be in flight."""
        request_id = self.request_id()
        try:
            params = self.offer(prompt, request_id)
        except OfferError as error:
            kind = Outcome.HANG if error.reply.is_late else Outcome.ERROR
            return Verdict(kind, f"the prefill server: {error}")
        return self.ask_loading(prompt, params, request_id, max_tokens)

    def ask_loading(
        self,
        prompt: Sequence[int],
        params: object,
        request_id: str,
        max_tokens: int = ANSWER_TOKENS,
        *,
        salt: str = "",
    ) -> Verdict:
        """Ask the decode server, and judge the answer.

        Nothing else may be in flight, because it says what was loaded.
        """
        client, metric = self.decode.client, LOADED_IMAGES if self.settings.connector.encodes else LOADED
        (before,) = client.metrics(metric)
        reply = client.start(prompt, max_tokens, request_id, params, salt=salt).reply()
        verdict = self.judge(reply, prompt, max_tokens)
        if verdict.outcome is not Outcome.RIGHT:
            return verdict
        (after,) = client.metrics(metric)
        return Verdict(verdict.outcome, verdict.why, after > before, verdict.near_ties, verdict.seconds)

    # -- moments and memory --------------------------------------------------------------------------

    def moment(self, longest_s: float) -> None:
        """Let a random time pass, so that a fault hits another instruction each time.

        Half of the times are in the first eighth, because most of a small load happens there.
        """
        time.sleep(longest_s * self.chance.random() ** 3)

    def overwrite(self, server: Server) -> list[tuple[list[int], Reply]]:
        """Use each block of a server's pool that is free for other prompts, and return these with their
        answers.
        """
        length = min(1024, self.pool_tokens // 3)
        num = -(-self.pool_tokens // length)
        if self.settings.connector.encodes:
            num, length = OTHER_IMAGES, OTHER_IMAGE_TOKENS
        done = []
        for _ in range(num):
            prompt = self.prompt(length)
            done.append((prompt, server.client.ask(prompt, 1, self.request_id())))
        return done

    def wait_for_pool(self, server: Server, longest_s: float) -> float:
        """Wait until a server uses no block. Returns the share that it still uses at the end.

        A server updates the figure when it computes something. So it is asked for a token before each look,
        and without an image, because an encoder would offer it.
        """
        until = time.monotonic() + longest_s
        client = server.client.without_image()
        while True:
            client.ask(self.prompt(8), 1, self.request_id())
            used = max(client.metrics(USAGE, ENCODER_USAGE))
            if used == 0.0 or time.monotonic() > until:
                return used
            time.sleep(POLL_S)

    def rest(self) -> Rest:
        """Look at the servers after a fault: do they run, hand over, and have their pools back?"""
        longest_s = self.settings.connector.lease_s + SLACK_S
        servers = [*self.pair, *([self._stranger] if self._stranger is not None else [])]
        dead = {server.name: why for server in servers if (why := server.trouble())}
        if dead:
            return Rest({}, dead, None, 0.0)
        until = time.monotonic() + longest_s
        while True:
            control = self.hand_over(self.prompt())
            # A connector may need a while until it talks to a server again. But wrong tokens are never in
            # order.
            if control.outcome in (Outcome.RIGHT, Outcome.WRONG) or time.monotonic() > until:
                break
            time.sleep(POLL_S)
        used: dict[str, float] = {}
        try:
            for server in servers:
                if share := self.wait_for_pool(server, longest_s):
                    used[server.name] = share
        except OSError as error:
            dead[server.name] = f"it answers no longer: {error}"
        dead |= {server.name: why for server in servers if (why := server.trouble())}
        return Rest(used, dead, control, longest_s)


class OfferError(Exception):
    """The prefill server did not compute a prompt for another server."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(
            reply.error
            or ("no transfer params in the answer" if reply.is_whole else f"status {reply.status}")
        )
        self.reply = reply


def parse_environments(words: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read the words of `--env`: server → variables.

    Raises:
        ConfigurationError: a word is not NAME=VALUE, with or without a side and a colon before it.
    """
    found: dict[str, dict[str, str]] = {side: {} for side in SERVERS}
    for word in words:
        name, equals, value = word.partition("=")
        side, colon, own = name.rpartition(":")
        if not equals or (colon and side not in SERVERS):
            raise ConfigurationError(
                f"--env must be NAME=VALUE, or SIDE:NAME=VALUE with one of {', '.join(SERVERS)}; got {word!r}",
                key="--env",
                value=word,
            )
        for each in (side,) if colon else SERVERS:
            found[each][own] = value
    return found
