"""What a model is and how an engine is asked to run, as plain host data. Knows no device."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args, get_type_hints

from jaxprefill.errors import ConfigError
from jaxprefill.latent_config import LatentConfig
from jaxprefill.moe_config import MoeConfig
from jaxprefill.options import check_choice, coerce, option, read_keys

PrefillBackend = Literal["auto", "full", "layerwise", "eager"]
NAMED_LADDERS = ("auto", "default", "upstream")
DType = Literal["auto", "float32", "bfloat16"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
PoolingKind = Literal["last", "mean"]
ClassActivation = Literal["softmax", "sigmoid", "none"]
Quantization = Literal["int8", "float8_e4m3fn"]
KernelKind = Literal["xla", "pallas_triton"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: which dimensions of a head turn, and how fast.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: dimensions of a head that turn, counted from the first; None: all.
        attention_factor: multiplies cosine and sine (yarn, longrope).
        factor: by how much the context was stretched; every kind but default and longrope.
        original_context: the context before it was stretched, in tokens (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: llama3's band, in turns over the original context.
        beta_fast, beta_slow: yarn's band, in turns over the original context.
        is_band_rounded: whether yarn's band ends at whole dimensions.
        short_factors, long_factors: longrope's divisor of each frequency, for contexts up to
            `original_context` and for longer ones.
    """

    kind: RopeKind = "default"
    theta: float
    rotary_dim: int | None = None
    attention_factor: float = 1.0
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_band_rounded: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_choice("model config: RoPE kind", self.kind, get_args(RopeKind))
        for name in ("theta", "factor", "attention_factor"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"model config: {name} of RoPE must be positive")
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ConfigError(f"model config: rotary_dim must be even, got {self.rotary_dim}")
        if self.kind in ("llama3", "yarn", "longrope") and self.original_context < 1:
            raise ConfigError(f"model config: {self.kind} RoPE needs original_context")
        if self.kind == "yarn" and self.theta <= 1:
            raise ConfigError(f"model config: theta of yarn must exceed 1, got {self.theta}")


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """How a text's hidden rows become its embedding: the last one, or their mean.

    Attributes:
        is_normalized: whether embeddings have length 1 unless a caller says otherwise.
    """

    kind: PoolingKind = "last"
    is_normalized: bool = True

    def __post_init__(self) -> None:
        check_choice("model config: pooling", self.kind, get_args(PoolingKind))


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """A head that gives every text one logit a label.

    Attributes:
        labels: their names, in the order of the logits.
        activation: what turns logits into scores.
        pad_id: texts are read at their last token that is not this one; None: at their last.
    """

    labels: tuple[str, ...]
    activation: ClassActivation
    pad_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a dense decoder. Counts, except where the name says otherwise.

    Attributes:
        head_dim: explicit, as some models have `head_dim * num_q_heads != hidden_size`.
        sliding_window: the most recent tokens a query sees, its own among them; None: all.
        sliding_layers: whether each layer has the window; empty: all have it.
        has_qk_norm: whether every head of q and k is RMS-normed before it is rotated.
        has_post_norms: whether what attention and MLP give is normed before it is added.
        norm_offset: added to the weights of all norms: 1 where checkpoints hold w of 1 + w.
        query_scale: multiplies attention's scores; None: head_dim ** -0.5.
        attention_soft_cap: scores s become cap * tanh(s / cap); None: as they are.
        logit_soft_cap: the same of the LM head's logits.
        embedding_scale: multiplies embeddings, rounded to the weights' dtype.
        sliding_rope: the rotation of layers with the window, where it is not `rope`.
        has_sinks: whether every query head has a score without a value (an attention sink).
        latent: what DeepSeek-V4's layers are; `compress_rope` is of those with compressed entries.
        moe: experts in the place of every layer's MLP, `mlp_size` columns each.
        classifier: the head over labels; such a model has no LM head.
        has_lm_head: whether there are logits of next tokens, or hidden rows only.
        quantization: the type of the layers' matrices where it is not that of everything else;
            each row of outputs has a scale then.
        kernels: what experts, and DeepSeek-V4's choice of entries and attention, run in; in the
            config of one device's part.
        num_shards: devices that share the model, in the config of one's part; the sizes are then
            those of the part (`models.sharding.share_of`).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    is_embedding_tied: bool
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    norm_offset: float = 0.0
    query_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    sliding_rope: RopeConfig | None = None
    has_sinks: bool = False
    activation: Activation = "silu"
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    compress_rope: RopeConfig | None = None
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    classifier: ClassifierConfig | None = None
    has_lm_head: bool = True
    quantization: Quantization | None = None
    kernels: KernelKind = "xla"
    num_shards: int = 1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "mlp_size", "num_layers", "num_q_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model config: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"model config: num_q_heads ({self.num_q_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"model config: head_dim must be even, got {self.head_dim}")
        self._check_rope()
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(
                f"model config: sliding_window must be at least 1, got {self.sliding_window}"
            )
        if self.sliding_layers and len(self.sliding_layers) != self.num_layers:
            raise ConfigError(
                f"model config: sliding_layers must name all {self.num_layers} layers, "
                f"got {len(self.sliding_layers)}"
            )
        check_choice("model config: activation", self.activation, get_args(Activation))

    @property
    def has_own_head(self) -> bool:
        """Whether the LM head is a table of its own."""
        return self.has_lm_head and not self.is_embedding_tied

    @property
    def norms_per_layer(self) -> int:
        """Norms over whole rows that each layer has."""
        return 4 if self.has_post_norms else 2

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that turn."""
        return self.rope.rotary_dim or self.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None where a query sees all before it."""
        layers = self.sliding_layers or (True,) * self.num_layers
        return tuple(self.sliding_window if is_sliding else None for is_sliding in layers)

    def _check_rope(self) -> None:
        if self.rotary_dim > self.head_dim:
            raise ConfigError(
                f"model config: rotary_dim ({self.rotary_dim}) must be at most "
                f"head_dim ({self.head_dim})"
            )
        if self.rope.kind != "longrope":
            return
        for name in ("short_factors", "long_factors"):
            if len(getattr(self.rope, name)) != self.rotary_dim // 2:
                raise ConfigError(
                    f"model config: {name} of longrope must hold {self.rotary_dim // 2} numbers, "
                    f"one a frequency, got {len(getattr(self.rope, name))}"
                )


prefill_option = partial(option, is_prefill=True)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of an engine; each field is a keyword of `Engine` and a flag of the command line.

    None and "auto" mean "chosen from model and device"; `plan.make_plan` resolves them and leaves
    alone what is said. Strings are taken wherever a flag would give one:
    `EngineConfig(prefill_buckets="16,64")`. What `prefill_config` says goes into the fields of
    the same names, over what these were given; it is None afterwards.

    Raises:
        ConfigError: a value is out of range; the message names field, value and range.
    """

    model: str = option(
        "demo",
        "demo, a folder (Hugging Face, or of `jaxprefill convert`), a GGUF file, or a hub id",
        "MODEL",
    )
    dtype: DType = option("auto", "auto: bfloat16 on GPU and on CPUs with AMX, else float32")
    quantization: Literal["auto", "none", Quantization] = option(
        "auto", "eight bits for the layers' weights; auto: as the model's files have them"
    )
    context_length: int | None = option(
        None, "longest prompt plus output, in tokens (default: the model's limit)", "TOKENS"
    )
    page_size: int = option(16, "tokens a KV page holds: a power of two, 1 to 128", "TOKENS")
    kv_cache_tokens: int | None = option(
        None, "tokens the KV pool holds (default: 16384 on CPU, sized by memory on GPU)", "TOKENS"
    )
    memory_fraction: float = option(
        0.85, "share of free device memory given to the KV pool on GPU", "FRACTION"
    )
    max_running_requests: int | None = option(
        None, "requests that run at once (default: 16 on CPU, 64 on GPU)", "N"
    )
    prefill_config: str | Mapping[str, Any] | None = option(
        None, "any of the next eight options in one JSON object, which win over flags", "JSON|FILE"
    )
    chunked_prefill_size: int | None = prefill_option(
        None, "most tokens in one step, and the last bucket (default: 1024 CPU, 8192 GPU)", "TOKENS"
    )
    prefill_backend: PrefillBackend = prefill_option(
        "auto",
        "full: one executable a shape; layerwise: one a layer; eager: fallback only; auto: full, "
        "but layerwise on a CPU where layers change kind often",
    )
    prefill_buckets: str | tuple[int, ...] = prefill_option(
        "auto",
        "auto (what `jaxprefill tune --write` chose, else default), default, upstream (SGLang's "
        "ladder), or token counts: 16,64,256",
        "LADDER",
    )
    full_prefill_max_req: int | None = prefill_option(
        None, "request slots of a prefill executable (default: max_running_requests)", "N"
    )
    prefill_max_context: tuple[int, ...] = prefill_option(
        (), "longest contexts the prefill executables take, e.g. 4K,32K (default: all)", "TOKENS"
    )
    max_padding_factor: float | None = prefill_option(
        None, "fall back when padded/real tokens exceed this (default: never)", "FACTOR"
    )
    strict_prefill: bool = prefill_option(False, "make a fallback an error")
    attention_backend: str = prefill_option(
        "auto",
        "auto, the name of an attention backend, or two joined by +: for layers with a sliding "
        "window, and for the others",
        "NAME",
    )
    tensor_parallel_size: int = option(1, "devices that share every layer out among them", "N")
    prefix_cache: bool = option(
        True, "keep the KV of prompts and answers for requests that begin alike"
    )
    executables: str | None = option(
        None, "load executables from this folder, which jaxprefill compile wrote", "DIR"
    )
    store: bool = option(True, "keep executables in the user's cache, and load them from there")
    trust_executables: bool = option(
        False, "load executables even from folders that others can write: they can run code"
    )
    compile_cache: str = option(
        "off", "folder of JAX's own compilation cache, beside the store; auto: user cache", "DIR"
    )
    seed: int | None = option(None, "seed of requests that bring none (default: random)", "SEED")

    def running(self, *, is_cpu: bool) -> int:
        """Requests that run at once."""
        return self.max_running_requests or (16 if is_cpu else 64)

    def __post_init__(self) -> None:
        self._coerce()
        counts = ("context_length", "kv_cache_tokens", "max_running_requests", "seed")
        counts += ("chunked_prefill_size", "full_prefill_max_req", "tensor_parallel_size")
        for name in counts:
            least = 0 if name == "seed" else 1
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if not 1 <= self.page_size <= 128 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, 1 to 128, got {self.page_size}")
        if not 0.05 <= self.memory_fraction <= 0.98:
            raise ConfigError(f"memory_fraction must be 0.05 to 0.98, got {self.memory_fraction}")
        factor = self.max_padding_factor
        if factor is not None and not 1 <= factor < math.inf:
            raise ConfigError(
                "max_padding_factor must be a number from 1, or left out for no limit, "
                f"got {factor}"
            )
        for name in ("prefill_max_context", "prefill_buckets"):
            for value in () if isinstance(given := getattr(self, name), str) else given:
                if value < 1:
                    raise ConfigError(f"{name} must be a positive integer, got {value}")
        if not self.prefill_buckets:
            raise ConfigError("prefill_buckets must name at least one count, got none")
        if isinstance(self.prefill_buckets, str):
            check_choice(
                "prefill_buckets", self.prefill_buckets, (*NAMED_LADDERS, "counts like 16,64,256")
            )
        check_choice("prefill_backend", self.prefill_backend, get_args(PrefillBackend))
        if self.strict_prefill and self.prefill_backend == "eager":
            raise ConfigError(
                "strict_prefill forbids the path that prefill_backend='eager' asks for; drop one"
            )
        check_choice("dtype", self.dtype, get_args(DType))
        quantizations = ("auto", "none", *get_args(Quantization))
        check_choice("quantization", self.quantization, quantizations)

    def _coerce(self) -> None:
        """Turns command-line text into the field's type; refuses any other type."""
        told = prefill_keys(self.prefill_config)
        for item, hint in engine_options():
            given = told.get(item.name, getattr(self, item.name))
            value = None if item.name == "prefill_config" else coerce(item.name, given, hint)
            object.__setattr__(self, item.name, value)

    @property
    def prefill_differences(self) -> dict[str, Any]:
        """The `prefill_config` that says what this one says: what differs from defaults, for JSON.

        Nothing else, as whatever such an object names counts as said by the user.
        """
        return {
            item.name: list(value) if isinstance(value, tuple) else value
            for item, _ in engine_options()
            if item.metadata["is_prefill"] and (value := getattr(self, item.name)) != item.default
        }


def engine_options() -> list[tuple["Field[Any]", Any]]:
    """Every option with its type, in order: what the command line makes its flags from."""
    hints = get_type_hints(EngineConfig)
    return [(item, hints[item.name]) for item in fields(EngineConfig)]


def make_config(**options: Any) -> EngineConfig:
    """EngineConfig from keywords; an unknown keyword is an error that lists the known ones."""
    known = [item.name for item, _ in engine_options() if item.default is not MISSING]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}"
        )
    return EngineConfig(**options)


def prefill_keys(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that a `prefill_config` names, with what it says.

    Raises:
        ConfigError: it cannot be read, or has an unknown key; lists the known ones.
    """
    known = [item.name for item, _ in engine_options() if item.metadata["is_prefill"]]
    return {} if given is None else read_keys("prefill_config", given, known)
