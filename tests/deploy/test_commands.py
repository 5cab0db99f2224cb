"""The commands of the chart's containers, run as real processes.

Only addresses, paths and the program's folder are replaced. Ports, options, environment and probes are the
chart's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvferry.transports.testing.certificates import Authority
from tests.support.client import wait_until
from tests.support.deployments import EXAMPLES, helm, ready_roles, render, running_pods
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.full, pytest.mark.skipif(not helm(), reason="`make tools` was not run")]

PROMPT = "A box that holds a box. " * 4
#: Small nodes. `{model}` is the folder of the model.
SETTINGS = [
    "model.path={model}",
    *(
        f"{role}.extraArgs={{--threads=1,--num-blocks=128,--max-num-batched-tokens=64,--log-level=warning}}"
        for role in ("prefill", "decode")
    ),
    "drain.delaySeconds=0",
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, because socket paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def over(name: str, *settings: str, transport: str, mechanism: str, needs: str = "") -> object:
    """A values file with settings that this machine needs, and what a transfer then says."""
    is_missing = bool(needs) and find_spec(needs) is None
    return pytest.param(
        name,
        settings,
        transport,
        mechanism,
        id=name,
        marks=pytest.mark.skipif(is_missing, reason=f"{needs} is not installed"),
    )


@pytest.mark.parametrize(
    ("name", "settings", "transport", "mechanism"),
    [
        over("reference-tcp", transport="tcp", mechanism="tcp+tls"),
        over("reference-shm-pod", transport="shm", mechanism="mapped"),
        # There is no RDMA here.
        over("reference-nixl", "transport.options.refuse_tcp=false", transport="nixl", mechanism="nixl", needs="nixl_cu12"),
    ],
)  # fmt: skip
def test_the_rendered_commands_are_a_pair_that_answers(
    name: str, settings: list[str], transport: str, mechanism: str, folder: Path, tiny_model: Path
) -> None:
    chosen = [setting.format(model=tiny_model) if "{model}" in setting else setting for setting in SETTINGS]
    manifests = render([EXAMPLES / f"{name}.yaml"], *chosen, *settings)

    def issue_certificate(addresses: Sequence[str]) -> None:
        """Write the files of the secret, which all nodes share."""
        files = Authority.make(folder).issue("node", *(f"IP:{address}" for address in addresses))
        for option, file in {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt"}.items():
            (folder / file).symlink_to(files[option])

    places = {path: str(folder) for path in ("/run/kvferry", "/etc/kvferry/transport", "/etc/kvferry/http")}
    with running_pods(manifests, folder, places, issue_certificate) as processes:
        router, prefill, decode = (processes[role] for role in ("router", "prefill", "decode"))
        for node in (prefill, decode):
            node.wait_for("startupProbe", 100)
            assert (node.status("livenessProbe"), node.status("readinessProbe")) == (200, 200)
        router.wait_for("readinessProbe", 30)
        wait_until(lambda: {"prefill", "decode"} <= ready_roles(router))
        answer = router.ask("/v1/completions", prompt=PROMPT, max_tokens=4, temperature=0)
        transfer = answer["metrics"]["transfer"]
        assert (transfer["transport"], transfer["error"]) == (transport, "")
        assert transfer["num_blocks"] > 0
        assert transfer["mechanism"].startswith(mechanism)
        # Each container drains when Kubernetes stops it.
        for process in (router, decode, prefill):
            assert process.stop() == 0
