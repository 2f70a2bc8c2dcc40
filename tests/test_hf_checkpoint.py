"""Hugging Face folders: both layouts, shards, what is left out, and every way they can be wrong."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxprefill.errors import CheckpointError
from jaxprefill.weights.checkpoint import Checkpoint
from jaxprefill.weights.huggingface import HuggingFaceCheckpoint
from jaxprefill.weights.load import check_names
from jaxprefill.weights.locate import open_checkpoint
from tests.folders import hf_config, write_folder, write_json
from tests.tiny import TinyCheckpoint

TINY = TinyCheckpoint(seed=3)
UNTIED = TinyCheckpoint(seed=3, is_embedding_tied=False)


def opened(folder: Path) -> Checkpoint:
    """As the engine does before it compiles: config, names and tokenizer."""
    found = open_checkpoint(str(folder))
    check_names(found)
    assert found.tokenizer
    return found


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_come_back_bit_for_bit_in_the_type_they_are_stored_in(tmp_path, num_shards, dtype):
    found = opened(write_folder(tmp_path / "m", UNTIED, num_shards=num_shards, dtype=dtype))
    assert isinstance(found, Checkpoint)
    assert found.name == "m"
    assert found.config == UNTIED.config
    assert found.names() == UNTIED.names()
    for name, value in UNTIED.tensors.items():
        read = found.read(name)
        assert read.dtype == dtype
        assert read.shape == found.shape(name) == value.shape
        np.testing.assert_array_equal(read, value.astype(dtype))


def test_the_layout_of_transformers_5_is_the_same_model(tmp_path):
    folder = write_folder(
        tmp_path,
        TINY,
        rope_theta=None,
        torch_dtype=None,
        dtype="float32",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    found = opened(folder)
    assert found.config == TINY.config
    assert found.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"


def test_names_without_the_prefix_of_the_headed_model_get_it(tmp_path):
    found = opened(write_folder(tmp_path, TINY, rename=lambda name: name.removeprefix("model.")))
    assert found.names() == TINY.names()
    np.testing.assert_array_equal(
        found.read("model.norm.weight"), TINY.tensors["model.norm.weight"]
    )


def test_buffers_and_the_head_of_a_tied_model_are_left_out(tmp_path):
    write_folder(tmp_path, TINY)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.rotary_emb.inv_freq": np.ones(8, np.int64),
        "lm_head.weight": np.zeros_like(TINY.tensors["model.embed_tokens.weight"]),
    }
    save_file(TINY.tensors | extra, tmp_path / "model.safetensors")
    assert opened(tmp_path).names() == TINY.names()


def test_other_tensors_are_unexpected(tmp_path):
    write_folder(tmp_path, TINY)
    save_file(TINY.tensors | {"vision.weight": np.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"vision\.weight.* has type F64"):
        open_checkpoint(str(tmp_path))
    extra = {"vision.weight": np.ones(2, np.float32)}
    save_file(TINY.tensors | extra, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected: vision\.weight"):
        opened(tmp_path)


def drop(name: str):
    return lambda folder: (folder / name).unlink()


def put(name: str, content):
    def change(folder: Path) -> None:
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def edit(name: str, **values):
    def change(folder: Path) -> None:
        write_json(folder / name, json.loads((folder / name).read_text()) | values)

    return change


def cut(name: str, kept: int):
    return lambda folder: put(name, (folder / name).read_bytes()[:kept])(folder)


def only(pickle: str):
    def change(folder: Path) -> None:
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        (folder / pickle).write_bytes(b"\x80\x02.")

    return change


def move_tensor(folder: Path) -> None:
    """The index promises a tensor in a file that does not hold it."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = SHARDS[0]
    index["weight_map"]["model.embed_tokens.weight"] = SHARDS[1]
    write_json(folder / INDEX, index)


def float8(folder: Path) -> None:
    tensors = load_file(folder / SHARDS[0])
    name = min(tensors)
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors, folder / SHARDS[0])


INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
NAMED = [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]

