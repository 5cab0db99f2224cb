"""Real vLLM engines in child processes, with a tiny model whose answers depend on every earlier token."""

from __future__ import annotations

import importlib
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.demo.near_tie import Expectation
from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.servers import KVFERRY, OFFLINE, LaunchedProcess, Launcher, start_vllm
from tests.support.engine_process import Answer, Node
from tests.support.same_answer import assert_same_answer
from tests.support.vllm_servers import VllmService

HERE = Path(__file__).parent

if find_spec("vllm") is None:
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name != "test_import.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about vLLM's and torch's own code
        importlib.import_module("kvferry.connector.vllm.adapter")

PROGRAM = HERE.resolve().parent / "support" / "vllm_program.py"
#: Short, because tests wait until these timeouts expire.
EXTRA = {
    "transport": "shm",
    "lease_s": 3,
    "connect_timeout_s": 2,
    "claim_timeout_s": 2,
}
BLOCK_SIZE = 32
NUM_BLOCKS = 128
MAX_NUM_SEQS = 4

#: The engine computes in the node's own process.
ENVIRONMENT = {**OFFLINE, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama model.

    Its weights are large, so that each token of a prompt changes the answer.
    """
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model(
        tmp_path_factory.mktemp("model"), hidden_size=128, head_dim=32, max_position_embeddings=2048
    )


@pytest.fixture(scope="session")
def start_node(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """Start an engine.

    The caller calls `wait_until_ready`, so that several engines can start at the same time.
    """
    nodes: list[Node] = []

    def start(**arguments: Any) -> Node:
        log = tmp_path_factory.mktemp("node") / "log"
        name, module = arguments.pop("connector", ("KvferryConnector", "kvferry.connector.vllm"))
        settings = {
            "model": str(arguments.pop("model", model)),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 1536,
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": NUM_BLOCKS,
            "max_num_seqs": MAX_NUM_SEQS,
            "kv_transfer_config": {
                "kv_connector": name,
                "kv_connector_module_path": module,
                "kv_role": "kv_both",
                "kv_connector_extra_config": EXTRA | arguments.pop("extra", {}),
                **arguments.pop("transfer", {}),
            },
        }
        with pytest.MonkeyPatch.context() as environment:
            for variable, value in ENVIRONMENT.items():
                environment.setenv(variable, value)
            nodes.append(Node(PROGRAM, settings | arguments, log))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode node, and operations that involve both."""

    prefill: Node
    decode: Node
    names: Iterator[str] = field(default_factory=lambda: (f"request-{number}" for number in count()))

    def prefilled(self, prompt: list[int], **more: Any) -> Answer:
        """Have the prefill node compute a prompt. Returns the params for the decode node.

        Here and below, `more` are further arguments of the order to add a request, such as its adapter.
        """
        answer = self.prefill.ask(next(self.names), prompt, params={"do_remote_decode": True}, **more)
        return answer["params"]

    def hand_over(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> Answer:
        """Return the decode node's answer to a prompt that the prefill node computed."""
        params = self.prefilled(prompt, **more)
        return self.decode.ask(next(self.names), prompt, max_tokens, params, **more)

    def alone(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> Answer:
        """Return the answer of a node that computed the prompt itself."""
        self.decode.order("forget")
        return self.decode.ask(next(self.names), prompt, max_tokens, **more)

    def expectation(self, prompt: str | Sequence[int], max_tokens: int, **more: Any) -> Expectation:
        """The same as `alone`, with the two largest logits for the first token."""
        tokens = [int(token) for token in prompt]
        self.decode.order("forget")
        told = self.decode.ask(next(self.names), tokens, max_tokens, num_top_logits=2, **more)
        top_logits = [(token, logit) for token, logit in told["top_logits"]]
        return Expectation(tokens, told["tokens"], top_logits, told["logprobs"])

    def assert_like_alone(
        self,
        prompt: list[int],
        answer: Answer,
        max_tokens: int = 8,
        *,
        alone: Answer | None = None,
        **more: Any,
    ) -> None:
        """Fail unless an answer is that of a node that computed the prompt itself, apart from near-ties of
        logits.

        Args:
            alone: That answer, if it is known.
        """
        alone = alone or self.alone(prompt, max_tokens, **more)
        assert_same_answer(
            prompt,
            answer["tokens"],
            alone["tokens"],
            partial(self.expectation, **more),
            logprobs=answer["logprobs"],
            expected_logprobs=alone["logprobs"],
        )
        for name in ("tokens", "logprobs"):
            # A near-tie at the last token must not hide that the answer ends too early.
            assert len(answer[name]) == max_tokens, f"{len(answer[name])} {name} instead of {max_tokens}"

    def answers(
        self,
        node: Node,
        prompts: Iterable[list[int]],
        max_tokens: int = 1,
        params: Iterable[Any] = repeat(None),
    ) -> list[Answer]:
        """Return a node's answers to prompts that it gets at the same time."""
        names = []
        for prompt, told in zip(prompts, params, strict=False):
            names.append(next(self.names))
            node.start(names[-1], prompt, max_tokens, told)
        return [node.result(name) for name in names]

    def assert_all_like_alone(self, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> None:
        """The same as `assert_like_alone` for many answers of eight tokens, with fewer steps."""
        self.decode.order("forget")
        alone = self.answers(self.decode, prompts, 8)
        wrong = []
        for prompt, answer, expected in zip(prompts, answers, alone, strict=True):
            try:
                self.assert_like_alone(prompt, answer, alone=expected)
            except AssertionError as error:
                wrong.append(f"{len(prompt)} tokens: {error}")
        assert not wrong, f"{len(wrong)} of {len(prompts)} answers are wrong:\n" + "\n".join(wrong)

    def assert_ended_by(self, policy: str, answer: Answer, prompt: list[int], **more: Any) -> None:
        """Check that a request whose load failed has failed or was recomputed, as the policy says."""
        if policy == "fail":
            assert answer["reason"] == "error"
        else:
            self.assert_like_alone(prompt, answer, **more)

    def fill(self, node: Node) -> list[str]:
        """Occupy all request slots of a node for a while, so that no other request is scheduled."""
        names = [next(self.names) for _ in range(MAX_NUM_SEQS)]
        for token, name in enumerate(names, start=3):
            node.start(name, [token], 1000)
        return names

    @contextmanager
    def busy(self, node: Node) -> Iterator[None]:
        """Occupy all request slots of a node inside the block."""
        names = self.fill(node)
        yield
        for name in names:
            node.order("abort", request=name)


@pytest.fixture(scope="session")
def pair_of(start_node: Callable[..., Node]) -> Callable[..., AbstractContextManager[Pair]]:
    """Start two nodes that end with the block.

    `prefill` and `decode` are arguments for one of the nodes. The other arguments are for both.
    """

    @contextmanager
    def running(prefill: Any = None, decode: Any = None, **arguments: Any) -> Iterator[Pair]:
        asked = [arguments | (own or {}) for own in (prefill, decode)]
        nodes = [start_node(**each) for each in asked]
        for node, each in zip(nodes, asked, strict=True):
            # vLLM rounds sizes up that a backend does not have, and tests are named after theirs.
            found = node.wait_until_ready().order("status")["block_size"]
            assert found == each.get("pages_of", each.get("block_size", found))
        yield Pair(*nodes)
        for node in nodes:
            node.close()

    return running


@pytest.fixture(scope="module")
def start_module_pair(pair_of: Callable[..., AbstractContextManager[Pair]]) -> Iterator[Callable[..., Pair]]:
    """Start two nodes that end with the module."""
    with ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(pair_of(**arguments))


@pytest.fixture(scope="session")
def shm_pair(pair_of: Callable[..., AbstractContextManager[Pair]]) -> Iterator[Pair]:
    """Two identical nodes that run until the end of the session."""
    with pair_of(extra={"transport": "shm"}) as pair:
        yield pair


@pytest.fixture(scope="module")
def pair_over(start_module_pair: Callable[..., Pair], shm_pair: Pair) -> Callable[[str], Pair]:
    """(transport) → two identical nodes. Those over another one than `shm` end with the module."""
    start = cache(lambda transport: start_module_pair(extra={"transport": transport}))
    return lambda transport: shm_pair if transport == "shm" else start(transport)


@pytest.fixture(scope="session")
def running_pair(shm_pair: Pair) -> Pair:
    """The nodes of most tests. Modules may override this fixture."""
    return shm_pair


@pytest.fixture
def pair(running_pair: Pair) -> Iterator[Pair]:
    """The nodes with empty caches. Every block must be free again after the test."""
    nodes = (running_pair.prefill, running_pair.decode)
    for node in nodes:
        node.order("forget")
        node.order("policy", policy="fail")
    yield running_pair
    for node in nodes:
        node.wait_for_status(_is_at_rest)


# -- vllm serve --------------------------------------------------------------------------------------

START_S = 400.0
#: With a chunk of 64 tokens most prompts have several, and a server that is stopped delivers its offers.
SERVED = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "1536", "--max-num-seqs", "4"),
    *("--enforce-eager", "--num-gpu-blocks-override", "128", "--max-num-batched-tokens", "64"),
    *("--shutdown-timeout", "60"),
)


#: Of a model whose tokenizer has none.
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def service_of(
    name: str,
    model: Path,
    role: str = "kv_both",
    policy: str = "fail",
    more: Sequence[str] = (),
    **options: Any,
) -> VllmService:
    """A `vllm serve` with `SERVED`, which starts with a `with` block.

    Args:
        more: Further arguments.
        options: The connector's.
    """
    extra = {"transport": "shm", **options}
    transfer = {**KVFERRY, "kv_role": role, "kv_load_failure_policy": policy}
    return VllmService(name, model, (*SERVED, *more), {**transfer, "kv_connector_extra_config": extra})


@pytest.fixture(scope="session")
def served(model: Path) -> Iterator[list[VllmService]]:
    """A prefill server and two decode servers. A test that ends one of them starts it again.

    The last one does not tell clients how many tokens of a prompt were cached.
    """
    with ExitStack() as stack:
        servers = []
        for name in ("prefill", "decode-1", "decode-2"):
            address = f"shm://@kvferry-{name}-{os.getpid()}"  # the same after a restart
            counts = () if name == "decode-2" else ("--enable-prompt-tokens-details",)
            more = ("--enable-scale-out", "--chat-template", TEMPLATE, *counts)
            server = service_of(name, model, more=more, address=address)
            servers.append(stack.enter_context(server))
        for server in servers:
            server.wait_ready(START_S)
        yield servers


@dataclass(frozen=True)
class SlowPair:
    """A prefill and a decode server of the default model, whose prompts take a second or more on a CPU.

    Attributes:
        places: Role → the folder in which a test names a place that is slow once; see `SlowConnector`.
    """

    servers: Sequence[LaunchedProcess]
    places: Mapping[str, Path]


@pytest.fixture(scope="module")  # they have 8 GB, which later tests need
def slow_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowPair]:
    from tests.support.slow_vllm_connector import FOLDER_VARIABLE

    transfer = {
        **KVFERRY,
        "kv_connector": "SlowConnector",
        "kv_connector_module_path": "tests.support.slow_vllm_connector",
        "kv_load_failure_policy": "fail",
    }
    path = os.pathsep.join([str(HERE.resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    places = {role: tmp_path_factory.mktemp(role) for role in ("prefill", "decode")}
    model = str(default_model_folder())
    with Launcher() as launcher:
        servers = []
        for role, folder in places.items():
            environment = {"PYTHONPATH": path, FOLDER_VARIABLE: str(folder)}
            servers.append(
                start_vllm(launcher, f"{role} server", model, transfer=transfer, environment=environment)
            )
        launcher.wait_ready(servers, START_S)
        yield SlowPair(servers, places)


@pytest.fixture(scope="session")
def is_at_rest() -> Callable[[Answer], bool]:
    return _is_at_rest


def _is_at_rest(status: Answer) -> bool:
    """Whether all blocks except the null block are free, and no state of any request remains."""
    return (status["used_blocks"], status["num_requests"], status["num_remembered"]) == (0, 0, 0)


@pytest.fixture(params=["fail", "recompute"])
def policy(request: pytest.FixtureRequest, pair: Pair) -> Iterator[str]:
    """The decode node's policy for a request whose load fails."""
    pair.decode.order("policy", policy=request.param)
    yield request.param
    pair.decode.order("policy", policy="fail")


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """`(num_tokens, seed)` → token ids that share no prefix with those of another seed or length."""

    def tokens(num_tokens: int, seed: int = 0) -> list[int]:
        return random.Random(f"{num_tokens} {seed}").choices(range(256), k=num_tokens)

    return tokens
