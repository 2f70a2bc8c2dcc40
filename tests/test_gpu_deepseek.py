"""On a GPU: DeepSeek-V4 through the engine and its kernels, against the reference without cache."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.start_up import RandomCheckpoint
from jaxprefill import SamplingParams
from jaxprefill.config import ModelConfig, RopeConfig
from jaxprefill.latent_config import LatentConfig
from jaxprefill.models.deepseek_v4.layer import choose_core
from jaxprefill.models.deepseek_v4.reference import reference_pass
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.moe_config import MoeConfig
from jaxprefill.weights.load import load_leaves
from tests.tiny import byte_tokenizer, tiny_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
CONFIG = ModelConfig(
    architecture="DeepseekV4ForCausalLM", vocab_size=272, hidden_size=128, mlp_size=64,
    num_layers=4, num_q_heads=16, num_kv_heads=1, head_dim=64, context_length=1024, norm_eps=1e-6,
    rope=RopeConfig(theta=1e4, rotary_dim=16), compress_rope=RopeConfig(theta=160e3, rotary_dim=16),
    is_embedding_tied=False, sliding_window=40,
    moe=MoeConfig(num_experts=8, num_chosen=2, scoring="sqrt_softplus"),
    latent=LatentConfig(
        layer_kinds=("sliding", "sparse", "heavy", "sparse"),
        hash_layers=(True, False, False, False), query_rank=32, num_groups=2, group_rank=32,
        sparse_rate=4, heavy_rate=128, index_heads=16, index_dim=32, index_top_k=16,
        num_streams=4, sinkhorn_steps=20, hyper_eps=1e-6, swiglu_limit=10.0,
    ),
)  # fmt: skip
PROMPTS = [np.random.default_rng(n).integers(256, size=n).tolist() for n in (600, 129, 5)]


class PeakedCheckpoint(RandomCheckpoint):
    """Weights of which attention is peaked and greedy choices have margins."""

    def __init__(self):
        super().__init__(CONFIG, np.dtype(np.float32))
        self.tokenizer = byte_tokenizer()

    def read(self, name):
        shape, rng = self.shape(name), np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith("tid2eid"):
            return rng.integers(CONFIG.moe.num_experts, size=shape, dtype=np.int32)
        if name.endswith("norm.weight"):
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return (rng.normal(size=shape) * 1.5 * shape[-1] ** -0.5).astype(np.float32)


@pytest.fixture(scope="module")
def wanted():
    """Logprobs of each token but the first of each prompt."""
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    tree = model_tree(CONFIG, jnp.dtype(jnp.float32), make_mesh())
    leaves = load_leaves(PeakedCheckpoint(), tree)
    run = jax.jit(lambda leaves, ids: reference_pass(tree.bind(leaves), ids)[0])
    head, found = np.asarray(tree.head(leaves), np.float64), []
    for prompt in PROMPTS:
        with jax.default_matmul_precision("highest"):
            hidden = run(leaves, jnp.array(prompt, jnp.int32))
        logits = np.asarray(hidden, np.float64) @ head.T
        logits -= np.logaddexp.reduce(logits, axis=1, keepdims=True)
        found.append(logits[np.arange(len(prompt) - 1), prompt[1:]])
    return found


@pytest.mark.parametrize("dtype, most, mean", [("float32", 2e-3, 2e-4), ("bfloat16", None, 0.15)])
def test_an_engine_scores_and_decodes_as_the_reference_does(wanted, dtype, most, mean):
    options = dict(prefill_buckets=(16, 136), kv_cache_tokens=4096, page_size=16, dtype=dtype)
    with tiny_engine(PeakedCheckpoint(), **options) as engine:
        assert choose_core(engine.plan.share) == "pallas_triton"
        for found, want in zip(engine.logprobs(PROMPTS), wanted, strict=True):
            errors = np.abs(np.array(found[1:], float) - want)
            assert errors.mean() <= mean and (most is None or errors.max() <= most)
        params = SamplingParams(temperature=0, logprobs=0, max_tokens=9, ignore_eos=True)
        for ids, one in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
            scored = engine.logprobs([ids + one.token_ids])[0][len(ids) :]
            assert np.abs(np.array(one.logprobs) - np.array(scored)).mean() <= 2 * mean
        stats = engine.stats()
    assert stats["fallbacks"] == {} and stats["compilations_after_ready"] == 0
    assert set(stats["passes"]) == {"full", "decode"}
