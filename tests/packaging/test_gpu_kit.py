"""The archive of vLLM for one kind of GPU: which code stays in its files, and what it contains."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PTX, CODE = 1, 2


@pytest.fixture(scope="module")
def kit():
    spec = importlib.util.spec_from_file_location("gpu_kit", ROOT / "tools" / "gpu_kit.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def piece(kind: int, gpu: int, text: str) -> bytes:
    """Return code as the compiler writes it: a header of 64 bytes, and a payload in units of 8."""
    payload = text.encode().ljust(-(-len(text) // 8) * 8, b".")
    return (
        struct.pack("<HHIQ", kind, 1, 64, len(payload)).ljust(28, b"\0")
        + struct.pack("<I", gpu)
        + bytes(32)
        + payload
    )


def library(*containers: list[bytes], section: bytes = b".nv_fatbin") -> bytes:
    """Return an ELF file with these containers, 16 bytes of nothing between each, and other bytes around."""
    code = b"".join(
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + bytes(16)
        for body in map(b"".join, containers)
    )
    names = b"\0" + section + b"\0.shstrtab\0"
    start = 64 + 8
    table = start + len(code) + len(names)
    header = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<Q", table)
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 3, 2)
    sections = [
        (0, 0, 0, 0, 0, 0),
        (1, 1, 2, 0, start, len(code)),
        (2 + len(section), 3, 0, 0, start + len(code), len(names)),
    ]
    rows = b"".join(struct.pack("<IIQQQQ", *each).ljust(64, b"\0") for each in sections)
    return header.ljust(64, b"\0") + b"HOSTCODE" + code + names + rows


def pieces_of(kit, raw: bytes) -> list[list[tuple[int, int]]]:
    return [[(each.kind, each.gpu) for each in pieces] for _, _, pieces in kit.containers_of(raw)]


def test_only_the_wanted_gpus_code_stays(kit, tmp_path):
    path = tmp_path / "kernels.so"
    whole = library(
        [piece(CODE, 80, "eighty"), piece(CODE, 90, "ninety"), piece(PTX, 90, "text")],
        [piece(CODE, 90, "ninety again"), piece(CODE, 120, "hundred twenty")],
        [piece(PTX, 80, "text"), piece(CODE, 80, "eighty again")],
    )
    path.write_bytes(whole)
    assert kit.prune(path, 90) == (3, 2)
    pruned = path.read_bytes()
    # The third has none. The smallest piece for another GPU makes the driver say so.
    assert pieces_of(kit, pruned) == [[(CODE, 90)], [(CODE, 90)], [(CODE, 80)]]
    assert len(pruned) == len(whole)
    assert pruned.startswith(whole[:72])
    assert b"HOSTCODE" in pruned
    assert b"ninety again" in pruned
    for gone in (b"text", b"eighty again", b"hundred"):
        assert gone not in pruned
    assert pruned.index(b"ninety again") < whole.index(b"ninety again") + 1


def test_code_of_an_earlier_gpu_of_the_generation_is_enough(kit, tmp_path):
    path = tmp_path / "kernels.so"
    path.write_bytes(library([piece(CODE, gpu, f"for {gpu}") for gpu in (75, 80, 86, 90)]))
    assert kit.prune(path, 89) == (1, 1)
    assert pieces_of(kit, path.read_bytes()) == [[(CODE, 86)]]


def test_a_file_without_code_for_gpus_stays_as_it_is(kit, tmp_path):
    path = tmp_path / "plain.so"
    path.write_bytes(whole := library([piece(CODE, 80, "no code")], section=b".rodata"))
    assert kit.prune(path, 90) == (0, 0)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("size", [0, 1 << 40])
def test_a_piece_of_an_impossible_size_is_refused(kit, tmp_path, size):
    path = tmp_path / "bad.so"
    bad = piece(CODE, 90, "code")
    path.write_bytes(library([struct.pack("<HHIQ", CODE, 1, 0 if size == 0 else 64, size) + bad[16:]]))
    with pytest.raises(ValueError, match="a piece of code for GPUs has"):
        kit.prune(path, 90)


@pytest.mark.parametrize(
    ("name", "gpu", "is_left_out"),
    [
        ("vllm/engine/arg_utils.py", 90, False),
        ("vllm/_C_stable_libtorch.abi3.so", 90, False),
        ("vllm/_flashmla_C.abi3.so", 90, True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", 90, True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", 90, False),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", 80, False),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", 80, True),
        ("vllm/third_party/deep_gemm/include/a/b.h", 90, True),
        ("openai/tests/test_a.py", 90, True),
        ("bin/uvicorn", 90, True),
        ("vllm/bin/x.py", 90, False),
    ],
)
def test_what_is_left_out(kit, name, gpu, is_left_out):
    assert kit.is_left_out(name, gpu) is is_left_out


def test_the_archive_has_vllm_and_the_packages_beside_it(kit, tmp_path, monkeypatch):
    """With a small wheel in the place of vLLM's, and a pip that writes one package."""
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    files = {
        "vllm/__init__.py": b"",
        "vllm/_C.so": library([piece(CODE, 80, "eighty"), piece(CODE, 90, "ninety")]),
        "vllm/vllm-rs": b"",
        "vllm-1.0.dist-info/METADATA": b"",
    }
    with zipfile.ZipFile(wheels / "vllm-1.0-cp38-abi3-linux_x86_64.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)

    def pip(command, *words):
        assert command == "install"  # the wheel is there
        for name in ("zmq/__init__.py", "zmq/tests/test_a.py"):
            path = Path(words[words.index("--target") + 1]) / name
            path.parent.mkdir(parents=True)
            path.touch()

    monkeypatch.setattr(kit, "pip", pip)
    kit.fill(site, wheels, "1.0", 90)
    found = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert found == {"vllm/__init__.py", "vllm/_C.so", "vllm-1.0.dist-info/METADATA", "zmq/__init__.py"}
    assert pieces_of(kit, (site / "vllm" / "_C.so").read_bytes()) == [[(CODE, 90)]]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "build" / "gpu-kit.tar.xz").exists(), reason="make gpu-kit has not been run")
def test_the_real_archive_is_small_and_has_code_for_one_gpu(kit, tmp_path):
    archive = ROOT / "build" / "gpu-kit.tar.xz"
    assert archive.stat().st_size <= kit.LIMIT_BYTES
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="tar")
    for name in ("vllm/entrypoints/openai/api_server.py", "zmq/__init__.py", "openai_harmony/__init__.py"):
        assert (tmp_path / name).exists(), name
    assert not list(tmp_path.glob("torch*"))
    kinds = [pieces for path in tmp_path.rglob("*.so") for pieces in pieces_of(kit, path.read_bytes())]
    assert len(kinds) > 100
    # Each container has code for one GPU, and most for Hopper.
    assert all(
        len({gpu for _, gpu in pieces}) == 1 and {kind for kind, _ in pieces} == {CODE} for pieces in kinds
    )
    assert sum((CODE, 90) in pieces for pieces in kinds) > 0.75 * len(kinds)
    shutil.rmtree(tmp_path / "vllm")
