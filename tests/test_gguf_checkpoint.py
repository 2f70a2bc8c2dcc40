"""A GGUF file as a checkpoint: config, names, row order, and refusals of what is not computed."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxprefill.errors import CheckpointError
from jaxprefill.weights.checkpoint import Checkpoint
from jaxprefill.weights.gguf import GgufCheckpoint
from jaxprefill.weights.known import KNOWN_MODELS
from jaxprefill.weights.locate import open_checkpoint

HIDDEN, MLP, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
TOKENS = ["<eos>", "a", "b", "ab", "Ġ", "<user>"]
ROWS = len(TOKENS) + 2  # the embedding is padded

LAYER_SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (Q_HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, Q_HEADS * HEAD_DIM),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}
ONES = np.ones(HEAD_DIM // 2, np.float32)
Change = Callable[[gguf.GGUFWriter], None]


def no_change(_: gguf.GGUFWriter) -> None:
    """A plain model."""


def tensor_values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (ROWS, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_model(
    path: Path,
    *,
    kind: T = T.F32,
    architecture: str = "llama",
    change: Change = no_change,
    omit: str = "nothing",
) -> dict[str, np.ndarray]:
    """Writes a tiny model; matrices quantised to `kind`. Returns values by GGUF name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(Q_HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 1, 1, 1, 1, 4])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    values = tensor_values()
    for name, value in values.items():
        if omit in name:
            continue
        stored = kind if value.ndim == 2 else T.F32
        writer.add_tensor(name, gguf.quants.quantize(value, stored), raw_dtype=stored)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def test_config_comes_from_the_metadata(model_path: Path) -> None:
    write_model(model_path)
    checkpoint: Checkpoint = GgufCheckpoint(model_path)
    config = checkpoint.config
    assert checkpoint.name == "tiny"
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.mlp_size) == (ROWS, HIDDEN, MLP)
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.context_length, config.rope.theta) == (16, 128, 5000.0)
    assert config.norm_eps == pytest.approx(1e-5)
    assert config.is_embedding_tied


def test_names_are_canonical_and_unknown_ones_are_kept(model_path: Path) -> None:
    def add_unknown(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.mystery.weight", np.ones((2, 2), np.float32))
        writer.add_tensor("blk.1.attn_q.bias", np.ones(Q_HEADS * HEAD_DIM, np.float32))

    write_model(model_path, change=add_unknown)
    names = GgufCheckpoint(model_path).names()
    assert len(names) == 2 + LAYERS * len(LAYER_SHAPES) + 2
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= names
    assert {
        f"model.layers.1.{name}.weight"
        for name in (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    } <= names
    assert {"blk.0.mystery.weight", "model.layers.1.self_attn.q_proj.bias"} <= names


@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1], ids=str)
def test_weights_keep_orientation_in_every_type(model_path: Path, kind: T) -> None:
    values = write_model(model_path, kind=kind)
    checkpoint = GgufCheckpoint(model_path)
    for name, gguf_name in [
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
    ]:
        read = checkpoint.read(name)
        assert read.dtype == np.float32
        assert read.shape == checkpoint.shape(name) == values[gguf_name].shape
        np.testing.assert_allclose(read, values[gguf_name], atol=0.4 if kind != T.F32 else 0)


