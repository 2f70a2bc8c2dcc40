"""The same numbers alone, in any company, after any cache state, chunked anyhow."""

import numpy as np
import pytest

from jaxprefill import SamplingParams
from tests.reference import greedy, prompt_logprobs, reference_embedding, reference_logprobs
from tests.tiny import tiny_engine


class Expected:
    """The oracle's answers, each computed once."""

    def __init__(self, checkpoint):
        self.checkpoint, self.known = checkpoint, {}

    def __call__(self, function, *arguments):
        key = (function.__name__, *map(tuple_of, arguments))
        if key not in self.known:
            self.known[key] = function(self.checkpoint, *arguments)
        return self.known[key]


def tuple_of(value):
    return tuple(value) if isinstance(value, list) else value


def prompts(rng) -> list[list[int]]:
    """Prompts that begin alike in pages, chunks and buckets, whole and half."""
    stem = rng.integers(0, 250, 80).tolist()
    cuts = [0, 1, 7, 8, 9, 16, 23, 24, 31, 32, 33, 40, 64, 65, 80]
    return [
        stem[: rng.choice(cuts)] + rng.integers(0, 250, rng.integers(1, 20)).tolist()
        for _ in range(10)
    ]


@pytest.mark.parametrize("chunk", [32, 20])
def test_any_sequence_of_requests_gives_the_oracles_numbers(checkpoint, chunk):
    rng, expected = np.random.default_rng(chunk), Expected(checkpoint)
    pool = prompts(rng)
    stream = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0)
    with tiny_engine(checkpoint, kv_cache_tokens=240, chunked_prefill_size=chunk) as made:
        for _ in range(15):
            chosen = [pool[i] for i in rng.integers(0, len(pool), rng.integers(1, 7))]
            match rng.integers(0, 5):
                case 0:
                    for ids, found in zip(chosen, made.logprobs(chosen), strict=True):
                        wanted = expected(prompt_logprobs, ids)
                        np.testing.assert_allclose(found[1:], wanted, atol=1e-4)
                case 1:
                    for ids, found in zip(chosen, made.generate(chosen, stream), strict=True):
                        assert found.token_ids == expected(greedy, ids, 5)
                case 2:
                    found = made.score(chosen[0], chosen, [3, 40, 41], apply_softmax=False)
                    for ids, scores in zip(chosen, found, strict=True):
                        table = expected(reference_logprobs, (chosen[0] + ids)[:160])
                        np.testing.assert_allclose(
                            np.log(scores), table[-1][[3, 40, 41]], atol=1e-4
                        )
                case 3:
                    for ids, found in zip(chosen, made.embed(chosen), strict=True):
                        wanted = expected(reference_embedding, ids)
                        np.testing.assert_allclose(found, wanted, atol=1e-4)
                case 4:
                    made.flush_cache()
        stats = made.stats()
    assert stats["cached_tokens"] > 0 and stats["preemptions"] >= 0
    assert stats["compilations_after_ready"] == 0
    assert stats["kv_pages"]["free"] == stats["kv_pages"]["total"]


def test_a_cache_hit_changes_no_score_whoever_filled_the_pages(checkpoint):
    stem, expected = list(range(1, 49)), Expected(checkpoint)
    fills = [
        lambda made, ids: made.logprobs([ids]),
        lambda made, ids: made.generate([ids], SamplingParams(max_tokens=3, seed=1)),
        lambda made, ids: made.score(ids, [[1], [2]], [5]),
        lambda made, ids: made.logprobs([ids[:17], ids[:33]]),
    ]
    with tiny_engine(checkpoint) as made:
        for fill in fills:
            made.flush_cache()
            for length in (15, 16, 17, 31, 32, 33, 48):
                fill(made, stem[:length])
                for tail in ([], [9], [9, 8, 7]):
                    ids = stem[:length] + tail
                    found = made.logprobs([ids, ids])
                    for one in found:
                        assert one[0] is None and len(one) == len(ids)
                        wanted = expected(prompt_logprobs, ids)
                        np.testing.assert_allclose(one[1:], wanted, atol=1e-4)
