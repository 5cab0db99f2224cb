"""What requests may ask for: each row of a table is answered by a pair of `vllm serve` behind the router as a
single server answers it, or refused in the same words. `docs/vllm.md` has the table.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from kvferry.lab.client import events_of
from kvferry.lab.demo.near_tie import tolerance_of
from kvferry.lab.servers import Launcher
from tests.support.client import Client
from tests.support.vllm_servers import FAILURES, USAGE, Server

from .conftest import START_S, service_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TEXT = "A ferry carries a box from one quay to the other. "
BOX = TEXT * 2
SHORT = TEXT[:40]
TOKENS = [(7 * position) % 190 + 3 for position in range(100)]

#: The tokens of lower-case letters, which are whole characters.
LETTERS = list(range(64, 90))
#: The token that ends thoughts.
THOUGHT = 258
SEEDED = {"prompt": SHORT, "temperature": 0.9, "seed": 4}
OFTEN = {"max_tokens": 40, "allowed_token_ids": LETTERS[:9]}
THOUGHTFUL = {"max_tokens": 24, "allowed_token_ids": [*LETTERS[:6], THOUGHT]}

SCHEMA = {
    "type": "object",
    "properties": {"quay": {"type": "string", "enum": ["left", "right"]}, "boxes": {"type": "boolean"}},
    "required": ["quay", "boxes"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}}
    for name in ("load", "unload")
]
CALL = '<tool_call>{"name": "unload", "arguments": {"quay": "left", "boxes": true}}</tool_call>'
CALLING = {"max_tokens": 120, "structured_outputs": {"choice": [CALL]}}
CHOICE = {"type": "function", "function": {"name": "load"}}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "box", "schema": SCHEMA}}


BEGUN = [{"role": "user", "content": BOX}, {"role": "assistant", "content": "To"}]
CALLED = [
    {"role": "user", "content": BOX},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "load", "arguments": '{"boxes": true}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "loaded"},
]


@dataclass(frozen=True)
class Row:
    """A request, and what becomes of it.

    Attributes:
        fields: Of the request, beside the model, a limit of tokens and a temperature of 0. The row is about
            the last one.
        path: Where it goes.
        refused: A part of the error's text; empty: it works.
        by_router: The router refuses what a single server answers.
        streams: Whether it may be a stream.
        is_loaded: Whether the decode server loads the prompt. If not, it computes the prompt, and no other
            server does.
        is_plain: The last field does not change the answer.
    """

    fields: Mapping[str, Any]
    path: str = COMPLETIONS
    refused: str = ""
    by_router: bool = False
    streams: bool = True
    is_loaded: bool = True
    is_plain: bool = False

    @property
    def outcome(self) -> str:
        """What the documents say of it."""
        if self.refused:
            return f'refused by {"the router" if self.by_router else "vLLM"}: "{self.refused}"'
        return "works" if self.is_loaded else "works; the decode server computes the prompt"

    def body(self, **more: Any) -> dict[str, Any]:
        prompt = {"prompt": BOX} if self.path == COMPLETIONS else {"messages": asked(BOX)}
        fixed = {"model": "model", "temperature": 0, "max_tokens": 12, "cache_salt": os.urandom(8).hex()}
        return {**fixed, **prompt, **self.fields, **more}


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def embeds(seed: int) -> str:
    """Return a prompt of 100 vectors."""
    vectors = torch.randn(100, 128, generator=torch.Generator().manual_seed(seed))
    torch.save(vectors, file := io.BytesIO())
    return base64.b64encode(file.getvalue()).decode()


def chat(fields: Mapping[str, Any], **more: Any) -> Row:
    return Row(fields, CHATS, **more)


#: Feature → its requests.
FEATURES: dict[str, list[Row]] = {
    "log probabilities": [
        Row({"logprobs": 0}),
        Row({"logprobs": 5, "return_tokens_as_token_ids": True}),
        Row({"logprobs": 1, "logprob_token_ids": [70, 71]}),
        chat({"logprobs": True}),
        chat({"logprobs": True, "top_logprobs": 5}),
        Row({"logprobs": 21}, refused="logprobs of 21, which is greater than max allowed: 20"),
    ],
    "log probabilities of the prompt": [
        Row({"prompt_logprobs": 2}, streams=False, is_loaded=False),
        chat({"prompt_logprobs": 0}, streams=False, is_loaded=False),
        Row(
            {"stream": True, "prompt_logprobs": 2},
            refused="`prompt_logprobs` are not available when `stream=True`",
        ),
    ],
    "echo": [
        Row({"echo": True}),
    ],
    "echo with log probabilities, and of chats": [
        Row({"logprobs": 2, "echo": True}, is_loaded=False),
        chat({"echo": True}, is_loaded=False),
    ],
    "several answers": [
        Row({**SEEDED, "logprobs": 1, "n": 3}),
        chat({"messages": asked(SHORT), "temperature": 0.9, "seed": 4, "n": 2}),
        Row({"n": 3}, refused="n must be 1 when using greedy sampling"),
        Row({"best_of": 3}, is_plain=True),
    ],
    "beam search": [
        Row({"n": 2, "use_beam_search": True}, streams=False, is_loaded=False),
        Row(
            {"stream": True, "use_beam_search": True},
            refused="Streaming is not currently supported with beam search",
        ),
    ],
    "several prompts": [
        Row({"prompt": [f"{number}: {BOX}" for number in range(3)]}),
        Row({"logprobs": 2, "prompt": [TOKENS, TOKENS[::-1]]}),
        Row({**SEEDED, "n": 2, "prompt": [SHORT, SHORT[:30]]}),
    ],
    "embeddings as prompts": [
        Row({"prompt": None, "prompt_embeds": embeds(0)}),
        Row(
            {"prompt": None, "prompt_embeds": [embeds(0), embeds(1)]},
            refused="'prompt_embeds' has 2 prompts: each needs a handoff of its own",
            by_router=True,
        ),
    ],
    "sampling with a seed, and penalties": [
        Row({"prompt": SHORT, "seed": 4, "temperature": 0.9}),
        Row(SEEDED),
        Row({**SEEDED, "top_p": 0.3}),
        Row({**SEEDED, "top_k": 2}),
        Row({**SEEDED, "min_p": 0.5}),
        Row({**OFTEN, "repetition_penalty": 2.0}),
        Row({**OFTEN, "presence_penalty": 2.0}),
        Row({**OFTEN, "frequency_penalty": 2.0}),
    ],
    "stop texts and tokens": [
        Row({"allowed_token_ids": LETTERS, "stop": ["qq", "fkup"]}),
        Row({"allowed_token_ids": LETTERS, "stop": ["fkup"], "include_stop_str_in_output": True}),
        chat({"allowed_token_ids": LETTERS, "stop": "yew"}),
        Row({"allowed_token_ids": LETTERS, "stop_token_ids": LETTERS[:9]}),
        Row({"allowed_token_ids": LETTERS, "stop_token_ids": LETTERS[:9], "min_tokens": 9}),
        Row({"logit_bias": {"256": 100}}),
        Row({"logit_bias": {"256": 100}, "ignore_eos": True}),
        Row({"logit_bias": {"256": 100}, "ignore_eos": True, "skip_special_tokens": False}),
        Row({"min_tokens": 13}, refused="min_tokens must be less than or equal to max_tokens=12"),
    ],
    "favoured and forbidden tokens": [
        Row({"logit_bias": {"70": 100, "71": 99.5}}),
        Row({"allowed_token_ids": LETTERS}),
        Row({"allowed_token_ids": LETTERS, "bad_words": ["a", "b", "c", "d", "e", "f"]}),
    ],
    "structured output": [
        Row({"max_tokens": 80, "structured_outputs": {"json": SCHEMA}}),
        Row({"structured_outputs": {"regex": "[a-c]{4}-[0-9]{3}"}}),
        Row({"structured_outputs": {"choice": ["left quay", "right quay"]}}),
        Row({"structured_outputs": {"grammar": 'root ::= "load" | "unload"'}}),
        Row({"max_tokens": 80, "response_format": RESPONSE_FORMAT}),
        chat({"structured_outputs": {"choice": ["left quay", "right quay"]}}),
        chat({"max_tokens": 80, "response_format": RESPONSE_FORMAT}),
        Row(
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            refused="You can only use one kind of constraints for structured outputs",
        ),
    ],
    "tools": [
        chat({"max_tokens": 80, "tool_choice": CHOICE, "tools": TOOLS}),
        chat({"max_tokens": 120, "tool_choice": "required", "tools": TOOLS}),
        chat({**CALLING, "tool_choice": "auto", "tools": TOOLS}),
        chat({"tools": TOOLS, "messages": CALLED}),
        chat({**CALLING, "tools": TOOLS, "tool_choice": "none"}),
        chat({"tool_choice": "required"}, refused="When using `tool_choice`, `tools` must be set"),
    ],
    "a reasoning parser": [
        chat({**THOUGHTFUL, "chat_template_kwargs": {"thinking": True}}),
        chat({**THOUGHTFUL, "chat_template_kwargs": {"thinking": True}, "include_reasoning": False}),
    ],
    "priorities": [Row({"priority": 3}, is_plain=True), chat({"priority": -3}, is_plain=True)],
    "truncated prompts": [
        Row({"truncate_prompt_tokens": 40}),
        Row({"truncate_prompt_tokens": 40, "truncation_side": "right"}),
        Row({"prompt": TEXT * 32, "truncate_prompt_tokens": -1}),
    ],
    "token ids": [
        Row({"return_token_ids": True}),
        Row({"prompt": TOKENS, "return_token_ids": True}),
        chat({"return_token_ids": True}),
        Row({"add_special_tokens": False}, is_plain=True),
    ],
    "chat templates": [
        chat({"chat_template_kwargs": {"title": "Cargo"}}),
        chat({"add_generation_prompt": False}),
        chat({"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}),
        chat({"documents": [{"title": "Cargo", "text": TEXT}]}),
        chat(
            {"chat_template": "{{ messages[0]['content'] }}"},
            refused="--trust-request-chat-template is not set",
        ),
    ],
    "suffixes": [
        Row({"suffix": "quay"}, refused="suffix is only supported for models with FIM completion rendering")
    ],
}
ROWS = {
    f"{feature}, {number}": row for feature, rows in FEATURES.items() for number, row in enumerate(rows, 1)
}

#: What other tests have, as the documents say it.
ELSEWHERE = {
    "LoRA adapters": ("`model`", "works, `test_prompt_contents.py`"),
    "images": ("`messages`", "works, `test_prompt_contents.py` and `test_encoder_apart.py`"),
    "answers in parts": ("`stream`, `stream_options`", "works, `test_served_streams.py` and `test_bill.py`"),
}


def documented() -> list[str]:
    """Return the lines of the table in `docs/vllm.md`: what, the fields that it is about, and the outcome."""
    lines = []
    for feature, rows in FEATURES.items():
        for outcome in dict.fromkeys(row.outcome for row in rows):
            fields = dict.fromkeys(f"`{list(row.fields)[-1]}`" for row in rows if row.outcome == outcome)
            lines.append(f"| {feature} | {', '.join(fields)} | {outcome} |")
    return [*lines, *(f"| {what} | {' | '.join(about)} |" for what, about in ELSEWHERE.items())]


OPTIONS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_v3"),
    # One chunk for the seeded prompts: vLLM 0.32 on the CPU dies of several ("CPU Generator does not use
    # offset").
    *("--max-num-batched-tokens", "256"),
    *("--scheduling-policy", "priority", "--max-logprobs", "20", "--enable-prompt-embeds"),
)

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}"
    "{{ title }}{% for message in messages %}"
    "{{ message['role'] + ': ' + (message['content'] or message['tool_calls'] | tojson) + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write a random model whose tokenizer has the two tokens that a reasoning parser looks for."""
    from transformers import AutoTokenizer

    from tests.support.tiny_models import write_tiny_model

    write_tiny_model(
        folder, vocab_size=THOUGHT + 1, hidden_size=128, head_dim=32, max_position_embeddings=2048
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Client]]:
    """A prefill and a decode server with the parsers and options that some rows need."""
    model = write_model(tmp_path_factory.mktemp("features"))
    with ExitStack() as stack:
        services = [
            stack.enter_context(
                service_of(name, model, more=OPTIONS, address=f"shm://@kvferry-{name}-{os.getpid()}")
            )
            for name in ("features-prefill", "features-decode")
        ]
        for service in services:
            service.wait_ready(START_S)
        yield [Client(service.process) for service in services]


