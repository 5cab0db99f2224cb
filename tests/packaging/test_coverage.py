"""`coverage.md` says where each known name is and which tests show it; these tests check that it is right."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

from kvferry.connector import testing

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("coverage.md")

#: The names that engine authors know: name → its first arguments, or None if only the name counts.
KNOWN: dict[str, dict[str, tuple[str, ...] | None]] = {
    "1. Runner mixin": {
        "maybe_setup_kv_connector": ("scheduler_output",),
        "maybe_wait_for_kv_save": (),
        "get_finished_kv_transfers": ("scheduler_output",),
        "get_kv_connector_stats": (),
        "ensure_kv_transfer_shutdown": (),
        "maybe_get_kv_connector_output": ("scheduler_output",),
        "_get_kv_connector_output": ("scheduler_output", "wait_for_save"),
        "kv_connector_no_forward": ("scheduler_output", "config"),
        "use_uniform_kv_cache": ("attn_groups", "cache_dtype"),
        "allocate_uniform_kv_caches": (
            "kv_cache_config",
            "attn_groups",
            "cache_dtype",
            "device",
            "kernel_block_sizes",
        ),
        "KVConnectorOutput": None,
        "is_empty": (),
        "KVOutputAggregator": None,
        "has_kv_transfer_group": (),
        "get_kv_transfer_group": (),
        "ensure_kv_transfer_initialized": None,
    },
    "2. Worker utilities": {
        "bind_kv_cache": ("kv_caches", "forward_context", "runner_kv_caches", "num_attn_module"),
        "add_kv_sharing_layers_to_kv_cache_groups": ("shared_layers", "groups", "runner_only_attn_layers"),
        "initialize_kv_cache_for_kv_sharing": ("shared_layers", "groups", "kv_caches"),
        "prepare_kernel_block_sizes": ("kv_cache_config", "attn_groups"),
        "select_common_block_size": ("kv_manager_block_size", "attn_groups"),
        "request_memory": ("snapshot", "cache_config"),
        "is_residual_scattered_for_sp": ("config", "num_input_tokens"),
        "sanity_check_mm_encoder_outputs": ("embeddings", "expected_num_items"),
        "scatter_mm_placeholders": ("embeds", "is_embed"),
        "gather_mm_placeholders": ("placeholders", "is_embed"),
    },
    "3. Attention plumbing": {
        "get_kv_cache_spec": ("config", "kv_cache_dtype"),
        "init_attn_backend": ("kv_cache_config", "config", "device"),
        "_allocate_kv_cache": ("kv_cache_config", "device"),
        "_reshape_kv_cache": ("kv_cache_config", "raw", "backends"),
        "init_kv_cache": None,
        "build_attn_metadata": None,
        "get_name": (),
        "get_kv_cache_shape": ("num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str"),
        "get_kv_cache_stride_order": ("include_num_layers_dimension",),
        "get_supported_kernel_block_sizes": (),
        "get_builder_cls": (),
    },
    "4. KV cache management": {
        "BlockHash": None,
        "BlockHashWithGroupId": None,
        "hash_block_tokens": None,
        "generate_block_hash_extra_keys": None,
        "need_extra_keys": None,
        "get_request_block_hasher": ("block_size", "hash_fn"),
        "KVCacheBlock": None,
        "FreeKVCacheBlockQueue": None,
        "popleft": (),
        "popleft_n": None,
        "remove": None,
        "append": None,
        "append_n": None,
        "get_all_free_blocks": (),
        "PrefixCachingMetrics": None,
        "BlockPool": None,
        "FullAttentionSpec": None,
        "SlidingWindowSpec": None,
        "ChunkedLocalAttentionSpec": None,
        "MambaSpec": None,
        "UniformTypeKVCacheSpecs": None,
        "EncoderOnlyAttentionSpec": None,
        "page_size_bytes": None,
        "merge": None,
        "max_memory_usage_bytes": None,
        "estimate_max_model_len": None,
        "check_enough_kv_cache_memory": None,
        "create_kv_cache_group_specs": None,
        "is_kv_cache_type_uniform": None,
        "is_kv_cache_page_size_uniform": None,
        "is_kv_cache_type_attention_free": None,
        "get_uniform_page_size": None,
        "get_num_blocks": None,
        "get_kv_cache_config": None,
        "unify_hybrid_kv_cache_specs": None,
        "unify_kv_cache_configs": None,
        "get_max_concurrency_for_kv_cache_config": None,
    },
    "5. Connector": dict.fromkeys(
        [
            "KVConnectorBase",
            "register_kv_caches",
            "register_cross_layers_kv_cache",
            "prefer_cross_layer_blocks",
            "bind_connector_metadata",
            "clear_connector_metadata",
            "start_load_kv",
            "wait_for_layer_load",
            "save_kv_layer",
            "wait_for_save",
            "get_finished",
            "get_block_ids_with_load_errors",
            "get_kv_connector_stats",
            "get_handshake_metadata",
            "handle_preemptions",
            "shutdown",
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "update_connector_output",
            "request_finished",
            "take_events",
            "SharedMemoryConnector",
            "ZeroMQConnector",
            "UCXConnector",
        ]
    ),
}


@dataclass(frozen=True)
class Row:
    """One row of the page."""

    section: str
    signature: str
    where: str
    used: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]


def _rows() -> list[Row]:
    rows, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            name, where, used, tests = (cell.strip() for cell in line.strip("|").split("|"))
            shown_by = tuple(re.findall(r"`([^`]+)`", tests))
            rows.append(Row(section, name.strip("`"), where.strip("`"), used, shown_by))
    return rows


ROWS = _rows()


def _lives_at(where: str) -> object:
    module, _, path = where.partition(":")
    found: object = importlib.import_module(module)
    *owners, last = path.split(".")
    for owner in owners:
        found = getattr(found, owner)
    if dataclasses.is_dataclass(found) and last in {field.name for field in dataclasses.fields(found)}:
        return last
    return getattr(found, last)


def _arguments(signature: str) -> list[tuple[str, str]]:
    """Return names and defaults, as written."""
    (function,) = ast.parse(f"def {signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    pairs = [*zip(given.args, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [(arg.arg, "" if default is None else ast.unparse(default)) for arg, default in pairs]


def _real_arguments(target: object) -> list[tuple[str, str]]:
    assert callable(target)
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        (p.name, "" if p.default is p.empty or dataclasses.is_dataclass(target) else repr(p.default))
        for p in inspect.signature(target).parameters.values()
        if p.name != "self" and p.kind not in variadic
    ]


@functools.cache
def _names_in(path: Path) -> frozenset[str]:
    """Return the names that a file's code refers to; comments and strings do not count."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.name)
    return frozenset(names)


