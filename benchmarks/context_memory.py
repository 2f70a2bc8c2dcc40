"""Memory, and on a GPU time, of a compressed-sparse layer's attention, by context and top-k.

    python -m benchmarks.context_memory --tokens 8192 --context 1M --max-context 256K --json
    python -m benchmarks.context_memory     a table, tokens x context, and a plot (extra `bench`)

DeepSeek-V4-Flash's shapes, compiled: bytes are the compiler's own. On a GPU the layer is also run,
on random numbers, for the last tokens of a request as long as max context: `ms`, the best of three.
*materialised* keeps the indexer's logits of all tokens and entries (4 bytes x tokens x context / 4,
as SGLang does), *streaming* those of one tile and block, and *pallas_triton*, on a GPU, does so in
a kernel and attends in another. `context_temp_bytes` is what exceeds the same layer at a context of
4096. Contexts are rounded up to pages of 128 tokens.
"""

import argparse
import json
import sys
import time
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxprefill.cache.kv_cache import pool_shapes
from jaxprefill.config import ModelConfig, RopeConfig
from jaxprefill.errors import ConfigError
from jaxprefill.integers import parse_count
from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.attention.tiles import tile_capacity
from jaxprefill.latent_config import LatentConfig
from jaxprefill.models.decoder import LayerInputs
from jaxprefill.models.deepseek_v4.choose import CoreVariant
from jaxprefill.models.deepseek_v4.layer import DeepseekV4Layer, cache_spec
from jaxprefill.models.sharding import make_mesh
from jaxprefill.moe_config import MoeConfig
from jaxprefill.prefill.compiler import CPU_OPTIONS
from jaxprefill.prefill.contexts import resolve_max_contexts

VARIANTS: tuple[CoreVariant, ...] = ("materialised", "streaming", "pallas_triton")
LINE = (
    "{variant:13} {tokens:6} tokens, max context {max_context:8}: {temp_bytes:11} bytes, "
    "of context {context_temp_bytes:11}"
)
FLAGS = ("--tokens", "--context", "--max-context")
PAGE, SLOTS, TILE = 128, 1, 64
SMALL_CONTEXT = 4096
RUNS = 3


def flash_config(context: int) -> ModelConfig:
    """One layer of DeepSeek-V4-Flash; its experts are left out."""
    rope = RopeConfig(theta=160_000.0, rotary_dim=64)
    return ModelConfig(
        architecture="DeepseekV4ForCausalLM", vocab_size=16, hidden_size=4096, mlp_size=16,
        num_layers=1, num_q_heads=64, num_kv_heads=1, head_dim=512, context_length=context,
        norm_eps=1e-6, rope=rope, compress_rope=rope, is_embedding_tied=True, sliding_window=128,
        moe=MoeConfig(num_experts=1, num_chosen=1, scoring="sqrt_softplus"),
        latent=LatentConfig(
            layer_kinds=("sparse",), hash_layers=(False,), query_rank=1024, num_groups=8,
            group_rank=1024, sparse_rate=4, heavy_rate=128, index_heads=64, index_dim=128,
            index_top_k=512, num_streams=4, sinkhorn_steps=20, hyper_eps=1e-6, swiglu_limit=10.0,
        ),
    )  # fmt: skip


def traced_layer(
    variant: CoreVariant, tokens: int, context: int, max_context: int, dtype: str
) -> tuple[jax.stages.Traced, tuple]:
    """(the attention of one layer, traced; the shapes of its arguments)."""
    config, kind = flash_config(context), jnp.dtype(dtype)
    layer = nnx.eval_shape(lambda: DeepseekV4Layer(config, 0, kind))
    graph, state = nnx.split(layer)

    def attend(state, pools, normed, inputs):
        own = nnx.merge(graph, state)
        own.core_variant = variant
        return own.attend(normed, pools, jnp.int32(0), inputs)

    spec, pages = cache_spec(config), context // PAGE
    pools = pool_shapes(spec, pages, PAGE, num_recent=pages, dtype=kind, mesh=make_mesh())
    normed = jax.ShapeDtypeStruct((tokens, config.hidden_size), np.float32)
    arguments = (state, pools, normed, input_shapes(tokens, max_context))
    return jax.jit(attend, donate_argnums=1).trace(*arguments), arguments


@cache
def compiled_layer(
    variant: CoreVariant, tokens: int, context: int, max_context: int, dtype: str
) -> tuple[jax.stages.Compiled, tuple]:
    """The same for this process's device."""
    traced, arguments = traced_layer(variant, tokens, context, max_context, dtype)
    quick = {"xla_backend_optimization_level": 0}  # of machine code: buffers are as they are
    options = CPU_OPTIONS | quick if jax.default_backend() == "cpu" else None
    return traced.lower().compile(options), arguments


def temp_bytes(
    variant: CoreVariant, tokens: int, context: int, max_context: int, dtype: str = "float32"
) -> int:
    """What the compiler plans beside arguments and results."""
    layer, _ = compiled_layer(variant, tokens, context, max_context, dtype)
    return layer.memory_analysis().temp_size_in_bytes


def run_ms(variant: CoreVariant, tokens: int, context: int, max_context: int, dtype: str) -> float:
    """The quickest of some passes over the last tokens of one request of `max_context`."""
    layer, (state, pools, normed, inputs) = compiled_layer(
        variant, tokens, context, max_context, dtype
    )
    state, pools, normed = jax.tree.map(drawn_like, (state, pools, normed))
    inputs = real_inputs(inputs, tokens, max_context)
    seconds: list[float] = []
    for _ in range(RUNS + 1):  # the first warms up
        began = time.perf_counter()
        out, pools = layer(state, pools, normed, inputs)
        jax.block_until_ready(out)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]) * 1000


