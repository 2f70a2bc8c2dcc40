"""Label scores: against the oracle, refused when wrong, and a shared query computed once."""

import numpy as np
import pytest

from jaxprefill.admission import Wants
from jaxprefill.errors import RequestError
from jaxprefill.request import SamplingParams
from tests.reference import reference_logprobs
from tests.tiny import VOCAB, tiny_engine


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed * 1000 + length).integers(0, 250, length).tolist()


def label_probabilities(checkpoint, ids, labels):
    return np.exp(reference_logprobs(checkpoint, ids)[-1][labels])


def test_label_scores_are_the_next_tokens_probabilities(engine, checkpoint):
    query, items, labels = random_ids(21), [random_ids(3, seed=s) for s in range(5)], [7, 200, 7]
    before = engine.stats()["compilations_after_ready"]
    plain = engine.score(query, items, labels, apply_softmax=False)
    softmax = engine.score(query, items, labels)
    for item, found, normalised in zip(items, plain, softmax, strict=True):
        wanted = label_probabilities(checkpoint, [*query, *item], labels)
        np.testing.assert_allclose(found, wanted, rtol=2e-4)
        np.testing.assert_allclose(normalised, wanted / wanted.sum(), rtol=2e-4)
    assert engine.stats()["compilations_after_ready"] == before
    assert engine.score("ab", ["c"], [1]) == [[1.0]] and engine.score("ab", [], [1]) == []
    assert engine.score("ab", ["c", "d"], [5, 6]) == engine.score("", ["abc", "abd"], [5, 6])
    first = engine.score("ab", ["c", "d"], [5, 6], item_first=True)
    assert first == engine.score("", ["cab", "dab"], [5, 6])


@pytest.mark.parametrize(
    ("query", "items", "labels", "said"),
    [
        ("q", ["a"], [], "at least one"),
        ("q", ["a"], [VOCAB], str(VOCAB)),
        ("q", ["a"], [True], "integers"),
        ("q", ["a"], "yes", "list"),
        ("q", [[1]], [1], "texts if the query is one"),
        ([1], ["a"], [1], "texts if the query is one"),
        (None, ["a"], [1], "query"),
        ("", ["a", ""], [1], r"items\[1\].*at least one token"),
    ],
)
def test_wrong_scoring_arguments_are_named(engine, query, items, labels, said):
    with pytest.raises(RequestError, match=said):
        engine.score(query, items, labels)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_the_logprobs_of_a_prompt_of_several_choices_are_computed_once(engine, max_tokens):
    ids = random_ids(61, seed=9)
    engine.flush_cache()
    before = engine.stats()["real_tokens"]
    params = SamplingParams(n=3, max_tokens=max_tokens, ignore_eos=True)
    requests = engine._requests([ids], [params], wants=Wants(prompt_logprobs=True, prompt_top=2))
    first, *others = engine._loop.run(requests)
    assert len(first.prompt_logprobs) == 61 and others[0].prompt_logprobs is None
    decoded = 3 * max(max_tokens - 1, 0)
    of_a_page = 61 % 8  # pages are shared whole
    assert engine.stats()["real_tokens"] - before == 61 + 2 * of_a_page + decoded


def test_a_shared_query_is_computed_once_and_one_that_is_known_not_at_all(engine, checkpoint):
    query, items = random_ids(50), [random_ids(5, seed=s) for s in range(16)]
    engine.flush_cache()
    for known in (0, 48):
        before = engine.stats()
        engine.score(query, items, [3, 4])
        after = engine.stats()
        computed = after["real_tokens"] - before["real_tokens"]
        assert computed == 50 - known + 5 + 15 * (2 + 5)
        assert after["cached_tokens"] - before["cached_tokens"] == 15 * 48 + known
    engine.flush_cache()
    assert engine.stats()["kv_pages"]["cached"] == 0
    assert engine.stats()["kv_pages"]["free"] == engine.stats()["kv_pages"]["total"]
    with tiny_engine(checkpoint, prefix_cache=False) as made:
        made.score(query, items, [3, 4])
        assert made.stats()["real_tokens"] == 16 * 55