def rotate_pairs(vectors: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """RoPE over neighbouring rows, as llama GGUFs are stored for."""
    even, odd = vectors[..., 0::2], vectors[..., 1::2]
    turned = [
        even * np.cos(angles) - odd * np.sin(angles),
        even * np.sin(angles) + odd * np.cos(angles),
    ]
    return np.stack(turned, axis=-1).reshape(vectors.shape)


def rotate_halves(vectors: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """RoPE over the two halves of a head, as Hugging Face computes it."""
    first, second = np.split(vectors, 2, axis=-1)
    turned = [
        first * np.cos(angles) - second * np.sin(angles),
        first * np.sin(angles) + second * np.cos(angles),
    ]
    return np.concatenate(turned, axis=-1)


def test_unpermuted_rows_give_the_same_attention_scores(model_path: Path) -> None:
    values = write_model(model_path)
    checkpoint = GgufCheckpoint(model_path)
    hidden = np.random.default_rng(2).standard_normal((5, HIDDEN), dtype=np.float32)
    angles = np.arange(5)[:, None, None] * 0.9 ** np.arange(HEAD_DIM // 2)

    def heads(matrix: np.ndarray) -> np.ndarray:
        return (hidden @ matrix.T).reshape(5, -1, HEAD_DIM)

    def scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        grouped = np.repeat(k, Q_HEADS // KV_HEADS, axis=1)
        return np.einsum("qhd,khd->hqk", q, grouped)

    stored = scores(
        rotate_pairs(heads(values["blk.0.attn_q.weight"]), angles),
        rotate_pairs(heads(values["blk.0.attn_k.weight"]), angles),
    )
    read = scores(
        rotate_halves(heads(checkpoint.read("model.layers.0.self_attn.q_proj.weight")), angles),
        rotate_halves(heads(checkpoint.read("model.layers.0.self_attn.k_proj.weight")), angles),
    )
    np.testing.assert_allclose(read, stored, rtol=1e-4, atol=1e-3)


def test_an_output_matrix_unties_the_embedding(model_path: Path) -> None:
    write_model(
        model_path,
        change=lambda writer: writer.add_tensor("output.weight", np.ones((ROWS, HIDDEN), "f4")),
    )
    checkpoint = GgufCheckpoint(model_path)
    assert not checkpoint.config.is_embedding_tied
    assert checkpoint.shape("lm_head.weight") == (ROWS, HIDDEN)


def test_head_dim_may_differ_from_hidden_over_heads(model_path: Path) -> None:
    def wide_heads(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(32)
        writer.add_value_length(32)
        writer.add_rope_dimension_count(32)

    write_model(model_path, change=wide_heads)
    checkpoint = GgufCheckpoint(model_path)
    assert checkpoint.config.head_dim == 32
    with pytest.raises(CheckpointError, match="must have 4 heads x 32 rows, got 64"):
        checkpoint.read("model.layers.0.self_attn.q_proj.weight")


def test_a_llama_file_with_a_window_is_mistral_s(model_path: Path) -> None:
    write_model(model_path, change=lambda w: w.add_sliding_window(32))
    config = GgufCheckpoint(model_path).config
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 32)


def test_the_pooling_of_embeddings_is_that_of_the_file(model_path: Path) -> None:
    for kind, wanted in ((None, "last"), ("NONE", "last"), ("LAST", "last"), ("MEAN", "mean")):
        write_model(
            model_path,
            change=lambda w, kind=kind: kind and w.add_pooling_type(gguf.PoolingType[kind]),
        )
        assert GgufCheckpoint(model_path).config.pooling.kind == wanted


def test_equal_head_counts_of_all_layers_are_one_count(model_path: Path) -> None:
    write_model(model_path, change=lambda w: w.add_array("llama.attention.head_count_kv", [2, 2]))
    assert GgufCheckpoint(model_path).config.num_kv_heads == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.add_string("llama.rope.scaling.type", "ntk"),
            "none, linear, yarn or longrope",
        ),
        (
            lambda w: w.add_rope_scaling_factor(-8.0),
            "rope.scaling.factor must be a positive number",
        ),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            r"longrope needs rope_factors_long\.weight and rope_factors_short\.weight, which are",
        ),
        (
            lambda w: (w.add_rope_scaling_factor(8.0), w.add_tensor("rope_freqs.weight", ONES)),
            "rope.scaling.type must be none beside tensors of RoPE factors, got 'linear'",
        ),
        (lambda w: w.add_tensor("rope_freqs.weight", ONES[:7]), "longrope must hold 8 numbers"),
        (lambda w: w.add_causal_attention(False), "attention.causal must be true"),
        (lambda w: w.add_pooling_type(gguf.PoolingType.CLS), r"pooling_type must be .* got 2"),
        (lambda w: w.add_logit_scale(0.5), "logit_scale must be 1 to be supported, got 0.5"),
        (lambda w: w.add_expert_count(8), "expert_count is 8"),
        (lambda w: w.add_value_length(8), "value_length must be 16 to be supported, got 8"),
        (lambda w: w.add_rope_dimension_count(8), "value_length|head|rows|dimension_count"),
        (lambda w: w.add_array("llama.attention.head_count_kv", [2, 1]), r"got \[2, 1\]"),
        (lambda w: w.add_head_count_kv(3), r"num_q_heads \(4\) must be a multiple"),
        (lambda w: w.add_block_count(3), "block_count is 3 but tensors of 2 layers"),
        (lambda w: w.add_embedding_length(65), "embedding_length must be 64"),
        (lambda w: w.add_string("llama.context_length", "long"), "positive integer, got 'long'"),
        (lambda w: w.add_rope_freq_base(float("nan")), "positive number, got nan"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts of a split GGUF"),
        (lambda w: w.add_tensor("model.norm.weight", np.ones(2, "f4")), "same canonical name"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_computed_is_refused(model_path: Path, change: Change, message: str) -> None:
    def override(writer: gguf.GGUFWriter) -> None:
        before = {key: writer.kv_data[0].pop(key) for key in list(writer.kv_data[0])}
        change(writer)
        writer.kv_data[0] = before | writer.kv_data[0]

    write_model(model_path, change=override)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint = GgufCheckpoint(model_path)
        checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert "tiny.gguf" in str(caught.value)


def test_a_missing_embedding_is_refused(model_path: Path) -> None:
    write_model(model_path, omit="token_embd")
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        GgufCheckpoint(model_path)


def test_another_architecture_is_refused_with_the_supported_ones(model_path: Path) -> None:
    write_model(model_path, architecture="mamba")
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported; .* llama"):
        GgufCheckpoint(model_path)


def test_absent_tensors_are_named(model_path: Path) -> None:
    write_model(model_path)
    with pytest.raises(CheckpointError, match=r"no tensor named 'lm_head\.weight'"):
        GgufCheckpoint(model_path).shape("lm_head.weight")


def test_more_token_ids_than_embedding_rows_are_refused(model_path: Path) -> None:
    many = [f"t{index}" for index in range(ROWS)] + ["a", "b", "ab"]

    def add_tokens(writer: gguf.GGUFWriter) -> None:
        for key in ("tokens", "token_type"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        writer.add_token_list(many)

    write_model(model_path, change=add_tokens)
    with pytest.raises(CheckpointError, match=f"{len(many)} ids but the embedding has {ROWS}"):
        _ = GgufCheckpoint(model_path).tokenizer


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    changes=st.lists(st.tuples(st.integers(0, 2600), st.integers(0, 255)), min_size=1, max_size=3)
)
def test_flipped_header_bytes_never_escape(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    clean = tmp_path / "clean.gguf"
    if not clean.exists():
        write_model(clean)
    data = bytearray(clean.read_bytes())
    for position, value in changes:
        data[position] = value
    flipped = tmp_path / "flipped.gguf"
    flipped.write_bytes(data)
    try:
        checkpoint = GgufCheckpoint(flipped)
        checkpoint.tokenizer.encode("ab <user>")
        for name in checkpoint.names():
            checkpoint.read(name)
    except CheckpointError:
        return


def test_open_checkpoint_reads_a_file(model_path: Path) -> None:
    write_model(model_path)
    assert open_checkpoint(str(model_path)).config.num_layers == LAYERS


def test_the_demo_is_a_known_model() -> None:
    assert [model.name for model in KNOWN_MODELS] == ["demo"]


@pytest.mark.demo
def test_the_demo_model_is_described(demo_path: Path) -> None:
    checkpoint = GgufCheckpoint(demo_path)
    config = checkpoint.config
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (49152, 576, 30)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.mlp_size, config.context_length, config.rope.theta) == (1536, 8192, 100000.0)
    assert config.is_embedding_tied
    assert len(checkpoint.names()) == 272
    assert all(name.startswith("model.") for name in checkpoint.names())
    assert np.isfinite(checkpoint.read("model.layers.29.self_attn.k_proj.weight")).all()


GOLDEN = [
    ("The capital of France is", [504, 3575, 282, 4649, 314]),
    ("Water boils at a temperature of", [12615, 36411, 418, 253, 2779, 282]),
    ("def fibonacci(n):\n    ", [1604, 3987, 46477, 24, 94, 727, 2367]),
    (
        "1, 2, 3, 4, 5, 6, 7,",
        [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28, 216, 39, 28],
    ),
    (
        "Once upon a time, in a small village near the sea,",
        [6403, 1980, 253, 655, 28, 281, 253, 1165, 6560, 2141, 260, 3426, 28],
    ),
    ("The three primary colours are red,", [504, 1296, 3003, 14797, 359, 2382, 28]),
    (
        "Q: What is the largest planet in the Solar System?\nA:",
        [65, 42, 1812, 314, 260, 3995, 3925, 281, 260, 10729, 3829, 47, 198, 49, 42],
    ),
    ("import numpy as np\n\nx = np.", [2017, 6772, 347, 2333, 198, 198, 104, 446, 2333, 30]),
    # Digits are split off before words, so the spaces before one stay together.
    ("def f(n):\n     1", [1604, 275, 24, 94, 727, 3914, 33]),
]
CONTINUATIONS = [
    ([7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33],
     " Paris.\n\nThe answer is: 2018-01"),
    ([1130, 216, 33, 28, 32, 32, 32, 4742, 51, 28, 527, 314, 3571, 2061, 670, 260],
     " around 1,000°C, which is significantly higher than the"),
]  # fmt: skip


@pytest.mark.demo
def test_the_demo_tokenizer_gives_the_golden_ids_and_text(demo_path: Path) -> None:
    tokenizer = GgufCheckpoint(demo_path).tokenizer
    for prompt, ids in GOLDEN:
        assert tokenizer.encode(prompt) == ids
        assert tokenizer.decode(ids) == prompt
    for ids, continuation in CONTINUATIONS:
        assert tokenizer.decode(ids) == continuation


@pytest.mark.demo
def test_the_demo_ends_at_its_own_eos_and_renders_chatml(demo_path: Path) -> None:
    tokenizer = GgufCheckpoint(demo_path).tokenizer
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.vocab_size) == ({2}, 1, 49152)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(1) == 3
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
