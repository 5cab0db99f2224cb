"""kvferry in Ray Serve's prefill and decode deployments: shapes the requests of a pair of replicas.

    from kvferry.connector.ray import register

    register()
    serve.run(build_pd_openai_app({"prefill_config": ..., "decode_config": ...}))

Ray's decode replica chooses a prefill replica, and asks a backend what to send to it and to its own engine.
Ray's default backend would do, one after the other. This one asks both at once, in a rendezvous
(docs/design.md), as soon as a prefill replica has answered once: only its answer says where its engine can be
reached. docs/behind-a-router.md says more.

It is written against Ray 2.60, whose interface for backends is not public.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    base_prefill_kv_transfer_params,
    clamp_request_to_single_token,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

from .p2p.params import RENDEZVOUS, draw_offer_name, rendezvous_params

__all__ = ["KvferryBackend", "register"]

CONNECTOR: Final = "KvferryConnector"
#: Prefill replicas whose places are kept. The one that was learned first is forgotten first.
MAX_PLACES: Final = 1024
#: How long a place is believed, in seconds. In a rendezvous Ray shows no answer of the prefill replica, so
#: nothing else would ever replace a place that is no longer true.
PLACE_S: Final = 60.0
#: Stands for the address of the replica's machine.
NODE_IP: Final = "{node_ip}"
_ENGINE: Final = "kvferry_engine_id"
#: What the decode engine is told in the rendezvous that was begun last in this task. None: the handoff is in
#: turn.
_claim: ContextVar[Mapping[str, Any] | None] = ContextVar("claim", default=None)


def register() -> None:
    """Let all processes of the cluster use `KvferryBackend` for `KvferryConnector`.

    Call it before `serve.run`; idempotent.
    """
    # Ray remembers in this process that it is registered, perhaps in another cluster than the one of now, and
    # refuses to repeat it.
    KVConnectorBackendFactory.unregister_backend(CONNECTOR)
    KVConnectorBackendFactory.register_backend(CONNECTOR, f"{__name__}:{KvferryBackend.__name__}")


class KvferryBackend(BaseConnectorBackend):  # type: ignore[misc]
    """Shapes requests for kvferry. Ray makes one per replica."""

    #: Ray chooses the prefill replica before it asks for the requests, and tells `replica_metadata` of it as
    #: `peer`.
    requires_peer_binding = True

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        self._engine_id = ""
        self._places: dict[
            str, tuple[float, Mapping[str, Any]]
        ] = {}  # by engine: until when, and an answer's params

    @property
    def concurrent_handoff(self) -> bool:
        """Whether the prefill request that this task prepared last begins a rendezvous.

        Ray reads this right after `prepare_prefill_request`, and in between nothing else runs in the task.
        """
        return _claim.get() is not None

    def setup(self) -> None:
        """Make the configuration that all replicas share that of this one.

        Its engine gets an id that no other start of a replica has, and `{node_ip}` in the connector's options
        becomes the address of the machine.
        """
        config = self.kv_transfer_config
        self._engine_id = config["engine_id"] = f"{config.get('engine_id') or 'ray'}-{secrets.token_hex(8)}"
        if extra := config.get("kv_connector_extra_config"):
            config["kv_connector_extra_config"] = _filled(extra, ray.util.get_node_ip_address())

    def replica_metadata(self) -> dict[str, Any]:
        """Return what tells this replica from the others, and from itself after a restart."""
        return {_ENGINE: self._engine_id}

    def prepare_prefill_request(self, *, request: Any, peer: Mapping[str, Any] | None) -> Any:
        """Return the request for the prefill replica, which begins a rendezvous if it is known where that
        replica is.

        What the client has in `kv_transfer_params` is dropped: it could name another client's cache.
        """
        name = draw_offer_name()
        until, place = self._places.get((peer or {}).get(_ENGINE, ""), (0.0, {}))
        claim = rendezvous_params(name, place) if time.monotonic() < until else None
        # Also if there is none, because the task may have begun a rendezvous before.
        _claim.set(claim)
        shaped = request.model_copy(deep=True)
        shaped.kv_transfer_params = base_prefill_kv_transfer_params()
        if claim is not None:
            shaped.kv_transfer_params[RENDEZVOUS] = name
        clamp_request_to_single_token(shaped)
        return shaped

    def prepare_decode_request(
        self, *, request: Any, peer: Mapping[str, Any] | None, prefill_response: Any | None
    ) -> Any:
        """Return the request for this replica's own engine: with the prefill replica's answer, or in a
        rendezvous without one.

        An answer without params leaves the prompt to this engine.
        """
        shaped = request.model_copy(deep=True)
        if prefill_response is None:
            shaped.kv_transfer_params = dict(_claim.get() or {})
            return shaped
        told = prefill_response.kv_transfer_params
        shaped.kv_transfer_params = told
        if told and (engine := (peer or {}).get(_ENGINE)):
            self._places.pop(engine, None)  # so that it is the latest
            self._places[engine] = time.monotonic() + PLACE_S, told
            if len(self._places) > MAX_PLACES:
                del self._places[next(iter(self._places))]
        return shaped


def _filled(options: Any, node_ip: str) -> Any:
    if isinstance(options, Mapping):
        return {key: _filled(value, node_ip) for key, value in options.items()}
    return options.replace(NODE_IP, node_ip) if isinstance(options, str) else options