def drawn_like(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Random numbers, as small as a weight's."""
    normal = partial(jax.random.normal, shape=shape.shape, dtype=shape.dtype)
    return jax.jit(lambda key: normal(key) / 32)(jax.random.key(0))


def real_inputs(shapes: LayerInputs, tokens: int, max_context: int) -> LayerInputs:
    """Of one request whose pages lie in order."""
    num_tiles = len(shapes.batch.tile_slot)
    batch = RaggedBatch(
        kv_rows=jnp.arange(max_context - tokens, max_context, dtype=jnp.int32),
        q_lens=jnp.array([tokens], jnp.int32),
        kv_lens=jnp.array([max_context], jnp.int32),
        q_starts=jnp.zeros(1, jnp.int32),
        page_table=jnp.arange(max_context // PAGE, dtype=jnp.int32)[None],
        tile_slot=jnp.zeros(num_tiles, jnp.int32),
        tile_start=jnp.arange(num_tiles, dtype=jnp.int32) * TILE,
        num_tiles=jnp.int32(-(-tokens // TILE)),
    )
    return LayerInputs(
        rotary=jnp.ones(shapes.rotary.shape, jnp.float32),
        batch=batch,
        num_tokens=jnp.int32(tokens),
        ids=jnp.zeros(tokens, jnp.int32),
        tile_offsets=jnp.arange(TILE, dtype=jnp.int32),
    )


def input_shapes(tokens: int, max_context: int) -> LayerInputs:
    """What a layer reads besides its rows, as shapes."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32)

    tiles, slots = ints(tile_capacity(tokens, SLOTS, TILE)), ints(SLOTS)
    batch = RaggedBatch(
        kv_rows=ints(tokens), q_lens=slots, kv_lens=slots, q_starts=slots,
        page_table=ints(SLOTS, max_context // PAGE),
        tile_slot=tiles, tile_start=tiles, num_tiles=ints(),
    )  # fmt: skip
    rotary = jax.ShapeDtypeStruct((2, tokens, 32), np.float32)
    return LayerInputs(rotary, batch, ints(), ints(tokens), ints(TILE))


def row(
    variant: CoreVariant, tokens: int, context: int, max_context: int, dtype: str
) -> dict[str, str | int | float]:
    """One measurement."""
    found = temp_bytes(variant, tokens, context, max_context, dtype)
    least = temp_bytes(variant, tokens, context, min(SMALL_CONTEXT, max_context), dtype)
    timed = {}
    if jax.default_backend() == "gpu":
        timed["ms"] = run_ms(variant, tokens, context, max_context, dtype)
    return {
        "variant": variant,
        "tokens": tokens,
        "context": context,
        "max_context": max_context,
        "temp_bytes": found,
        "context_temp_bytes": found - least,
        "dtype": dtype,
    } | timed


def draw(rows: list[dict], out: Path) -> None:
    """Context-dependent memory over max context, one line for each variant and token count."""
    # The plot alone needs matplotlib, which the extra `bench` installs.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for variant, tokens in sorted({(one["variant"], one["tokens"]) for one in rows}):
        own = [one for one in rows if (one["variant"], one["tokens"]) == (variant, tokens)]
        gib = [one["temp_bytes"] / 2**30 for one in own]
        style = "--" if variant == "materialised" else "-"
        label = f"{variant}, {tokens} tokens"
        axes.plot([one["max_context"] for one in own], gib, style, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("max context, tokens")
    axes.set_ylabel("temporaries of one sparse layer, GiB")
    axes.legend()
    figure.savefig(out, dpi=110, bbox_inches="tight")


def shapes_of(given: dict[str, str | None]) -> tuple[list[int], list[int]]:
    """(token counts, max contexts) of the three flags; the first max context is the model's.

    Raises:
        ConfigError: one is no positive count, or more than the next.
    """
    found = {name: parse_count(name, text) for name, text in given.items() if text is not None}
    for name, value in found.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    context = -(-found.get("--context", 1 << 20) // PAGE) * PAGE
    bounds = tuple(bound for bound in (1 << 16, 1 << 18) if bound < context)
    rounded = resolve_max_contexts(
        (found["--max-context"],) if "--max-context" in found else bounds,
        page_size=PAGE,
        model_context=context,
        context=context,
        is_used=True,
    )
    least = min(rounded)
    tokens = [found["--tokens"]] if "--tokens" in found else [2048, 8192]
    fitting = [count for count in tokens if count <= least]
    if not fitting:
        raise ConfigError(f"--tokens must be at most the max context of {least}, got {tokens[0]}")
    return fitting, sorted({context, *rounded}, reverse=True)


def main() -> None:
    """Prints JSON, or a table beside a plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in FLAGS:
        parser.add_argument(name)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, default=Path("benchmarks/results/context_memory.png"))
    args = parser.parse_args()
    try:
        given = vars(args)
        tokens, bounds = shapes_of({name: given[name[2:].replace("-", "_")] for name in FLAGS})
    except ConfigError as error:
        parser.error(str(error))
    rows = []
    variants = VARIANTS if jax.default_backend() == "gpu" else VARIANTS[:2]
    for variant, count, bound in product(variants, tokens, bounds):
        rows.append(row(variant, count, bounds[0], bound, args.dtype))
        took = f", {rows[-1]['ms']:.2f} ms" if "ms" in rows[-1] else ""
        told = sys.stderr if args.json else sys.stdout
        print(LINE.format(**rows[-1]) + took, file=told, flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))
    elif find_spec("matplotlib"):
        draw(rows, args.plot)
    else:
        print("no plot: it needs the extra `bench`")


if __name__ == "__main__":
    main()
