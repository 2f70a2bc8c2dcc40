"""Every architecture and RoPE kind against transformers, from fixtures that tests/oracle writes."""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefill.cache.pages import PageAllocator
from jaxprefill.cache.prefix import PrefixCache
from jaxprefill.models.layers import rotary_table
from jaxprefill.models.registry import ARCHITECTURES, read_config
from jaxprefill.models.rope import rotary_frequencies
from jaxprefill.prefill.compiler import CPU_OPTIONS
from jaxprefill.request import SamplingParams
from jaxprefill.scheduler import Scheduler
from tests.oracle.cases import CASES, ROPE_CASES, ROPE_POSITIONS
from tests.tiny import TensorsCheckpoint, tiny_engine

FOLDER = Path(__file__).parent / "data" / "oracle"
TOLERANCE = 1e-4


@cache
def fixture(name):
    with np.load(FOLDER / f"{name}.npz") as held:
        return {key: held[key] for key in held.files}


def open_fixture(name):
    """The model of a fixture."""
    held = fixture(name)
    tensors = {
        key.removeprefix("w:"): held[key].astype(np.float32) for key in held if key[:2] == "w:"
    }
    return TensorsCheckpoint(read_config(json.loads(held["config"].tobytes())), tensors)


QUICK = ("qwen2_yarn_window_in_upper_layers", "phi3_longrope_short")
ENGINES = [
    pytest.param(case, marks=() if case.name in QUICK else pytest.mark.slow) for case in CASES
]


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def served(request):
    """(case, engine, prompts, expected logprobs of each)."""
    case, held = request.param, fixture(request.param.name)
    prompts = np.split(held["ids"], np.cumsum(case.lengths)[:-1])
    scored = np.split(held["logprobs"], np.cumsum(np.array(case.lengths) - 1)[:-1])
    checkpoint = open_fixture(case.name)
    options = {"prefill_buckets": (32,), "max_running_requests": 2} | case.options
    with tiny_engine(checkpoint, **options) as made:
        yield case, made, [ids.tolist() for ids in prompts], scored


def use_chunks(engine, size, *, is_cached=False):
    """From now on a step takes at most `size` tokens: compiled shapes stay, batches change."""
    core, plan = engine._core, engine.plan
    pages = PageAllocator(plan.num_pages, plan.config.page_size)
    core.cache = PrefixCache(pages, is_enabled=is_cached)
    core.scheduler = Scheduler(replace(plan.limits, max_batch_tokens=size), core.cache)


@contextmanager
def counted_steps(engine):
    """Collects the number of tokens of every step."""
    sizes, scheduler = [], engine._core.scheduler
    original = scheduler.next_batch

    def next_batch():
        batch = original()
        if batch is not None:
            sizes.append(sum(row.q_len for row in batch.rows))
        return batch

    scheduler.next_batch = next_batch
    yield sizes


def worst(found, wanted):
    pairs = zip(found, wanted, strict=True)
    return max(np.abs(np.array(one[1:], float) - two).max(initial=0) for one, two in pairs)


@pytest.mark.parametrize("chunk", [32, 3, 1])
def test_ragged_batches_and_chunks_equal_the_oracle(served, chunk):
    _, engine, prompts, wanted = served
    use_chunks(engine, chunk)
    with counted_steps(engine) as sizes:
        found = engine.logprobs(prompts)
    assert worst(found, wanted) <= TOLERANCE
    assert max(sizes) <= chunk and sum(sizes) == sum(map(len, prompts))


def test_decoding_equals_the_oracle_from_cached_prefixes_too(served):
    case, engine, prompts, _ = served
    use_chunks(engine, 32, is_cached=True)
    held = fixture(case.name)
    params = SamplingParams(temperature=0, logprobs=0, max_tokens=4, ignore_eos=True)
    for is_cached in (False, True):
        found = engine.generate(prompts[: case.num_greedy], params)
        assert (found[1].cached_tokens > 0) == is_cached
        assert [one.token_ids for one in found] == held["greedy_ids"].tolist()
        logprobs = np.array([one.logprobs for one in found])
        np.testing.assert_allclose(logprobs, held["greedy_logprobs"], atol=TOLERANCE)


def test_every_architecture_has_a_fixture():
    tested_elsewhere = {"DeepseekV4ForCausalLM"}
    assert {case.architecture for case in CASES} | tested_elsewhere == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_transformers_4_and_5_layouts_mean_the_same(case):
    assert read_config(case.hf) == open_fixture(case.name).config


def test_gemma_3_caps_no_scores_whatever_its_config_says():
    case = next(case for case in CASES if case.name == "gemma3_two_ropes")
    capped = read_config(case.hf | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0})
    assert capped == replace(read_config(case.hf), logit_soft_cap=3.0)


@pytest.mark.parametrize("name", ROPE_CASES)
def test_rotary_tables_equal_the_oracle_up_to_position_131071(name):
    config = read_config(ROPE_CASES[name])
    frequencies = rotary_frequencies(config)
    assert frequencies.dtype == np.float32
    factor = config.rope.attention_factor
    table = jax.jit(  # optimised as in an executable
        lambda positions: rotary_table(positions, frequencies, factor),
        compiler_options=CPU_OPTIONS,
    )
    found = table(jnp.array(ROPE_POSITIONS, jnp.int32))
    np.testing.assert_allclose(found, fixture("rope")[name], atol=2e-5)