@pytest.fixture(scope="module", params=["auto", "off"])
def router(request: pytest.FixtureRequest, servers: list[Client]) -> Iterator[Client]:
    """A router, which asks both servers at once or one after the other."""
    prefill, decode = (client.process for client in servers)
    with Launcher() as launcher:
        process = launcher.start_router("router", [prefill], [decode], "--rendezvous", request.param)
        client = Client(process.wait_ready(START_S))
        # The router knows after this where the prefill server can be reached.
        client.complete("x", model="model", max_tokens=1)
        yield client


@pytest.fixture(scope="module")
def alone(servers: list[Client]) -> Any:
    """(row, whether it is a stream) → what the first server answers by itself."""
    told: dict[str, Told] = {}

    def ask_alone(row: Row, is_stream: bool) -> Told:
        key = f"{row} {is_stream}"
        if key not in told:
            told[key] = ask(servers[0], row, is_stream)
        return told[key]

    return ask_alone


@pytest.mark.parametrize("name", ROWS)
def test_a_pair_answers_as_one_server_does(
    name: str, router: Client, servers: list[Client], alone: Any
) -> None:
    row, (prefill, decode) = ROWS[name], [Server(client.process) for client in servers]
    for is_stream in (False, True)[: 1 + row.streams]:
        expected = alone(row, is_stream)
        before = (figures(prefill), figures(decode))
        found = ask(router, row, is_stream)
        # An offer that nothing loads would hold its blocks until its lease ends.
        prefill.wait_for(USAGE, lambda usage: usage == 0, LEASE_S / 2)
        computed, loaded = (
            figures(server) - was for server, was in zip((prefill, decode), before, strict=True)
        )
        if row.refused:
            assert found.status == 400
            assert row.refused in found.content["error"]["message"]
            assert row.by_router or found == expected
            continue
        assert expected.status == found.status == 200, (found, expected)
        assert_alike(found.content, expected.content)
        num_tokens = found.content["usage"]["prompt_tokens"]
        handed_over = num_tokens if row.is_loaded else 0
        assert (computed["local_compute"], loaded["external_kv_transfer"]) == (handed_over, handed_over)
        assert not loaded[FAILURES]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.refused])
