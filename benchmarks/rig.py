"""A model of random weights on the device, and the project's own executables over it.

Knows shapes and batches; measures nothing. Imports no server, tokenizer or checkpoint code.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxprefill.batch import Batch, BatchRow, SampleSpec
from jaxprefill.cache.kv_cache import pool_shapes
from jaxprefill.cache.small_blocks import reserve_small_blocks
from jaxprefill.config import ModelConfig, RopeConfig
from jaxprefill.device_state import DeviceState
from jaxprefill.kernels.attention.select import AttentionChoice
from jaxprefill.models.quantized import SCALE
from jaxprefill.models.registry import model_class
from jaxprefill.models.sharding import make_mesh, replicated
from jaxprefill.models.stacks import can_view, stack_leaves
from jaxprefill.models.tree import ModelTree, model_tree
from jaxprefill.prefill.buckets import ShapeKey, slot_buckets
from jaxprefill.prefill.compiler import (
    CPU_OPTIONS,
    GPU_OPTIONS,
    Compiled,
    CompileJob,
    compile_all,
)
from jaxprefill.prefill.executable import LayerwiseExecutable, PrefillExecutable
from jaxprefill.prefill.forward import Body
from jaxprefill.prefill.fused import make_body, uses_fused_layers
from jaxprefill.prefill.padding import BufferLayout
from jaxprefill.prefill.staging import MARK, Staging, mark_job, pinned_sharding
from jaxprefill.request import SamplingParams
from jaxprefill.sampling.head import HeadFunctions
from jaxprefill.sampling.pack import NUM_WORDS, RowToSample, pack_rows

Executable = PrefillExecutable | LayerwiseExecutable
_EIGHT_BIT_SPREAD = 32.0  # of what is drawn for weights in eight bits, before their scales


def qwen3(
    *, hidden: int, mlp: int, layers: int, q_heads: int, is_embedding_tied: bool
) -> ModelConfig:
    """A Qwen3 model's shape, q/k norms included."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=hidden, mlp_size=mlp,
        num_layers=layers, num_q_heads=q_heads, num_kv_heads=8, head_dim=128,
        context_length=40960, norm_eps=1e-6, rope=RopeConfig(theta=1e6), has_qk_norm=True,
        is_embedding_tied=is_embedding_tied,
    )  # fmt: skip


