"""DeepSeek-V4 against transformers, from the fixture that tests/oracle/deepseek.py writes."""

import json
from functools import cache, partial
from itertools import chain, repeat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.cache.kv_cache import pool_shapes
from jaxprefill.cache.pages import PageAllocator
from jaxprefill.cache.recent import RecentPages
from jaxprefill.config import EngineConfig
from jaxprefill.errors import CheckpointError, ConfigError
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.kernels.device import DeviceInfo
from jaxprefill.models.deepseek_v4.decoder import DeepseekV4
from jaxprefill.models.deepseek_v4.hf import read_deepseek
from jaxprefill.models.deepseek_v4.reference import reference_pass
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.plan import make_plan
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.compiler import CPU_OPTIONS
from jaxprefill.prefill.forward import Body
from jaxprefill.prefill.padding import BufferLayout, pad
from jaxprefill.request import SamplingParams
from jaxprefill.weights.load import load_leaves
from tests.tiny import TensorsCheckpoint, tiny_engine

PATH = Path(__file__).parent / "data" / "oracle" / "deepseek_v4.npz"
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 257, 600)
TOLERANCE = 1e-4
NUM_PAGES, NUM_RECENT = 130, 40  # far fewer recent ones than the longest prompt has pages


@cache
def fixture():
    with np.load(PATH) as held:
        return {key: held[key] for key in held.files}


def fixture_config():
    return json.loads(fixture()["config"].tobytes())


@cache
def checkpoint():
    held, config = fixture(), read_deepseek(fixture_config())
    tensors = {
        key[2:]: held[key].astype(np.int32 if key.endswith("tid2eid") else np.float32)
        for key in held
        if key[:2] == "w:"
    }
    return TensorsCheckpoint(config, tensors)


@cache
def tree_and_leaves():
    tree = model_tree(checkpoint().config, jnp.dtype(jnp.float32), make_mesh())
    return tree, load_leaves(checkpoint(), tree)


def logprobs_of(hidden):
    tree, leaves = tree_and_leaves()
    logits = np.array(hidden) @ np.array(tree.head(leaves)).T
    return np.array(jax.nn.log_softmax(logits.astype(np.float32)))


def worst(hidden, length):
    """How far logprobs of a prompt's next tokens are from transformers'."""
    held, found = fixture(), logprobs_of(hidden)
    own = found[np.arange(length - 1), held[f"ids:{length}"][1:]]
    return np.abs(np.append(own, found[-1].max()) - held[f"logprobs:{length}"]).max()


@pytest.mark.long
@pytest.mark.parametrize("length", LENGTHS)
def test_the_reference_equals_transformers(length):
    tree, leaves = tree_and_leaves()
    ids = jnp.array(fixture()[f"ids:{length}"], jnp.int32)
    run = jax.jit(lambda leaves, ids: reference_pass(tree.bind(leaves), ids))
    hidden, chosen = run(leaves, ids)
    assert worst(hidden, length) <= TOLERANCE
    wanted = fixture()[f"chosen:{length}"]  # with 16 heads no scores tie at 0
    for layer, seen in enumerate(chosen):
        for token, row in enumerate(np.array(seen)):
            assert set(np.flatnonzero(row)) == set(wanted[layer, token]) - {-1}


PAGE, TOKENS, SLOTS, CONTEXT = 16, 136, 3, 640
POISON = 257  # an id that no prompt has: its embedding is NaN, and all padding is made of it


