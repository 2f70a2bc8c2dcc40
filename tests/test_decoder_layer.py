"""The fused decoder layer without a GPU: interpreted numerics, lowering for CUDA, its limits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks import rig as rigs
from jaxprefill.assembly import Assembly
from jaxprefill.config import EngineConfig
from jaxprefill.kernels import triton
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON
from jaxprefill.kernels.attention.select import AttentionChoice
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.kernels.decoder_layer import pallas_triton as layers
from jaxprefill.kernels.decoder_layer.gemm import GemmTiles
from jaxprefill.kernels.decoder_layer.select import lacks_fused_layer
from jaxprefill.kernels.device import DeviceInfo
from jaxprefill.models.fused import lacks_fusion, layer_sizes
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.stacks import can_view, stack_leaves, stacked_shapes
from jaxprefill.models.tree import model_tree
from jaxprefill.plan import make_plan
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.forward import Body
from jaxprefill.prefill.fused import FusedBody
from jaxprefill.prefill.padding import BufferLayout, pad
from tests.tiny import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
# Results need no optimised code, and there are many to compile.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
SMALL = replace(
    rigs.MODELS["tiny"], hidden_size=64, mlp_size=128, num_q_heads=4, num_kv_heads=2, head_dim=32,
    has_qkv_bias=True,
)  # fmt: skip
SWAPPED = GemmTiles(16, 32, 32, num_splits=2, is_swapped=True)
TWO = GemmTiles(16, 16, 64, is_interleaved=True)


def rig_of_small(monkeypatch, quantization=None):
    monkeypatch.setitem(rigs.MODELS, "small", replace(SMALL, quantization=quantization))
    sizes = rigs.RigSizes(
        model="small", num_slots=4, max_context=128, page_size=16, pool_tokens=512, max_tokens=64,
        num_threads=1,
    )  # fmt: skip
    return rigs.make_rig(sizes, AttentionChoice(PALLAS_TRITON), jnp.dtype("float32"))


@pytest.mark.parametrize(
    ("num_tokens", "tiles", "kind"),
    [
        pytest.param(8, SWAPPED, None, id="fewer_rows_than_a_tile_split_and_swapped"),
        pytest.param(8, SWAPPED, "int8", id="int8_split_and_swapped", marks=pytest.mark.slow),
        pytest.param(16, None, None, id="as_chosen", marks=pytest.mark.slow),
        pytest.param(32, TWO, None, id="two_row_tiles_interleaved", marks=pytest.mark.slow),
        pytest.param(32, TWO, "float8_e4m3fn", id="fp8_interleaved", marks=pytest.mark.slow),
        pytest.param(16, "xla", None, id="xla_products", marks=pytest.mark.slow),
        pytest.param(16, "xla", "int8", id="int8_xla_products", marks=pytest.mark.slow),
    ],
)
def test_a_fused_body_equals_the_plain_one(monkeypatch, num_tokens, tiles, kind):
    if tiles is not None:
        chosen = None if tiles == "xla" else tiles
        head = chosen and chosen._replace(block_n=SMALL.head_dim // 2)
        narrow = chosen and chosen._replace(is_interleaved=False)
        monkeypatch.setattr(layers, "choose_tiles", lambda *_, **__: narrow)
        monkeypatch.setattr(layers, "choose_gated_tiles", lambda *_, **__: chosen)
        monkeypatch.setattr(layers, "choose_head_tiles", lambda *_, **__: head)
    rig, key = rig_of_small(monkeypatch, kind), ShapeKey(num_tokens, 4, 128)
    rng = np.random.default_rng(0)
    leaves = tuple(
        leaf * jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
        if "norm" in path or "scale" in path
        else leaf
        for path, leaf in zip(rig.tree.paths, rig.state.leaves, strict=True)
    )
    pool = jnp.asarray(rng.normal(size=rig.state.pools[0].shape), jnp.float32)
    batch = rigs.make_batch(rig, [3, num_tokens - 6], 40, is_decode=False)
    leaves, stacked = stack_leaves(rig.tree, leaves, lambda _: lambda *own: jnp.stack(own))
    found: list[list[np.ndarray]] = []
    for backend, make in ((PALLAS_TRITON, FusedBody), (XLA, Body)):
        layout = BufferLayout(key, backend.tile_shape(*key, page_size=16, is_decode=False), 16)
        options = {"interpret": True, "has_stacks": True} if make is FusedBody else {}
        body, state = make(rig.tree, backend, layout, **options), rig.state
        assert body.is_stacked == (make is FusedBody and tiles != "xla")
        out = jax.jit(lambda *operands, body=body: body(*operands), compiler_options=FAST_COMPILE)(
            stacked if body.is_stacked else leaves,
            (pool,),
            state.hidden,
            state.last_tokens,
            pad(batch, layout),
        )
        found.append([np.asarray(out[0][0]), np.asarray(out[1])[: num_tokens - 3]])
    for fused, plain in zip(*found, strict=True):
        assert np.linalg.norm(fused - plain) <= 1e-5 * np.linalg.norm(plain)


@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "is_decode", "num_kernels", "kind"),
    [
        (1, 1, True, 5, None),
        (32, 16, False, 5, None),
        (32, 16, False, 5, "int8"),
        (64, 64, True, 5, "float8_e4m3fn"),
        (128, 16, False, 3, None),
        (256, 16, False, 2, None),
        (2048, 16, False, 2, None),
    ],
)
def test_a_qwen3_8b_layer_is_five_kernels_on_cuda(
    num_tokens, num_slots, is_decode, num_kernels, kind
):
    config = replace(rigs.MODELS["qwen3-8b"], num_layers=2, quantization=kind)
    tree = model_tree(config, jnp.dtype("bfloat16"), make_mesh())
    key = ShapeKey(num_tokens, num_slots, 4096)
    tiles = PALLAS_TRITON.tile_shape(*key, page_size=16, is_decode=is_decode)
    layout = BufferLayout(key, tiles, 16)

    def words(*shape, dtype=np.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    pool, hidden = (
        words(2, 8, 64, 16, 128, dtype=jnp.bfloat16),
        words(2048, 4096, dtype=jnp.bfloat16),
    )
    body = FusedBody(tree, PALLAS_TRITON, layout, has_stacks=True)
    given = stacked_shapes(tree) if body.is_stacked else tree.shapes
    leaves = tuple(words(*leaf.shape, dtype=leaf.dtype) for leaf in given)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda *operands: body(*operands), donate_argnums=(1, 2)).trace(
            leaves, (pool,), hidden, words(64), words(layout.num_words)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2 * num_kernels
    assert "stablehlo.while" not in text


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64])
def test_chosen_tiles_divide_what_they_cut(num_tokens, itemsize):
    for config in (SMALL, *rigs.MODELS.values()):
        sizes = layer_sizes(config)
        if lacks_fused_layer(sizes, platform="gpu", dtype="bfloat16"):
            continue
        tiles = layers.layer_tiles(sizes, num_tokens, itemsize=itemsize)
        cuts = (
            (tiles.qkv, sizes.hidden_size, sizes.qkv_size // 2),
            (tiles.output, sizes.attended_size, sizes.hidden_size),
            (tiles.gate_up, sizes.hidden_size, sizes.mlp_size),
            (tiles.down, sizes.mlp_size, sizes.hidden_size),
        )
        for own, depth, outputs in cuts:
            assert outputs % own.block_n == depth % (own.num_splits * own.block_k) == 0
            assert own.num_splits == 1 or depth // own.num_splits >= 256
            assert (own.pack > 1) == (itemsize == 1)


@pytest.mark.parametrize("pack", [2, 4])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_eight_bits_are_widened_exactly(kind, pack):
    """The PTX text, run by hand on every byte."""
    given = np.arange(256, dtype=np.uint8)
    values = given.view(jnp.dtype(kind)).astype(np.float32)
    found = run_ptx(triton._WIDEN[kind, pack], given.view(f"<u{pack}").astype(np.uint32))
    wide = np.stack(found, axis=1).view(jnp.bfloat16).reshape(-1).astype(np.float32)
    is_number = ~np.isnan(values)
    np.testing.assert_array_equal(wide[is_number], values[is_number])
    assert np.isfinite(wide).all()


def run_ptx(text, operand):
    """The results of a few kinds of instructions: arrays of two bfloat16 a word."""
    num_results = 2 if "$2" in text else 1
    registers = {f"${num_results}": operand}

    def read(name):
        return registers[name] if name in registers else np.uint32(int(name, 0))

    def permuted(low, high, order):
        both = low.astype(np.uint64) | np.uint64(high) << np.uint64(32)
        parts = [
            (both >> np.uint64(8 * (int(order) >> 4 * at & 7)) & np.uint64(255))
            << np.uint64(8 * at)
            for at in range(4)
        ]
        return sum(parts).astype(np.uint32)

    def multiplied(a, b, c):
        a, b, c = (
            np.broadcast_to(x, operand.shape)
            .astype(np.uint32)
            .view(jnp.bfloat16)
            .astype(np.float64)
            for x in (a, b, c)
        )
        return (a * b + c).astype(jnp.bfloat16).view(np.uint32)

    kinds = {
        "mov": lambda a: a,
        "cvt": lambda a: a,
        "and": np.bitwise_and,
        "shr": np.right_shift,
        "shl": np.left_shift,
        "prmt": permuted,
        "lop3": lambda a, b, c, _: a & b | c,  # 0xea
        "fma": multiplied,
    }
    for line in text.splitlines()[2:-1]:
        name, _, rest = line.strip(" ;").partition(" ")
        to, *operands = rest.split(", ")
        registers[to] = kinds[name.split(".")[0]](*map(read, operands))
    return [registers[f"${at}"] for at in range(num_results)]


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        ({}, {}, None),
        ({"has_mlp_bias": True}, {}, "no bias"),
        ({"activation": "gelu"}, {}, "silu"),
        ({"num_shards": 2}, {}, "one device"),
        ({"hidden_size": 4000}, {}, "multiples of 64"),
        ({}, {"platform": "cpu"}, "not on cpu"),
        ({}, {"dtype": "float32"}, "bfloat16"),
    ],
)
def test_what_cannot_be_fused_is_said(changes, where, said):
    config = replace(rigs.MODELS["qwen3-8b"], **changes)
    asked = {"platform": "gpu", "dtype": "bfloat16"} | where
    lack = lacks_fusion(config, **asked)
    assert lack is None if said is None else said in lack


def test_an_engine_of_fused_layers_keeps_its_weights_once_in_stacks():
    model = tiny_config(
        hidden_size=64, mlp_size=128, num_q_heads=4, num_kv_heads=2, head_dim=32, has_qk_norm=True
    )
    device = DeviceInfo(
        platform="gpu", kind="NVIDIA H200", memory_bytes=2**30, has_bf16_matmul=True
    )
    plan = make_plan(EngineConfig(model="t"), model, device)
    tree = model_tree(model, jnp.dtype("bfloat16"), make_mesh())
    assembly = Assembly(plan, tree, make_mesh(), num_valid=250)
    jobs = {job.name: job for job in assembly.jobs()}
    stacks = [job for name, job in jobs.items() if name.startswith("stack ")]
    assert len(stacks) == 5 and len(assembly.shapes.stacked) == 5 + len(tree.paths) - 5 * 2
    given = [len(jobs[f"prefill {key}"].arguments[0]) for key in plan.ladder.keys]
    assert given[-1] < given[0] == len(tree.paths), "the smallest shape, and the largest"
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape.shape).astype(shape.dtype) for shape in tree.shapes]
    leaves = tuple(map(jax.device_put, values))
    views, _ = stack_leaves(tree, leaves, lambda name: jax.jit(jobs[f"stack {name}"].function))
    for path, value, view in zip(tree.paths, values, views, strict=True):
        np.testing.assert_array_equal(np.asarray(view), value, err_msg=path)
    assert sum(leaf.is_deleted() for leaf in leaves) == 5 * 2
    odd = model_tree(replace(model, head_dim=16), jnp.dtype("bfloat16"), make_mesh())
    assert [can_view(own, jax.devices()[0]) for own in (tree, odd)] == [True, False]
