"""The examples in the docstring of `jaxprefill.offline` run as they stand, over the tiny engine."""

import inspect
import math
import re
import sys
import textwrap

import numpy as np
import pytest

import jaxprefill
import jaxprefill.offline


class TinyEngine:
    """The session's engine by whatever name it is asked for; its tokenizer has no "yes"."""

    def __init__(self, engine):
        self._engine = engine

    def __call__(self, model):
        return self

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def rerank(self, query, documents):
        return [row[0] for row in self._engine.score(query, documents, [1, 2])]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


BLOCKS = [
    textwrap.dedent(block)
    for block in re.findall(
        r"(?:^    .*\n)+", inspect.cleandoc(jaxprefill.offline.__doc__) + "\n", re.M
    )
]


@pytest.fixture
def outcome(engine, monkeypatch, tmp_path):
    """Runs an example in an empty folder; returns its names."""
    monkeypatch.setattr(jaxprefill, "Engine", TinyEngine(engine), raising=False)
    monkeypatch.chdir(tmp_path)

    def run(index: int) -> dict:
        names = {}
        exec(BLOCKS[index], names)
        return names

    return run


def test_there_are_five():
    assert len(BLOCKS) == 5


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

    def map_batches(self, predictor, *, fn_constructor_kwargs, compute, batch_size):
        assert (compute, batch_size) == ({"size": 2}, 512)
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
