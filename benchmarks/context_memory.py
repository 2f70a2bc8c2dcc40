"""Temporary memory of one compressed-sparse layer's attention, by context and kind of top-k.

    python -m benchmarks.context_memory --tokens 8192 --context 1M --max-context 256K --json
    python -m benchmarks.context_memory     a table, tokens x context, and a plot (extra `bench`)

DeepSeek-V4-Flash's shapes in float32, compiled and not run: the numbers are the compiler's own.
*materialised* keeps the indexer's logits of all tokens and entries (4 bytes x tokens x context / 4,
as SGLang does), *streaming* those of one tile and block. `context_temp_bytes` is what exceeds the
same layer at a context of 4096.
"""

import argparse
import json
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
from jaxprefill.integers import parse_count
from jaxprefill.kernels.attention import RaggedBatch
from jaxprefill.kernels.attention.tiles import tile_capacity
from jaxprefill.latent_config import LatentConfig
from jaxprefill.models.decoder import LayerInputs
from jaxprefill.models.deepseek_v4.choose import TopKVariant
from jaxprefill.models.deepseek_v4.layer import DeepseekV4Layer, cache_spec
from jaxprefill.models.sharding import make_mesh
from jaxprefill.moe_config import MoeConfig
from jaxprefill.prefill.compiler import CPU_OPTIONS

VARIANTS: tuple[TopKVariant, ...] = ("materialised", "streaming")
LINE = (
    "{variant:13} {tokens:6} tokens, max context {max_context:8}: {temp_bytes:11} bytes, "
    "of context {context_temp_bytes:11}"
)
PAGE, SLOTS, TILE = 128, 1, 64
SMALL_CONTEXT = 4096


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


@cache
def temp_bytes(variant: TopKVariant, tokens: int, context: int, max_context: int) -> int:
    """What the compiler plans beside arguments and results."""
    config = flash_config(context)
    layer = nnx.eval_shape(lambda: DeepseekV4Layer(config, 0, jnp.dtype(jnp.float32)))
    graph, state = nnx.split(layer)

    def attend(state, pools, normed, inputs):
        own = nnx.merge(graph, state)
        own.top_k_variant = variant
        return own.attend(normed, pools, jnp.int32(0), inputs)

    pools = pool_shapes(
        cache_spec(config), context // PAGE, PAGE, dtype=jnp.dtype(jnp.float32), mesh=make_mesh()
    )
    normed = jax.ShapeDtypeStruct((tokens, config.hidden_size), np.float32)
    arguments = (state, pools, normed, input_shapes(tokens, max_context))
    lowered = jax.jit(attend, donate_argnums=1).lower(*arguments)
    quick = {"xla_backend_optimization_level": 0}  # of machine code: buffers are as they are
    options = CPU_OPTIONS | quick if jax.default_backend() == "cpu" else None
    return lowered.compile(options).memory_analysis().temp_size_in_bytes


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
    rotary = jax.ShapeDtypeStruct((4, tokens, 32), np.float32)
    return LayerInputs(rotary, batch, ints(), ints(tokens), ints(TILE))


def row(variant: TopKVariant, tokens: int, context: int, max_context: int) -> dict:
    """One measurement."""
    found = temp_bytes(variant, tokens, context, max_context)
    return {
        "variant": variant,
        "tokens": tokens,
        "context": context,
        "max_context": max_context,
        "temp_bytes": found,
        "context_temp_bytes": found - temp_bytes(variant, tokens, context, SMALL_CONTEXT),
    }


def draw(rows: list[dict], out: Path) -> None:
    """Context-dependent memory over max context, one line for each variant and token count."""
    # The plot alone needs matplotlib, which the extra `bench` installs.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for variant, tokens in sorted({(one["variant"], one["tokens"]) for one in rows}):
        own = [one for one in rows if (one["variant"], one["tokens"]) == (variant, tokens)]
        gib = [one["temp_bytes"] / 2**30 for one in own]
        style = "-" if variant == "streaming" else "--"
        label = f"{variant}, {tokens} tokens"
        axes.plot([one["max_context"] for one in own], gib, style, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("max context, tokens")
    axes.set_ylabel("temporaries of one sparse layer, GiB")
    axes.legend()
    figure.savefig(out, dpi=110, bbox_inches="tight")


def main() -> None:
    """Prints JSON, or a table beside a plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("--tokens", "--context", "--max-context"):
        parser.add_argument(name, type=partial(parse_count, name))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, default=Path("benchmarks/results/context_memory.png"))
    args = parser.parse_args()
    context = args.context or 1 << 20
    tokens = [args.tokens] if args.tokens else [2048, 8192]
    bounds = [args.max_context] if args.max_context else [1 << 16, 1 << 18]
    rows = []
    for variant, count, bound in product(VARIANTS, tokens, (context, *reversed(bounds))):
        rows.append(row(variant, count, context, bound))
        if not args.json:
            print(LINE.format(**rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))
    elif find_spec("matplotlib"):
        draw(rows, args.plot)
    else:
        print("no plot: it needs the extra `bench`")


if __name__ == "__main__":
    main()
