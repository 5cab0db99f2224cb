"""The services of `docker/compose.yaml` in containers: with Docker, or with Buildah, which needs no
daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvferry.lab.servers import LaunchedProcess, Launcher
from tests.support.deployments import free_address

COMPOSE_FILE = Path(__file__).parents[2] / "docker" / "compose.yaml"
#: The first start converts the model. On a busy machine three processes import PyTorch at the same time.
START_TIMEOUT_S = 400
#: The user in the images.
USER_ID = 10001
SINGLE = ("serve", "--host=0.0.0.0", "--insecure-http", "--port=8000", "--role=single")

#: Sends a request to the node or router at an address. In Docker that is the container where it runs.
ASK = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(
    f"http://{sys.argv[1]}:8000/v1/completions", sys.argv[2].encode(), {"Content-Type": "application/json"}
)
try:
    print(urllib.request.urlopen(request, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
"""


def run(*command: str, timeout_s: float = 120, environment: Mapping[str, str] | None = None) -> str:
    """Return what a command wrote to stdout. Fail the test if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def has_docker() -> bool:
    """Return whether a Docker daemon answers."""
    return (
        bool(shutil.which("docker"))
        and not subprocess.run(["docker", "info"], capture_output=True).returncode
    )


class Stack(ABC):
    """One profile of `compose.yaml`, while it runs."""

    def __init__(self, profile: str) -> None:
        self.profile = profile

    def ask(self, role: str, prompt: str, **fields: Any) -> dict[str, Any]:
        """Return the body of the answer to a greedy completion, or the body of the error."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **fields}
        answer: dict[str, Any] = json.loads(self.python(role, ASK, self.address(role), json.dumps(body)))
        return answer

    @abstractmethod
    def address(self, role: str) -> str:
        """Return the address at which a container reaches itself."""

    @abstractmethod
    def python(self, role: str, program: str, *arguments: str) -> str:
        """Run a Python program in the container of a node or the router, and return what it wrote."""

    @abstractmethod
    def router_status(self) -> int:
        """Return the HTTP status of the router's `/ready`, asked from outside."""

    @abstractmethod
    def kill(self, role: str) -> None:
        """Kill a container."""

    @abstractmethod
    def single_node(self) -> contextlib.AbstractContextManager[str]:
        """Start one more node, which hands nothing over, and yield the role by which to ask it."""


# == with Docker ===================================================================================


