"""Run the tests over RDMA verbs in virtual machines, and write one Markdown page of results: `make
test-rdma`.

    python tests/rdma/run.py [--output build/rdma.md] [--image FOLDER] [--seconds 840] [ucx] [nixl]

The guests have soft-RoCE, so no RDMA hardware is needed; QEMU emulates them, so neither KVM nor root is. One
guest per transport runs, both at the same time. Root is needed once, to build the image that both use
(`make_image.sh`). If something is missing, this says what, and exits with 0. The exit status is 1 if a test
failed or did not end in time.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry" / "rdma"

#: Files that decide what is in the image.
SOURCES = (
    HERE / "make_image.sh",
    ROOT / "requirements" / "constraints.txt",
    ROOT / "requirements" / "constraints-cuda12.txt",
)
IMAGE = ("vmlinuz", "initrd", "root.img")

#: Programs, and the Debian packages that have them.
TO_RUN = {"qemu-system-x86_64": "qemu-system-x86"}
TO_BUILD = {
    "apt-get": "apt",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
}
BUILD_LIMIT_S = 1800.0

#: What a guest has of this repository, and where. It is one archive, because reading many shared files takes
#: long.
CHECKOUT = {
    "pyproject.toml": "pyproject.toml",
    "src/kvferry/__init__.py": "src/kvferry/__init__.py",
    "tests/__init__.py": "tests/__init__.py",
    "tests/conftest.py": "tests/conftest.py",
    "tests/rdma": "tests/rdma",
    "tests/support": "tests/support",
    "tests/transports": "tests/transports",
    "transports": "src/kvferry/transports",
}

#: What a guest runs, in this order, and the largest part of the guest's time that it may take.
PARTS: Mapping[str, tuple[str, float]] = {
    "Routes": ("test_routes.py", 0.15),
    "Faults": ("test_faults.py", 0.35),
    "Conformance": ("test_conformance.py", 1.0),
}
#: Seconds of a guest's time that are kept for its end.
END_S = 40.0
GUEST_MIB = 2048


class Skipped(Exception):
    """This machine cannot run the tests."""


# == the image =====================================================================================


def require(programs: Mapping[str, str], what: str) -> None:
    """Check that programs are installed. Raises Skipped: some are not."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [package for program, package in programs.items() if shutil.which(program, path=path) is None]
    if missing:
        raise Skipped(f"{what} needs: apt-get install --no-install-recommends {' '.join(missing)}")


def image(folder: Path) -> Path:
    """Return the folder of the image, and build it if it is missing or older than its sources.

    Raises:
        Skipped: it cannot be built here.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Skipped(f"there is no place for the image: {error}; set --image") from error
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may build it
        stamp = folder / "digest"
        is_built = all((folder / name).exists() for name in IMAGE)
        if not is_built or not stamp.exists() or stamp.read_text() != digest:
            build(folder)
            stamp.write_text(digest)
    return folder


def build(folder: Path) -> None:
    """Build the image. Raises Skipped: it cannot be built here."""
    require(TO_BUILD, f"building the image in {folder}")
    if os.geteuid() != 0:
        raise Skipped(f"building the image in {folder} needs root; run this once as root, or set --image")
    print(f"building the image in {folder} (a few minutes, once)", flush=True)
    log = folder / "build.log"
    with log.open("w") as output:
        try:
            status = subprocess.run(
                [str(HERE / "make_image.sh"), str(folder)],
                env={**os.environ, "PYTHON": sys.executable},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=BUILD_LIMIT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        raise Skipped(
            f"the image could not be built (see {log}); are Debian's and Python's packages reachable?\n{tail}"
        )


# == the guests ====================================================================================


def job(scheme: str, seconds: float) -> str:
    """Return what a guest runs, as a shell script. It takes at most `seconds`, from the guest's start."""
    lines = []
    if scheme == "ucx":
        # NIXL's UCX; see make_image.sh. Without NIXL, nothing keeps its module for EFA from ending processes
        # by SIGSEGV.
        lines.append("export LD_LIBRARY_PATH=/site/nixl_cu12.libs UCX_MODULES=^efa")
    for name, share in PARTS.values():
        # On SIGINT pytest still writes the results of the tests that have ended.
        lines.append(f"left=$(({seconds:.0f} - $(cut -d. -f1 /proc/uptime))); most={seconds * share:.0f}")
        lines.append(
            "timeout -s INT -k 20 $((left < 1 ? 1 : left < most ? left : most)) "
            f"python3 -m pytest tests/rdma/{name} -m '' -k {scheme} -p no:cacheprovider -v --tb=short "
            f"-o junit_family=xunit1 --junitxml=/share/{Path(name).stem}.xml"
        )
        lines.append(f"echo $? > /share/{Path(name).stem}.status")
    return "\n".join([*lines, ""])


