"""The Helm chart with engine `vllm`: the commands of its containers as real processes, on the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.lab.servers import OFFLINE
from kvferry.transports.testing.certificates import Authority
from tests.support.client import wait_until
from tests.support.deployments import EXAMPLES, helm, ready_roles, render, running_pods
from tests.support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not helm(), reason="`make tools` was not run"),
]

#: What vLLM needs on a CPU. The chart leaves it to `extraArgs` and `extraEnv`.
ARGUMENTS = (
    "--dtype=float32",
    "--block-size=32",
    "--max-model-len=256",
    "--max-num-seqs=4",
    "--enforce-eager",
)


def test_the_rendered_commands_of_vllm_are_a_pair_that_answers(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model", head_dim=32)  # the smallest for vLLM's CPU attention
    values = {
        "extraArgs": [*ARGUMENTS, "--num-gpu-blocks-override=64"],
        "extraEnv": [{"name": name, "value": value} for name, value in OFFLINE.items()],
    }
    own = tmp_path / "values.json"
    own.write_text(json.dumps({"prefill": values, "decode": values, "drain": {"delaySeconds": 0}}))
    manifests = render([EXAMPLES / "vllm-tcp.yaml", own])

    def issue_certificate(addresses: Sequence[str]) -> None:
        files = Authority.make(tmp_path).issue("node", *(f"IP:{address}" for address in addresses))
        for option, file in {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt"}.items():
            os.symlink(files[option], tmp_path / file)

    secrets = dict.fromkeys(
        ("/etc/kvferry/transport", "/etc/kvferry/http", "/var/cache/kvferry"), str(tmp_path)
    )
    places = {**secrets, "/models/model": str(model)}
    with running_pods(manifests, tmp_path, places, issue_certificate) as processes:
        router, prefill, decode = (processes[role] for role in ("router", "prefill", "decode"))
        for node in (prefill, decode):
            node.wait_for("startupProbe", 400)
            assert (node.status("livenessProbe"), node.status("readinessProbe")) == (200, 200)
        wait_until(lambda: {"prefill", "decode"} <= ready_roles(router))
        answer = router.ask(
            "/v1/completions",
            model="model",
            prompt="A box that holds a box. " * 4,
            max_tokens=4,
            temperature=0,
        )
        assert answer["usage"]["completion_tokens"] == 4
        assert decode.metric("kvferry_load_seconds_count") == 1
        for process in (router, decode, prefill):
            assert process.stop(60) == 0
