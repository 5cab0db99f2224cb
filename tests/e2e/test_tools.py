"""Programs of others talk to a pair as they are: an evaluation harness and a load generator.

See `make build/tools/.ready`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluation import DOCUMENTS, NEEDS_TOOLS, evaluated, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), NEEDS_TOOLS]


def test_an_evaluation_harness_gets_the_single_nodes_answers(
    tiny_fleet: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """lm-eval asks with several prompts of token ids per request."""
    address = f"{tiny_fleet.router.process.url}/v1/completions"
    found = evaluated(
        address,
        "tiny",
        *("--model", "local-completions", "--batch_size", "4"),
        more=f",tokenizer={tiny_model},max_length=400",
        folder=tmp_path,
    )
    assert found == [
        tiny_fleet.single.complete(document["question"], max_tokens=4).body["choices"][0]["text"]
        for document in DOCUMENTS
    ]


def test_a_load_generator_has_no_failed_request(tiny_fleet: Any, tiny_model: Path, tmp_path: Path) -> None:
    """guidellm streams, asks for the usage, and passes the end token by `ignore_eos`."""
    run(
        *("guidellm", "run", "--disable-progress", "--profile", "kind=concurrent,streams=2"),
        *(
            "--backend",
            f"kind=openai_http,target={tiny_fleet.router.process.url},request_format=/v1/completions",
        ),
        *("--tokenizer", f"kind=hf_auto,model={tiny_model}", "--constraint", "kind=max_requests,count=6"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
        cwd=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)