class Passes:
    """The body of two shapes, compiled once, over pools that begin full of NaN."""

    def __init__(self):
        tree, leaves = tree_and_leaves()
        at = tree.paths.index("embedding")
        poisoned = leaves[at].at[POISON].set(jnp.nan)
        self.leaves = (*leaves[:at], poisoned, *leaves[at + 1 :])
        spec = DeepseekV4.cache_spec(tree.config)
        self.recent = RecentPages(PageAllocator(NUM_RECENT, PAGE), spec.reach)
        self.spec = spec
        shapes = pool_shapes(
            spec,
            NUM_PAGES,
            PAGE,
            num_recent=NUM_RECENT,
            dtype=jnp.dtype(jnp.float32),
            mesh=make_mesh(),
        )
        self.pools = tuple(jnp.full(shape.shape, jnp.nan, shape.dtype) for shape in shapes)
        self.hidden = jnp.zeros((TOKENS, tree.config.hidden_size), jnp.float32)
        self.last = jnp.zeros(4, jnp.int32)
        self.bodies = {}

    def body(self, is_decode):
        """(layout, executable) of the shape."""
        if is_decode not in self.bodies:
            tokens = SLOTS if is_decode else TOKENS
            tiles = XLA.tile_shape(tokens, SLOTS, CONTEXT, page_size=PAGE, is_decode=is_decode)
            columns = self.spec.recent_pages(PAGE, 1 if is_decode else tokens)
            layout = BufferLayout(ShapeKey(tokens, SLOTS, CONTEXT), tiles, PAGE, columns)
            body = Body(tree_and_leaves()[0], XLA, layout)
            buffer = jax.ShapeDtypeStruct((layout.num_words,), np.int32)
            arguments = (self.leaves, self.pools, self.hidden, self.last, buffer)
            lowered = jax.jit(body, donate_argnums=(1, 2)).lower(*arguments)
            options = CPU_OPTIONS | {"xla_backend_optimization_level": 0}
            self.bodies[is_decode] = layout, lowered.compile(options)
        return self.bodies[is_decode]

    def run(self, rows, *, is_decode=False):
        """Hidden rows of each request's new tokens."""
        layout, compiled = self.body(is_decode)
        buffer = pad(Batch(rows=tuple(rows), is_decode=is_decode), layout).copy()
        count = sum(row.q_len for row in rows)
        layout.fields(buffer)["ids"][count:] = POISON
        self.pools, self.hidden = compiled(self.leaves, self.pools, self.hidden, self.last, buffer)
        found = np.array(self.hidden[:count])
        return np.split(found, np.cumsum([row.q_len for row in rows])[:-1])


@pytest.fixture(scope="module")
def passes():
    return Passes()


