"""Resolves options, model and device into what will be built. Makes no array, compiles nothing.

`EnginePlan` lists every executable that will exist, so that it can be read before start-up.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxprefill.cache.spec import CacheSpec
from jaxprefill.config import EngineConfig, ModelConfig
from jaxprefill.errors import ConfigError
from jaxprefill.kernels.attention import AttentionBackend, AttentionNeeds
from jaxprefill.kernels.attention.select import AttentionChoice, choose_backends
from jaxprefill.kernels.device import DeviceInfo
from jaxprefill.models.decoder import attention_specs
from jaxprefill.models.moe import choose_kernels
from jaxprefill.models.registry import model_class
from jaxprefill.models.sharding import share_of
from jaxprefill.prefill.backend import PrefillPath, choose_prefill_backend
from jaxprefill.prefill.buckets import (
    CPU_BUCKETS,
    GPU_BUCKETS,
    BucketLadder,
    ShapeKey,
    coarse_buckets,
    cut_ladder,
    slot_buckets,
    upstream_buckets,
)
from jaxprefill.prefill.contexts import resolve_max_contexts
from jaxprefill.prefill.padding import BufferLayout
from jaxprefill.scheduler import SchedulerLimits

logger = logging.getLogger(__name__)
MAX_RUNNING = 4096  # each request slot holds two rows of the vocabulary on the device


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Every size that start-up needs; nothing is left to choose.

    Attributes:
        ladder: the prefill executables.
        decode_slots: slot counts of the decode executables; none without an LM head.
        eager_ladder: coarse shapes of the eager fallback, at the full context.
        sample_rows, score_rows: row counts of the LM head; none where the model lacks it.
        pool_rows: row count of what makes embeddings and reads the classifier.
        ladder_origin: where the buckets come from, where neither the user nor the default says.
        share: one device's part of the model, with what its experts run in.
        path: what prefill executables are: `config.prefill_backend`, or chosen.
        path_why: why, where the user left it open.
        cache_spec: what one device keeps per token.
        num_pages: pages of each pool, and layer.
        num_recent: of pools that keep recent tokens alone.
    """

    config: EngineConfig
    model: ModelConfig
    share: ModelConfig
    device: DeviceInfo
    dtype: jnp.dtype
    attention: AttentionChoice
    context_length: int
    chunked_prefill_size: int
    max_running: int
    cache_spec: CacheSpec
    num_pages: int
    num_recent: int
    ladder: BucketLadder
    decode_slots: tuple[int, ...]
    eager_ladder: BucketLadder
    sample_rows: tuple[int, ...]
    score_rows: tuple[int, ...]
    pool_rows: int
    path: PrefillPath
    ladder_origin: str = ""
    path_why: str = ""

    @property
    def default_buckets(self) -> tuple[int, ...]:
        """The default ladder of this device, up to the same size."""
        ladder = CPU_BUCKETS if self.device.platform == "cpu" else GPU_BUCKETS
        return cut_ladder(ladder, self.chunked_prefill_size)

    @property
    def limits(self) -> SchedulerLimits:
        """What the scheduler must keep to."""
        factor = self.config.max_padding_factor
        return SchedulerLimits(
            max_batch_tokens=self.chunked_prefill_size,
            max_batch_requests=self.ladder.num_slots,
            max_running=self.max_running,
            prefill_context=self.ladder.max_contexts[-1],
            buckets=self.ladder.buckets,
            split_above=min(1.5 if self.device.platform == "cpu" else math.inf, factor or math.inf),
        )

    def describe(self) -> str:
        """One line: device, attention, and the shapes that are built."""
        experts = "" if self.model.moe is None else f", experts {self.share.kernels}"
        origin = f" ({self.ladder_origin})" if self.ladder_origin else ""
        return (
            f"{self.device.platform}, {self.dtype.name}, attention {self.attention}{experts}; "
            f"prefill {self.path}: "
            f"buckets {_joined(self.ladder.buckets)}{origin}, "
            f"{self.ladder.num_slots} slots, context {_joined(self.ladder.max_contexts)}; "
            f"decode slots {_joined(self.decode_slots)}"
        )

    def ladder_table(self) -> dict[str, Any]:
        """The shapes that are built, ready for JSON."""
        return {
            "path": self.path,
            "buckets": list(self.ladder.buckets),
            "origin": self.ladder_origin,
            "slots": self.ladder.num_slots,
            "max_contexts": list(self.ladder.max_contexts),
            "decode_slots": list(self.decode_slots),
            "eager_buckets": list(self.eager_ladder.buckets),
        }

    @property
    def hidden_rows(self) -> int:
        """Rows of the shared hidden buffer: the largest shape of any path."""
        return max(self.ladder.buckets[-1], self.eager_ladder.buckets[-1], self.max_running)

    def decode_key(self, num_slots: int) -> ShapeKey:
        """The shape of a decode executable: one token a slot."""
        return ShapeKey(num_slots, num_slots, self.context_length)

    @property
    def backend(self) -> AttentionBackend:
        """Of all shapes but those where another is faster."""
        return self.attention.first

    def layout(self, key: ShapeKey, *, is_decode: bool = False) -> BufferLayout:
        """The buffer of one shape, tiled as the attention backend likes it."""
        page_size = self.config.page_size
        backend = self.attention.at(key.num_tokens, is_decode=is_decode)
        tiles = backend.tile_shape(*key, page_size=page_size, is_decode=is_decode)
        num_new = 1 if is_decode else key.num_tokens
        return BufferLayout(key, tiles, page_size, self.cache_spec.recent_pages(page_size, num_new))


