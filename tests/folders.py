"""Tiny Hugging Face folders written for tests: a random Llama with a byte-level tokenizer."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import processors

from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.weights.load import check_names, check_shapes, load_leaves
from tests.tiny import TEMPLATE, TinyCheckpoint


def hf_config(checkpoint: TinyCheckpoint, **changes) -> dict:
    """config.json as transformers 4 writes it; a change to None takes the key out."""
    c = checkpoint.config
    values = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.mlp_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_q_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.norm_eps,
        rope_theta=1e4,
        tie_word_embeddings=c.is_embedding_tied,
        hidden_act="silu",
        eos_token_id=256,
        bos_token_id=257,
        torch_dtype="float32",
    )
    return {key: value for key, value in (values | changes).items() if value is not None}


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_tokenizer(folder: Path, checkpoint: TinyCheckpoint, **settings) -> None:
    """tokenizer.json, which adds BOS, and tokenizer_config.json in the layout of transformers 4."""
    backend = checkpoint.tokenizer._backend
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 257)]
    )
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "special": True}}
    values = {"chat_template": TEMPLATE} | named | settings
    kept = {key: value for key, value in values.items() if value is not None}
    write_json(folder / "tokenizer_config.json", kept)


def write_folder(
    folder: Path,
    checkpoint: TinyCheckpoint,
    *,
    dtype=np.float32,
    num_shards: int = 1,
    rename=lambda name: name,
    **changes,
) -> Path:
    """A whole folder, its weights in one file or in several; `changes` go to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", hf_config(checkpoint, **changes))
    write_tokenizer(folder, checkpoint)
    tensors = {rename(name): value.astype(dtype) for name, value in checkpoint.tensors.items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, placed = sorted(tensors), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})
    return folder


def assert_parameters_are(found, wanted, dtype):
    """Whether a checkpoint gives the same parameters as another, to the bit."""
    check_names(found)
    tree = model_tree(found.config, jnp.dtype(dtype), make_mesh())
    check_shapes(found, tree)
    for path, one, other in zip(
        tree.paths, load_leaves(found, tree), load_leaves(wanted, tree), strict=True
    ):
        np.testing.assert_array_equal(one, other, err_msg=path)
