"""The demo model on a GPU, through the Pallas kernels, against transformers in float32."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxprefill import Engine, SamplingParams

pytestmark = [
    pytest.mark.demo,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
CASES = json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text())["cases"]
OPTIONS = dict(prefill_buckets=(16, 64, 256), max_running_requests=4, kv_cache_tokens=4096)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def demo(request, demo_path, compile_cache):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    options = OPTIONS | {"dtype": request.param, "compile_cache": compile_cache}
    with Engine(str(demo_path), **options) as made:
        yield made


def differences(found):
    return [
        abs(a - b)
        for case, one in zip(CASES, found, strict=True)
        for a, b in zip(case["prompt_logprobs"][1:], one[1:], strict=True)
    ]


def test_prompts_batched_chunked_and_alone_score_as_recorded(demo):
    assert demo.plan.backend.name == "pallas_triton"
    assert any(len(case["ids"]) > 256 for case in CASES), "one is computed in chunks"
    batched = demo.logprobs([case["ids"] for case in CASES])
    alone = [demo.logprobs([case["ids"]])[0] for case in CASES]
    for found in (batched, alone):
        if demo.plan.dtype == np.float32:
            assert max(differences(found)) <= 2e-3
        else:
            assert np.mean(differences(found)) <= 0.05
    stats = demo.stats()
    assert stats["fallbacks"] == {} and stats["compilations_after_ready"] == 0
    assert set(stats["passes"]) == {"full"}
    buckets = {name.split()[1].split("x")[0] for name in stats["executables"]}
    assert buckets == {"16", "64", "256"}, "every prefill executable ran"


def test_greedy_decoding_says_what_was_recorded(demo):
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    short = [case for case in CASES if "greedy16" in case]
    margin = 0.02 if demo.plan.dtype == np.float32 else 0.5
    for case, found in zip(short, demo.generate([c["ids"] for c in short], params), strict=True):
        pairs = zip(found.token_ids, case["greedy16"], case["greedy16_margin"], strict=True)
        differs = next((gap for token, expected, gap in pairs if token != expected), 0.0)
        assert differs <= margin, "rounding may decide only where two tokens are close"
    assert demo.stats()["passes"]["decode"] > 0
