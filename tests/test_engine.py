"""The engine against the float64 oracle: whole, chunked, batched, mixed, padded."""

import numpy as np
import pytest

from jaxprefill import SamplingParams
from tests.reference import greedy, prompt_logprobs

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed * 1000 + length).integers(0, 250, length).tolist()


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 159])
def test_prompt_logprobs_equal_the_oracle_at_every_edge(engine, checkpoint, length):
    ids = random_prompt(length)
    found = engine.logprobs([ids])[0]
    assert found[0] is None and len(found) == length
    np.testing.assert_allclose(found[1:], prompt_logprobs(checkpoint, ids), atol=1e-4)


def test_greedy_tokens_and_their_logprobs_equal_the_oracle(engine, checkpoint):
    prompts = [random_prompt(n, seed=n) for n in (3, 9, 40)]
    for ids, found in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert found.token_ids == greedy(checkpoint, ids, 6)
        expected = prompt_logprobs(checkpoint, ids + found.token_ids)[len(ids) - 1 :]
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)


def test_a_short_batch_after_a_long_one_sees_nothing_stale(engine, checkpoint):
    engine.logprobs([random_prompt(31), random_prompt(90)])
    ids = random_prompt(3)
    np.testing.assert_allclose(
        engine.logprobs([ids])[0][1:], prompt_logprobs(checkpoint, ids), atol=1e-4
    )
