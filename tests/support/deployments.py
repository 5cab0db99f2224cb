"""Render the Helm chart, and run the commands of containers and systemd units as real processes on loopback
addresses.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import urljoin

import yaml

from kvferry.lab.client import totals_of

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "kvferry"
EXAMPLES = ROOT / "deploy" / "helm" / "examples"
#: What `make tools` downloads.
TOOLS = ROOT / "build" / "helm"
RELEASE = "ferry"
NAMESPACE = "inference"
API_KEY = "the-key-in-the-secret"

#: How the commands in containers and units are started here.
PROGRAMS: Mapping[str, Sequence[str]] = {
    "python": (sys.executable,),
    "python3": (sys.executable,),
    "kvferry": (sys.executable, "-m", "kvferry"),
}

Manifest = Mapping[str, Any]


# == rendering =====================================================================================


@cache
def helm() -> str:
    """Return the path of Helm; empty if there is none."""
    program = TOOLS / "helm"
    return str(program) if program.exists() else (shutil.which("helm") or "")


@cache
def kubernetes_schemas() -> zipfile.ZipFile | None:
    """Return the package with the schemas of Kubernetes, or None if it was not downloaded."""
    wheels = sorted(TOOLS.glob("kubernetes_validate-*.whl"))
    return zipfile.ZipFile(wheels[-1]) if wheels else None


def run_helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm and return what it wrote."""
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, timeout=60)


def render(values: Sequence[Path], *settings: str) -> list[Manifest]:
    """Return the objects that the chart makes of values files and `KEY=VALUE` settings."""
    files = [word for file in values for word in ("--values", file)]
    chosen = [word for setting in settings for word in ("--set", setting)]
    done = run_helm("template", RELEASE, CHART, "--namespace", NAMESPACE, *files, *chosen)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    """Return the objects of some kinds."""
    return [found for found in manifests if found["kind"] in kinds]


def containers_of(workload: Manifest) -> list[Manifest]:
    """Return the containers of a workload's pods, sidecars first."""
    spec = workload["spec"]["template"]["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


# == running =======================================================================================


@dataclass
class Running:
    """A process with the command of a container or of a unit."""

    name: str
    address: str
    process: subprocess.Popen[bytes]
    log: Path
    probes: Mapping[str, str]

    def status(self, probe: str) -> int:
        """Return the HTTP status with which a probe is answered; 0 without an answer."""
        try:
            with _open(self.probes[probe], timeout_s=10) as response:
                return cast(int, response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """GET a path, or POST a JSON object, with the API key. Return the JSON object of the answer."""
        url = urljoin(self.probes["livenessProbe"], path)
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
        try:
            with _open(urllib.request.Request(url, data, headers), timeout_s=100) as response:
                return cast(dict[str, Any], json.load(response))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{self.name} answered {error.code}: {error.read().decode()}") from None

    def wait_for(self, probe: str, timeout_s: float) -> None:
        """Return as soon as a probe succeeds. Fail the test if the process ends, or if it takes too long."""
        deadline = time.monotonic() + timeout_s
        while self.status(probe) != 200:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self.log.read_text()}"
            time.sleep(0.05)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with _open(urljoin(self.probes["livenessProbe"], "/metrics"), timeout_s=10) as response:
            return totals_of(response.read().decode()).get(name, 0.0)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Stop it as Kubernetes and systemd do, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def _open(request: str | urllib.request.Request, timeout_s: float) -> Any:
    """Open a URL. Kubernetes does not verify certificates for probes either."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return urllib.request.urlopen(request, timeout=timeout_s, context=context)


class Host:
    """Starts processes, each with loopback addresses instead of those of pods, and ends them.

    Args:
        folder: For logs.
        places: Paths, names and addresses in commands, and what stands for them here.
    """

    def __init__(self, folder: Path, places: Mapping[str, str]) -> None:
        self.folder = folder
        self.places = dict(places)
        self.running: list[Running] = []

    def start(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        address: str,
        probes: Mapping[str, str],
    ) -> Running:
        """Start a command. Only its program, addresses and paths are replaced."""
        program, *arguments = (self._here(word) for word in words)
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*PROGRAMS[os.path.basename(program)], *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **{key: self._here(value) for key, value in environment.items()}},
                process_group=0,
            )
        self.running.append(Running(name, address, process, log, probes))
        return self.running[-1]

    def _here(self, text: str) -> str:
        for there, here in self.places.items():
            text = text.replace(there, here)
        return text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End what still runs."""
        for each in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def free_address(*ports: int) -> str:
    """Return a loopback address of which the ports are free, so that commands keep their ports."""
    for _ in range(50):
        address = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(1, 254)}"
        try:
            for port in ports:
                with socket.socket() as probe:
                    probe.bind((address, port))
        except OSError:
            continue
        return address
    raise OSError(f"no loopback address has free ports {ports}: another program listens on all addresses")


@contextlib.contextmanager
def running_pods(
    manifests: Sequence[Manifest],
    folder: Path,
    places: Mapping[str, str],
    prepare: Callable[[Sequence[str]], None] = lambda addresses: None,
) -> Iterator[dict[str, Running]]:
    """Run each container of the first pod of each workload; yield the processes by the name of their
    container.

    A pod gets an address of its own instead of its name in DNS. Addresses of pods that do not run lead
    nowhere.

    Args:
        places: Paths in the containers, and paths here.
        prepare: Called with the addresses of the pods before any container starts.
    """
    workloads = of_kind(manifests, "StatefulSet", "Deployment")
    addresses = {
        each["metadata"]["name"]: free_address(8000, 8100, 8200, *range(5600, 5604)) for each in workloads
    }
    prepare([*addresses.values()])
    nowhere = free_address(8000)
    names: dict[str, str] = {"0.0.0.0": "$(POD_IP)"}
    for workload, address in addresses.items():
        for index in range(4):
            pod = f"{workload}-{index}.{workload}"
            here = address if index == 0 else nowhere
            names |= {f"{pod}.{NAMESPACE}.svc.cluster.local": here, f"//{pod}:": f"//{here}:"}
        names[f"{workload}-ready.{NAMESPACE}.svc.cluster.local"] = address
    with Host(folder, places) as host:
        for workload in workloads:
            name = workload["metadata"]["name"]
            for container in containers_of(workload):
                _start_container(host, container, f"{name}-0", addresses[name], names)
        yield {each.name: each for each in host.running}


def _start_container(
    host: Host, container: Manifest, pod: str, address: str, names: Mapping[str, str]
) -> None:
    fields = {"status.podIP": address, "metadata.name": pod, "metadata.namespace": NAMESPACE}
    environment: dict[str, str] = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            environment[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        else:
            environment[variable["name"]] = variable.get("value", API_KEY)

    def expanded(word: str) -> str:
        word = re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word)
        for there, here in names.items():
            word = word.replace(there, here)
        # Containers of a pod share its address, and one of the other end is always loopback.
        word = word.replace("$(POD_IP)", address)
        return word.replace("//localhost:", f"//{address}:")

    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = {}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        probes[probe] = f"{get['scheme'].lower()}://{address}:{ports[get['port']]}{get['path']}"
    words = [expanded(word) for word in (*container["command"], *container["args"])]
    host.start(container["name"], words, environment, address, probes)


def ready_roles(router: Running) -> set[str]:
    """Return the roles of which a router sees a node that is ready."""
    return {node["role"] for node in router.ask("/nodes")["nodes"] if node["state"] == "ready"}
