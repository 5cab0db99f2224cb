"""Publish the events of the prefix cache with ZeroMQ, in vLLM's format."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import zmq

from ...transports.errors import ConfigurationError


class EventPublisher:
    """A ZeroMQ socket that subscribers connect to. One thread at a time may use it.

    A message is a topic (empty), the number of the batch in 8 bytes, and `[time, events, None]` in
    MessagePack. A subscriber that does not keep up loses batches, which it notices by their numbers.

    Args:
        endpoint: `tcp://HOST:PORT`; port 0 takes a free one.

    Raises:
        ConfigurationError: Nothing can listen there.
    """

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(
                f"cannot publish KV events at {endpoint!r}: {error}; choose another --kv-events",
                key="kv_events_endpoint",
                value=endpoint,
            ) from None
        self._num_sent = 0
        #: Where it listens.
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def publish(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send a batch, without waiting for any subscriber."""
        payload = msgpack.packb([time.time(), events, None])
        self._socket.send_multipart((b"", self._num_sent.to_bytes(8, "big"), payload))
        self._num_sent += 1

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._context.destroy(linger=0)
