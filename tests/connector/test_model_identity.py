"""Every byte of a model's weights counts, and is read only once while the files stay the same."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.connector.identity import model
from kvferry.connector.identity.digest_cache import DigestCache, cache_folder
from kvferry.connector.identity.model import (
    chat_template_digest,
    configuration_digest,
    find_weight_files,
    read_configuration,
    tokenizer_digest,
    weights_digest,
)
from kvferry.transports.errors import ConfigurationError
from tests.support.patience import DEADLINE_S

SIZE = 300_000


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    scratch, deadline = tmp_path / "scratch", time.monotonic() + DEADLINE_S
    # Wait until the file system's clock has moved on, so that a later change has a later time.
    while not scratch.exists() or scratch.stat().st_ctime_ns <= path.stat().st_ctime_ns:
        assert time.monotonic() < deadline
        scratch.write_text("")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    """A cache that keeps the hashes of small and new files too."""
    return DigestCache(tmp_path / "cache", min_bytes=0, settle_s=0.0)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, one entry per part."""
    read: list[Path] = []
    hash_part = model._hash_part

    def noted(path: Path, start: int, size: int) -> bytes:
        read.append(path)
        return hash_part(path, start, size)

    monkeypatch.setattr(model, "_hash_part", noted)
    return read


def _overwrite(path: Path, offset: int) -> None:
    """Change one byte in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 1]))


@pytest.mark.parametrize("offset", [0, SIZE // 2 + 7, SIZE - 1])
def test_every_byte_counts(weights: Path, cache: DigestCache, offset: int) -> None:
    before = weights_digest([weights], cache)
    _overwrite(weights, offset)
    assert weights_digest([weights], cache) != before


def test_parts_of_a_large_file_count_in_their_order(
    weights: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_PART_BYTES", SIZE // 3)
    data = weights.read_bytes()
    whole = weights_digest([weights], cache)
    weights.write_bytes(data[SIZE // 3 :] + data[: SIZE // 3])
    assert weights_digest([weights], cache) != whole


def test_names_and_folders_of_files_do_not_count(weights: Path, cache: DigestCache) -> None:
    second = weights.with_name("other.safetensors")
    second.write_bytes(b"second")
    moved = weights.with_name("a.safetensors")
    both = weights_digest([weights, second], cache)
    assert both != weights_digest([weights], cache)
    weights.rename(moved)
    assert weights_digest([second, moved], cache) == both


class TestCache:
    def test_an_unchanged_file_is_read_once(
        self, weights: Path, cache: DigestCache, hashed: list[Path]
    ) -> None:
        assert weights_digest([weights], cache) == weights_digest([weights], cache)
        assert hashed == [weights]

    @pytest.mark.parametrize("change", ["inode", "size", "mtime", "contents with the old mtime"])
    def test_a_changed_file_is_read_again(
        self, weights: Path, cache: DigestCache, hashed: list[Path], change: str
    ) -> None:
        weights_digest([weights], cache)
        found = weights.stat()
        match change:
            case "inode":
                twin = weights.with_name("twin")
                twin.write_bytes(weights.read_bytes())
                twin.rename(weights)
            case "size":
                weights.write_bytes(weights.read_bytes() + b"x")
            case "mtime":
                os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
            case _:
                _overwrite(weights, SIZE // 2)
        if change != "mtime":
            os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
        weights_digest([weights], cache)
        assert len(hashed) == 2

    @pytest.mark.parametrize("entry", ["", "ab" * 20, "no digest" * 8])
    def test_a_damaged_entry_is_written_again(
        self, weights: Path, cache: DigestCache, hashed: list[Path], entry: str
    ) -> None:
        digest = weights_digest([weights], cache)
        assert cache.folder is not None
        (name,) = [path for path in cache.folder.iterdir() if path.suffix != ".lock"]
        name.write_text(entry)
        assert weights_digest([weights], cache) == digest
        assert weights_digest([weights], cache) == digest
        assert len(hashed) == 2

    def test_a_cache_that_cannot_be_used_costs_only_time(
        self, weights: Path, cache: DigestCache, tmp_path: Path, hashed: list[Path]
    ) -> None:
        (tmp_path / "file").write_text("")
        unusable = [DigestCache(tmp_path / "file" / "cache", 0, 0.0), DigestCache(None, 0, 0.0)]
        digests = {weights_digest([weights], one) for one in [cache, *unusable, *unusable]}
        assert len(digests) == 1
        assert len(hashed) == 5

    def test_a_file_that_changes_while_it_is_hashed_is_not_kept(
        self,
        weights: Path,
        cache: DigestCache,
        hashed: list[Path],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        read_part = model._hash_part

        def changing(path: Path, start: int, size: int) -> bytes:
            digest = read_part(path, start, size)
            _overwrite(path, 5)
            os.utime(path, ns=(1, 1))
            return digest

        monkeypatch.setattr(model, "_hash_part", changing)
        first = weights_digest([weights], cache)
        assert "changed while it was hashed" in caplog.text
        monkeypatch.setattr(model, "_hash_part", read_part)
        assert weights_digest([weights], cache) != first
        assert len(hashed) == 2

    def test_a_file_that_was_just_written_is_not_kept(
        self, weights: Path, cache: DigestCache, hashed: list[Path]
    ) -> None:
        young = DigestCache(cache.folder, 0, settle_s=3600.0)
        weights_digest([weights], young)
        weights_digest([weights], young)
        assert len(hashed) == 2

    def test_ranks_that_start_together_read_the_files_once(
        self, weights: Path, cache: DigestCache, hashed: list[Path]
    ) -> None:
        digests: list[str] = []
        ranks = [
            threading.Thread(target=lambda: digests.append(weights_digest([weights], cache)))
            for _ in range(4)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert len(digests) == 4
        assert len(set(digests)) == 1
        assert hashed == [weights]

    def test_the_cache_is_in_the_folder_that_the_user_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
        assert cache_folder() == tmp_path
        folder = DigestCache.default().folder
        assert folder is not None
        assert folder.parent == tmp_path


class TestProgressBar:
    @pytest.mark.parametrize(("bar_above", "is_shown"), [(SIZE - 1, True), (SIZE, False)])
    def test_progress_is_shown_only_for_large_models(
        self,
        weights: Path,
        cache: DigestCache,
        bar_above: int,
        is_shown: bool,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        weights_digest([weights], cache, bar_above_bytes=bar_above)
        out, err = capfd.readouterr()
        assert out == ""
        assert ("hashing the model's weights" in err) == is_shown

    def test_progress_is_not_shown_for_known_files(
        self, weights: Path, cache: DigestCache, capfd: pytest.CaptureFixture[str]
    ) -> None:
        for bar_above in (SIZE, 0):
            weights_digest([weights], cache, bar_above_bytes=bar_above)
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: (path.unlink(), path.mkdir())])
def test_a_file_that_cannot_be_read_is_named(
    weights: Path, cache: DigestCache, spoil: Callable[[Path], object]
) -> None:
    spoil(weights)
    with pytest.raises(
        ConfigurationError, match=r"cannot hash the weight file .*model\.safetensors"
    ) as caught:
        weights_digest([weights], cache)
    assert caught.value.key == "model"


def test_a_file_that_becomes_shorter_is_reported(weights: Path) -> None:
    with pytest.raises(ConfigurationError, match="became shorter"):
        model._hash_part(weights, SIZE - 10, 20)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("model.safetensors", "pytorch_model.bin"), ("model.safetensors",)),
        (("b.safetensors", "a.safetensors", "notes.txt"), ("a.safetensors", "b.safetensors")),
        (("training_args.bin", "optimizer.pt", "model.gguf"), ("model.gguf",)),
        (("consolidated.pt", "config.json"), ("consolidated.pt",)),
        (("config.json",), ()),
    ],
)
def test_weight_files_are_those_that_a_loader_would_read(
    tmp_path: Path, names: tuple[str, ...], found: tuple[str, ...]
) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    assert tuple(path.name for path in find_weight_files(tmp_path)) == found


def test_everything_in_a_configuration_counts_except_where_it_came_from() -> None:
    base = {"rope_theta": 1e4, "text_config": {"layers": 2, "dtype": "float32"}}
    same = {
        "text_config": {"dtype": "bfloat16", "layers": 2, "_name_or_path": "/x"},
        "transformers_version": "5.1",
        "rope_theta": 1e4,
    }
    assert configuration_digest(base) == configuration_digest(same)
    quantized = [{**base, "quantization_config": {"bits": 4, "dtype": dtype}} for dtype in ("a", "b")]
    others = [{**base, "rope_theta": 1e6}, {**base, "text_config": {"layers": 3}}, *quantized]
    assert len({configuration_digest(one) for one in [base, *others]}) == 5


def test_an_object_in_a_configuration_counts_by_its_type() -> None:
    assert configuration_digest({"x": object()}) == configuration_digest({"x": object()})


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"cannot read .*config\.json"):
        read_configuration(tmp_path)


def _write(folder: Path, **contents: object) -> Path:
    folder.mkdir()
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_tokenizer_is_identified_by_how_it_tokenizes_a_text(tmp_path: Path) -> None:
    tokens, settings = {"model": {"vocab": {"a": 0}}}, {"add_bos_token": True}
    one = _write(tmp_path / "one", tokenizer=tokens, tokenizer_config=settings)
    resaved = {**settings, "chat_template": "x", "name_or_path": "/x"}
    same = _write(tmp_path / "same", tokenizer=tokens, tokenizer_config=resaved, vocab={"a": 0})
    token = _write(tmp_path / "token", tokenizer={"model": {"vocab": {"b": 0}}}, tokenizer_config=settings)
    other = _write(tmp_path / "other", tokenizer=tokens, tokenizer_config={"add_bos_token": False})
    assert tokenizer_digest(one) == tokenizer_digest(same)
    assert len({tokenizer_digest(folder) for folder in (one, token, other)}) == 3


def test_a_chat_template_is_the_same_in_either_file(tmp_path: Path) -> None:
    inside = _write(tmp_path / "inside", tokenizer_config={"chat_template": "{{ messages }}"})
    beside = _write(tmp_path / "beside", tokenizer_config={})
    (beside / "chat_template.jinja").write_text("{{ messages }}")
    other = _write(tmp_path / "other", tokenizer_config={"chat_template": "{{ date }}{{ messages }}"})
    assert chat_template_digest(inside) == chat_template_digest(beside) != chat_template_digest(other)


@pytest.mark.parametrize("content", [None, "{"])
def test_an_optional_part_that_cannot_be_read_is_not_compared(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_text(content)
    assert (tokenizer_digest(tmp_path), chat_template_digest(tmp_path)) == ("", "")