def _joined(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values)) or "none"


def make_plan(config: EngineConfig, model: ModelConfig, device: DeviceInfo) -> EnginePlan:
    """Chooses whatever the options leave open.

    Raises:
        ConfigError: options contradict the model or each other.
        KernelUnsupported: no attention backend fits.
    """
    is_cpu = device.platform == "cpu"
    dtype, context = _resolve_dtype(config, device), _resolve_context(config, model)
    model, most = _served(config, model, context), model.context_length
    path, why = choose_prefill_backend(config.prefill_backend, model, platform=device.platform)
    max_contexts = resolve_max_contexts(
        config.prefill_max_context,
        page_size=config.page_size,
        model_context=most,
        context=context,
        is_used=path != "eager",
    )
    share = _resolve_share(config, model, device, dtype)
    attention = _resolve_attention(config, share, device, dtype, has_max=max_contexts != (context,))
    max_running = _resolve_running(config, is_cpu=is_cpu)
    buckets = _resolve_buckets(config, max_running * context, is_cpu=is_cpu)
    slots = _resolve_slots(config, max_running)
    row_counts = _row_counts(max_running, dtype, is_cpu=is_cpu) if model.has_lm_head else ()
    # In a group another rank's prompt can send a decode step there, of all running requests.
    eager_buckets = coarse_buckets(max(buckets[-1], max_running), factor=16 if is_cpu else 4)
    spec, step = model_class(share).cache_spec(share), (buckets[-1], max_running)
    num_pages, num_recent = _resolve_pages(config, share, spec, step, device, dtype)
    return EnginePlan(
        config=config,
        model=model,
        share=share,
        device=device,
        dtype=dtype,
        attention=attention,
        context_length=context,
        chunked_prefill_size=buckets[-1],
        max_running=max_running,
        cache_spec=spec,
        num_pages=num_pages,
        num_recent=num_recent,
        ladder=BucketLadder(buckets, slots, max_contexts),
        decode_slots=row_counts,
        eager_ladder=BucketLadder(eager_buckets, max_running, (context,)),
        sample_rows=row_counts,
        score_rows=() if not row_counts else (16, 128) if is_cpu else (16, 256),
        pool_rows=min(max_running, 16),
        path=path,
        path_why=why,
    )