WRONG = {
    "no config": (drop("config.json"), r"must hold config\.json, which is missing"),
    "config is no JSON": (put("config.json", "{"), r"config\.json: must be JSON, but Expecting"),
    "config is not UTF-8": (put("config.json", b"\xff\xfe{}"), r"config\.json: must be JSON, but"),
    "config is a list": (put("config.json", []), r"config\.json: must be a JSON object, got list"),
    "a size is no number": (edit("config.json", hidden_size="big"), "hidden_size must be .*'big'"),
    "quantised": (
        edit("config.json", quantization_config={"quant_method": "gptq"}),
        "quantised weights in safetensors are not supported; use the model's",
    ),
    "no weights": (drop(INDEX), "2 safetensors files need a model.safetensors.index.json"),
    "pickles": (only("pytorch_model.bin"), r"found pytorch_model\.bin.*convert them to safetens"),
    "nothing at all": (only("readme.md"), "neither is there; fetch them"),
    "no shard": (drop(SHARDS[1]), r"00002-of-00002\.safetensors is missing \(1 of 2\)"),
    "index is a list": (put(INDEX, []), "must be a JSON object, got list"),
    "index without map": (put(INDEX, {}), "weight_map must map tensor names to files, got None"),
    "index leads away": (put(INDEX, {"weight_map": {"a": "../x"}}), r"same folder, got '\.\./x'"),
    "index of others": (move_tensor, r"lacks model\.(norm|embed_tokens)\.weight; fetch both"),
    "header cut": (cut(SHARDS[0], 40), r"00001-of-00002\.safetensors: must be a whole safetensors"),
    "data cut": (cut(SHARDS[0], 9000), "must be a whole safetensors file, but .* fetch it again"),
    "empty shard": (put(SHARDS[0], b""), "must be a whole safetensors file"),
    "float8": (float8, "has type F8_E4M3, which is not supported; use weights in F32, F16, BF16"),
    "no head": (
        edit("config.json", tie_word_embeddings=False),
        r"lm_head\.weight must be there, as tie_word_embeddings is false.* set tie_word",
    ),
    "no tokenizer": (drop("tokenizer.json"), r"must hold tokenizer\.json, which is missing; fetch"),
    "damaged tokenizer": (put("tokenizer.json", "{}"), r"tokenizer\.json: must be a tokenizer"),
    "unknown eos token": (
        edit("tokenizer_config.json", eos_token="<absent>"),
        r"eos_token must be a token of tokenizer\.json, got '<absent>'",
    ),
    "template is a number": (
        edit("tokenizer_config.json", chat_template=5),
        "chat_template must be a text or a list of .* got 5",
    ),
    "generation_config is wrong": (
        put("generation_config.json", {"eos_token_id": ["</s>"]}),
        r"generation_config\.json: eos_token_id must be a token id or a list of them, got \['</s>",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_with_rule_and_remedy(tmp_path, change, message):
    write_folder(tmp_path / "m", TINY, num_shards=2)
    change(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path / "m")
    assert str(tmp_path / "m") in str(caught.value)


def test_a_sentencepiece_model_alone_is_refused_by_name(tmp_path):
    write_folder(tmp_path, TINY)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"missing; tokenizer\.model is not read; fetch it"):
        opened(tmp_path)


def test_an_absent_tensor_is_named(tmp_path):
    found = HuggingFaceCheckpoint(write_folder(tmp_path, TINY))
    for ask in (found.read, found.shape):
        with pytest.raises(CheckpointError, match=r"no tensor named 'lm_head\.weight'"):
            ask("lm_head.weight")


def test_one_file_of_another_name_needs_no_index(tmp_path):
    write_folder(tmp_path, TINY)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert opened(tmp_path).names() == TINY.names()


def test_the_config_is_that_of_the_folder_whatever_its_weights(tmp_path):
    write_folder(tmp_path, TINY)
    write_json(tmp_path / "config.json", hf_config(TINY, max_position_embeddings=64))
    assert opened(tmp_path).config.context_length == 64


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_never_escape(tmp_path, data):
    if not (tmp_path / "config.json").exists():
        write_folder(tmp_path, TINY, num_shards=2)
        put("generation_config.json", {"eos_token_id": [256, 3]})(tmp_path)
    path = data.draw(st.sampled_from(sorted(tmp_path.iterdir())))
    clean = path.read_bytes()
    start = data.draw(st.integers(0, min(len(clean), 2000)))
    removed = data.draw(st.integers(0, 8))
    added = data.draw(st.sampled_from([b"", b"x", b"\xff", b'"', b"null", b"-1", b"{}", b"1e999"]))
    path.write_bytes(clean[:start] + added + clean[start + removed :])
    try:
        found = opened(tmp_path)
        found.tokenizer.encode("hi <bos>")
        for name in found.names():
            found.read(name)
    except CheckpointError:
        pass
    finally:
        path.write_bytes(clean)
