"""The connector suite inside vLLM: on our connector, on vLLM's ExampleConnector, and on that one with planted
bugs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvferry.connector.testing.broken import BrokenPromiseError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings about vLLM's and torch's own code
    try:
        from kvferry.connector.testing.vllm import (
            VllmConnectorConformance,
            groups_of_one,
            nodes_of,
            skip_unless_drivable,
        )
    except ImportError as error:
        pytest.skip(f"this vLLM is too old for the suite: {error}", allow_module_level=True)

NEVER_FINDS_ITSELF = (
    "_found_match_for_prompt looks for align_to_block_size(n - 1) tokens, and ReqMeta.make_meta saves "
    "align_to_block_size(n): a prompt of whole blocks and one token is not found again"
)
SAVES_THE_FIRST_CHUNK = (
    "build_connector_meta orders the save of a whole prompt in its first step; with chunked prefill only the first chunk "
    "has blocks then, and the file is shorter than what is loaded from it"
)
KEY = "_generate_foldername_debug hashes token ids and the identifiers of items; the key lacks"


class TestExampleConnector(VllmConnectorConformance):
    """Each reason names the cause in `v1/example_connector.py` of vLLM 0.32.0."""

    deadline_s = 1.0
    expected_violations: ClassVar[Mapping[str, str]] = {
        "test_what_one_node_computed_another_loads": (
            "get_num_new_matched_tokens answers -4 for a prompt of one token, as align_to_block_size(0) is minus one block; "
            f"and {NEVER_FINDS_ITSELF}"
        ),
        "test_requests_of_one_step_are_not_mixed_up": NEVER_FINDS_ITSELF,
        "test_a_prompt_that_was_computed_in_chunks": SAVES_THE_FIRST_CHUNK,
        "test_a_prompt_that_was_not_finished_frees_its_blocks": SAVES_THE_FIRST_CHUNK,
        "test_a_prompt_that_was_preempted": SAVES_THE_FIRST_CHUNK,
        "test_blocks_of_a_preempted_prompt_are_another_requests": SAVES_THE_FIRST_CHUNK,
        "test_requests_of_one_step_are_not_mixed_up_in_chunks": SAVES_THE_FIRST_CHUNK,
        "test_what_bytes_depend_on_separates_caches[cache_salt]": f"{KEY} the cache salt",
        "test_what_bytes_depend_on_separates_caches[lora_id]": f"{KEY} the LoRA adapter",
        "test_what_bytes_depend_on_separates_caches[offset of mm_features]": f"{KEY} the places of items",
        "test_what_bytes_depend_on_separates_caches[prompt_embeds]": f"{KEY} vectors; without token ids it is empty",
        "test_another_models_cache_is_not_loaded": f"{KEY} the model",
        **{
            f"test_a_cache_of_another_shape_is_not_mistaken[{what}]": f"{KEY} the cache's shape"
            for what in ("heads", "head size", "dtype")
        },
        "test_a_damaged_store_is_a_failed_load": (
            "start_load_kv lets the error of safetensors escape instead of reporting blocks; that ends vLLM's engine"
        ),
        "test_an_unknown_option_is_named": "the constructor reads shared_storage_path and looks at no other option",
    }

    @pytest.fixture
    def transfer(self, tmp_path: Path) -> dict[str, Any]:
        return {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
        }

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Callable[[], None]:
        def cut_each_file_short() -> None:
            for path in (tmp_path / "store").glob("*/*.safetensors"):
                path.write_bytes(path.read_bytes()[:-100])

        return cut_each_file_short


class TestOurs(VllmConnectorConformance):
    options: ClassVar[Mapping[str, Any]] = {"transport": "shm"}

    @pytest.fixture
    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": "kvferry.connector.vllm",
            "kv_connector_extra_config": dict(self.options),
        }


class TestOursOverZeroMQ(TestOurs):
    options: ClassVar[Mapping[str, Any]] = {"transport": "zeromq", "cross_layer_blocks": True}


@pytest.fixture(scope="module")
def _groups() -> Iterator[None]:
    with groups_of_one():
        yield


@pytest.mark.usefixtures("_groups")
@pytest.mark.parametrize(
    ("connector", "promise", "seen"),
    [
        ("SavesTooLate", "test_what_is_here_already_is_not_loaded", "has the contents of a free block"),
        ("ForgetsALayer", "test_a_prompt_with_a_long_answer", r"\(layer 2, .* the contents of a free block"),
        ("LoadsTheLastToken", "test_a_prompt_with_a_long_answer", "leaves at least the prompt's last token"),
        ("AnswersOnce", "test_asking_changes_nothing", "the same question has the same answer"),
        ("ReportsSynchronousLoads", "test_a_prompt_with_a_long_answer", "no asynchronous load of it"),
    ],
)  # fmt: skip
def test_a_planted_bug_is_reported(tmp_path: Path, connector: str, promise: str, seen: str) -> None:
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": "tests.vllm.planted",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    suite = VllmConnectorConformance()
    with nodes_of(transfer, tmp_path) as make_node, pytest.raises(BrokenPromiseError, match=seen):
        getattr(suite, promise)(make_node)


def test_a_connector_that_needs_the_block_pool_is_skipped_by_name() -> None:
    transfer = {"kv_connector": "UsesTheBlockPool", "kv_connector_module_path": "tests.vllm.planted"}
    with pytest.raises(pytest.skip.Exception, match="UsesTheBlockPool overrides bind_gpu_block_pool"):
        skip_unless_drivable(transfer)
