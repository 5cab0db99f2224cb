"""A minimal proxy for one pair. It speaks the request protocol of the example proxy that comes with vLLM.

It asks the prefill node for one token of the prompt. The `kv_transfer_params` of that answer go with the client's request to the
decode node, whose answer is streamed back. It retries nothing; for real use there is `examples/router.py`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.web.errors import bad_request, error_middleware

ASK_TO_OFFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def proxy_application(prefill_url: str, decode_url: str) -> web.Application:
    """Make a proxy for completions over one prefill node and one decode node."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        _check_one_prompt(body)
        headers = {"X-Request-Id": uuid.uuid4().hex}
        short = {key: value for key, value in body.items() if key != "stream_options"}
        short |= {"n": 1, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK_TO_OFFER}
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            async with session.post(prefill_url + request.path, json=short, headers=headers) as response:
                params = (await response.json()).get("kv_transfer_params") or {}
            body["kv_transfer_params"] = params
            async with session.post(decode_url + request.path, json=body, headers=headers) as response:
                answer = web.StreamResponse(headers={"Content-Type": response.headers["Content-Type"]})
                await answer.prepare(request)
                async for chunk in response.content.iter_any():
                    await answer.write(chunk)
        await answer.write_eof()
        return answer

    app = web.Application(middlewares=[error_middleware])
    app.router.add_post("/v1/completions", complete)
    return app


def _check_one_prompt(body: Mapping[str, Any]) -> None:
    """Refuse several prompts, because one set of `kv_transfer_params` belongs to one prompt.

    Raises:
        ApiError: There are several prompts.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt):
        raise bad_request(
            f"cannot hand over {len(prompt)} prompts of one request: an offer holds one prompt; send one request per prompt",
            "prompt",
        )
