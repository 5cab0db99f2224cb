"""The demo's option `--router`, and what a node accepts from routers of other projects."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.lab import servers
from kvferry.lab.demo.cli import parse_arguments
from kvferry.lab.demo.report import Way
from kvferry.lab.node.openai_request import parse_completion
from kvferry.lab.servers import Launcher, LaunchError
from kvferry.router.http.errors import ApiError

DO_REMOTE_DECODE = {"do_remote_decode": True}


def test_only_our_router_asks_both_nodes_at_once() -> None:
    assert parse_arguments([]).ways == (Way.DEFAULT, Way.IN_TURN)
    assert parse_arguments(["--router", "vllm-router"]).ways == (Way.IN_TURN,)


def test_without_vllm_router_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "find_vllm_router", lambda: None)
    with Launcher() as launcher, pytest.raises(LaunchError, match="make build/vllm-router"):
        servers.start_router_program(launcher, "router")


def test_the_program_of_the_variable_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(servers.VLLM_ROUTER_VARIABLE, "/bin/sh")
    assert servers.find_vllm_router() == "/bin/sh"


def test_a_prefill_may_ask_for_at_least_one_token() -> None:
    """vllm-router writes `min_tokens` into it. Elsewhere the engine does not support it."""
    prefill: dict[str, Any] = {
        "prompt": "a", "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": DO_REMOTE_DECODE
    }  # fmt: skip
    assert parse_completion(prefill).sampling.max_tokens == 1
    for change in ({"max_tokens": 2}, {"min_tokens": 2}, {"kv_transfer_params": None}):
        with pytest.raises(ApiError, match="min_tokens"):
            parse_completion({**prefill, **change})
