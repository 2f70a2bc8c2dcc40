"""The demo model against values of transformers in float32 (golden_smollm2.json)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxprefill import Engine, SamplingParams

pytestmark = [pytest.mark.demo, pytest.mark.slow, pytest.mark.usefixtures("as_shipped")]
CASES = json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text())["cases"]
SHORT = [case for case in CASES if "greedy16" in case]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def demo(demo_path, compile_cache, as_shipped):
    options = dict(prefill_buckets=(64, 256), max_running_requests=4, kv_cache_tokens=4096)
    with Engine(str(demo_path), dtype="float32", compile_cache=compile_cache, **options) as made:
        yield made


def check_greedy(case, found):
    """Equal until a step whose recorded margin says that rounding may decide."""
    for step, (token, expected) in enumerate(zip(found.token_ids, case["greedy16"], strict=True)):
        if token != expected:
            assert case["greedy16_margin"][step] <= 0.02
            return
        assert abs(found.logprobs[step] - case["greedy16_logprobs"][step]) <= 2e-3
    assert found.text == case["greedy16_text"]


def test_every_prompt_logprob_is_within_2e_3(demo):
    found = demo.logprobs([case["ids"] for case in CASES])
    for case, logprobs in zip(CASES, found, strict=True):
        assert logprobs[0] is None and len(logprobs) == len(case["ids"])
        np.testing.assert_allclose(logprobs[1:], case["prompt_logprobs"][1:], atol=2e-3)
    assert sum(found[-1][1:]) == pytest.approx(CASES[-1]["sum_logprob"], abs=0.05)


def test_greedy_ids_logprobs_and_texts(demo):
    for case, found in zip(SHORT, demo.generate([c["ids"] for c in SHORT], GREEDY), strict=True):
        check_greedy(case, found)


def test_texts_encode_to_the_recorded_ids_and_score_the_same(demo):
    for case in SHORT:
        assert demo.tokenizer.encode(case["prompt"]) == case["ids"]
    found = demo.generate([case["prompt"] for case in SHORT], GREEDY)
    for case, one in zip(SHORT, found, strict=True):
        check_greedy(case, one)


def test_the_five_likeliest_next_tokens(demo):
    for case, found in zip(SHORT, demo.generate([c["ids"] for c in SHORT], GREEDY), strict=True):
        top = found.top_logprobs[0]
        for token, logprob in case["next_top5"]:
            assert top[token] == pytest.approx(logprob, abs=2e-3)


def test_the_chat_template_renders_and_answers(demo):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=12)
    assert "Paris" in demo.chat(messages, params)[0].text


def test_nothing_compiled_and_nothing_fell_back(demo):
    stats = demo.stats()
    assert stats["compilations_after_ready"] == 0 and stats["fallbacks"] == {}
    assert stats["passes"]["full"] > 0


def test_bfloat16_is_close_in_the_mean(demo_path, compile_cache):
    options = dict(prefill_buckets=(64,), max_running_requests=2, kv_cache_tokens=2048)
    with Engine(
        str(demo_path),
        dtype="bfloat16",
        prefill_backend="layerwise",
        compile_cache=compile_cache,
        **options,
    ) as made:
        found = made.logprobs([case["ids"] for case in SHORT])
    differences = [
        abs(a - b)
        for case, one in zip(SHORT, found, strict=True)
        for a, b in zip(case["prompt_logprobs"][1:], one[1:], strict=True)
    ]
    assert np.mean(differences) <= 0.05


def test_a_process_that_only_starts_an_engine_ends_well(demo_path):
    code = "from jaxprefill import Engine; Engine('demo', prefill_buckets='16').close()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr[-500:]
