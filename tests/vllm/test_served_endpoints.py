"""The clients of agents at a pair of `vllm serve` processes: each answer is that of a single server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvferry.lab.servers import Launcher
from tests.support.evaluation import DOCUMENTS, NEEDS_TOOLS, evaluated
from tests.support.vllm_servers import LOADS, Server, VllmService

from .conftest import START_S, service_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}\n{% endif %}"
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "Tell me of the river, and of its ferries, in as many words as there are ferries on it. " * 2
PARAMETERS = {"type": "object", "properties": {"to": {"enum": ["a", "b"]}}, "required": ["to"]}
TOKENS = list(range(3, 103))


@dataclass(frozen=True)
class Place:
    """A router over a pair, and one of its servers alone."""

    router: str
    alone: str
    decode: Server

    def both(self, ask: Callable[[str], Any]) -> tuple[Any, Any]:
        """Return the router's answer and that of the single server, after a check that the first one was
        handed over.
        """
        before = self.decode.metric(LOADS)
        through = ask(self.router)
        assert self.decode.metric(LOADS) == before + 1
        return through, ask(self.alone)


@pytest.fixture(scope="module")
def place(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    more = ("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with ExitStack() as stack:
        pair: list[VllmService] = []
        for name in ("prefill", "decode"):
            service = service_of(name, model, more=(*more, "--chat-template", str(template)))
            pair.append(stack.enter_context(service))
        for server in pair:
            server.wait_ready(START_S)
        launcher = stack.enter_context(Launcher())
        router = launcher.start_router("router", [pair[0].process], [pair[1].process])
        router.wait_ready(START_S)
        yield Place(router.url, pair[0].process.url, Server(pair[1].process))


def openai_at(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def anthropic_at(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def post(url: str, path: str, body: Mapping[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def text_of(response: Any) -> tuple[str, str, int, int]:
    return response.output_text, response.status, response.usage.input_tokens, response.usage.output_tokens


# Each test has a prompt of its own, so that the decode server has none of it.


def test_responses_whole_and_streamed(place: Place) -> None:
    asked = {"model": "model", "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 12}

    def whole(url: str) -> Any:
        with openai_at(url) as client:
            return text_of(client.responses.create(input=f"whole {TEXT}", **asked))

    def streamed(url: str) -> Any:
        text = ""
        with openai_at(url) as client, client.responses.stream(input=f"streamed {TEXT}", **asked) as stream:
            for event in stream:
                text += event.delta if event.type == "response.output_text.delta" else ""
            # vLLM's last event is `response.completed` also where the limit has ended the answer.
            final = text_of(stream.get_final_response())
        return text, final

    for ask in (whole, streamed):
        through, alone = place.both(ask)
        assert through == alone


def test_responses_with_a_function_tool_and_its_result(place: Place) -> None:
    tool = {"type": "function", "name": "cross", "parameters": PARAMETERS, "strict": True}
    asked = {"model": "model", "tools": [tool], "temperature": 0, "max_output_tokens": 200}

    def call(url: str) -> Any:
        with openai_at(url) as client:
            response = client.responses.create(input=f"tool {TEXT}", tool_choice="required", **asked)
        # A random model need not end a call. What it gives must be what the single server gives.
        return [item.model_dump(exclude={"id", "call_id"}) for item in response.output], response.status

    def result(url: str) -> Any:
        items = [
            {"role": "user", "content": f"result {TEXT}"},
            {"type": "function_call", "call_id": "c", "name": "cross", "arguments": '{"to": "a"}'},
            {"type": "function_call_output", "call_id": "c", "output": "crossed"},
        ]
        with openai_at(url) as client:
            return text_of(client.responses.create(input=items, **asked))

    for ask in (call, result):
        through, alone = place.both(ask)
        assert through == alone


@pytest.mark.parametrize("choice", [None, {"type": "any"}, {"type": "tool", "name": "cross"}])
def test_messages_whole_and_streamed(place: Place, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "model", "system": "Be brief.", "max_tokens": 120}
    asked |= {"extra_body": {"temperature": 0}}  # the client no longer has this argument
    if choice is not None:
        asked |= {
            "tools": [{"name": "cross", "input_schema": PARAMETERS, "strict": True}],
            "tool_choice": choice,
        }

    def told(message: Any) -> Any:
        blocks = [block.model_dump(exclude={"id"}) for block in message.content]
        return blocks, message.stop_reason, message.usage.input_tokens, message.usage.output_tokens

    def whole(url: str) -> Any:
        messages = [{"role": "user", "content": f"{choice} {TEXT}"}]
        with anthropic_at(url) as client:
            return told(client.messages.create(messages=messages, **asked))

    def streamed(url: str) -> Any:
        messages = [{"role": "user", "content": f"streamed {choice} {TEXT}"}]
        with anthropic_at(url) as client, client.messages.stream(messages=messages, **asked) as stream:
            return told(stream.get_final_message())

    for ask in (whole, streamed):
        through, alone = place.both(ask)
        assert through == alone


def test_token_ids_whole_and_streamed(place: Place) -> None:
    params = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}

    def whole(url: str) -> Any:
        body = {"token_ids": TOKENS, "sampling_params": {**params, "logprobs": 1}}
        (choice,) = post(url, "/inference/v1/generate", body).json()["choices"]
        return choice["token_ids"], choice["finish_reason"], len(choice["logprobs"]["content"])

    def streamed(url: str) -> Any:
        body = {"token_ids": TOKENS[::-1], "sampling_params": params, "stream": True}
        lines = post(url, "/inference/v1/generate", body).text.split()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        assert lines[-1] == "[DONE]"
        return [token for event in events for token in event["choices"][0]["token_ids"]]

    for ask in (whole, streamed):
        through, alone = place.both(ask)
        assert through == alone
        assert through


@NEEDS_TOOLS
def test_an_evaluation_harness_gets_the_single_servers_chats(place: Place, tmp_path: Path) -> None:
    def chats(url: str, folder: Path) -> list[str]:
        folder.mkdir()
        options = ("--model", "local-chat-completions", "--apply_chat_template")
        return evaluated(f"{url}/v1/chat/completions", "model", *options, folder=folder)

    before = place.decode.metric(LOADS)
    assert chats(place.router, tmp_path / "pair") == chats(place.alone, tmp_path / "alone")
    assert place.decode.metric(LOADS) == before + len(DOCUMENTS)


def test_what_one_server_answers(place: Place) -> None:
    message = {"model": "model", "messages": [{"role": "user", "content": TEXT}]}
    for path, body in (
        ("/tokenize", {"model": "model", "prompt": TEXT}),
        ("/tokenize", message),
        ("/detokenize", {"model": "model", "tokens": TOKENS}),
        ("/v1/messages/count_tokens", message),
    ):
        through, alone = (post(url, path, body) for url in (place.router, place.alone))
        assert (through.status_code, through.json()) == (200, alone.json()), path
    with anthropic_at(place.router) as client:
        assert client.messages.count_tokens(**message).input_tokens > len(TEXT)
    refused = post(place.router, "/v1/embeddings", {"model": "model", "input": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_served")


def test_clients_read_refusals_as_errors_of_their_own(place: Place) -> None:
    with openai_at(place.router) as client:
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            client.responses.create(model="model", input="x", store=True)
        with pytest.raises(openai.NotFoundError, match="keeps no responses"):
            client.responses.retrieve("resp_1")
    messages: Any = [{"role": "user", "content": "x"}]
    with anthropic_at(place.router) as other, pytest.raises(anthropic.NotFoundError, match="does not exist"):
        other.messages.create(model="another", messages=messages, max_tokens=1)
