"""One check of a node: ask `/ready`, or `/health` if the node has no `/ready`, and interpret the answer.

A node of ours says on `/ready` what it is. A server of vLLM is asked with a request of one token, once per
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import aiohttp

from ...connector.p2p.params import IDENTITY, IDENTITY_FIELDS
from .reading import read_whole
from .states import Health, NodeState, Occupancy

#: The largest body of `/health`.
MAX_HEALTH_BYTES = 64 << 10
#: The router is out of descriptors or memory, which says nothing about the node.
LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


#: The paths to ask, in order of preference. Most servers other than ours, vLLM among them, have only
#: `/health`.
READY_PATH, HEALTH_PATH = "/ready", "/health"
_NO_HEALTH = Health(None, f"neither {READY_PATH} nor {HEALTH_PATH} exists")
#: Answers of a server that does not have a path.
NOT_FOUND = frozenset({404, 405, 501})
MAX_VERSION_CHARS = 80
#: Of what a node says is wrong with it, at most this many characters are kept.
MAX_REASON_CHARS = 400
#: A node that states more requests than this does not tell the truth.
MAX_STATED = 10**9
#: The largest page of `/metrics`.
MAX_METRICS_BYTES = 4 << 20
#: How long a busy server of vLLM may take to say what it is. It answers after the requests that wait before
#: this one.
QUESTION_TIMEOUT_S = 60.0
#: How vLLM's `/metrics` states its load, with a row per engine.
_VLLM_LOAD = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{[^}\n]*\} ([0-9.eE+-]{1,24})$",
    re.MULTILINE,
)
_PROTOCOL = re.compile(rb'^kvferry_build_info\{[^}\n]*\bprotocol="(\d{1,9})"', re.MULTILINE)


@dataclass(frozen=True)
class LastProbe:
    """What the last check did.

    Attributes:
        path: The path that was asked.
        at: When the check ended, in seconds since the epoch.
        took_s: How long it took.
        error: Why the node is not ready. Empty if it is.
    """

    path: str
    at: float
    took_s: float
    error: str


class Prober:
    """Checks one node.

    Attributes:
        last: The last check. None before the first one.
        version: The node's version. Empty if it is not known.
        protocol: The newest version of kvferry's handoff protocol that the node speaks. 0 if it does not say.
        vllm_max_model_len: The longest sequence of a vLLM server. 0 if the node is none, or does not say.
        vllm_models: The names of a vLLM server's own model. Those of adapters are not among them.
        fields: What a vLLM server has described of its model and its cache. Empty if it has not.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._path = READY_PATH
        self._has_asked_version = False
        self.last: LastProbe | None = None
        self.version = ""
        self.protocol = 0
        self.vllm_max_model_len = 0
        self.vllm_models: frozenset[str] = frozenset()
        self.fields: Mapping[str, Any] = {}
        self._models: frozenset[str] = frozenset()
        # What a server of vLLM has said of itself. None: it was not asked yet, or may have changed since.
        self._told: Mapping[str, Any] | None = None
        self._question: asyncio.Task[None] | None = None
        self._has_waited = False
        self._num_doubts = 0

    async def probe(self, session: aiohttp.ClientSession, timeout_s: float) -> Health:
        """Check the node once. Every failure is a result, not an exception."""
        began = time.monotonic()
        health = await ask_health(session, self._url, timeout_s, self._path)
        if health is None:
            self._path = HEALTH_PATH
            health = await ask_health(session, self._url, timeout_s, self._path) or _NO_HEALTH
        self.last = LastProbe(self._path, time.time(), time.monotonic() - began, health.error)
        if health.state is NodeState.GONE:
            # The next process at this address may be of another version.
            self._path, self._has_asked_version, self._has_waited = READY_PATH, False, False
            self.close()
            self.fields = {}
        return health

    async def completed(self, session: aiohttp.ClientSession, timeout_s: float, health: Health) -> Health:
        """Return the result of a check that found the node ready, with what a server of vLLM says of itself
        elsewhere.

        The first check of a process waits for that, so that no request goes to a node of another role. A busy
        server may take longer; then a later check has it.
        """
        await self._learn_version(session, timeout_s)
        if not self.version or self._path != HEALTH_PATH:  # vLLM has no `/ready`
            return health
        # Each time, because adapters come and go.
        if listed := await self._ask(session, "/v1/models", timeout_s):
            self.vllm_max_model_len, self._models = _vllm_max_model_len(listed), _ids(_listed(listed))
            self.vllm_models = _ids(_vllm_models(listed))
        if not self.vllm_max_model_len:
            return health
        if self._told is None:
            await self._describe(session, timeout_s)
        told = self._told or {}
        page = await _ask_metrics(session, self._url, timeout_s)
        protocol = told.get("protocol")
        self.protocol = protocol if type(protocol) is int else self.protocol
        return replace(
            health,
            load_failure_policy=str(told.get("load_failure_policy") or ""),
            continues_answers=str(told.get(IDENTITY) or ""),
            kv_role=str(told.get("kv_role") or ""),
            models=self._models,
            description=told,
            occupancy=_vllm_occupancy(page),
        )

    def forget(self) -> None:
        """Ask a server of vLLM again what it is, because it may have changed."""
        self._told = None
        self._num_doubts += 1  # an answer that is under way comes too early

    def close(self) -> None:
        """Forget what the server has said, and end a question that is under way."""
        self.forget()
        if self._question is not None:
            self._question.cancel()
            self._question = None

    async def _describe(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask_description(session))
        if not self._has_waited:
            self._has_waited = True
            await asyncio.wait({self._question}, timeout=timeout_s)

    async def _ask_description(self, session: aiohttp.ClientSession) -> None:
        """Ask what the server is. A server without our connector answers with a token and nothing else."""
        body = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": {"describe": True}}
        headers = {"X-Request-Id": f"describe-{uuid.uuid4().hex}"}
        num_doubts = self._num_doubts
        timeout = aiohttp.ClientTimeout(total=QUESTION_TIMEOUT_S)
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            url = f"{self._url}/v1/completions"
            async with session.post(url, json=body, headers=headers, timeout=timeout) as response:
                payload = await read_whole(response.content, MAX_HEALTH_BYTES)
                if response.status < 500 and response.status != 429:
                    told = _object(payload).get("kv_transfer_params")
                    told = told if isinstance(told, dict) else {}
                    fields = told.get(IDENTITY_FIELDS)
                    self.fields = fields if isinstance(fields, dict) else {}
                    self._told = told if num_doubts == self._num_doubts else None

    async def _learn_version(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Ask a ready node for its version, once per process. A node need not have one."""
        if self._has_asked_version:
            return
        self._has_asked_version = True
        found = _PROTOCOL.search(await _ask_metrics(session, self._url, timeout_s))
        self.protocol = int(found[1]) if found else 0
        answer = await self._ask(session, "/version", timeout_s)
        self.version = str(answer.get("version") or "")[:MAX_VERSION_CHARS]
        self.vllm_max_model_len, self._models = 0, frozenset()

    async def _ask(self, session: aiohttp.ClientSession, path: str, timeout_s: float) -> dict[str, Any]:
        """Return the JSON object at a path; empty if there is none."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with session.get(f"{self._url}{path}", timeout=timeout) as response:
                payload = await read_whole(response.content, MAX_HEALTH_BYTES)
                if response.status == 200:
                    return _object(payload)
        return {}


async def _ask_metrics(session: aiohttp.ClientSession, url: str, timeout_s: float) -> bytes:
    """Return a node's page of metrics; empty if it has none."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(f"{url}/metrics", timeout=timeout) as response:
            return await read_whole(response.content, MAX_METRICS_BYTES) if response.status == 200 else b""
    return b""


def _vllm_occupancy(page: bytes) -> Occupancy | None:
    found: dict[bytes, list[float]] = {}
    for name, value in _VLLM_LOAD.findall(page):
        with contextlib.suppress(ValueError):
            found.setdefault(name, []).append(float(value))
    running, waiting = (found.get(name, []) for name in (b"num_requests_running", b"num_requests_waiting"))
    return (
        _occupancy(sum(running), sum(waiting), max(found.get(b"kv_cache_usage_perc", [0.0])))
        if running
        else None
    )


def _occupancy(running: object, waiting: object, pool_usage: object) -> Occupancy | None:
    """Return what a node states, if it can be true."""
    figures = [each for each in (running, waiting, pool_usage) if isinstance(each, int | float)]
    if len(figures) < 3 or not all(type(each) is not bool and 0 <= each <= MAX_STATED for each in figures):
        return None
    return Occupancy(int(figures[0]), int(figures[1]), min(1.0, float(figures[2])))


async def ask_health(
    session: aiohttp.ClientSession, url: str, timeout_s: float, path: str = HEALTH_PATH
) -> Health | None:
    """Ask a node once how it is. Every failure is a result, not an exception.

    Returns:
        The result. None if the node answers that it does not have `path`.
    """
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(f"{url}{path}", timeout=timeout) as response:
            if response.status in NOT_FOUND:
                return None
            payload = await read_whole(response.content, MAX_HEALTH_BYTES)
            return _answered(path, response.status, payload)
    except TimeoutError:
        return Health(None, f"{path} did not answer within {timeout_s:g} s", ends_requests=True)
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno == errno.ECONNREFUSED:
            # The host is alive, and closes the connections of a process that ends. So do not end requests in
            # flight: at a node that only stopped listening, as vLLM does while it drains, they can still
            # finish.
            return Health(NodeState.GONE, "the process is gone: connection refused")
        # A failed DNS look-up says nothing about existing connections.
        is_silent = not is_local(error) and not isinstance(error, aiohttp.ClientConnectorDNSError)
        return Health(None, reason_of(error), is_local=is_local(error), ends_requests=is_silent)
    except aiohttp.ClientError as error:
        return Health(None, f"{path} failed: {reason_of(error)}")


def _answered(path: str, status: int, payload: bytes) -> Health:
    body = _object(payload)
    kv_role, models = str(body.get("kv_role") or ""), body.get("models")
    load = told if isinstance(told := body.get("load"), dict) else {}
    occupancy = _occupancy(*(load.get(key) for key in ("running", "waiting", "pool_usage")))
    if status == 200:
        return Health(
            NodeState.READY,
            load_failure_policy=str(body.get("load_failure_policy") or ""),
            continues_answers=str(body.get("continues_answers") or ""),
            kv_role=kv_role,
            models=frozenset(filter(_is_text, models if isinstance(models, list) else ())),
            description=told if isinstance(told := body.get("kv_transfer_params"), dict) else {},
            occupancy=occupancy,
        )
    if status != 503:
        return Health(None, f"{path} answered {status}")
    word, error = str(body.get("status") or ""), str(body.get("error") or "")
    # Logs and `/nodes` repeat it, in one line.
    reported = " ".join(": ".join(filter(None, (word, error))).split())[:MAX_REASON_CHARS]
    said = f"{path} says {reported}" if word else f"{path} answered 503"
    if word == "draining":
        return Health(NodeState.DRAINING, said, is_reported=True)
    if word == "overloaded":
        return Health(NodeState.OVERLOADED, said, is_reported=True, kv_role=kv_role, occupancy=occupancy)
    # A node that can no longer hand over may still finish its answers; a node with a dead engine cannot. vLLM
    # answers `/health` with 503 and an empty body, and only if its engine is dead.
    is_dead = word not in ("starting", "failing") if path == HEALTH_PATH else word == "dead"
    return Health(NodeState.GONE, said, ends_requests=is_dead, is_reported=bool(word))


def _vllm_max_model_len(models: dict[str, Any]) -> int:
    """Return the longest sequence of the models that a vLLM server lists. 0 if another server answered."""
    return min((model["max_model_len"] for model in _vllm_models(models)), default=0)


def _vllm_models(models: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a vLLM server lists of its own model. Adapters are listed without a length."""
    own = (model for model in _listed(models) if model.get("owned_by") == "vllm")
    return [model for model in own if type(model.get("max_model_len")) is int]


def _listed(models: dict[str, Any]) -> list[dict[str, Any]]:
    listed = models.get("data")
    return [model for model in (listed if isinstance(listed, list) else []) if isinstance(model, dict)]


def _ids(models: list[dict[str, Any]]) -> frozenset[str]:
    """Return the names of models that a server lists."""
    return frozenset(filter(_is_text, (model.get("id") for model in models)))


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _object(payload: bytes) -> dict[str, Any]:
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def is_local(error: Exception) -> bool:
    """Return whether a connection failed because of the router itself."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in LOCAL_ERRORS


def reason_of(error: Exception) -> str:
    """Return an exception's message, or its type if the message is empty."""
    return str(error) or type(error).__name__
