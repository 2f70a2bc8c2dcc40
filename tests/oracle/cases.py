"""What the oracle computes: tiny models as config.json describes them. Needs no torch.

Configs are written in transformers 4's way; the fixtures hold what transformers 5 makes of them.
"""

from dataclasses import dataclass, field
from typing import Any

VOCAB = 258
SIZES = dict(
    vocab_size=VOCAB,
    num_hidden_layers=2,
    intermediate_size=56,
    max_position_embeddings=160,
    rms_norm_eps=1e-5,
    pad_token_id=0,
    bos_token_id=257,
    eos_token_id=256,
)
PHI3 = dict(
    hidden_size=48,
    num_attention_heads=3,
    num_key_value_heads=1,
    partial_rotary_factor=0.75,
    original_max_position_embeddings=64,
    rope_theta=1e4,
    rope_scaling={
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.5, 2.0, 2.5, 3.0, 4.0, 6.0],
    },
)


@dataclass(frozen=True, kw_only=True)
class OracleCase:
    """A model, prompts, and how the engine is started for them.

    Attributes:
        lengths: tokens of each prompt; the first `num_greedy` of them are continued greedily.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    lengths: tuple[int, ...] = (5, 37, 1, 90)
    num_greedy: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def hf(self) -> dict[str, Any]:
        """The config.json."""
        return {"architectures": [self.architecture]} | SIZES | self.config


CASES = (
    OracleCase(
        name="llama_llama3_biases_one_kv_head",
        architecture="LlamaForCausalLM",
        config=dict(
            hidden_size=40,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            rope_theta=5e5,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    OracleCase(
        name="llama_linear_tied_no_groups",
        architecture="LlamaForCausalLM",
        config=dict(
            hidden_size=48,
            num_attention_heads=3,
            tie_word_embeddings=True,
            rope_scaling={"type": "linear", "factor": 2.5},
        ),
        options=dict(prefill_backend="eager"),
    ),
    OracleCase(
        name="mistral_window_dynamic",
        architecture="MistralForCausalLM",
        config=dict(
            hidden_size=56,
            num_attention_heads=7,
            num_key_value_heads=1,
            head_dim=12,
            sliding_window=9,
            rope_scaling={"rope_type": "dynamic", "factor": 2.0},
        ),
    ),
    OracleCase(
        name="qwen2_yarn_window_in_upper_layers",
        architecture="Qwen2ForCausalLM",
        config=dict(
            num_hidden_layers=3,
            hidden_size=48,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=21,
            max_window_layers=1,
            rope_theta=1e6,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 40,
            },
        ),
        options=dict(prefill_backend="layerwise"),
    ),
    OracleCase(
        name="qwen3_biases_wide_heads",
        architecture="Qwen3ForCausalLM",
        config=dict(
            hidden_size=40,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            attention_bias=True,
            rope_theta=1e6,
        ),
    ),
    OracleCase(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        config=dict(
            hidden_size=40,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            moe_intermediate_size=12,
            num_experts=10,
            num_experts_per_tok=3,
            norm_topk_prob=True,
        ),
    ),
    OracleCase(
        name="phi3_longrope_short",
        architecture="Phi3ForCausalLM",
        config=PHI3 | dict(sliding_window=30),
        lengths=(5, 37, 1, 60),
        options=dict(context_length=64),
    ),
    OracleCase(
        name="phi3_longrope_long",
        architecture="Phi3ForCausalLM",
        config=PHI3 | dict(tie_word_embeddings=True),
        lengths=(65, 90, 120),
    ),
    OracleCase(
        name="gemma2_soft_caps",
        architecture="Gemma2ForCausalLM",
        config=dict(
            hidden_size=40,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=9,
            sliding_window=11,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=9.0,
        ),
    ),
    OracleCase(
        name="gemma3_two_ropes",
        architecture="Gemma3ForCausalLM",
        config=dict(
            num_hidden_layers=3,
            hidden_size=40,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=20,
            sliding_window=11,
            sliding_window_pattern=3,
            rope_theta=1e5,
            rope_local_base_freq=1e3,
            rope_scaling={"rope_type": "linear", "factor": 2.0},
        ),
        options=dict(prefill_backend="layerwise"),
    ),
    OracleCase(
        name="gpt_oss_sinks",
        architecture="GptOssForCausalLM",
        config=dict(
            hidden_size=40,
            intermediate_size=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=11,
            swiglu_limit=1.5,
            rope_theta=1.5e5,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 40,
            },
        ),
    ),
)

# Classifiers over the bodies above, whose prompts may end in padding tokens.
PADDING = SIZES["pad_token_id"]
CLASSIFIERS = (
    OracleCase(
        name="qwen3_classifier_of_three_labels",
        architecture="Qwen3ForSequenceClassification",
        config=dict(
            hidden_size=40,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            rope_theta=1e6,
            id2label={"0": "bad", "1": "fair", "2": "good"},
        ),
    ),
    OracleCase(
        name="mistral_classifier_of_one_label",
        architecture="MistralForSequenceClassification",
        config=dict(
            hidden_size=48,
            num_attention_heads=3,
            num_key_value_heads=1,
            sliding_window=9,
            id2label={"0": "relevance"},
        ),
    ),
)

ROPE_POSITIONS = (0, 1, 63, 4095, 99_991, 131_071)
_NO_ROPE_OF_THEIR_OWN = (
    "mistral_window_dynamic",
    "qwen3_moe",
    "gemma2_soft_caps",
    "gemma3_two_ropes",  # two tables, which the logprobs show
    "gpt_oss_sinks",
)
ROPE_CASES = {case.name: case.hf for case in CASES if case.name not in _NO_ROPE_OF_THEIR_OWN} | {
    "default_head_128": CASES[0].hf
    | dict(hidden_size=512, num_attention_heads=4, head_dim=128, rope_scaling=None),
    "yarn_unrounded_with_mscale": CASES[0].hf
    | dict(
        head_dim=80,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.4,
        },
    ),
}
