"""Build an archive of vLLM for CUDA that is small enough to carry to a machine without a network.

    python3 tools/gpu_kit.py                           vLLM 0.26.0 for compute capability 9.0
    python3 tools/gpu_kit.py --vllm 0.32.0 --gpu 90    another version
    make gpu-kit GPU_KIT_ARGS="--vllm 0.32.0"          the same

The archive is a folder for PYTHONPATH: vLLM's wheel from the registry and the packages of
`requirements/gpu-kit.txt`. vLLM's Python code is unchanged. Its compiled files keep only what the wanted GPU
runs. Files that this GPU does not use, or that no test of ours uses, are left out.

vLLM 0.26 is made for PyTorch 2.11. 0.32 is made for 2.13, but its compiled files load with 2.11. This needs
pip and xz. The status is 1 if the archive is larger than it may be.
"""

from __future__ import annotations

import argparse
import mmap
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "gpu-kit.txt"
#: What can be carried has 64 MiB, and our checkout goes with it.
LIMIT_BYTES = 48 << 20
#: The machine that the archive is for: Python 3.12 on x86-64.
TARGET = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
TARGET += [f"--abi={abi}" for abi in ("cp312", "abi3", "none")]
TARGET += [f"--platform=manylinux_2_{number}_x86_64" for number in (34, 31, 28, 27, 26, 24, 17)]
TARGET += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]

#: Patterns of files that stay out; a star stands for folders as well.
LEFT_OUT = (
    # vLLM's front end and parsers in Rust, and its pages
    "vllm/vllm-rs",
    "vllm/_rust_tool_parser*",
    "vllm/entrypoints/serve/instrumentator/static/*",
    # kernels for FP8 and FP4, for some large models, and for newer GPUs
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/_qutlass_C*",
    "vllm/_flashmla*.so",
    "vllm/_flashkda_C*",
    "vllm/_deepselect_C*",
    # data and tests of other packages
    "mistral_common/data/*",
    "pycountry/locales/*",
    "tvm_ffi/3rdparty/*",
    "tvm_ffi/include/*",
    "*/tests/*",
    "bin/*",
    "share/*",
    "*/RECORD",
    "*.pyc",
)
#: vLLM takes FlashAttention 3 on Hopper and FlashAttention 2 on the others.
FLASH_ATTENTION_2, FLASH_ATTENTION_3 = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/vllm_flash_attn/_vllm_fa3_C*",
)

SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2


# -- code for GPUs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """The code of some kernels for one kind of GPU.

    Attributes:
        kind: `PTX` or `MACHINE_CODE`.
        gpu: The compute capability times ten.
        start, size: Where it is in the file, with its header.
    """

    kind: int
    gpu: int
    start: int
    size: int

    def runs_on(self, gpu: int) -> bool:
        """Whether it is machine code for this GPU, or for an earlier one of its generation.

        PTX does not count: only kernels for quantized weights need it here, and it is half of their size.
        """
        return self.kind == MACHINE_CODE and self.gpu // 10 == gpu // 10 and self.gpu <= gpu


def wanted(pieces: Sequence[Piece], gpu: int) -> list[Piece]:
    """Return the pieces that the driver takes for this GPU; empty if there are none."""
    able = [piece for piece in pieces if piece.runs_on(gpu)]
    return [piece for piece in able if piece.gpu == max(each.gpu for each in able)]


def prune(path: Path, gpu: int) -> tuple[int, int]:
    """Keep only one GPU's code in a shared library. Its size and all addresses stay, and what is removed
    becomes zeros.

    A container without code for this GPU gets the file's smallest piece for another one. Then the driver says
    of its kernels what it says with the original file: they have no image for this GPU.

    Returns:
        How many containers of code it has, and how many of them have code for this GPU. A library without
        code for GPUs has none and is left as it is.

    Raises:
        ValueError: the code has another form than expected; the file may be half pruned.
    """
    usable = 0
    with path.open("r+b") as file, closing(mmap.mmap(file.fileno(), 0)) as data:
        containers = list(containers_of(data))
        others = [piece for _, _, pieces in containers for piece in pieces if not piece.runs_on(gpu)]
        smallest = min(
            (piece for piece in others if piece.kind == MACHINE_CODE),
            key=lambda piece: piece.size,
            default=None,
        )
        filler = code_of(data, [smallest] if smallest else [])
        for start, room, pieces in containers:
            code = code_of(data, wanted(pieces, gpu))
            usable += bool(code)
            code = code or filler
            data[start : start + room] = code.ljust(room, b"\0")
            # The container's header ends with the size of its contents.
            data[start - 8 : start] = struct.pack("<Q", len(code))
    return len(containers), usable


def code_of(data: mmap.mmap, pieces: Sequence[Piece]) -> bytes:
    return b"".join(data[piece.start : piece.start + piece.size] for piece in pieces)


def containers_of(data: mmap.mmap | bytes) -> Iterator[tuple[int, int, list[Piece]]]:
    """Yield each container of a shared library: where its contents start, how many bytes they are, and the
    pieces in it.
    """
    at, end = section_of(data)
    while at + 16 <= end:
        magic, _, header, room = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8  # what aligns the next container
            continue
        start = at + header
        at = start + room
        if header != 16 or at > end:
            raise ValueError(
                f"a container of code for GPUs has a header of {header} and contents of {room} bytes"
            )
        pieces, piece = [], start
        while piece < at:
            kind, _, own_header, size = struct.unpack_from("<HHIQ", data, piece)
            (gpu,) = struct.unpack_from("<I", data, piece + 28)
            if own_header + size == 0 or piece + own_header + size > at:
                raise ValueError(f"a piece of code for GPUs has {own_header + size} bytes of {at - piece}")
            pieces.append(Piece(kind, gpu, piece, own_header + size))
            piece += own_header + size
        if pieces:
            yield start, room, pieces


def section_of(data: mmap.mmap | bytes) -> tuple[int, int]:
    """Return where the code for GPUs starts and ends in an ELF file of 64 bits; (0, 0) if it has none."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if data[start : start + len(SECTION) + 1] == SECTION + b"\0":
            return offset, offset + length
    return 0, 0