def _row_counts(max_running: int, dtype: jnp.dtype, *, is_cpu: bool) -> tuple[int, ...]:
    # XLA's CPU compiler would convert every weight for one row of bfloat16.
    return slot_buckets(max_running, smallest=2 if is_cpu and dtype == jnp.bfloat16 else 1)


def _resolve_dtype(config: EngineConfig, device: DeviceInfo) -> jnp.dtype:
    auto = "bfloat16" if device.has_bf16_matmul else "float32"
    return jnp.dtype(auto if config.dtype == "auto" else config.dtype)


def _resolve_attention(
    config: EngineConfig, share: ModelConfig, device: DeviceInfo, dtype: jnp.dtype, *, has_max: bool
) -> AttentionChoice:
    page = config.page_size
    needs = attention_needs(share, device, dtype, page_size=page, has_max_context=has_max)
    return choose_backends(config.attention_backend, needs)


def attention_needs(
    share: ModelConfig,
    device: DeviceInfo,
    dtype: jnp.dtype,
    *,
    page_size: int,
    has_max_context: bool = False,
) -> AttentionNeeds:
    """What one device's part of a model asks of attention."""
    return AttentionNeeds(
        platform=device.platform,
        dtype=dtype.name,
        page_size=page_size,
        head_dim=share.head_dim,
        specs=attention_specs(share),
        group=share.num_q_heads // share.num_kv_heads,
        compute_capability=device.compute_capability,
        has_max_context=has_max_context,
    )


def _resolve_share(
    config: EngineConfig, model: ModelConfig, device: DeviceInfo, dtype: jnp.dtype
) -> ModelConfig:
    """One device's part of the model and its kernels; the devices asked for must be there."""
    size, found = config.tensor_parallel_size, device.num_devices
    if size > found:
        more = (
            "more devices of a CPU come with XLA_FLAGS=--xla_force_host_platform_device_count=N"
            if device.platform == "cpu"
            else "of other machines they come with jax.distributed.initialize"
        )
        raise ConfigError(
            f"tensor_parallel_size must be at most the {found} devices that jax sees, got {size}; "
            f"lower it, or show jax more ({more})"
        )
    if device.num_processes > 1 and size != found:
        raise ConfigError(
            f"tensor_parallel_size must be {found}, all devices of the {device.num_processes} "
            f"processes that run one engine, got {size}"
        )
    if device.num_processes > 1 and config.seed is None:
        raise ConfigError(
            "seed must be given where several processes run one engine, got None: all of them "
            "must draw alike; give each the same"
        )
    share = share_of(model, size)
    kernels = choose_kernels(
        share,
        attention_backend=config.attention_backend,
        platform=device.platform,
        dtype=dtype.name,
    )
    return replace(share, kernels=kernels)


def _served(config: EngineConfig, model: ModelConfig, context: int) -> ModelConfig:
    """The model as it is served: longrope chooses by the context, an idle window goes."""
    if config.quantization != "auto":
        kind = None if config.quantization == "none" else config.quantization
        model = replace(model, quantization=kind)
    window = model.sliding_window
    if window is not None and window >= context and model.sliding_rope is None:
        model = replace(model, sliding_window=None, sliding_layers=())
    return replace(model, context_length=context)


def _resolve_running(config: EngineConfig, *, is_cpu: bool) -> int:
    running = config.running(is_cpu=is_cpu)
    if running > MAX_RUNNING:
        raise ConfigError(f"max_running_requests must be at most {MAX_RUNNING}, got {running}")
    return running


def _resolve_slots(config: EngineConfig, max_running: int) -> int:
    asked = config.full_prefill_max_req or max_running
    if asked > max_running:
        logger.warning(
            "full_prefill_max_req %d is lowered to max_running_requests, %d: no step has more",
            asked,
            max_running,
        )
    return min(asked, max_running)


def _resolve_context(config: EngineConfig, model: ModelConfig) -> int:
    context = config.context_length or model.context_length
    if context > model.context_length:
        raise ConfigError(
            f"context_length must be at most the model's {model.context_length}, got {context}"
        )
    return context


