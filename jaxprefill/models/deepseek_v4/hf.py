"""DeepSeek-V4's config.json, as it is published and as transformers 5 writes it."""

from collections.abc import Mapping
from typing import Any

from jaxprefill.config import ModelConfig, RopeConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.latent_config import LatentConfig, LayerKind
from jaxprefill.models.hf_rope import read_rope
from jaxprefill.models.hf_values import HfValues, config_errors
from jaxprefill.moe_config import MoeConfig

_DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_hash_layers": 3,
    "rms_norm_eps": 1e-6,
}
_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}
_KIND_OF_RATIO: dict[int, LayerKind] = {0: "sliding", 4: "sparse", 128: "heavy"}
_ONLY = {
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "topk_method": "noaux_tc",
}


def read_deepseek(given: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json of DeepSeek-V4 describes.

    Raises:
        CheckpointError: it asks for what is not supported, or a key is missing or wrong.
    """
    hf = HfValues(given, _DEFAULTS)
    for name, wanted in _ONLY.items():
        if hf.get(name) not in (None, wanted):
            raise CheckpointError(
                f"config.json: {name} must be {wanted!r} for DeepSeek-V4, got {hf.get(name)!r}"
            )
    num_layers = hf.integer("num_hidden_layers", most=10_000)
    with config_errors():
        latent = _read_latent(hf, num_layers)
        config = ModelConfig(
            architecture=hf.text_list("architectures")[0],
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hf.integer("hidden_size"),
            mlp_size=hf.integer("moe_intermediate_size"),
            num_layers=num_layers,
            num_q_heads=hf.integer("num_attention_heads"),
            num_kv_heads=1,
            head_dim=hf.integer("head_dim"),
            context_length=hf.integer("max_position_embeddings"),
            norm_eps=hf.number("rms_norm_eps"),
            rope=_read_rope(hf, "main"),
            compress_rope=_read_rope(hf, "compress"),
            is_embedding_tied=hf.flag("tie_word_embeddings", False),
            sliding_window=hf.integer("sliding_window"),
            moe=MoeConfig(
                num_experts=hf.integer("n_routed_experts"),
                num_chosen=hf.integer("num_experts_per_tok"),
                scoring="sqrt_softplus",
                scale=hf.number("routed_scaling_factor"),
            ),
            latent=latent,
        )
    _check_sizes(config, latent)
    return config


def _check_sizes(config: ModelConfig, latent: LatentConfig) -> None:
    """What no single key is at fault for."""
    turned, compressed = (
        config.head_dim if rope is None else rope.rotary_dim or config.head_dim
        for rope in (config.rope, config.compress_rope)
    )
    attended = config.num_q_heads * config.head_dim
    wrong: list[str] = []
    if attended % latent.num_groups:
        wrong.append(
            f"o_groups must divide the {attended} dimensions of all heads, got {latent.num_groups}"
        )
    if "sparse" in latent.layer_kinds and latent.index_dim < turned:
        wrong.append(
            f"index_head_dim must be at least the {turned} dimensions that are rotated, "
            f"got {latent.index_dim}"
        )
    if compressed != turned:
        wrong.append(
            "partial_rotary_factor must be the same for main and compress, got factors "
            f"that rotate {turned} and {compressed} dimensions"
        )
    if wrong:
        raise CheckpointError(f"config.json: {'; '.join(wrong)}")


def _read_latent(hf: HfValues, num_layers: int) -> LatentConfig:
    rates = HfValues(hf.mapping("compress_rates"), where="config.json: compress_rates")
    sparse = rates.integer("compressed_sparse_attention", hf.integer("compress_rate_csa", 4))
    heavy = rates.integer("heavily_compressed_attention", hf.integer("compress_rate_hca", 128))
    return LatentConfig(
        layer_kinds=_read_kinds(hf, num_layers),
        hash_layers=_read_hash_layers(hf, num_layers),
        query_rank=hf.integer("q_lora_rank"),
        num_groups=hf.integer("o_groups"),
        group_rank=hf.integer("o_lora_rank"),
        sparse_rate=sparse,
        heavy_rate=heavy,
        index_heads=hf.integer("index_n_heads"),
        index_dim=hf.integer("index_head_dim"),
        index_top_k=hf.integer("index_topk"),
        num_streams=hf.integer("hc_mult"),
        sinkhorn_steps=hf.integer("hc_sinkhorn_iters"),
        hyper_eps=hf.number("hc_eps"),
        swiglu_limit=hf.number("swiglu_limit"),
    )


def _read_kinds(hf: HfValues, num_layers: int) -> tuple[LayerKind, ...]:
    """Of each layer; `compress_ratios` of older files also lists layers that predict more."""
    if hf.get("layer_types") is not None:
        known: dict[Any, LayerKind] = dict(_KINDS)
        named: tuple[Any, ...] = hf.text_list("layer_types")
    elif hf.get("compress_ratios") is not None:
        ratios = hf.get("compress_ratios")
        if not isinstance(ratios, (list, tuple)):
            raise CheckpointError(f"config.json: compress_ratios must be a list, got {ratios!r}")
        known, named = dict(_KIND_OF_RATIO), tuple(ratios)
    else:
        known = {"heavy": "heavy", "sparse": "sparse"}
        named = tuple("sparse" if at > 2 and at % 2 else "heavy" for at in range(num_layers))
    for unknown in set(named) - set(known):
        raise CheckpointError(
            f"config.json: layers must be of the kinds {', '.join(map(str, known))}, "
            f"got {unknown!r}"
        )
    if len(named) < num_layers:
        raise CheckpointError(
            f"config.json: layer_types must name all {num_layers} layers, got {len(named)}"
        )
    return tuple(known[name] for name in named[:num_layers])


def _read_hash_layers(hf: HfValues, num_layers: int) -> tuple[bool, ...]:
    if hf.get("mlp_layer_types") is None:
        count = hf.get("num_hash_layers")
        if not isinstance(count, int) or count < 0:
            raise CheckpointError(
                f"config.json: num_hash_layers must be 0 to {num_layers}, got {count!r}"
            )
        return tuple(at < count for at in range(num_layers))
    named = hf.text_list("mlp_layer_types")[:num_layers]
    for unknown in set(named) - {"hash_moe", "moe"}:
        raise CheckpointError(
            f"config.json: mlp_layer_types must be of hash_moe, moe, got {unknown!r}"
        )
    return tuple(name == "hash_moe" for name in named)


def _read_rope(hf: HfValues, label: str) -> RopeConfig:
    """One of the two: `main` is plain, `compress` may be stretched, with a base of its own."""
    head_dim = hf.integer("head_dim")
    given = hf.mapping("rope_parameters") or hf.mapping("rope_scaling")
    share = hf.number("partial_rotary_factor", hf.integer("qk_rope_head_dim", 64) / head_dim)
    if isinstance(given.get(label), Mapping):
        own = dict(given[label])
    elif label == "main":
        own = {"rope_theta": hf.number("rope_theta", 10000.0)}
    else:
        own = given | {"rope_theta": hf.number("compress_rope_theta")}
        if "yarn" in (own.get("rope_type"), own.get("type")):
            own.setdefault("attention_factor", 1.0)
    own.setdefault("partial_rotary_factor", share)
    context = hf.integer("max_position_embeddings")
    values = {"rope_parameters": own, "max_position_embeddings": context}
    return read_rope(HfValues(values), head_dim=head_dim, is_partial=True)
