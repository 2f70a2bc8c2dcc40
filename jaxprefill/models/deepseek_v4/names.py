"""DeepSeek-V4's tensors: what the parameters are made of, and the names they are published under.

The names that the model's own inference code has are turned into those of transformers' modules;
transformers saves a mixture of both.
"""

from jaxprefill.config import ModelConfig
from jaxprefill.models.decoder import Fused, TensorIndex
from jaxprefill.models.deepseek_v4.modules import latent_of
from jaxprefill.models.moe import expert_sources

_WORDS = {
    "embed": "embed_tokens",
    "head": "lm_head",
    "attn": "self_attn",
    "attn_norm": "input_layernorm",
    "attn_sink": "sinks",
    "ffn": "mlp",
    "ffn_norm": "post_attention_layernorm",
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "q_norm": "q_a_norm",
    "wkv": "kv_proj",
    "wgate": "gate_proj",
    "ape": "position_bias",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_PHRASES = (
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
    ("hc_head_", "hc_head.hc_"),
    (".self_attn.indexer.compressor.", ".self_attn.compressor.indexer."),
    (".self_attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (".self_attn.indexer.", ".self_attn.compressor.indexer."),
    (".compressor.norm.", ".compressor.kv_norm."),
    (".indexer.norm.", ".indexer.kv_norm."),
    (".self_attn.norm.", ".self_attn.kv_norm."),  # so transformers 5 saves it
    (".gate.bias", ".gate.e_score_correction_bias"),
)
_EXPERTS = ".experts."


def parts_of(name: str, shape: tuple[int, ...]) -> dict[str, TensorIndex]:
    """See `decoder.Decoder`; layers that predict more than the next token are left out."""
    if name.removeprefix("model.").startswith("mtp."):
        return {}
    name = ".".join(_WORDS.get(word, word) for word in name.split("."))
    for theirs, ours in _PHRASES:
        name = name.replace(theirs, ours)
    prefix, is_expert, part = name.partition(_EXPERTS)
    if is_expert and part in ("gate_up_proj", "down_proj"):  # of all experts, as modules have them
        return _parts_of_experts(prefix + _EXPERTS, part, shape)
    return {name: ()}


def _parts_of_experts(prefix: str, part: str, shape: tuple[int, ...]) -> dict[str, TensorIndex]:
    if part == "down_proj":
        return {f"{prefix}{expert}.down_proj.weight": (expert,) for expert in range(shape[0])}
    half = shape[1] // 2
    halves = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}
    return {
        f"{prefix}{expert}.{one}.weight": (expert, rows)
        for expert in range(shape[0])
        for one, rows in halves.items()
    }


def sources_of(config: ModelConfig) -> dict[str, Fused]:
    """See `decoder.Decoder.sources`."""
    sources = {"embedding": Fused(("model.embed_tokens.weight",))}
    if config.has_own_head:
        sources["head"] = Fused(("lm_head.weight",))
    norms: list[str] = []
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        norms += [f"{name}.input_layernorm.weight", f"{name}.post_attention_layernorm.weight"]
        own = _layer_sources(config, layer, name)
        sources |= {f"layers.{layer}.{path}": fused for path, fused in own.items()}
    sources["norms"] = Fused((*norms, "model.norm.weight"), is_stacked=True)
    for ours, theirs in (("function", "hc_fn"), ("base", "hc_base"), ("scale", "hc_scale")):
        sources[f"hyper_head.{ours}"] = Fused((f"model.hc_head.{theirs}",))
    return sources


def _layer_sources(config: ModelConfig, layer: int, name: str) -> dict[str, Fused]:
    latent = latent_of(config)
    kind, attention, moe = latent.layer_kinds[layer], f"{name}.self_attn", f"{name}.mlp"
    down = (f"{attention}.q_a_proj.weight", f"{attention}.kv_proj.weight")
    found = {
        "attention.down": Fused(down, (latent.query_rank, config.head_dim)),
        "attention.query": Fused((f"{attention}.q_b_proj.weight",)),
        "attention.group": Fused((f"{attention}.o_a_proj.weight",)),
        "attention.output": Fused((f"{attention}.o_b_proj.weight",)),
        "attention.query_norm": Fused((f"{attention}.q_a_norm.weight",)),
        "attention.key_norm": Fused((f"{attention}.kv_norm.weight",)),
        "attention.sinks": Fused((f"{attention}.sinks",)),
    }
    if kind != "sliding":
        parts = 2 if kind == "sparse" else 1
        own = _compressor_sources(f"{attention}.compressor", parts * config.head_dim)
        found |= {f"attention.compressor.{path}": fused for path, fused in own.items()}
    if kind == "sparse":
        indexer = f"{attention}.compressor.indexer"
        own = _compressor_sources(indexer, 2 * latent.index_dim)
        found |= {f"attention.indexer.compressor.{path}": fused for path, fused in own.items()}
        found["attention.indexer.query"] = Fused((f"{indexer}.q_b_proj.weight",))
        found["attention.indexer.weight"] = Fused((f"{indexer}.scorer.weights_proj.weight",))
    for ours, theirs in (("attention_mixing", "attn_hc"), ("mlp_mixing", "ffn_hc")):
        for part, tensor in (("function", "fn"), ("base", "base"), ("scale", "scale")):
            found[f"{ours}.{part}"] = Fused((f"{name}.{theirs}.{tensor}",))
    return found | _moe_sources(config, moe, is_hashed=latent.hash_layers[layer])


def _compressor_sources(name: str, size: int) -> dict[str, Fused]:
    pair = (f"{name}.kv_proj.weight", f"{name}.gate_proj.weight")
    return {
        "kv_gate": Fused(pair, (size, size)),
        "bias": Fused((f"{name}.position_bias",)),
        "norm": Fused((f"{name}.kv_norm.weight",)),
    }


def _moe_sources(config: ModelConfig, name: str, *, is_hashed: bool) -> dict[str, Fused]:
    assert config.moe is not None, "every layer has experts"
    shared = tuple(f"{name}.shared_experts.{part}_proj.weight" for part in ("gate", "up"))
    if is_hashed:
        choice = {"moe.table": Fused((f"{name}.gate.tid2eid",), below=config.moe.num_experts)}
    else:
        choice = {"moe.bias": Fused((f"{name}.gate.e_score_correction_bias",))}
    own = {
        "moe.shared_gate_up": Fused(shared, (config.mlp_size,) * 2),
        "moe.shared_down": Fused((f"{name}.shared_experts.down_proj.weight",)),
    }
    return expert_sources(name, config.moe.num_experts) | choice | own
