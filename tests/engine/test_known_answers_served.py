"""What a node does not continue is refused with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.lab.engine.settings import EngineSettings
from tests.support.engines import served_engine
from tests.support.patience import DEADLINE_S

PROMPT = [(37 * number) % 250 for number in range(30)]


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