def _without_caches(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in file.name else file


class Guest:
    """A virtual machine that runs the tests of one transport."""

    def __init__(self, scheme: str, image: Path, share: Path, seconds: float, num_cpus: int) -> None:
        self.scheme = scheme
        self.share = share
        with tarfile.open(share / "checkout.tar", "w", dereference=True) as archive:
            for source, target in CHECKOUT.items():
                archive.add(ROOT / source, target, filter=_without_caches)
        shutil.copy(HERE / "guest_init", share)
        (share / "job").write_text(job(scheme, seconds - END_S))
        (share / "log").touch()
        self._process = subprocess.Popen(
            [
                "qemu-system-x86_64",
                *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max"),
                *("-smp", str(num_cpus), "-m", str(GUEST_MIB)),
                *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
                *("-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd")),
                *("-append", "console=ttyS0 quiet panic=-1 mitigations=off"),
                *("-serial", f"file:{share / 'console'}", "-device", "virtio-rng-pci"),
                *("-drive", f"file={image / 'root.img'},if=virtio,format=raw,snapshot=on"),
                *("-virtfs", f"local,path={share},mount_tag=share,security_model=none"),
            ],
            stdin=subprocess.DEVNULL,
        )

    def wait(self, until: float) -> None:
        """Wait for the guest's end; at `until` by `time.monotonic`, end it."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def log(self) -> str:
        """What the guest printed, or its console if it did not start."""
        said = (self.share / "log").read_text(errors="replace")
        console = self.share / "console"
        return said or (console.read_text(errors="replace") if console.exists() else "")


@contextmanager
def running(
    schemes: Sequence[str], image: Path, seconds: float, num_cpus: int
) -> Iterator[Mapping[str, Guest]]:
    """Start one guest per transport; end those that still run."""
    guests: dict[str, Guest] = {}
    with tempfile.TemporaryDirectory(prefix="kvferry-rdma-") as folder:
        try:
            for scheme in schemes:
                share = Path(folder, scheme)
                share.mkdir()
                guests[scheme] = Guest(scheme, image, share, seconds, num_cpus)
            yield guests
        finally:
            for guest in guests.values():
                guest.close()


# == the report ====================================================================================


@dataclass(frozen=True)
class Test:
    """One test's result.

    Attributes:
        outcome: `"passed"`, `"skipped"`, or why it failed.
        seen: What the test recorded.
    """

    name: str
    seconds: float
    outcome: str
    seen: Mapping[str, str]

    @property
    def has_failed(self) -> bool:
        return self.outcome not in ("passed", "skipped")

    def row(self) -> str:
        seen = "; ".join(f"late bytes: {v}" if k == "late_bytes" else v for k, v in self.seen.items())
        return f"| {self.name} | {self.outcome} | {self.seconds:.0f} | {seen} |"


def results_of(part: str, guest: Guest) -> tuple[list[Test], bool]:
    """Return the results of a part, and whether it ran to its end."""
    name = Path(PARTS[part][0]).stem
    results, status = guest.share / f"{name}.xml", guest.share / f"{name}.status"
    cases = ElementTree.parse(results).iter("testcase") if status.exists() and results.exists() else ()
    # pytest's own: 0 passed, 1 some failed, 5 no tests.
    has_ended = status.exists() and status.read_text().strip() in ("0", "1", "5")
    return [_result(case) for case in cases], has_ended


def _result(case: ElementTree.Element) -> Test:
    outcome = "passed"
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            text = (found.get("message") or kind).splitlines()[0].replace("|", "\\|")
            outcome = "skipped" if kind == "skipped" else text[:200]
            break
    seen = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
    name = case.get("name", "").removeprefix("test_")
    return Test(name, float(case.get("time", "0")), outcome, seen)


def report(guests: Mapping[str, Guest], seconds: float) -> tuple[str, bool]:
    """Return the page, and whether every test ran and passed."""
    lines = ["# Over RDMA verbs", ""]
    lines.append(
        f"Soft-RoCE (`rdma_rxe`) in QEMU guests without KVM, {time.strftime('%Y-%m-%d')}; {seconds:.0f} s in all. "
        "These are tests of function: the times say nothing about RDMA hardware."
    )
    late: list[str] = []
    is_good = True
    for part in PARTS:
        for scheme, guest in guests.items():
            tests, has_ended = results_of(part, guest)
            lines += ["", f"## {part}: `{scheme}`", ""]
            if not has_ended:
                lines += ["**Did not run to its end**, which may be for lack of time. Of its tests:", ""]
            failed = [test for test in tests if test.has_failed]
            is_good &= has_ended and not failed
            num_skipped = sum(test.outcome == "skipped" for test in tests)
            spent = sum(test.seconds for test in tests)
            lines.append(
                f"{len(tests) - len(failed) - num_skipped} passed, {len(failed)} failed, {num_skipped} skipped, in {spent:.0f} s."
            )
            if part == "Conformance":
                lines.append(
                    "Left out: what happens inside one node (`LEFT_OUT` in `tests/rdma/test_conformance.py`)."
                )
            shown = failed if part == "Conformance" else tests
            if shown:
                lines += ["", "| test | result | seconds | seen |", "|---|---|---|---|"]
                lines += [test.row() for test in shown]
            for test in tests:
                if "late_bytes" in test.seen:
                    late.append(f"| `{scheme}`: {test.name} | {test.seen['late_bytes']} |")
    lines += ["", "## Bytes that landed after the end of a read was reported", ""]
    lines += ["| reader | late bytes |", "|---|---|", *late]
    return "\n".join([*lines, ""]), is_good


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests over RDMA verbs in virtual machines.")
    parser.add_argument("schemes", nargs="*", help="transports to test (default: ucx nixl)")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "rdma.md",
        help="page to write (default: build/rdma.md)",
    )
    parser.add_argument("--image", type=Path, default=CACHE, help=f"folder of the image (default: {CACHE})")
    parser.add_argument(
        "--seconds", type=float, default=840.0, help="limit without building the image (default: 840)"
    )
    parser.add_argument("--cpus", type=int, default=2, help="processors per guest (default: 2)")
    options = parser.parse_args()
    try:
        if platform.machine() != "x86_64":
            raise Skipped(f"the guest is x86_64, this machine is {platform.machine()}")
        require(TO_RUN, "emulating the guest")
        folder = image(options.image)
    except Skipped as reason:
        print(f"skipped the tests over RDMA verbs: {reason}")
        return 0
    began = time.monotonic()
    with running(options.schemes or ("ucx", "nixl"), folder, options.seconds, options.cpus) as guests:
        for guest in guests.values():
            guest.wait(began + options.seconds)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        for scheme, guest in guests.items():
            options.output.with_name(f"{options.output.stem}-{scheme}.log").write_text(guest.log)
        page, is_good = report(guests, time.monotonic() - began)
    options.output.write_text(page)
    print(page)
    print(f"wrote {options.output}; what the guests printed is in the .log files next to it")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