def test_a_row_shows_what_it_is_about(name: str, alone: Any) -> None:
    """Without its last field a single server's answer is another one, so a lost field would be seen."""
    row = ROWS[name]
    fields = dict(row.fields)
    fields.popitem()
    told = alone(row, False)
    assert (told == alone(replace(row, fields=fields), False)) == row.is_plain, told


# -- requests and answers --------------------------------------------------------------------------

TOKENS_OF_PROMPTS = "vllm:prompt_tokens_by_source_total"
#: The default `lease_s`.
LEASE_S = 30.0
#: What differs from one request to the next, and what only a pair's answer has.
OWN = ("id", "created", "kv_transfer_params", "system_fingerprint")
TOLERANCE = tolerance_of("float32")


@dataclass(frozen=True)
class Told:
    """An answer, with the pieces of a stream put together."""

    status: int
    content: Mapping[str, Any]


def figures(server: Server) -> Counter[str]:
    """Return how many tokens of prompts a server has had, by their source, and how many loads have failed."""
    samples = [
        sample
        for family in text_string_to_metric_families(server.metrics_page())
        for sample in family.samples
    ]
    tokens = {each.labels["source"]: each.value for each in samples if each.name == TOKENS_OF_PROMPTS}
    return Counter({**tokens, FAILURES: sum(each.value for each in samples if each.name == FAILURES)})


