"""Run an image and `compose.yaml` with a real Docker daemon. Only `make test-docker` does this.

`make test-docker` first builds `kvferry:cpu`, or the CUDA image if `DOCKER_TARGET=cuda` is set. Nodes of the CUDA image
also compute on the processor here. `make test` builds no image and starts no container.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

#: The image under test. Empty if the tests should not run.
TARGET = os.environ.get("KVFERRY_TEST_DOCKER", "")
IMAGE = f"kvferry:{TARGET}"
COMPOSE_FILE = Path(__file__).parents[2] / "docker" / "compose.yaml"
#: The first start converts the model. On a busy machine three processes import PyTorch at the same time.
START_TIMEOUT_S = 400
PROMPT = "The ferry leaves at six in the morning, and it carries letters. " * 6

#: Sends a request to the node or router in the container where it runs.
ASK = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", sys.argv[1].encode(), {"Content-Type": "application/json"}
)
try:
    print(urllib.request.urlopen(request, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
"""
#: Prints a node's user and group in its container, the folders that it can write to, and the compilers that it finds.
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


def docker(*arguments: str, timeout_s: float = 120) -> str:
    """Return what a docker command wrote to stdout. Fail the test if the command fails."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"docker {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def ask(container: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """Return the body of the answer to a greedy completion, or the body of the error."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **fields}
    answer: dict[str, Any] = json.loads(docker("exec", container, "python", "-c", ASK, json.dumps(body)))
    return answer


@dataclass(frozen=True)
class Stack:
    """One profile of a compose project."""

    project: str
    profile: str

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run a compose command."""
        chosen = ("--project-name", self.project, "--profile", self.profile, "--file", str(COMPOSE_FILE))
        return docker("compose", *chosen, *arguments, timeout_s=timeout_s)

    def container(self, role: str) -> str:
        """The container of a node or the router."""
        return self.compose("ps", "--quiet", f"{role}-{self.profile}")

    @contextmanager
    def single_node(self) -> Iterator[str]:
        """Start one more node, which hands nothing over, and yield its container."""
        command = ("serve.py", "--host=0.0.0.0", "--insecure-http", "--port=8000", "--role=single")
        container = self.compose("run", "--detach", "--no-deps", f"decode-{self.profile}", *command)
        try:
            wait_healthy(container)
            yield container
        finally:
            docker("rm", "--force", container)


def wait_healthy(container: str) -> None:
    """Return once Docker reports the container as healthy. Fail the test if it does not in time."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (health := docker("inspect", "--format", "{{.State.Health.Status}}", container)) != "healthy":
        assert health == "starting", docker("logs", container)
        assert time.monotonic() < deadline, docker("logs", container)
        time.sleep(0.5)


def remaining(project: str) -> list[str]:
    """Return what Docker still has of a project, except volumes."""
    mine = ("--quiet", "--filter", f"label=com.docker.compose.project={project}")
    return [*docker("ps", "--all", *mine).split(), *docker("network", "ls", *mine).split()]


@pytest.fixture(scope="module")
def project() -> Iterator[str]:
    """A project with a unique name, so that no other containers are touched. Its profiles share the converted model."""
    name = f"kvferry-test-{uuid.uuid4().hex[:8]}"
    yield name
    mine = ("--quiet", "--filter", f"label=com.docker.compose.project={name}")
    for volume in docker("volume", "ls", *mine).split():
        docker("volume", "rm", volume)


@pytest.fixture(params=["shm", "zeromq", "tcp", "ucx"])
def stack(request: pytest.FixtureRequest, project: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A running profile, with its router on any free port. Fail the test if anything of it remains."""
    monkeypatch.setenv("KVFERRY_PORT", "0")
    monkeypatch.setenv("KVFERRY_TARGET", TARGET)
    stack = Stack(project, request.param)
    try:
        stack.compose("up", "--no-build", "--wait", timeout_s=START_TIMEOUT_S)
        yield stack
    finally:
        stack.compose("down")
    assert remaining(project) == []


def test_an_image_has_the_pytorch_that_it_is_named_for() -> None:
    built_for = docker("run", "--rm", IMAGE, "-c", "import torch; print(torch.version.cuda)")
    assert (built_for == "None") == (TARGET == "cpu")


def test_a_node_that_finds_no_gpu_says_so_and_ends() -> None:
    confined = ("docker", "run", "--rm", "--read-only", "--tmpfs=/tmp", "--env=NVIDIA_VISIBLE_DEVICES=void")
    command = [*confined, IMAGE, "serve.py", "--role=single", "--device=cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "device='cuda': this machine has 0 CUDA devices that PyTorch can use" in done.stderr


def test_a_profile_answers_like_a_single_node_and_outlives_its_prefill_node(stack: Stack) -> None:
    prefill, decode, router = map(stack.container, ["prefill", "decode", "router"])
    early, late = PROMPT, f"Later: {PROMPT}"
    with stack.single_node() as single:
        expected = {prompt: ask(single, prompt)["choices"] for prompt in (early, late)}

    for node in (prefill, decode):
        said = docker("exec", node, "python", "-c", CONFINEMENT)
        assert said == "10001 10001 /var/cache/kvferry /tmp"
    published = stack.compose("port", f"router-{stack.profile}", "8000")
    with urllib.request.urlopen(f"http://{published}/health", timeout=60) as response:
        assert response.status == 200

    answer = ask(router, early)
    assert answer["choices"] == expected[early]
    transfer = answer["metrics"]["transfer"]
    assert (transfer["transport"], transfer["error"]) == (stack.profile, "")
    assert transfer["num_blocks"] > 0

    offer = ask(prefill, late, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    stack.compose("kill", f"prefill-{stack.profile}")
    recomputed = ask(decode, late, kv_transfer_params=offer["kv_transfer_params"])
    assert recomputed["choices"] == expected[late]
    assert recomputed["metrics"]["transfer"]["num_bytes"] == 0
    assert ask(router, early)["choices"] == expected[early]  # by the decode node alone
