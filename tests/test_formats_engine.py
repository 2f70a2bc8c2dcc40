"""One tiny model in every format gives one set of logprobs, through the engine."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxprefill.engine import Engine
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.weights.load import load_leaves
from jaxprefill.weights.locate import open_checkpoint
from tests.folders import write_folder
from tests.gguf_files import write_gguf
from tests.reference import prompt_logprobs
from tests.tiny import SMALL, TinyCheckpoint

TINY = TinyCheckpoint(seed=4)  # the shapes of the shared engine, so that nothing compiles anew
# The path with the fewest executables: what is tested is how weights get there. JAX's own cache
# serves both formats, whose vocabularies differ; a store would not.
FEW = SMALL | {"prefill_backend": "eager", "store": False}
PROMPTS = [[5, 200, 31, 7], list(range(40, 90)), [257, 1, 2]]


def logprobs(path, **options) -> list[np.ndarray]:
    with Engine(str(path), **(FEW | options)) as engine:
        return [np.array(found[1:]) for found in engine.logprobs(PROMPTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("hf") / "tiny", TINY, num_shards=2)


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """Float64 logprobs."""
    return [prompt_logprobs(TINY, ids) for ids in PROMPTS]


def test_a_hugging_face_folder_equals_the_oracle_and_chats(folder, expected):
    with Engine(str(folder), **FEW) as engine:
        for found, wanted in zip(engine.logprobs(PROMPTS), expected, strict=True):
            np.testing.assert_allclose(found[1:], wanted, atol=1e-4)
        text = "<user>hi<a>"
        assert engine.tokenizer.encode(text)[0] == 257  # tokenizer.json adds BOS to a text
        [answer] = engine.chat([{"role": "user", "content": "hi"}])
        assert answer.prompt_tokens == len(engine.tokenizer.encode(text)) - 1  # and chat does not


def test_bfloat16_weights_reach_the_device_bit_for_bit(tmp_path):
    held = open_checkpoint(str(write_folder(tmp_path, TINY, dtype=ml_dtypes.bfloat16)))
    tree = model_tree(held.config, jnp.dtype("bfloat16"), make_mesh())
    found = np.asarray(tree.leaf(load_leaves(held, tree), "embedding"))
    wanted = TINY.tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))


def test_a_gguf_file_of_the_same_weights_gives_the_same_logprobs(folder, expected, tmp_path):
    hf = json.loads((folder / "config.json").read_text())
    found = logprobs(write_gguf(tmp_path / "tiny.gguf", hf, TINY.tensors))
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-4)
