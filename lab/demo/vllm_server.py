"""Ask a `vllm serve`, and what it has loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from ..client import Answer, ask, samples_of
from ..servers import LaunchedProcess

#: The name and the labels of a metric.
Series = tuple[str, tuple[tuple[str, str], ...]]


async def ask_pair(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    decode: LaunchedProcess,
    **more: Any,
) -> Answer:
    """Ask a pair as `ask` does, and give the answer the figures of its load, which vLLM does not send with
    it.

    They are what the request has added to the metrics of `decode`. So no other request may be in flight.
    """
    before = await _load_metrics(session, decode.url)
    answer = await ask(session, url, prompt, max_tokens, **more)
    after = await _load_metrics(session, decode.url)
    answer.metrics = _figures({key: value - before.get(key, 0.0) for key, value in after.items()})
    return answer


async def _load_metrics(session: aiohttp.ClientSession, url: str) -> dict[Series, float]:
    """Read a node's metrics: name and labels → value."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    return {(name, tuple(labels.items())): value for name, labels, value in samples_of(text)}


def _figures(added: Mapping[Series, float]) -> Mapping[str, Any]:
    """Return the figures of a load in the form of a reference node's; empty if there was none."""

    def total(name: str) -> float:
        return sum(value for (own, _), value in added.items() if own == name)

    if total("kvferry_load_failures_total"):
        return {"transfer": {"error": "see the log of the decode node"}}
    through = [
        labels for (name, labels), value in added.items() if name == "kvferry_load_seconds_count" and value
    ]
    if not through:
        return {}
    labels = dict(through[0])
    return {
        "num_loaded_tokens": int(total("vllm:external_prefix_cache_hits_total")),
        "transfer": {
            "transport": labels["transport"],
            "mechanism": labels["mechanism"],
            "seconds": total("kvferry_load_seconds_sum"),
            "exposed_seconds": total("kvferry_load_exposed_seconds_sum"),
            "num_bytes": int(total("kvferry_load_bytes_sum")),
            "num_blocks": int(total("kvferry_load_blocks_sum")),
            "num_regions": int(total("kvferry_load_regions_sum")),
        },
    }
