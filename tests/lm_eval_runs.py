"""Small tasks for lm-eval, offline: what it runs as a process of its own, and what it wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path

DOCS = [
    {"question": "The sky is", "choices": [" blue", " green"], "label": 0},
    {"question": "Two and two make", "choices": [" four", " fish", " é"], "label": 1},
    {"question": "Answer:", "choices": ["A", " B"], "label": 1},
]
CHOOSING = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATING = """
task: tiny_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
target_delimiter: ""
generation_kwargs: {until: ["e"], max_gen_toks: 12, temperature: 0}
metric_list: [{metric: bypass, aggregation: bypass, higher_is_better: true}]
"""


def run_lm_eval(
    folder: Path,
    module: str,
    model: str,
    arguments: str,
    tasks: dict[str, str],
    docs: list[dict],
    *,
    batch_size: int = 3,
) -> None:
    """Runs `python -m MODULE` on the documents; `tasks` are YAML by name, DATA is their file."""
    folder.mkdir(exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(f"{line}\n" for line in map(json.dumps, docs)), encoding="utf-8")
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    command = [sys.executable, "-m", module, "--model", model, "--model_args", arguments]
    command += ["--tasks", ",".join(tasks), "--include_path", str(folder)]
    command += [
        "--batch_size",
        str(batch_size),
        "--output_path",
        str(folder / "out"),
        "--log_samples",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    ran = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]


def samples(folder, task: str) -> list[dict]:
    """What lm-eval wrote for each document, in order."""
    (path,) = folder.glob(f"out/**/samples_{task}_*.jsonl")
    lines = path.read_text(encoding="utf-8").split("\n")
    return sorted((json.loads(line) for line in lines if line), key=lambda one: one["doc_id"])
