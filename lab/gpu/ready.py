"""Make a checkout run on a machine with nothing but Python, PyTorch and a compiler.

What this module imports from kvferry needs neither packages nor the compiled part.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
#: What `make gpu-kit` writes, and where it is unpacked.
KIT: Final = ROOT / "build" / "gpu-kit.tar.xz"
SITE: Final = ROOT / "build" / "gpu-kit"
#: Folders in which a container may have the driver's libraries. vLLM's files are linked to them.
DRIVER: Final = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib")
#: Set for the program that `restart` starts.
READY: Final = "KVFERRY_GPU_READY"


class NotReadyError(Exception):
    """Something that the steps need is missing. The message says what to do."""


def unpack(kit: Path = KIT, site: Path = SITE) -> list[str]:
    """Return folders for PYTHONPATH with vLLM; none where vLLM is installed. Unpack the kit if necessary.

    Raises:
        NotReadyError: vLLM is not installed, and there is no kit.
    """
    if find_spec("vllm") is not None:
        return []
    if not (site / "vllm").exists():
        if not kit.exists():
            raise NotReadyError(
                f"vLLM is not installed, and there is no kit at {str(kit)!r}: run make gpu-kit where there is a network"
            )
        with tarfile.open(kit) as archive:
            archive.extractall(site, filter="tar")
    return [str(site)]


def compile_native(root: Path = ROOT) -> None:
    """Compile the C part beside its source, if this is a checkout in which that has not been done."""
    source = root / "transports" / "_native.c"
    target = source.with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    if source.exists() and not target.exists():
        include = sysconfig.get_paths()["include"]
        command = ["gcc", "-shared", "-fPIC", "-O3", f"-I{include}", str(source), "-o", str(target)]
        subprocess.run(command, check=True)


def restart(arguments: Sequence[str]) -> None:
    """Replace this process by one that finds vLLM, kvferry and the driver, unless it is that process.

    The variables are for all servers that it will start as well.
    """
    if READY in os.environ:
        return
    packages = unpack()
    compile_native()
    found = {
        "PYTHONPATH": [*packages, str(ROOT / "src")],
        # Before PyTorch has loaded the driver's library, vLLM's files look for it by name.
        "LD_LIBRARY_PATH": [folder for folder in DRIVER if Path(folder).is_dir()],
    }
    variables = {
        name: os.pathsep.join([*folders, *filter(None, [os.environ.get(name)])])
        for name, folders in found.items()
        if folders
    }
    if find_spec("flashinfer") is None:
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM would import it
    command = [sys.executable, "-m", "kvferry.lab.gpu", *arguments]
    os.execve(sys.executable, command, {**os.environ, **variables, READY: "1"})