def ask(client: Client, row: Row, is_stream: bool) -> Told:
    more = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    with client.requesting(row.path, row.body(**more), {}) as response:
        if not is_stream or response.status != 200:
            return Told(response.status, blank(json.load(response)))
        events = list(events_of(response))
    if errors := [event for event in events if "error" in event]:
        return Told(errors[0]["error"]["code"], errors[0])  # vLLM begins some streams before it refuses them
    return Told(200, blank(put_together(events)))


def put_together(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a stream's choices in the form of a whole answer, as far as it has one."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for event in events:
        whole |= {key: value for key, value in event.items() if value is not None and key != "choices"}
        for choice in event["choices"]:
            add(choices.setdefault(choice["index"], {}), {k: v for k, v in choice.items() if k != "index"})
    return {**whole, "choices": [{"index": index, **choices[index]} for index in sorted(choices)]}


def add(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add a piece of an answer: texts and lists go on, calls by their index."""
    for key, value in piece.items():
        if value is None or key in ("role", "type", "id"):
            continue
        if isinstance(value, dict):
            add(whole.setdefault(key, {}), value)
        elif key == "tool_calls":
            calls = whole.setdefault(key, {})
            for call in value:
                add(calls.setdefault(call["index"], {}), {k: v for k, v in call.items() if k != "index"})
        elif isinstance(value, str | list) and key in whole:
            whole[key] += value
        else:
            whole[key] = value


def blank(value: Any) -> Any:
    """Return an answer without what differs from one request to the next."""
    if isinstance(value, dict):
        kept = {key: blank(each) for key, each in value.items() if key not in OWN and each is not None}
        if "prompt_tokens" in kept:
            kept.pop("prompt_tokens_details", None)  # see test_bill.py
        return kept
    return [blank(each) for each in value] if isinstance(value, list) else value


def assert_alike(found: Any, expected: Any, at: str = "answer") -> None:
    """Fail unless two answers are equal, with log probabilities that may differ by a near-tie's worth."""
    if isinstance(expected, float) and isinstance(found, float):
        assert math.isclose(found, expected, rel_tol=0, abs_tol=TOLERANCE), f"{at}: {found}, not {expected}"
    elif isinstance(expected, dict) and isinstance(found, dict):
        assert sorted(found) == sorted(expected), at
        for key, value in expected.items():
            assert_alike(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        assert len(found) == len(expected), f"{at}: {found}, not {expected}"
        for index, value in enumerate(expected):
            assert_alike(found[index], value, f"{at}[{index}]")
    else:
        assert found == expected, at