class Prompt:
    """A prompt that is computed piece by piece."""

    def __init__(self, recent, length, first_page, pieces):
        self.ids = fixture()[f"ids:{length}"].astype(int).tolist()
        self.pages = list(range(first_page, first_page + -(-length // PAGE)))
        self.recent, self.lease = recent, []  # its pages of recent tokens, from `recent_first` on
        self.recent_first, self.pieces, self.done, self.hidden = 0, pieces, 0, []

    def fork(self, pieces, first_page):
        """Another that goes on from here, by pages of its own."""
        assert self.done % PAGE == 0
        other = Prompt(self.recent, len(self.ids), first_page, pieces)
        other.pages[: self.done // PAGE] = self.pages[: self.done // PAGE]
        other.done, other.hidden = self.done, list(self.hidden)
        first = self.recent.first_page(self.done)
        other.lease, other.recent_first = list(self.lease[first - self.recent_first :]), first
        for page in other.lease:
            self.recent.hold(page)
        return other

    def row(self):
        """The next piece, or None at the end."""
        while self.lease and self.recent_first < self.recent.first_page(self.done):
            self.recent.drop(self.lease.pop(0))
            self.recent_first += 1
        if self.done == len(self.ids):
            while self.lease:
                self.recent.drop(self.lease.pop())
            return None
        count = min(next(self.pieces), len(self.ids) - self.done)
        start, self.done = self.done, self.done + count
        while (self.recent_first + len(self.lease)) * PAGE < self.done:
            self.lease.append(self.recent.new())
        return BatchRow(
            request_id="",
            slot=0,
            token_ids=self.ids[start : self.done],
            kv_len=self.done,
            pages=self.pages,
            recent=[page.id for page in self.lease],
            recent_first=self.recent_first,
        )


def run_all(passes, prompts, *, is_decode=False):
    """Steps until all prompts are done; each must then equal transformers."""
    while rows := [(prompt, row) for prompt in prompts if (row := prompt.row())]:
        found = passes.run([row for _, row in rows], is_decode=is_decode)
        for (prompt, _), hidden in zip(rows, found, strict=True):
            prompt.hidden.append(hidden)


def check(prompts):
    for prompt in prompts:
        assert worst(np.concatenate(prompt.hidden), len(prompt.ids)) <= TOLERANCE


def pieces(*sizes, then):
    """These sizes, then the last one for ever."""
    return chain(sizes, repeat(then))


@pytest.mark.slow
def test_chunks_of_ragged_batches_equal_transformers(passes):
    start = partial(Prompt, passes.recent)
    long = pieces(128, 128, 128, 112, *[1] * 8, *[3] * 4, *[4] * 4, then=64)
    middle = pieces(1, 1, 1, 1, 3, 4, 1, then=64)
    prompts = [start(600, 3, long), start(257, 60, middle)]
    small = [start(n, 80 + 10 * at, repeat(4)) for at, n in enumerate((1, 3, 5))]
    for chosen in ([prompts[0]], [prompts[1], *small[:2]], [small[2]]):
        run_all(passes, chosen)
        check(chosen)
    whole = [start(129, 3, repeat(129)), start(4, 60, repeat(3))]
    run_all(passes, whole)
    check(whole)
    assert passes.recent.num_available == NUM_RECENT


@pytest.mark.long
def test_decode_goes_on_across_windows_and_from_shared_prefixes(passes):
    start = partial(Prompt, passes.recent)
    first = start(257, 2, pieces(64, 64, then=129))
    first.hidden += passes.run([first.row()])
    early = first.fork(pieces(56, 20, then=1), 40)
    first.hidden += passes.run([first.row()])
    late = first.fork(repeat(1), 70)
    run_all(passes, [first])
    other = start(128, 100, pieces(119, then=1))
    for prompt in (early, early, other):
        prompt.hidden += passes.run([prompt.row()])
    prompts = [early, late, other]
    run_all(passes, prompts, is_decode=True)
    check([first, *prompts])
    assert passes.recent.num_available == NUM_RECENT


@pytest.mark.long
def test_an_engine_scores_and_decodes_as_transformers_does():
    lengths = (129, 5, 600)
    prompts = [fixture()[f"ids:{length}"].astype(int).tolist() for length in lengths]
    options = dict(prefill_buckets=(136,), kv_cache_tokens=2048, page_size=16)
    with tiny_engine(checkpoint(), **options) as engine:
        for length, found in zip(lengths, engine.logprobs(prompts), strict=True):
            wanted = fixture()[f"logprobs:{length}"][:-1]
            np.testing.assert_allclose(np.array(found[1:], float), wanted, atol=TOLERANCE)
        params = SamplingParams(temperature=0, logprobs=0, max_tokens=9, ignore_eos=True)
        first, again = (engine.generate(prompts[:2], params) for _ in range(2))
        assert [one.token_ids for one in first] == [one.token_ids for one in again]
        assert again[0].cached_tokens > 0 and engine.stats()["compilations_after_ready"] == 0
        recent = engine.stats()["recent_pages"]
        assert recent["free"] == recent["total"] < engine.plan.num_pages
        for ids, one in zip(prompts[:2], first, strict=True):
            scored = engine.logprobs([ids + one.token_ids])[0]
            np.testing.assert_allclose(one.logprobs, scored[len(ids) :], atol=TOLERANCE)


def test_config_json_without_lists_means_the_published_models():
    pro = read_deepseek({"architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 6})
    kinds = ("heavy", "heavy", "heavy", "sparse", "heavy", "sparse")
    assert pro.latent.layer_kinds == kinds
    assert pro.latent.hash_layers == (True,) * 3 + (False,) * 3
    ratios = {"compress_ratios": [0, 0, 4, 128, 4, 128, 0], "num_hash_layers": 1}
    unlisted = {"layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 6}
    flash = read_deepseek(fixture_config() | ratios | unlisted)
    assert flash.latent.layer_kinds == ("sliding", "sliding", "sparse", "heavy", "sparse", "heavy")
    assert flash.latent.hash_layers == (True,) + (False,) * 5


TWO_SHARES = {
    label: {"rope_theta": 1e4, "partial_rotary_factor": share}
    for label, share in (("main", 0.5), ("compress", 0.25))
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scoring_func": "softmax"}, "scoring_func must be 'sqrtsoftplus'"),
        ({"layer_types": ["full_attention"] * 4}, "kinds sliding_attention.*'full_attention'"),
        ({"layer_types": ["sliding_attention"]}, "must name all 4 layers, got 1"),
        ({"mlp_layer_types": ["dense"] * 4}, "must be of hash_moe, moe, got 'dense'"),
        ({"compress_rates": {"compressed_sparse_attention": 3}}, "a power of two, got 3"),
        ({"num_experts_per_tok": 7}, "num_chosen must be 1 to the 6 experts"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc' for DeepSeek-V4"),
        ({"mlp_layer_types": None, "num_hash_layers": "3"}, "num_hash_layers must be 0 to .*'3'"),
        ({"layer_types": None, "compress_ratios": 4}, "compress_ratios must be a list, got 4"),
        ({"o_groups": 3}, "o_groups must divide the 64 dimensions of all heads, got 3"),
        ({"index_head_dim": 6}, "index_head_dim must be at least the 8 dimensions .* got 6"),
        ({"rope_parameters": TWO_SHARES}, "the same for main and compress, .* 8 and 4 dimensions"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_deepseek(fixture_config() | change)


def test_the_plan_asks_for_pages_of_whole_windows():
    sizes = dict(kind="cpu", memory_bytes=2**34, has_bf16_matmul=False, num_devices=2)
    device = DeviceInfo(platform="cpu", **sizes)
    with pytest.raises(ConfigError, match="page_size must be at least the 4 tokens"):
        make_plan(EngineConfig(page_size=2), checkpoint().config, device)
