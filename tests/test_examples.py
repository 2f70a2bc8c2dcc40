"""Examples of docstrings and READMEs run as they stand, over the tiny engine; commands parse."""

import importlib
import inspect
import math
import re
import shlex
import sys
import textwrap
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import jaxprefill
import jaxprefill.offline
from jaxprefill.cli.main import COMMANDS, load_command, make_parser
from jaxprefill.offline import ray_data


class TinyEngine:
    """The session's engine by whatever name it is asked for; its tokenizer has no "yes"."""

    def __init__(self, engine):
        self._engine = engine

    def __call__(self, model):
        return self

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def score(self, query, items, label_ids):
        return self._engine.score(query, items, [id % 200 for id in label_ids])

    def rerank(self, query, documents):
        return [row[0] for row in self._engine.score(query, documents, [1, 2])]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def blocks_of(text: str) -> list[str]:
    """What is indented by four."""
    found = re.findall(r"(?:^    .*\n)+", inspect.cleandoc(text) + "\n", re.M)
    return [textwrap.dedent(block) for block in found]


ROOT = Path(__file__).parent.parent
BLOCKS = blocks_of(jaxprefill.offline.__doc__)
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def commands_of(text: str) -> list[str]:
    """`jaxprefill NAME …` of indented lines, with those that continue them."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    found = [re.search(r"^ {2,}(?:.*/bin/)?jaxprefill ([a-z][^#|<>]*)", line) for line in lines]
    return [match[1] for match in found if match]


COMMAND_LINES = [
    *commands_of(README),
    *(re.findall(r"`jaxprefill ([^`]*)`", (ROOT / "checkpoints/README.md").read_text("utf-8"))),
    *(line for name in COMMANDS for line in commands_of(load_command(name).epilog or "")),
]


@pytest.fixture
def outcome(engine, monkeypatch, tmp_path):
    """Runs an example in an empty folder; returns its names."""
    monkeypatch.setattr(jaxprefill, "Engine", TinyEngine(engine), raising=False)
    monkeypatch.chdir(tmp_path)

    def run(block: int | str) -> dict:
        names = {}
        exec(BLOCKS[block] if isinstance(block, int) else block, names)
        return names

    return run


def test_there_are_five():
    assert (len(BLOCKS), len(PYTHON), len(COMMAND_LINES) > 30) == (5, 2, True)


@pytest.mark.parametrize("line", sorted({line for line in COMMAND_LINES if " " in line.strip()}))
def test_commands_parse(line):
    make_parser().parse_args(shlex.split(line))


def test_the_readme_runs(outcome, capsys):
    names = outcome(PYTHON[0])
    assert capsys.readouterr().out and len(names["completion"].logprobs) > 0
    compile(PYTHON[1], "README.md", "exec")  # of several processes: tests/test_devices.py


def test_a_guard_model_is_asked(outcome):
    names = outcome(0)
    assert np.allclose(np.sum(names["shares"], axis=1), 1) and len(names["refused"]) == 2


def test_documents_are_ranked(outcome):
    names = outcome(1)
    assert names["ranked"][0][0] == max(names["scores"])
    assert {text for _, text in names["ranked"]} == {"Grass.", "Blood."}


def test_rows_are_filtered_by_perplexity(outcome, engine):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["hello", "xyz", "a", "0101"]
    parquet.write_table(arrow.table({"text": texts}), "in.parquet")
    outcome(2)
    rows = engine.logprobs(texts)
    low = [text for text, row in zip(texts, rows, strict=True) if mean(row) > -np.log(50)]
    assert parquet.read_table("out.parquet")["text"].to_pylist() == low and "a" in low


def mean(row):
    return np.mean(row[1:]) if row[1:] else 0.0


def test_embeddings_are_saved(outcome, engine):
    outcome(3)
    found = np.load("vectors.npy")
    assert np.allclose(found, engine.embed(["A text.", "Another."]), atol=1e-5)


class FakeRay:
    """Ray's rows, as one batch in this process."""

    def __init__(self):
        self.data, self.read, self.written = self, [], []
        self.ActorPoolStrategy = dict

    def read_parquet(self, path):
        self.batch = {"text": np.array(["hello", "abc"], object)}
        return self

    def map_batches(self, predictor, *, fn_constructor_kwargs, compute, num_cpus, batch_size):
        assert (compute, num_cpus, batch_size) == ({"size": 2}, 0, 512)
        self.batch = predictor(**fn_constructor_kwargs)(self.batch)
        return self

    def write_parquet(self, path):
        self.written.append(path)


def test_ray_data_gets_perplexities(outcome, engine, monkeypatch):
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr("jaxprefill.offline.ray_data.Engine", TinyEngine(engine))
    outcome(4)
    assert fake.written == ["out"]
    wanted = [math.exp(-np.mean(row[1:])) for row in engine.logprobs(["hello", "abc"])]
    np.testing.assert_allclose(fake.batch["perplexity"], wanted, rtol=1e-5)


def test_the_docstring_of_ray_data_runs(engine, monkeypatch):
    fake = FakeRay().read_parquet("")
    monkeypatch.setattr(ray_data, "Engine", TinyEngine(engine))
    (block,) = [text for text in blocks_of(ray_data.__doc__) if "map_batches" in text]
    exec(block, {"dataset": fake, "ray": fake, "RayPredictor": ray_data.RayPredictor})
    assert len(fake.batch["perplexity"]) == 2


def test_the_docstring_of_ray_serve_runs(monkeypatch):
    serve, name = mock.MagicMock(), "jaxprefill.remote.ray_serve"
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    monkeypatch.setitem(sys.modules, "ray", mock.MagicMock(serve=serve))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)  # it holds the mock
    (block,) = blocks_of(module.__doc__)
    exec(block, {"serve": serve, "deployment": module.deployment})
    told = serve.deployment.return_value.options.call_args.kwargs
    assert told["autoscaling_config"]["max_replicas"] == 4 and serve.run.called