class DockerStack(Stack):
    """One profile of a project that Docker Compose runs."""

    def __init__(self, project: str, profile: str) -> None:
        super().__init__(profile)
        self._project = project
        self._containers: dict[str, str] = {}

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run a compose command."""
        chosen = ("--project-name", self._project, "--profile", self.profile, "--file", str(COMPOSE_FILE))
        return run("docker", "compose", *chosen, *arguments, timeout_s=timeout_s)

    @classmethod
    @contextlib.contextmanager
    def up(cls, project: str, profile: str) -> Iterator[DockerStack]:
        """Run a profile, with its router on any free port. Fail the test if anything of it remains."""
        stack = cls(project, profile)
        try:
            stack.compose("up", "--no-build", "--wait", timeout_s=START_TIMEOUT_S)
            yield stack
        finally:
            stack.compose("down")
        mine = ("--quiet", "--filter", f"label=com.docker.compose.project={project}")
        remaining = [run("docker", "ps", "--all", *mine), run("docker", "network", "ls", *mine)]
        assert remaining == ["", ""]

    def address(self, role: str) -> str:
        return "127.0.0.1"

    def python(self, role: str, program: str, *arguments: str) -> str:
        container = self._containers.get(role) or self.compose("ps", "--quiet", f"{role}-{self.profile}")
        return run("docker", "exec", container, "python", "-c", program, *arguments)

    def router_status(self) -> int:
        return _status(f"http://{self.compose('port', f'router-{self.profile}', '8000')}/ready")

    def kill(self, role: str) -> None:
        self.compose("kill", f"{role}-{self.profile}")

    @contextlib.contextmanager
    def single_node(self) -> Iterator[str]:
        container = self.compose("run", "--detach", "--no-deps", f"decode-{self.profile}", *SINGLE)
        self._containers["single"] = container
        try:
            _wait(lambda: self._health(container) == "healthy", lambda: run("docker", "logs", container))
            yield "single"
        finally:
            run("docker", "rm", "--force", container)

    @staticmethod
    def _health(container: str) -> str:
        health = run("docker", "inspect", "--format", "{{.State.Health.Status}}", container)
        assert health in ("starting", "healthy"), run("docker", "logs", container)
        return health


# == with Buildah ==================================================================================


class BuildahStack(Stack):
    """One profile, each service in a container that Buildah runs with chroot isolation.

    The containers share the host's network and processes. So each service listens on a loopback address of
    its own, which the names in `compose.yaml` stand for in `/etc/hosts`. Its other options, its volumes and
    its user are those of `compose.yaml` and of the image.

    Args:
        folder: For volumes and logs.
    """

    def __init__(self, image: str, profile: str, folder: Path) -> None:
        super().__init__(profile)
        self._image, self._folder = image, folder
        services = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
        self._services: dict[str, Any] = {
            name.removesuffix(f"-{profile}"): service
            for name, service in services.items()
            if profile in service["profiles"]
        }
        self._services["single"] = {**self._services["decode"], "command": SINGLE}
        self._addresses = {name: free_address(8000) for name in self._services}
        self._running: dict[str, tuple[str, LaunchedProcess]] = {}
        self._launcher = Launcher(logs=folder)
        # Not by mounting /etc/hosts: Buildah mounts its own in no fixed order.
        self._hosts = [
            f"--add-host={host}:{address}"
            for name, address in self._addresses.items()
            for host in (f"{name}-{profile}", f"{name}.caches")
        ]

    @classmethod
    @contextlib.contextmanager
    def up(cls, image: str, profile: str, folder: Path) -> Iterator[BuildahStack]:
        """Run a profile, and remove its containers afterwards."""
        stack = cls(image, profile, folder)
        try:
            for name in stack._services.keys() - {"prefill", "decode", "router", "single"}:
                stack._start(name)
                _, process = stack._running[name]
                assert process.wait(60) == 0, process.log_tail
            for role in ("prefill", "decode", "router"):
                stack._start(role)
            for role in ("prefill", "decode", "router"):
                stack._running[role][1].wait_ready(START_TIMEOUT_S)
            yield stack
        finally:
            for name in [*stack._running]:
                stack._remove(name)
            stack._launcher.close()

    def address(self, role: str) -> str:
        return self._addresses[role]

    def python(self, role: str, program: str, *arguments: str) -> str:
        container = self._running[role][0]
        return run(
            *self._command(role, container, ["python", "-c", program, *arguments]), environment=_ENVIRONMENT
        )

    def router_status(self) -> int:
        return _status(f"http://{self._addresses['router']}:8000/ready")

    def kill(self, role: str) -> None:
        self._running[role][1].kill()

    @contextlib.contextmanager
    def single_node(self) -> Iterator[str]:
        self._start("single")
        try:
            self._running["single"][1].wait_ready(START_TIMEOUT_S)
            yield "single"
        finally:
            self._remove("single")

    def _start(self, name: str) -> None:
        container = run(
            "buildah", "from", "--pull-never", *self._hosts, self._image, environment=_ENVIRONMENT
        )
        service = self._services[name]
        words = [*service.get("entrypoint", ["kvferry"]), *service["command"]]
        words = [word.replace("--host=0.0.0.0", f"--host={self._addresses[name]}") for word in words]
        command = self._command(name, container, words)
        process = self._launcher.start_server(
            name, command, 8000, "/ready", host=self._addresses[name], environment=_ENVIRONMENT
        )
        self._running[name] = (container, process)

    def _command(self, name: str, container: str, words: Sequence[str]) -> list[str]:
        volumes = [f"{self._volume(f'{name}-tmp')}:/tmp"]
        for volume in self._services[name].get("volumes", ()):
            source, rest = volume.split(":", 1)
            volumes.append(f"{self._volume(source)}:{rest}")
        mounts = [word for volume in volumes for word in ("--volume", volume)]
        return ["buildah", "run", "--isolation", "chroot", *mounts, container, "--", *words]

    def _volume(self, name: str) -> Path:
        folder = self._folder / name
        if not folder.exists():
            folder.mkdir(mode=0o700)
            os.chown(folder, USER_ID, USER_ID)
        return folder

    def _remove(self, name: str) -> None:
        container, process = self._running.pop(name)
        process.kill()
        run("buildah", "rm", container, environment=_ENVIRONMENT)


#: As `docker/build.sh` sets them.
_ENVIRONMENT = {"STORAGE_DRIVER": "vfs", **os.environ, "BUILDAH_ISOLATION": "chroot"}


def run_in_image(image: str, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program in a new container of an image."""
    if has_docker():
        confined = (
            "docker",
            "run",
            "--rm",
            "--read-only",
            "--tmpfs=/tmp",
            "--env=NVIDIA_VISIBLE_DEVICES=void",
        )
        command = [*confined, f"--entrypoint={words[0]}", image, *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    container = run("buildah", "from", "--pull-never", image, environment=_ENVIRONMENT)
    try:
        command = ["buildah", "run", "--isolation", "chroot", container, "--", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=_ENVIRONMENT)
    finally:
        run("buildah", "rm", container, environment=_ENVIRONMENT)


def new_project() -> str:
    """Return a unique name, so that no other containers are touched."""
    return f"kvferry-test-{uuid.uuid4().hex[:8]}"


def remove_volumes(project: str) -> None:
    """Remove the volumes of a project of Docker Compose."""
    mine = ("--quiet", "--filter", f"label=com.docker.compose.project={project}")
    for volume in run("docker", "volume", "ls", *mine).split():
        run("docker", "volume", "rm", volume)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _wait(condition: Callable[[], bool], log: Callable[[], str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, log()
        time.sleep(0.5)
