"""Programs of others talk to a pair as they are: an evaluation harness and a load generator.

See `make build/tools/.ready`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "build" / "tools" / "bin"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (TOOLS / "lm_eval").exists(), reason="not installed: `make build/tools/.ready` does it"
    ),
]

#: The model's tokenizer has one token per byte, so that a test can count tokens.
DOCUMENTS = [
    {"question": f"On board of the {thing}, the manifest is", "answer": "signed"}
    for thing in ("ferry", "Heron", "Tern")
]
ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 4, until: ["never"], temperature: 0}
metric_list: [{metric: exact_match}]
"""


def run(tool: str, *arguments: str, cwd: Path) -> None:
    """Run a tool without a hub of models and data sets, and with PyTorch's threads as our nodes have them."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(cwd / "hub"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [TOOLS / tool, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_evaluation_harness_gets_the_single_nodes_answers(
    tiny_fleet: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """lm-eval asks with several prompts of token ids per request."""
    data = tmp_path / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    (tmp_path / "answers.yaml").write_text(ANSWERS % data)
    address = f"{tiny_fleet.router.process.url}/v1/completions"
    run(
        *(
            "lm_eval",
            "run",
            "--model",
            "local-completions",
            "--batch_size",
            "4",
            "--tasks",
            "answers",
        ),
        *("--model_args", f"model=tiny,base_url={address},tokenizer={tiny_model},max_length=400"),
        *("--include_path", str(tmp_path), "--output_path", "out", "--log_samples"),
        cwd=tmp_path,
    )
    (file,) = tmp_path.glob("out/*/samples_answers_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])
    for document, sample in zip(DOCUMENTS, samples, strict=True):
        expected = tiny_fleet.single.complete(document["question"], max_tokens=4).body["choices"][0]["text"]
        assert sample["filtered_resps"] == [expected]


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
