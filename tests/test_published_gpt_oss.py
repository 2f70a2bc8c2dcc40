"""gpt-oss as it is published: experts in MXFP4, everything else in bfloat16."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxprefill.errors import CheckpointError
from jaxprefill.models.gpt_oss import GptOss
from jaxprefill.models.registry import read_config
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.weights.huggingface import HuggingFaceCheckpoint
from tests.folders import assert_parameters_are, write_json, write_tokenizer
from tests.oracle.cases import CASES
from tests.tiny import TensorsCheckpoint

HIDDEN, MLP, EXPERTS = 64, 32, 3
HF = next(case.hf for case in CASES if case.name == "gpt_oss_sinks") | dict(
    num_hidden_layers=1, hidden_size=HIDDEN, intermediate_size=MLP, num_local_experts=EXPERTS,
    quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
)  # fmt: skip
STACK = "model.layers.0.mlp.experts."


def packed(rng, outputs, inputs):
    """(blocks, scales, the weight [experts, inputs, outputs] they stand for)."""
    numbers = rng.integers(0, 16, (EXPERTS, outputs, inputs)).astype(np.uint8)
    blocks = (numbers[..., ::2] | numbers[..., 1::2] << 4).reshape(EXPERTS, outputs, -1, 16)
    scales = rng.integers(110, 130, (EXPERTS, outputs, inputs // 32)).astype(np.uint8)
    values = numbers.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, axis=-1)
    return blocks, scales, (values * powers).swapaxes(1, 2).astype(ml_dtypes.bfloat16)


def make_model():
    """(a folder's tensors, what they stand for by canonical name)."""
    rng, config = np.random.default_rng(0), read_config(HF)
    tree = model_tree(config, jnp.dtype(jnp.bfloat16), make_mesh())
    shapes = dict(zip(tree.paths, tree.whole_shapes, strict=True))
    weights = {}
    for path, fused in GptOss.sources(config).items():
        for at, name in enumerate(fused.sources):
            shape = shapes[path][1:] if fused.is_stacked else shapes[path]
            shape = (fused.rows[at], *shape[1:]) if fused.rows else shape
            weights[name] = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
    stored = dict(weights)
    for name, outputs, inputs in (("gate_up_proj", 2 * MLP, HIDDEN), ("down_proj", HIDDEN, MLP)):
        blocks, scales, weights[STACK + name] = packed(rng, outputs, inputs)
        del stored[STACK + name]
        stored |= {f"{STACK}{name}_blocks": blocks, f"{STACK}{name}_scales": scales}
    return stored, weights


def open_model(folder, tensors, **config):
    write_json(folder / "config.json", HF | config)
    save_file(tensors, folder / "model.safetensors")
    return HuggingFaceCheckpoint(folder)


def test_experts_in_mxfp4_are_what_they_stand_for(tmp_path):
    stored, weights = make_model()
    found = open_model(tmp_path, stored)
    wanted = TensorsCheckpoint(found.config, weights)
    write_tokenizer(tmp_path, wanted)
    assert_parameters_are(found, wanted, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, {"quantization_config": {"quant_method": "awq"}}, "quant_method mxfp4, or fp8.*'awq'"),
        ({}, {"quantization_config": None}, "has scales, so config.json must hold"),
        (
            {"down_proj_scales": np.ones((EXPERTS, HIDDEN, 2), np.uint8)},
            {},
            r"down_proj_blocks' of shape \[3, 32, 64\] must have scales of shape \[3, 64, 1\]",
        ),
        ({"down_proj_scales": None}, {}, "down_proj_blocks' has type U8, which is not supported"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, config, message):
    stored, _ = make_model()
    stored |= {STACK + name: value for name, value in changes.items()}
    stored = {name: value for name, value in stored.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path, stored, **config)
