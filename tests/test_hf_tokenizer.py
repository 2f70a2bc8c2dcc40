"""Tokenizers of Hugging Face folders: ids of the library, BOS and EOS, templates, streaming."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxprefill.errors import CheckpointError
from jaxprefill.tokenizer import Detokenizer, Tokenizer
from jaxprefill.weights.hf_tokenizer import read_tokenizer
from tests.folders import write_json, write_tokenizer
from tests.tiny import TinyCheckpoint

TINY = TinyCheckpoint()


def byte_level(folder: Path, **files) -> Tokenizer:
    """A byte-level tokenizer: <eos> is 256, <bos> 257; `files` are settings by file."""
    write_tokenizer(folder, TINY, **files.get("tokenizer_config", {}))
    for name in ("generation_config", "special_tokens_map"):
        if name in files:
            write_json(folder / f"{name}.json", files[name])
    if "post_processor" in files:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = files["post_processor"]
        backend.save(str(folder / "tokenizer.json"))
    return read_tokenizer(folder, files.get("config", {}))


@pytest.mark.parametrize(
    ("files", "ids", "first"),
    [
        ({}, {256}, "<eos>"),
        ({"generation_config": {"eos_token_id": [3, 5]}}, {3, 5, 256}, "<eos>"),
        (
            {"generation_config": {"eos_token_id": 3}, "config": {"eos_token_id": 4}},
            {3, 256},
            "<eos>",
        ),
        ({"generation_config": {}, "config": {"eos_token_id": [4, 256]}}, {4, 256}, "<eos>"),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": 4}}, {4}, None),
        ({"tokenizer_config": {"eos_token": None}}, set(), ""),
    ],
)
def test_generation_ends_at_every_eos_that_the_files_name(tmp_path, files, ids, first):
    tokenizer = byte_level(tmp_path, **files)
    assert tokenizer.eos_ids == ids
    if first is not None:
        tokenizer.chat_templates = {"default": "{{ eos_token }}"}
        assert tokenizer.apply_chat_template([{"role": "user", "content": ""}]) == first


def test_special_tokens_may_stand_in_a_file_of_their_own(tmp_path):
    tokenizer = byte_level(
        tmp_path,
        tokenizer_config={"eos_token": None, "bos_token": None},
        special_tokens_map={"eos_token": {"content": "<eos>"}, "bos_token": "<bos>"},
    )
    assert (tokenizer.eos_ids, tokenizer.bos_id) == ({256}, 257)


def test_a_named_token_becomes_special(tmp_path):
    tokenizer = byte_level(tmp_path, tokenizer_config={"eos_token": "A"})
    [token] = tokenizer.encode("A", add_special_tokens=False)
    assert tokenizer.is_special(token) and tokenizer.eos_ids == {token}


TEMPLATE = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
BYTES = processors.ByteLevel(trim_offsets=False)
NO_BOS = {"add_bos_token": False}


@pytest.mark.parametrize(
    ("post_processor", "settings", "added"),
    [
        (TEMPLATE, {}, [257]),
        (TEMPLATE, {"add_bos_token": True}, [257]),
        (TEMPLATE, {"add_bos_token": False}, [257]),
        (BYTES, {}, []),
        (BYTES, {"add_bos_token": False}, []),
        (BYTES, {"add_bos_token": True}, [257]),
        (BYTES, {"add_bos_token": True, "add_eos_token": True}, [257, 256]),
        (TEMPLATE, {"add_eos_token": True}, [257, 256]),
    ],
)
def test_bos_is_added_once_by_whichever_file_says_so(tmp_path, post_processor, settings, added):
    tokenizer = byte_level(tmp_path, post_processor=post_processor, tokenizer_config=settings)
    text = tokenizer.encode("x", add_special_tokens=False)
    assert len(text) == 1
    assert tokenizer.encode("") == added
    assert tokenizer.encode("x") == [*added[:1], *text, *added[1:]]


def test_cutting_and_filling_up_that_training_left_on_is_off(tmp_path):
    write_tokenizer(tmp_path, TINY)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(read_tokenizer(tmp_path, {}).encode("abcdefgh")) == 9  # BOS and eight letters
    assert len(read_tokenizer(tmp_path, {}).encode("ab")) == 3


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a", "a"),
        ([{"name": "default", "template": "b"}, {"name": "tool_use", "template": "c"}], "b"),
        (None, None),
    ],
)
def test_templates_come_from_the_settings_unless_a_file_holds_one(tmp_path, template, text):
    messages = [{"role": "user", "content": "x"}]
    tokenizer = byte_level(tmp_path, tokenizer_config={"chat_template": template})
    if text is None:
        assert not tokenizer.chat_templates
    else:
        assert tokenizer.apply_chat_template(messages) == text
    (tmp_path / "chat_template.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    assert read_tokenizer(tmp_path, {}).apply_chat_template(messages) == "é"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t", encoding="utf-8")
    both = read_tokenizer(tmp_path, {})
    assert both.apply_chat_template(messages) == "é"
    assert both.apply_chat_template(messages, tools=[1]) == "t"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read as UTF-8"):
        read_tokenizer(tmp_path, {})


def test_ids_above_a_hole_are_known():
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 7}, [])))
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("ab") == [0, 7]
    assert tokenizer.token(3) is None and tokenizer.decode([3]) == ""


def llama2(*, is_legacy: bool) -> tokenizers.Tokenizer:
    """A SentencePiece vocabulary as tokenizer.json holds it, in its two forms."""
    pieces = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "é"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *byte_tokens, *pieces])}
    merges = [("a", "b"), ("b", "c"), ("▁", "ab"), ("▁", "a")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_legacy:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


@pytest.fixture(scope="module", params=[True, False], ids=["legacy", "metaspace"])
def sentencepiece(request, tmp_path_factory) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """The library's tokenizer, and ours of the folder it was saved to."""
    folder = tmp_path_factory.mktemp("llama2")
    backend = llama2(is_legacy=request.param)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "legacy": False}
    write_json(folder / "tokenizer_config.json", settings)
    return backend, read_tokenizer(folder, {})


TEXTS = [
    "ab ab", " ab", "  ab  ", "ab", "", " ", "é", "e\u0301", "ﬁ", "𠜎", "👩\u200d👩\u200d👧",
    "שלום", "a\u2028b\u0085c\r\n", "a\u0000b", "<s>ab</s> ab",
]  # fmt: skip


def test_sentencepiece_ids_are_the_library_s_own(sentencepiece):
    backend, tokenizer = sentencepiece
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
        assert tokenizer.decode(ids) == backend.decode(ids)
        if "<s>" not in text and text[:1] != " ":  # Metaspace adds no second space
            assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.has_byte_tokens) == (1, {2}, True)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 270), st.integers(259, 267)), max_size=40))
@example(ids=[259, 259, 260, 1, 259, 262])
@example(ids=[1, 263, 259, 3 + 0xC3, 3 + 0xA9, 3 + 0xFF, 263])
def test_sentencepiece_streams_what_it_decodes(sentencepiece, ids):
    _, tokenizer = sentencepiece
    stream = Detokenizer(tokenizer)
    streamed = [stream.push(token) for token in ids]
    assert "".join([*streamed, stream.flush()]) == tokenizer.decode(ids)