def _resolve_buckets(config: EngineConfig, reach: int, *, is_cpu: bool) -> tuple[int, ...]:
    """The ladder, cut at chunked_prefill_size, which becomes its last bucket.

    `reach` is the most tokens that all running requests together can have.
    """
    size, named = config.chunked_prefill_size, config.prefill_buckets
    if isinstance(named, tuple):
        buckets = cut_ladder(named, size or max(named))
    else:
        size = size or min(1024 if is_cpu else 8192, reach)
        ladder = CPU_BUCKETS if is_cpu else GPU_BUCKETS
        buckets = cut_ladder(upstream_buckets(size) if named == "upstream" else ladder, size)
    if buckets[-1] > reach:
        what = "a prefill bucket" if isinstance(named, tuple) else "chunked_prefill_size"
        raise ConfigError(
            f"{what} must be at most max_running_requests x context_length = {reach} tokens, got "
            f"{buckets[-1]}; name a smaller one"
        )
    return buckets


def _resolve_pages(
    config: EngineConfig,
    share: ModelConfig,
    spec: CacheSpec,
    step: tuple[int, int],
    device: DeviceInfo,
    dtype: jnp.dtype,
) -> tuple[int, int]:
    """(pages of the pool, pages of recent tokens); a step has at most so many tokens and requests.

    As asked, 16384 tokens on CPU, or a part of each device's memory.
    """
    tokens = config.kv_cache_tokens or 16384
    _check_page_size(config, spec)
    num_recent = spec.all_recent_pages(config.page_size, *step)
    recent_bytes = spec.page_bytes(config.page_size, dtype.itemsize, is_recent=True)
    taken = _weight_bytes(share, dtype) + num_recent * recent_bytes
    token_bytes = spec.page_bytes(config.page_size, dtype.itemsize) / config.page_size
    if config.kv_cache_tokens is None and device.platform != "cpu":
        budget = device.memory_bytes * config.memory_fraction - taken
        tokens = math.floor(budget / max(token_bytes, 1))  # 0: recent tokens alone are kept
    if tokens < config.page_size:
        raise ConfigError(
            f"kv_cache_tokens must hold at least one page of {config.page_size} tokens, "
            f"got {tokens}; raise kv_cache_tokens or memory_fraction"
        )
    pages = tokens // config.page_size
    most_layers = max(pool.num_layers for pool in spec.pools)
    needed = taken + tokens * token_bytes
    if needed > device.memory_bytes or pages * most_layers * config.page_size >= 2**31:
        raise ConfigError(
            f"kv_cache_tokens must fit each device's {device.memory_bytes / 2**30:.0f} GiB beside "
            f"the weights, and 32-bit rows over all layers; {tokens} tokens need "
            f"{needed / 2**30:.0f} GiB; lower it"
        )
    return pages, min(num_recent, pages)


def _check_page_size(config: EngineConfig, spec: CacheSpec) -> None:
    """An entry that overlaps the window before needs whole windows in a page."""
    rates = (pool.rate for pool in spec.pools if pool.is_exact and pool.name != "heavy_state")
    least = max(rates, default=1)
    if config.page_size < least:
        raise ConfigError(
            f"page_size must be at least the {least} tokens of a compressed entry, got "
            f"{config.page_size}; raise it"
        )


def _weight_bytes(model: ModelConfig, dtype: jnp.dtype) -> int:
    if model.latent is not None:  # no formula: as its modules say
        shapes = nnx.eval_shape(lambda: model_class(model)(model, dtype))
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes))) * dtype.itemsize
    heads = (2 * model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim
    moe = model.moe
    mlp = 3 * model.mlp_size if moe is None else moe.num_experts * (3 * model.mlp_size + 1)
    narrow = jnp.dtype(model.quantization or dtype).itemsize
    layer = heads * narrow + mlp * (narrow if moe is None else dtype.itemsize)
    tables = (2 if model.has_own_head else 1) * model.vocab_size * dtype.itemsize
    return model.hidden_size * (layer * model.num_layers + tables)