@functools.cache
def _tests_in(path: Path) -> frozenset[str]:
    """Return a file's tests: functions, methods as `Class::method` (inherited ones too), and state
    machines.
    """
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
            for base in node.bases:
                methods += dir(getattr(testing, ast.unparse(base), object))
            found |= {f"{node.name}::{method}" for method in methods if method.startswith("test")}
        elif isinstance(node, ast.Assign) and "TestCase" in ast.unparse(node.value):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def test_nothing_is_left_out() -> None:
    listed = {(row.section, row.name) for row in ROWS}
    assert not {(section, name) for section, names in KNOWN.items() for name in names} - listed


def test_they_are_there_with_these_arguments() -> None:
    for row in ROWS:
        target = _lives_at(row.where)
        assert row.where.split(":")[1].split(".")[-1] == row.name
        if "(" in row.signature:
            assert _arguments(row.signature) == _real_arguments(target), row.signature


def test_they_say_what_they_do() -> None:
    for row in ROWS:
        target = _lives_at(row.where)
        if not isinstance(target, NewType):
            own = getattr(target, "__doc__", None) or ""
            assert own.strip(), row.signature
            assert not own.startswith(f"{row.name}("), f"made by dataclass: {row.signature}"


def test_arguments_are_those_that_engine_authors_know() -> None:
    for row in ROWS:
        known = KNOWN[row.section].get(row.name)
        if known is not None:
            assert tuple(name for name, _ in _arguments(row.signature))[: len(known)] == known, row.signature


def test_the_engine_uses_them_or_the_page_says_that_it_does_not() -> None:
    for row in ROWS:
        if not row.used.startswith("*library*"):
            path, *by = re.findall(r"`([^`]+)`", row.used)
            assert path.startswith("lab/engine/"), row.signature
            assert (by[0] if by else row.name) in _names_in(ROOT / path), row.signature


def test_their_tests_exist() -> None:
    for row in ROWS:
        assert row.tests, row.signature
        for test in row.tests:
            path, _, name = test.partition("::")
            assert name in _tests_in(ROOT / path), test


def test_only_these_are_for_other_engines_than_ours() -> None:
    """The reference engine uses everything else."""
    library = {row.name for row in ROWS if row.used.startswith("*library*")}
    assert library == {
        "is_residual_scattered_for_sp",
        "sanity_check_mm_encoder_outputs",
        "scatter_mm_placeholders",
        "gather_mm_placeholders",
        "EncoderOnlyAttentionSpec",
        "MambaSpec",
    }
