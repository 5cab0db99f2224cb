"""A node reports whether it can hand over: in its health check, its metrics and each answer's header."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from kvferry.connector.aggregator import KVOutputAggregator
from kvferry.connector.config import KVTransferConfig
from kvferry.connector.output import KVConnectorOutput
from kvferry.connector.stats import TransferRecord
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.engine.types import RequestMetrics
from kvferry.lab.node.replies import transfer_outcome
from tests.support.engines import served_engine
from tests.support.patience import DEADLINE_S

#: The params of a prefill node that uses shared memory.
FOREIGN_OFFER = {
    "do_remote_prefill": True,
    "remote_engine_id": "there",
    "remote_epoch": "1",
    "remote_request_id": "theirs",
    "remote_lease": "1",
    "remote_addresses": ["shm://@there"],
    "remote_num_tokens": 9,
    "remote_block_ids": [[1, 2, 3]],
    "tp_size": 1,
}


@asynccontextmanager
async def served(
    tiny_model: Callable[[str], Path],
    *,
    faults: list[Mapping[str, object]] | None = None,
    policy: str = "recompute",
) -> AsyncIterator[TestClient[Any, Any]]:
    """Serve a decode node with an in-process transport that has these faults."""
    transfer = KVTransferConfig(
        "FaultyConnector",
        "kv_both",
        kv_connector_module_path="kvferry.connector.testing",
        kv_connector_extra_config={"transport_options": {"faults": faults or []}},
        kv_load_failure_policy=policy,  # type: ignore[arg-type]
    )
    settings = EngineSettings(str(tiny_model("llama")), block_size=4, num_blocks=60, kv_transfer=transfer)
    async with served_engine(settings) as (_, _, client):
        yield client


async def complete(client: TestClient[Any, Any], **fields: Any) -> tuple[int, str, Any]:
    """Ask for two tokens. Returns the status, `X-KV-Transfer`, and the body."""
    body = {"prompt": [*range(9)], "max_tokens": 2, "temperature": 0, **fields}
    async with client.post("/v1/completions", json=body) as reply:
        return reply.status, reply.headers["X-KV-Transfer"], await reply.text()


async def health(client: TestClient[Any, Any]) -> tuple[int, Any]:
    async with client.get("/health") as reply:
        return reply.status, await reply.json()


async def metric(client: TestClient[Any, Any], name: str) -> float:
    async with client.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


async def test_the_death_of_the_handoff_thread_is_reported_while_a_node_has_nothing_to_do(
    tiny_model: Callable[[str], Path],
) -> None:
    broken = [
        {"kind": "raise", "at": "wait_events", "nth": nth, "error": "ZeroDivisionError"}
        for nth in range(2, 40)
    ]
    async with served(tiny_model, faults=broken) as client:
        async with asyncio.timeout(DEADLINE_S):
            while (said := await health(client))[0] != 503:
                await asyncio.sleep(0.01)
        assert said[1]["status"] == "failing"
        assert "ZeroDivisionError('injected by a test')" in said[1]["error"]
        assert await metric(client, "kvferry_engine_healthy") == 0
        # It still computes requests, but stays out of service.
        assert (await complete(client))[:2] == (200, "none")
        assert (await health(client))[0] == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_an_offer_of_another_transport_is_recomputed_and_reported(
    stream: bool, tiny_model: Callable[[str], Path]
) -> None:
    async with served(tiny_model) as client:
        status, said = await health(client)
        assert len(said.pop("continues_answers")) == 16
        assert (status, said) == (200, {"status": "ok", "load_failure_policy": "recompute"})
        assert (await complete(client, stream=stream))[:2] == (200, "none")
        prompt = [*range(50, 59)]
        status, outcome, _ = await complete(
            client, prompt=prompt, stream=stream, kv_transfer_params=FOREIGN_OFFER
        )
        assert (status, outcome) == (200, "failed")
        status, said = await health(client)
        assert (status, said["status"]) == (200, "ok")
        assert "'shm://@there'" in said["warning"]
        assert "'faulty:inproc://" in said["warning"]
        assert await metric(client, "kvferry_engine_healthy") == 1
        assert await metric(client, "kvferry_unreachable_peers_total") == 1
        assert await metric(client, "kvferry_load_failures_total") == 1


async def test_a_load_that_fails_its_request_is_in_the_header_too(tiny_model: Callable[[str], Path]) -> None:
    async with served(tiny_model, policy="fail") as client:
        status, outcome, body = await complete(client, kv_transfer_params=FOREIGN_OFFER)
        assert (status, outcome) == (500, "failed")
        assert "use the same connector on both nodes" in body


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "none"), ("", "loaded"), ("the peer is gone", "failed")]
)
def test_the_header_says_how_the_load_ended(error: str | None, outcome: str) -> None:
    record = TransferRecord("a", "shm", "mapped", "uniform", 1, 1, 1, 1, 0.1, error or "")
    transfer = None if error is None else record
    assert transfer_outcome(RequestMetrics(9, 1, 0, 0, 0, 0.1, transfer)) == outcome


def test_the_header_does_not_need_the_connectors_figures() -> None:
    assert transfer_outcome(RequestMetrics(9, 1, 0, 8, 0, 0.1, None)) == "loaded"


def test_a_failure_of_any_rank_is_a_failure_of_the_node() -> None:
    joined = KVOutputAggregator(2).aggregate([None, KVConnectorOutput(failure="it broke", warning="careful")])
    assert (joined.failure, joined.warning) == ("it broke", "careful")
    assert not KVConnectorOutput(failure="it broke").is_empty()
    assert not KVConnectorOutput(warning="careful").is_empty()
