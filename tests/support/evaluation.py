"""Run programs of others against servers, lm-eval among them: see `make build/tools/.ready`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "build" / "tools" / "bin"

NEEDS_TOOLS = pytest.mark.skipif(
    not (TOOLS / "lm_eval").exists(), reason="not installed: `make build/tools/.ready` does it"
)

#: With tokenizers that have one token per byte, a test can count tokens.
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


def evaluated(address: str, model: str, *arguments: str, more: str = "", folder: Path) -> list[Any]:
    """Return what lm-eval makes of a server's answers to `DOCUMENTS`, one for each.

    Args:
        address: Of an endpoint, with its path.
        more: Of the model's arguments.
    """
    data = folder / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    (folder / "answers.yaml").write_text(ANSWERS % data)
    run(
        *("lm_eval", "run", "--tasks", "answers", *arguments),
        *("--model_args", f"model={model},base_url={address}{more}"),
        *("--include_path", str(folder), "--output_path", "out", "--log_samples"),
        cwd=folder,
    )
    (file,) = folder.glob("out/*/samples_answers_*.jsonl")
    samples = map(json.loads, file.read_text().splitlines())
    return [sample["filtered_resps"][0] for sample in sorted(samples, key=lambda one: one["doc_id"])]