# -- the archive -------------------------------------------------------------------------------------


def is_left_out(name: str, gpu: int) -> bool:
    """Say whether the archive does not have this file of a package."""
    attention = FLASH_ATTENTION_2 if gpu // 10 == 9 else FLASH_ATTENTION_3
    return any(fnmatchcase(f"/{name}", f"/{pattern}") for pattern in (*LEFT_OUT, attention))


def pip(command: str, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *TARGET, *words],
        check=True,
    )


def fill(site: Path, wheels: Path, version: str, gpu: int) -> None:
    """Write the packages into a folder, and prune their compiled files."""
    found = list(wheels.glob(f"vllm-{version}-*.whl"))
    if not found:
        pip("download", "--dest", str(wheels), f"vllm=={version}")
        found = list(wheels.glob(f"vllm-{version}-*.whl"))
    pip("install", "--no-compile", "--target", str(site), "--requirement", str(REQUIREMENTS))
    for path in sorted(site.rglob("*")):
        if path.is_file() and is_left_out(path.relative_to(site).as_posix(), gpu):
            path.unlink()
    with zipfile.ZipFile(found[0]) as wheel:
        wheel.extractall(site, [name for name in wheel.namelist() if not is_left_out(name, gpu)])
    for path in sorted(site.rglob("*.so")):
        containers, usable = prune(path, gpu)
        if containers:
            print(
                f"{path.relative_to(site)}: {usable} of {containers} containers have code for it", flush=True
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--vllm", default="0.26.0", metavar="VERSION", help="vLLM (default: %(default)s)")
    parser.add_argument(
        "--gpu", type=int, default=90, help="compute capability times ten (default: %(default)s, Hopper)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "gpu-kit.tar.xz",
        help="the archive (default: %(default)s)",
    )
    arguments = parser.parse_args()
    wheels = arguments.output.parent / "gpu-kit-wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), wheels, arguments.vllm, arguments.gpu)
        # The same packages give the same archive.
        owner = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]
        part = arguments.output.absolute().with_suffix(".part")
        subprocess.run(["tar", *owner, "-I", "xz -6 -T0", "-cf", str(part), "."], cwd=folder, check=True)
    part.replace(arguments.output)
    size = arguments.output.stat().st_size
    print(f"{arguments.output}: {size / 2**20:.1f} MiB")
    if size > LIMIT_BYTES:
        print(f"the archive has more than {LIMIT_BYTES >> 20} MiB: leave more out of it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
