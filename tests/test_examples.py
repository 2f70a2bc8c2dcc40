"""The examples in the docstring of `jaxprefill.offline` run as they stand, over the tiny engine."""

import inspect
import re
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


def test_there_are_four():
    assert len(BLOCKS) == 4


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
