"""One health check of a node: ask `/health`, and read what the answer means."""

from __future__ import annotations

import enum
import errno
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

#: A longer body of `/health` is not read further.
MAX_HEALTH_BYTES = 64 << 10
#: The router's own want of descriptors or memory says nothing about the node.
LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class NodeState(enum.Enum):
    """What the router thinks of a node. Only a `READY` node gets requests, and an `UNKNOWN` one if no other is ready."""

    UNKNOWN = "unknown"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True)
class Health:
    """The result of one check.

    Attributes:
        state: The state that follows from it; None if the check failed without an answer, which may be chance.
        error: Why the node is not ready, empty if it is.
        is_local: The check failed because of the router itself.
        ends_requests: No request at the node can be answered any more, or nothing shows that it will be.
        load_failure_policy: The node's policy, empty if it does not tell.
        is_said: `error` is what the node says of itself.
    """

    state: NodeState | None
    error: str = ""
    is_local: bool = False
    ends_requests: bool = False
    load_failure_policy: str = ""
    is_said: bool = False


async def ask_health(session: aiohttp.ClientSession, url: str, timeout_s: float) -> Health:
    """Ask a node's `/health` once; every failure is a result, not an exception."""
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(f"{url}/health", timeout=timeout) as response:
            payload = await response.content.read(MAX_HEALTH_BYTES)
            return _answered(response.status, payload)
    except TimeoutError:
        return Health(None, f"/health did not answer within {timeout_s:g} s", ends_requests=True)
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno == errno.ECONNREFUSED:
            # Its host is alive and closes the connections of a process that ends. So requests in flight need no help,
            # and those at a node that has merely stopped to listen, as vLLM does while it drains, can go on.
            return Health(NodeState.GONE, "the process is gone: connection refused")
        is_local = error.os_error.errno in LOCAL_ERRORS
        # A name that cannot be looked up says nothing about connections that there are.
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
        return Health(NodeState.DRAINING, said, is_said=True)
    # A node that cannot hand over any more may still finish its answers; one whose engine is dead cannot. vLLM
    # answers 503, without a word, for the latter only.
    return Health(NodeState.GONE, said, ends_requests=word not in ("starting", "failing"), is_said=bool(word))


def _object(payload: bytes) -> dict[str, Any]:
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def reason_of(error: Exception) -> str:
    """Say what an exception says, or its type if it says nothing."""
    return str(error) or type(error).__name__