MODELS = {
    "qwen3-8b": qwen3(hidden=4096, mlp=12288, layers=36, q_heads=32, is_embedding_tied=False),
    "qwen3-4b": qwen3(hidden=2560, mlp=9728, layers=36, q_heads=32, is_embedding_tied=True),
    "qwen3-1.7b": qwen3(hidden=2048, mlp=6144, layers=28, q_heads=16, is_embedding_tied=True),
    "qwen3-0.6b": qwen3(hidden=1024, mlp=3072, layers=28, q_heads=16, is_embedding_tied=True),
    "tiny": ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=512, hidden_size=128, mlp_size=256,
        num_layers=2, num_q_heads=8, num_kv_heads=2, head_dim=64, context_length=1024,
        norm_eps=1e-6, rope=RopeConfig(theta=1e6), has_qk_norm=True, is_embedding_tied=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RigSizes:
    """Sizes that a benchmark run chooses; counts."""

    model: str
    num_slots: int
    max_context: int
    page_size: int
    pool_tokens: int
    max_tokens: int
    num_threads: int


@dataclass
class Rig:
    """Device state, and executables by (path, key)."""

    sizes: RigSizes
    tree: ModelTree
    attention: AttentionChoice
    dtype: jnp.dtype
    state: DeviceState
    executables: dict[tuple[str, ShapeKey], Executable] = field(default_factory=dict)
    temp_bytes: dict[tuple[str, ShapeKey], int] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    heads: dict[int, Compiled] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.tree.config

    @property
    def options(self) -> dict[str, bool | int | str]:
        return CPU_OPTIONS if jax.default_backend() == "cpu" else GPU_OPTIONS

    def layout(self, key: ShapeKey, *, is_decode: bool) -> BufferLayout:
        size = self.sizes.page_size
        backend = self.attention.at(key.num_tokens, is_decode=is_decode)
        tiles = backend.tile_shape(*key, page_size=size, is_decode=is_decode)
        return BufferLayout(key, tiles, size)


def make_rig(sizes: RigSizes, attention: AttentionChoice, dtype: jnp.dtype) -> Rig:
    """Random weights and cached keys; no executable yet."""
    config, mesh = MODELS[sizes.model], make_mesh()
    tree, everywhere = model_tree(config, dtype, mesh), replicated(mesh)
    leaves, stacked = random_leaves(tree), ()
    is_stacked = uses_fused_layers(
        config, attention.first, platform=jax.default_backend(), dtype=dtype.name
    ) and can_view(tree, mesh.devices.flat[0])
    if is_stacked:
        leaves, stacked = stack_leaves(tree, leaves, lambda _: lambda *own: jnp.stack(own))
    pages = sizes.pool_tokens // sizes.page_size
    spec = model_class(config).cache_spec(config)
    pools = pool_shapes(spec, pages, sizes.page_size, dtype=dtype, mesh=mesh)

    def zeros(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros(shape, dtype, device=everywhere)

    state = DeviceState(
        leaves=leaves,
        stacked=stacked,
        head=tree.head(leaves),
        pools=tuple(map(random_pool, pools)),
        hidden=zeros(sizes.max_tokens, config.hidden_size, dtype=dtype),
        last_tokens=zeros(64),
        history=zeros(1, 1),
        bias=zeros(1, 1, dtype=jnp.float32),
        small_blocks=reserve_small_blocks(everywhere) if jax.default_backend() == "gpu" else (),
    )
    return Rig(sizes, tree, attention, dtype, state)


def random_pool(pool: jax.ShapeDtypeStruct) -> jax.Array:
    """One random page of each head, in every page: zeros would be multiplied faster."""
    parts, heads, _, *page = pool.shape
    drawn = jax.random.normal(jax.random.key(1), (parts, heads, 1, *page), pool.dtype)
    fill = jax.jit(lambda one: jnp.broadcast_to(one, pool.shape), out_shardings=pool.sharding)
    return fill(drawn)


def random_leaves(tree: ModelTree) -> tuple[jax.Array, ...]:
    """Normal weights scaled by fan-in, made on the device; norms are ones."""
    depths = {path: leaf.shape[-1] for path, leaf in _named(tree)}

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
        kind = jnp.bfloat16 if dtype.itemsize == 1 else dtype
        return jnp.clip(jax.random.normal(key, shape, kind) * scale, -127, 127).astype(dtype)

    draw_jit = jax.jit(draw, static_argnums=(1, 2, 3))
    keys = jax.random.split(jax.random.key(0), len(tree.shapes))
    leaves: list[jax.Array] = []
    for key, (path, leaf) in zip(keys, _named(tree), strict=True):
        if path.endswith(SCALE):
            size = depths[path.removesuffix(SCALE)] ** -0.5 / _EIGHT_BIT_SPREAD
            leaves.append(jnp.full(leaf.shape, size, leaf.dtype, device=leaf.sharding))
            continue
        if "norm" in path:
            leaves.append(jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding))
            continue
        scale = 1.0 if path == "embedding" else leaf.shape[-1] ** -0.5
        scale = _EIGHT_BIT_SPREAD if leaf.dtype.itemsize == 1 else scale
        made = draw_jit(key, leaf.shape, leaf.dtype, scale)
        leaves.append(jax.device_put(made, leaf.sharding))
    return tuple(leaves)


def _named(tree: ModelTree) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    return list(zip(tree.paths, tree.shapes, strict=True))


def compile_paths(rig: Rig, wanted: set[tuple[str, ShapeKey]]) -> None:
    """Compiles each (path, key) and the greedy heads; `path` is full, layerwise, eager, decode."""
    jobs: list[CompileJob] = []
    bodies: dict[tuple[str, ShapeKey], Body] = {}
    for path, key in sorted(wanted):
        layout, platform = rig.layout(key, is_decode=path == "decode"), jax.default_backend()
        backend = rig.attention.at(key.num_tokens, is_decode=path == "decode")
        if path in ("full", "decode"):
            body = make_body(
                rig.tree, backend, layout, platform=platform,
                has_stacks=bool(rig.state.stacked),
            )  # fmt: skip
        else:
            body = Body(rig.tree, backend, layout, is_looped=platform == "cpu")
        bodies[path, key] = body
        if path in ("full", "decode"):
            jobs.append(PrefillExecutable.job(f"{path} {key}", body, rig.state, pinned()))
        else:
            jobs += LayerwiseExecutable.jobs(f"{path} {key}", body, rig.state)
    rows = slot_buckets(64)
    jobs += [_head_job(rig, count) for count in rows]
    if pinned() is not None:
        jobs.append(mark_job(rig.state.hidden))
    done = compile_all(
        jobs,
        options=rig.options,
        num_threads=rig.sizes.num_threads,
        on_done=lambda record: rig.compile_s.update({record.name: record.compile_s}),
    )
    rig.heads = {count: done[f"greedy {count}"] for count in rows}
    for (path, _), body in bodies.items():
        _assemble(rig, path, body, done)


def pinned() -> NamedSharding | None:
    """Where a GPU's executables find their int buffers; a CPU reads the host's memory as it is."""
    is_staged = jax.default_backend() == "gpu"
    return pinned_sharding(replicated(make_mesh())) if is_staged else None


def _head_job(rig: Rig, rows: int) -> CompileJob:
    state = rig.state
    words = jax.ShapeDtypeStruct((rows, NUM_WORDS), np.int32)
    arguments = (state.head, state.hidden, state.last_tokens, words)
    function = HeadFunctions(rig.config.vocab_size).greedy
    return CompileJob(
        name=f"greedy {rows}",
        function=function,
        arguments=arguments,
        donated=(2,),
        is_graph=False,
        read_back=() if pinned() is None else (1,),
    )


def _assemble(rig: Rig, path: str, body: Body, done: dict[str, Compiled]) -> None:
    key, name = body.layout.key, f"{path} {body.layout.key}"
    if path in ("full", "decode"):
        everywhere = replicated(make_mesh())
        staging = None if pinned() is None else Staging(body.layout, done[MARK], everywhere)
        whole = PrefillExecutable(body, done[name], staging)
        whole.bind(rig.state)
        rig.executables[path, key] = whole
        rig.temp_bytes[path, key] = done[name].record.temp_bytes
        return
    executable = LayerwiseExecutable(name, key, body, done)
    executable.bind(rig.state)
    rig.executables[path, key] = executable
    rig.temp_bytes[path, key] = max(
        part.record.temp_bytes for at, part in done.items() if at.startswith(f"{name}/")
    )


def make_batch(rig: Rig, lens: list[int], prefix: int, *, is_decode: bool, seed: int = 0) -> Batch:
    """One request a length, each behind `prefix` cached tokens, its pages scattered."""
    rng, size = np.random.default_rng(seed), rig.sizes.page_size
    vocab = rig.config.vocab_size
    counts = [-(-(prefix + q_len) // size) for q_len in lens]
    order = rng.permutation(rig.sizes.pool_tokens // size)
    ends = np.cumsum(counts)
    rows = [
        BatchRow(
            request_id=str(slot),
            slot=slot,
            token_ids=None if is_decode else rng.integers(vocab, size=q_len).tolist(),
            kv_len=prefix + q_len,
            pages=order[end - count : end].tolist(),
        )
        for slot, (q_len, count, end) in enumerate(zip(lens, counts, ends, strict=True))
    ]
    return Batch(rows=tuple(rows), is_decode=is_decode)


def step(rig: Rig, path: str, key: ShapeKey, batch: Batch) -> jax.Array:
    """Host metadata, body and greedy head, dispatched; the head's [rows, 2] result."""
    rig.executables[path, key].run(rig.state, batch)
    return run_head(rig, batch)


def run_head(rig: Rig, batch: Batch, *, least_rows: int = 1) -> jax.Array:
    """The greedy head over each request's last row, in the smallest head that holds them."""
    ends = np.cumsum([row.q_len for row in batch.rows])
    spec = SampleSpec(params=SamplingParams(temperature=0.0), seed=0, position=0, num_generated=0)
    wanted = [
        RowToSample(int(end) - 1, row.slot, spec) for end, row in zip(ends, batch.rows, strict=True)
    ]
    rows = min(count for count in rig.heads if count >= max(len(wanted), least_rows))
    state = rig.state
    packed = pack_rows(wanted, rows, no_slot=len(state.last_tokens))
    call = rig.heads[rows].call
    state.last_tokens, out = call(state.head, state.hidden, state.last_tokens, packed)
    return out
