"""A node continues an answer as if it had given all of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.lab.engine.settings import EngineSettings
from tests.support.engines import served_engine
from tests.support.patience import DEADLINE_S

PROMPT = [(37 * number) % 250 for number in range(30)]
BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("completions", {"prompt": [*PROMPT, number], "temperature": 0}) for number in range(8)),
    ("completions", {"prompt": PROMPT, "seed": 3, "temperature": 0.9, "top_p": 0.8}),
    ("completions", {"prompt": PROMPT, "seed": 4}),
    ("completions", {"prompt": PROMPT * 8, "temperature": 0, "max_tokens": 100}),
    ("chat/completions", {"messages": [{"role": "user", "content": "ferry"}], "temperature": 0}),
]
COMMON = {
    "max_tokens": 8,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
}


def normalized(stream: bytes) -> bytes:
    """Return a stream without times, and without what tells how it was computed."""
    stream = re.sub(rb'"created": \d+', b'"created": 0', stream)
    stream = re.sub(rb'"metrics": \{.*?"queue_s": [^}]*\}', b'"metrics": {}', stream)
    return re.sub(rb'"cached_tokens": \d+', b'"cached_tokens": 0', stream)


async def test_the_rest_of_an_answer_is_that_of_one_nodes_stream(tiny_model: Callable[[str], Path]) -> None:
    settings = EngineSettings(model=str(tiny_model("llama")), num_blocks=60, max_model_len=256, num_threads=1)
    async with asyncio.timeout(DEADLINE_S), served_engine(settings) as (_, _, client):

        async def ask(path: str, body: dict[str, Any]) -> bytes:
            async with client.post(f"/v1/{path}", json=body, headers={"X-Request-Id": "r"}) as response:
                assert response.status == 200, await response.text()
                return await response.read()

        for path, fields in BODIES:
            body = COMMON | fields
            expected = await ask(path, body)
            events = expected.split(b"\n\n")
            chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
            num_known = len(chunks) // 2
            token_ids = [token for chunk in chunks[:num_known] for token in chunk["choices"][0]["token_ids"]]
            known = {"token_ids": token_ids, "created": chunks[0]["created"]}
            rest = await ask(path, body | {"kv_transfer_params": {"continues": known}})
            assert normalized(rest) == normalized(b"\n\n".join(events[num_known:]))


async def test_what_a_node_does_not_continue(tiny_model: Callable[[str], Path]) -> None:
    settings = EngineSettings(model=str(tiny_model("llama")), num_blocks=60, max_model_len=256, num_threads=1)
    async with asyncio.timeout(DEADLINE_S), served_engine(settings) as (_, _, client):

        async def ask(params: dict[str, Any], **fields: Any) -> tuple[int, dict[str, Any]]:
            body = {
                "prompt": PROMPT,
                "max_tokens": 1,
                "temperature": 0,
                "kv_transfer_params": params,
                **fields,
            }
            async with client.post("/v1/completions", json=body) as response:
                return response.status, await response.json()

        for known, fields in (
            ({"token_ids": [7]}, {"max_tokens": 1}),  # it ends the answer
            ({"token_ids": [256]}, {"max_tokens": 5}),  # it is the end token
            ({"token_ids": [300]}, {"max_tokens": 5}),
            ({"token_ids": ["7"]}, {"max_tokens": 5}),
            ({"token_ids": 7}, {"max_tokens": 5}),
            ({"token_ids": [7, 256, 8]}, {"max_tokens": 5}),
            ({"token_ids": [7]}, {"max_tokens": 5, "logprobs": 0}),
            ({"token_ids": [7]}, {"max_tokens": 5, "n": 2}),
        ):
            status, answer = await ask({"continues": known}, **fields)
            assert status == 400, answer
        status, answer = await ask({"continues": {"token_ids": [7], "model": "another one"}}, max_tokens=5)
        assert (status, "another model" in answer["error"]["message"]) == (503, True)
