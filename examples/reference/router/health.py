"""One health check of a node: ask `/health` and interpret the answer."""

from __future__ import annotations

import enum
import errno
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

#: At most this much of a `/health` body is read.
MAX_HEALTH_BYTES = 64 << 10
#: The router is out of descriptors or memory, which says nothing about the node.
LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class NodeState(enum.Enum):
    """The state of a node. Only `READY` nodes receive requests, and `UNKNOWN` ones if no node is ready."""

    UNKNOWN = "unknown"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True)
class Health:
    """The result of one check.

    Attributes:
        state: The state that follows. None if the check failed without an answer, which may be temporary.
        error: Why the node is not ready. Empty if it is.
        is_local: The check failed because of the router itself.
        ends_requests: The node can no longer answer its requests, or there is no sign that it will.
        load_failure_policy: The node's policy. Empty if it does not report one.
        is_reported: `error` is what the node reports about itself.
    """

    state: NodeState | None
    error: str = ""
    is_local: bool = False
    ends_requests: bool = False
    load_failure_policy: str = ""
    is_reported: bool = False


async def ask_health(session: aiohttp.ClientSession, url: str, timeout_s: float) -> Health:
    """Ask a node's `/health` once. Every failure is a result, not an exception."""
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(f"{url}/health", timeout=timeout) as response:
            payload = await response.content.read(MAX_HEALTH_BYTES)
            return _answered(response.status, payload)
    except TimeoutError:
        return Health(None, f"/health did not answer within {timeout_s:g} s", ends_requests=True)
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno == errno.ECONNREFUSED:
            # The host is alive, and closes the connections of a process that ends. So do not end requests in flight: at a
            # node that only stopped listening, as vLLM does while it drains, they can still finish.
            return Health(NodeState.GONE, "the process is gone: connection refused")
        is_local = error.os_error.errno in LOCAL_ERRORS
        # A failed DNS look-up says nothing about existing connections.
        is_silent = not is_local and not isinstance(error, aiohttp.ClientConnectorDNSError)
        return Health(None, reason_of(error), is_local=is_local, ends_requests=is_silent)
    except aiohttp.ClientError as error:
        return Health(None, f"/health failed: {reason_of(error)}")


def _answered(status: int, payload: bytes) -> Health:
    body = _object(payload)
    if status == 200:
        return Health(NodeState.READY, load_failure_policy=str(body.get("load_failure_policy") or ""))
    if status != 503:
        return Health(None, f"/health answered {status}")
    word, error = str(body.get("status") or ""), str(body.get("error") or "")
    said = f"/health says {': '.join(filter(None, (word, error)))}" if word else "/health answered 503"
    if word == "draining":
        return Health(NodeState.DRAINING, said, is_reported=True)
    # A node that can no longer hand over may still finish its answers; a node with a dead engine cannot. vLLM answers
    # 503 with an empty body, and only if its engine is dead.
    return Health(
        NodeState.GONE, said, ends_requests=word not in ("starting", "failing"), is_reported=bool(word)
    )


def _object(payload: bytes) -> dict[str, Any]:
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def reason_of(error: Exception) -> str:
    """Return an exception's message, or its type if the message is empty."""
    return str(error) or type(error).__name__
