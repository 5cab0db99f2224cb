"""Run an image and the services of `compose.yaml` in containers. Only `make test-docker` does this.

`make test-docker` first builds `kvferry:cpu`, or the CUDA image if `DOCKER_TARGET=cuda` is set. Nodes of the
CUDA image also compute on the processor here. Without a Docker daemon, Buildah runs the containers; the tests
of what it cannot do are skipped by name. `make test` builds no image and starts no container.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.containers import (
    COMPOSE_FILE,
    START_TIMEOUT_S,
    BuildahStack,
    DockerStack,
    Stack,
    has_docker,
    new_project,
    remove_volumes,
    run,
    run_in_image,
)

#: The image under test. Empty if the tests should not run.
TARGET = os.environ.get("KVFERRY_TEST_DOCKER", "")
IMAGE = f"kvferry:{TARGET}"
PROMPT = "The ferry leaves at six in the morning, and it carries letters. " * 6

#: Prints a node's user and group in its container, the folders that it can write to, and the compilers that
#: it finds.
CONFINEMENT = """
import os, shutil
def is_writable(folder):
    try:
        os.close(os.open(folder + "/probe", os.O_CREAT | os.O_WRONLY))
    except OSError:
        return False
    os.remove(folder + "/probe")
    return True
folders = ["/", "/app", "/opt/kvferry", "/var/cache/kvferry", "/tmp"]
print(os.getuid(), os.getgid(), *filter(is_writable, folders), *filter(shutil.which, ["cc", "gcc", "c++", "ld"]))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * START_TIMEOUT_S),
    pytest.mark.skipif(
        not TARGET,
        reason="starts containers, for minutes: `make test-docker` builds the image and runs these",
    ),
]


@pytest.fixture(scope="module")
def project() -> Iterator[str]:
    """A project of Docker Compose. Its profiles share the converted model."""
    name = new_project()
    yield name
    if has_docker():
        remove_volumes(name)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the volumes of Buildah's containers, which the profiles share for the same reason."""
    return tmp_path_factory.mktemp("volumes")


@pytest.fixture(params=["shm", "zeromq", "tcp", "ucx"])
def stack(
    request: pytest.FixtureRequest, project: str, volumes: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stack]:
    """A running profile."""
    monkeypatch.setenv("KVFERRY_PORT", "0")
    monkeypatch.setenv("KVFERRY_TARGET", TARGET)
    with (
        DockerStack.up(project, request.param)
        if has_docker()
        else BuildahStack.up(IMAGE, request.param, volumes) as running
    ):
        yield running


def test_an_image_has_the_pytorch_that_it_is_named_for() -> None:
    done = run_in_image(IMAGE, "python", "-c", "import torch; print(torch.version.cuda)")
    assert (done.stdout.strip() == "None") == (TARGET == "cpu"), done.stderr


def test_a_node_that_finds_no_gpu_says_so_and_ends() -> None:
    done = run_in_image(IMAGE, "kvferry", "serve", "--role=single", "--device=cuda")
    assert done.returncode != 0
    assert "device='cuda': this machine has 0 CUDA devices that PyTorch can use" in done.stderr


def test_a_profile_answers_like_a_single_node_and_outlives_its_prefill_node(stack: Stack) -> None:
    early, late = PROMPT, f"Later: {PROMPT}"
    with stack.single_node() as single:
        expected = {prompt: stack.ask(single, prompt)["choices"] for prompt in (early, late)}

    for role in ("prefill", "decode"):
        assert stack.python(role, CONFINEMENT) == "10001 10001 /var/cache/kvferry /tmp"
    assert stack.router_status() == 200

    answer = stack.ask("router", early)
    assert answer["choices"] == expected[early]
    transfer = answer["metrics"]["transfer"]
    assert (transfer["transport"], transfer["error"]) == (stack.profile, "")
    assert transfer["num_blocks"] > 0

    offer = stack.ask("prefill", late, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    stack.kill("prefill")
    recomputed = stack.ask("decode", late, kv_transfer_params=offer["kv_transfer_params"])
    assert recomputed["choices"] == expected[late]
    assert recomputed["metrics"]["transfer"]["num_bytes"] == 0
    assert stack.ask("router", early)["choices"] == expected[early]  # by the decode node alone


def test_a_service_has_no_capability_and_a_read_only_root() -> None:
    if not has_docker():
        pytest.skip(
            "Buildah's containers have a writable root and share the host's network: needs a Docker daemon"
        )
    service = yaml.safe_load(COMPOSE_FILE.read_text())["services"]["prefill-shm"]
    assert service["read_only"]
    options = [f"--cap-drop={name}" for name in service["cap_drop"]]
    options += [f"--security-opt={name}" for name in service["security_opt"]]
    program = "print(open('/proc/self/status').read()); open('/var/cache/kvferry/x', 'w')"
    with pytest.raises(AssertionError, match="Read-only file system"):
        run("docker", "run", "--rm", "--read-only", *options, "--entrypoint=python", IMAGE, "-c", program)
    program = "print(open('/proc/self/status').read())"
    status = run(
        "docker", "run", "--rm", "--read-only", *options, "--entrypoint=python", IMAGE, "-c", program
    )
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (int(fields["CapEff"], 16), fields["NoNewPrivs"]) == (0, "1")
