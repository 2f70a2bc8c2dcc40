"""Folders of embedding models: what modules.json says, and bodies saved without a head."""

import json

import pytest

from jaxprefill.config import PoolingConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.weights.load import check_names
from jaxprefill.weights.locate import open_checkpoint
from tests.folders import write_folder, write_json
from tests.tiny import TinyCheckpoint

TINY = TinyCheckpoint(seed=3)
HEADLESS = TinyCheckpoint(seed=3, is_embedding_tied=False, has_lm_head=False)
NAMES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "3_Dense"}
LAST, MEAN = ({f"pooling_mode_{name}": True} for name in ("lasttoken", "mean_tokens"))


def modules(*kinds):
    """modules.json, whose types changed their homes over the years."""
    home = "sentence_transformers.models"
    return [
        {"idx": index, "name": str(index), "path": NAMES[kind], "type": f"{home}.{kind}"}
        for index, kind in enumerate(kinds)
    ]


def write_modules(folder, listed, pooling=None):
    write_json(folder / "modules.json", listed)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        flags = {"word_embedding_dimension": 48, "pooling_mode_cls_token": False}
        write_json(folder / "1_Pooling" / "config.json", flags | pooling)


def bare(name):
    return name.removeprefix("model.")


@pytest.mark.parametrize(
    ("kinds", "pooling", "wanted"),
    [
        (("Transformer", "Pooling", "Normalize"), LAST, PoolingConfig()),
        (("Transformer", "Pooling"), MEAN, PoolingConfig(kind="mean", is_normalized=False)),
        (
            ("Transformer", "Pooling", "Normalize"),
            {"pooling_mode": "mean"},
            PoolingConfig(kind="mean"),
        ),
        (("Transformer", "Pooling"), {"pooling_mode": ["lasttoken"], "include_prompt": False},
         PoolingConfig(is_normalized=False)),
        (None, None, PoolingConfig()),
    ],
)  # fmt: skip
def test_the_pooling_is_that_of_the_folder(tmp_path, kinds, pooling, wanted):
    write_folder(tmp_path, TINY)
    if kinds is not None:
        write_modules(tmp_path, modules(*kinds), pooling)
    assert open_checkpoint(str(tmp_path)).config.pooling == wanted


@pytest.mark.parametrize(
    ("listed", "pooling", "said"),
    [
        (modules("Transformer", "Pooling", "Dense"), LAST, "got Transformer, Pooling, Dense; what"),
        ({}, None, "must be a list of"),
        ([{"type": "a.Pooling"}], None, r"must be a list of .*type.*path"),
        ([{"type": "a.Pooling", "path": "../x"}], None, r"beside it, got '\.\./x'"),
        (modules("Transformer", "Pooling"), None, r"1_Pooling/config\.json: cannot be read"),
        (modules("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "got cls_token"),
        (modules("Transformer", "Pooling"), LAST | MEAN, "got lasttoken, mean_tokens"),
        (modules("Transformer", "Pooling"), {}, "one of lasttoken, mean, got none"),
        (modules("Transformer", "Pooling"), {"pooling_mode": 5}, "got 5"),
        (modules("Transformer", "Pooling"), MEAN | {"include_prompt": False}, "include_prompt"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, listed, pooling, said):
    write_folder(tmp_path, TINY)
    write_modules(tmp_path, listed, pooling)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_checkpoint(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "rename"),
    [("LlamaModel", str), ("LlamaModel", bare), ("LlamaForCausalLM", bare)],
)
def test_a_body_without_a_head_opens(tmp_path, architecture, rename):
    write_folder(tmp_path, HEADLESS, rename=rename, architectures=[architecture])
    found = open_checkpoint(str(tmp_path))
    check_names(found)
    assert not found.config.has_lm_head
    assert found.names() == HEADLESS.names()
    assert found.config.architecture == architecture


def test_a_tied_body_keeps_its_head(tmp_path):
    write_folder(tmp_path, TINY, rename=bare)
    assert open_checkpoint(str(tmp_path)).config.has_lm_head
    values = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", values | {"architectures": ["LlamaModel"]})
    assert not open_checkpoint(str(tmp_path)).config.has_lm_head
