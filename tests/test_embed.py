"""Embeddings: against the oracle in any company, from models with a head and without one."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefill import SamplingParams, embedding_query
from jaxprefill.config import PoolingConfig
from jaxprefill.errors import RequestError
from jaxprefill.request import Request
from jaxprefill.sampling.pooling import last_rows, summed_rows
from jaxprefill.scheduler import RequestState
from tests.reference import prompt_logprobs, reference_embedding
from tests.tiny import TinyCheckpoint, tiny_engine

LENGTHS = (1, 7, 8, 9, 31, 32, 33, 65, 90)
MEAN = PoolingConfig(kind="mean")


def prompts():
    """Of every length, all beginning alike."""
    stem = np.random.default_rng(5).integers(0, 250, max(LENGTHS)).tolist()
    return [[*stem[: length - 1], length] for length in LENGTHS]


@pytest.fixture(scope="module")
def averaging():
    """(checkpoint, engine) of a model that embeds by the mean and has no LM head."""
    held = TinyCheckpoint(pooling=MEAN, has_lm_head=False, is_embedding_tied=False)
    with tiny_engine(held, chunked_prefill_size=20) as made:
        yield held, made


def test_a_mean_is_the_oracles_alone_in_company_in_chunks_and_after_a_cache_hit(averaging):
    checkpoint, engine = averaging
    wanted = np.array([reference_embedding(checkpoint, ids) for ids in prompts()])
    together = engine.embed(prompts())
    assert together.dtype == np.float32 and together.shape == (len(LENGTHS), 48)
    np.testing.assert_allclose(together, wanted, atol=1e-4)
    backwards = engine.embed(prompts()[::-1])[::-1]  # every page is known by now
    np.testing.assert_allclose(backwards, wanted, atol=1e-4)
    for ids, one in zip(prompts(), wanted, strict=True):
        np.testing.assert_allclose(engine.embed(ids)[0], one, atol=1e-4)
        engine.flush_cache()
    stats = engine.stats()
    assert stats["cached_tokens"] == 0  # what is skipped has no hidden row to add
    assert stats["compilations_after_ready"] == 0
    assert stats["kv_pages"]["free"] == stats["kv_pages"]["total"]


def test_for_a_mean_nobody_waits_for_a_shared_prefix(averaging):
    _, engine = averaging
    before = engine.stats()["passes"]["full"]
    engine.embed([[*range(8), 8], [*range(8), 9]])
    assert engine.stats()["passes"]["full"] == before + 1


def test_a_last_row_is_the_oracles_and_takes_cache_hits(engine, checkpoint):
    wanted = np.array([reference_embedding(checkpoint, ids) for ids in prompts()])
    engine.flush_cache()
    np.testing.assert_allclose(engine.embed(prompts()), wanted, atol=1e-4)
    before = engine.stats()
    np.testing.assert_allclose(engine.embed(prompts()), wanted, atol=1e-4)
    after = engine.stats()
    assert after["cached_tokens"] > before["cached_tokens"]
    assert after["compilations_after_ready"] == before["compilations_after_ready"]


def test_dimensions_cut_before_lengths_become_one(engine, checkpoint):
    ids = prompts()[4]
    cut = engine.embed(ids, dimensions=16)
    np.testing.assert_allclose(
        cut[0], reference_embedding(checkpoint, ids, dimensions=16), atol=1e-4
    )
    plain = engine.embed(ids, dimensions=np.int64(16), normalize=False)
    np.testing.assert_allclose(plain / np.linalg.norm(plain), cut, atol=1e-6)
    assert np.linalg.norm(plain) > 1.5
    assert engine.embed([]).shape == (0, 48) and engine.embed([], dimensions=5).shape == (0, 5)


def test_the_models_files_decide_whether_lengths_are_one():
    pooling = PoolingConfig(is_normalized=False)
    held = TinyCheckpoint(pooling=pooling, has_lm_head=False, is_embedding_tied=False)
    with tiny_engine(held, prefill_backend="eager") as made:
        plain, scaled = made.embed("abc"), made.embed("abc", normalize=True)
        assert np.linalg.norm(plain) > 1.5
        np.testing.assert_allclose(scaled, plain / np.linalg.norm(plain), atol=1e-6)


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        ("", {}, "at least one token"),
        (["a", ""], {}, r"texts\[1\].*at least one token"),
        ([1, 999], {}, "0 to 271, got 999"),
        (5, {}, "texts or lists of token ids"),
        ("a", {"dimensions": 0}, "dimensions must be an integer, 1 to the model's 48, got 0"),
        ("a", {"dimensions": 49}, "got 49"),
        ("a", {"dimensions": True}, "got True"),
        ("a", {"dimensions": "8"}, "got '8'"),
        ("a", {"normalize": "no"}, "normalize must be true, false or None, got 'no'"),
        ("a" * 161, {}, "maximum context length"),
    ],
)
def test_wrong_arguments_are_named(engine, texts, options, said):
    with pytest.raises(RequestError, match=said):
        engine.embed(texts, **options)


def test_without_a_head_nothing_is_generated_and_nothing_compiled_for_it(averaging):
    _, engine = averaging
    for ask in (
        lambda: engine.generate("abc", SamplingParams(max_tokens=3)),
        lambda: engine.logprobs("abc"),
        lambda: engine.score("a", ["b"], [1]),
        lambda: engine.rerank("a", ["b"]),
    ):
        with pytest.raises(RequestError, match=r"need.* an LM head"):
            ask()
    names = {record["name"] for record in engine.stats()["compiled"]}
    assert "sum_hidden" in names and "classify" not in names
    assert not [name for name in names if name.split()[0] in ("greedy", "score", "decode")]


def test_spans_are_summed_and_nothing_else_is_looked_at():
    hidden = np.full((12, 3), np.nan, np.float32)
    hidden[2:9] = np.arange(21).reshape(7, 3)
    spans = np.array([[2, 3], [5, 4], [2, 1], [0, 0]], np.int32)
    found = np.asarray(summed_rows(jnp.array(hidden), jnp.array(spans)))
    np.testing.assert_allclose(found[:2], [hidden[2:5].sum(0), hidden[5:9].sum(0)])
    np.testing.assert_array_equal(found[2:], [hidden[2], [0, 0, 0]])
    rows = last_rows(jnp.array(hidden), jnp.array(spans))
    np.testing.assert_array_equal(rows[:3], hidden[[2, 5, 2]])


def test_after_a_preemption_every_row_is_still_added_once():
    request = Request(
        id="a", prompt_ids=tuple(range(20)), params=SamplingParams(max_tokens=0), seed=0,
        pooling="mean",
    )  # fmt: skip
    state = RequestState(request, max_tokens=0, slot=0, target=20)
    row = state.prefill_row(9)
    assert row.pool_span == (0, 9)
    state.dispatched(row)
    state.num_computed = 0  # its pages were taken away
    assert state.prefill_row(12).pool_span == (9, 3)
    assert state.prefill_row(5).pool_span[1] == 0


def test_queries_carry_their_task_in_the_text():
    assert embedding_query("who?", "Find names") == "Instruct: Find names\nQuery:who?"
    assert embedding_query("q").startswith("Instruct: Given a web search query, retrieve")


def test_embedding_leaves_other_results_as_they_are(engine, checkpoint):
    ids = prompts()[6]
    engine.flush_cache()
    engine.embed([ids, ids[:9]])
    np.testing.assert_allclose(
        engine.logprobs(ids)[0][1:], prompt_logprobs(checkpoint, ids), atol=1e-4
    )
