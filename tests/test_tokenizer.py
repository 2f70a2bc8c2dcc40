"""Tokenizers built from GGUF metadata, chat templates, and streamed decoding."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxprefill.admission import Admission
from jaxprefill.errors import CheckpointError, RequestError
from jaxprefill.tokenizer import Detokenizer, Message, Tokenizer
from jaxprefill.weights.gguf import GgufCheckpoint
from jaxprefill.weights.gguf_file import MetadataValue
from jaxprefill.weights.gguf_tokenizer import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
PATH = Path("made.gguf")
CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level_metadata(**changes: MetadataValue) -> dict[str, MetadataValue]:
    """Every byte, a few merges, two control tokens and a user-defined one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["he", "ll", "hell", "hello", "Ġhello", "12", "123"]
    tokens = ["<s>", "</s>", "<think>", *alphabet, *merged]
    fields: dict[str, MetadataValue] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array([CONTROL, CONTROL, USER] + [NORMAL] * (len(tokens) - 3)),
        "merges": ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items()}
    return {**metadata, "tokenizer.chat_template": CHATML}


def sentencepiece_metadata(**changes: MetadataValue) -> dict[str, MetadataValue]:
    """The layout of Llama 2: unknown, two control tokens, 256 bytes, then pieces with scores."""
    scored = {"▁": -9.0, "a": -9.1, "b": -9.2, "c": -9.3, "ab": -1.0, "bc": -2.0, "▁ab": -3.0}
    scored |= {"abc": -4.0, "▁a": -5.0}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *scored]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(scored)
    fields: dict[str, MetadataValue] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(kinds),
        "scores": np.array([0.0] * 259 + list(scored.values()), dtype=np.float32),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items()}


def byte_level(**changes: MetadataValue) -> Tokenizer:
    return build_tokenizer(byte_level_metadata(**changes), path=PATH)


def sentencepiece(**changes: MetadataValue) -> Tokenizer:
    return build_tokenizer(sentencepiece_metadata(**changes), path=PATH)


def pieces(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[str | None]:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return [tokenizer.token(token_id) for token_id in ids]


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()


def test_merges_and_special_tokens_are_honoured() -> None:
    assert pieces(BYTE_LEVEL, "hello hello</s>") == ["hello", "Ġhello", "</s>"]
    assert BYTE_LEVEL.vocab_size == 3 + 256 + 7
    assert BYTE_LEVEL.eos_ids == {1}
    assert BYTE_LEVEL.bos_id == 0
    assert [BYTE_LEVEL.is_special(token_id) for token_id in range(4)] == [True, True, False, False]


def test_control_tokens_are_left_out_of_text_and_user_defined_ones_are_not() -> None:
    ids = BYTE_LEVEL.encode("<s><think>hello</s>")
    assert BYTE_LEVEL.decode(ids) == "<think>hello"
    assert BYTE_LEVEL.decode([*ids, 5000], skip_special_tokens=False) == "<s><think>hello</s>"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a 123", ["a", "Ġ", "123"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("qwen2", "a123", ["a", "1", "2", "3"]),
        ("llama-bpe", "a1234", ["<s>", "a", "123", "4"]),
        ("llama-bpe", "12 12", ["<s>", "12", "Ġ", "12"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_its_own_way(
    pre: str, text: str, expected: list[str]
) -> None:
    assert pieces(byte_level(pre=pre), text) == expected


@pytest.mark.parametrize(
    ("pre", "text", "words", "has_bos"),
    [
        ("dbrx", "don't 1234", ["don", "'t", "Ġ", "123", "4"], False),
        ("tekken", "helloWorld's 12", ["hello", "World", "'s", "Ġ", "1", "2"], True),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", "Ġ", "123", "4"], False),
        ("gpt-4o", "HTTPServer/\n ÉTÉ", ["HTTPServer", "/Ċ", "ĠÃīTÃī"], False),
        ("command-r", "a 12", ["a", "Ġ", "1", "2"], False),
    ],
)
def test_each_pre_tokenizer_has_words_of_its_own(
    pre: str, text: str, words: list[str], has_bos: bool
) -> None:
    tokenizer = byte_level(pre=pre)
    splitter = tokenizer._backend.pre_tokenizer
    assert splitter is not None
    assert [word for word, _ in splitter.pre_tokenize_str(text)] == words
    assert tokenizer.encode("") == ([0] if has_bos else [])


def test_bos_and_eos_are_added_when_the_file_says_so() -> None:
    tokenizer = byte_level(add_bos_token=True, add_eos_token=True)
    assert pieces(tokenizer, "he") == ["<s>", "he", "</s>"]
    assert pieces(tokenizer, "he", add_special_tokens=False) == ["he"]
    assert pieces(byte_level(pre="llama-bpe", add_bos_token=False), "he") == ["he"]


def test_end_of_turn_and_of_message_end_generation_too() -> None:
    assert byte_level(eot_token_id=2, eom_token_id=5).eos_ids == {1, 2, 5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "'t5' is not supported; supported: gpt2, llama"),
        ({"model": 3}, "model must be a string, got 3"),
        ({"pre": "mystery"}, "pre must be one of default, gpt-2.*smollm.*, got 'mystery'"),
        ({"tokens": ["a", "a"]}, "tokens must hold no token twice"),
        ({"tokens": 5}, "tokens must be a list of strings, got 5"),
        ({"merges": ["h  e"]}, "merges must each be two tokens with a space between"),
        ({"merges": ["he"]}, "merges must each be two tokens"),
        (
            {"merges": ["hello hello"]},
            "merges must each join known tokens into a known token, got .hello hello",
        ),
        ({"token_type": np.array([1])}, "token_type must be 266 numbers"),
        ({"eos_token_id": 9999}, "eos_token_id must be an id below 266, got 9999"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false, got 'yes'"),
    ],
)
def test_malformed_metadata_is_refused(changes: dict[str, MetadataValue], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        byte_level(**changes)
    assert "made.gguf" in str(caught.value)


@settings(deadline=None)
@given(st.text())
def test_byte_level_round_trip(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


def test_the_best_score_merges_first() -> None:
    assert pieces(SENTENCEPIECE, "abc") == ["<s>", "▁ab", "c"]
    assert pieces(SENTENCEPIECE, "cab") == ["<s>", "▁", "c", "ab"]
    better_bc = sentencepiece_metadata()
    scores = better_bc["tokenizer.ggml.scores"]
    assert isinstance(scores, np.ndarray)
    scores[3 + 256 + 5] = -0.5
    assert pieces(build_tokenizer(better_bc, path=PATH), "abc") == ["<s>", "▁", "abc"]


def test_unknown_characters_become_bytes() -> None:
    assert pieces(SENTENCEPIECE, "aé") == ["<s>", "▁a", "<0xC3>", "<0xA9>"]
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode("aé\n b")) == "aé\n b"


def with_turns(architecture: str) -> Tokenizer:
    metadata = sentencepiece_metadata()
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(kinds, np.ndarray)
    scores = np.append(metadata["tokenizer.ggml.scores"], [0.0, 0.0]).astype(np.float32)
    changes: dict[str, MetadataValue] = {
        "tokens": [*tokens, "<|end|>", "<|im_end|>"],
        "token_type": np.append(kinds, [CONTROL, CONTROL]),
        "scores": scores,
    }
    metadata = sentencepiece_metadata(**changes) | {"general.architecture": architecture}
    template = "{% for m in messages %}{{ m.content }}<|end|>\n{% endfor %}"
    return build_tokenizer(metadata | {"tokenizer.chat_template": template}, path=PATH)


def test_a_token_that_ends_the_template_s_messages_ends_generation() -> None:
    tokenizer = with_turns("llama")
    assert {tokenizer.token(end) for end in tokenizer.eos_ids} == {"</s>", "<|end|>"}
    assert pieces(tokenizer, "a<|end|>\nb") == ["<s>", "▁a", "<|end|>", "▁", "<0x0A>", "b"]


def test_phi_3_s_added_tokens_take_the_space_after_them_along() -> None:
    tokenizer = with_turns("phi3")
    assert pieces(tokenizer, "a<|end|>\nb")[:3] == ["<s>", "▁a", "<|end|>"]
    assert "<0x0A>" not in pieces(tokenizer, "a<|end|>\nb")
    assert "<0x0A>" in pieces(tokenizer, "a<s>\nb")


def test_the_space_prefix_can_be_off() -> None:
    tokenizer = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert pieces(tokenizer, "ab ab") == ["ab", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_scores_are_required() -> None:
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointError, match="scores must be present"):
        build_tokenizer(metadata, path=PATH)


@settings(deadline=None)
@given(st.text().filter(lambda text: "▁" not in text))
def test_sentencepiece_round_trip(text: str) -> None:
    # Control tokens written in a text are control tokens; take them out of the comparison.
    text = text.replace("<", "")
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(text)) == text


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_an_incomplete_character_is_held_back() -> None:
    ids = BYTE_LEVEL.encode("a😀b")
    assert stream(BYTE_LEVEL, ids) == ["a", "", "", "", "😀", "b", ""]
    assert stream(BYTE_LEVEL, ids[:3]) == ["a", "", "", "�"]


def test_no_piece_ends_inside_a_character() -> None:
    text = "héllo 你好 👩‍👩‍👧 мир"
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        parts = stream(tokenizer, tokenizer.encode(text))
        assert "".join(parts) == text
        assert not any("�" in part for part in parts)


def test_the_stream_can_be_used_again_after_flush() -> None:
    detokenizer = Detokenizer(SENTENCEPIECE)
    ids = SENTENCEPIECE.encode("ab c")
    for _ in range(2):
        assert "".join([detokenizer.push(i) for i in ids] + [detokenizer.flush()]) == "ab c"


def test_a_long_run_of_invalid_bytes_streams_in_bounded_windows() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    bad = next(i for i in range(3, 259) if BYTE_LEVEL.decode([i]) == "�")
    text = "".join(detokenizer.push(bad) for _ in range(2000))
    assert len(text) >= 1990
    assert len(detokenizer._window) < 40
    assert text + detokenizer.flush() == BYTE_LEVEL.decode([bad] * 2000)


BYTE_IDS = st.integers(0, 270)  # a few beyond the vocabulary


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(BYTE_IDS, max_size=60), skip=st.booleans())
def test_streamed_byte_level_text_equals_decoded_text(ids: list[int], skip: bool) -> None:
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(BYTE_LEVEL, ids, skip_special_tokens=skip)) == whole


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 270), st.integers(259, 267)), max_size=60),
    skip=st.booleans(),
)
@example(ids=[259, 259, 267, 1, 259, 260], skip=True)
@example(ids=[3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 3 + 0xFF, 260], skip=True)
def test_streamed_sentencepiece_text_equals_decoded_text(ids: list[int], skip: bool) -> None:
    whole = SENTENCEPIECE.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(SENTENCEPIECE, ids, skip_special_tokens=skip)) == whole


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_streams_hold_for_tokens_of_several_odd_bytes(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(ODD_BYTES) - 1), max_size=80))
    assert "".join(stream(ODD, ids)) == ODD.decode(ids)


def odd_tokenizer(entries: list[bytes]) -> Tokenizer:
    """Tokens that cut characters anywhere, as large vocabularies do."""
    printable = {
        ord(c): c for c in map(chr, range(256)) if c in pre_tokenizers.ByteLevel.alphabet()
    }
    others = [byte for byte in range(256) if byte not in printable]
    printable |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocab = {"".join(printable[b] for b in entry): index for index, entry in enumerate(entries)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


ODD_BYTES = [
    b"a", b" ", b" \xf0\x9f", b"\x98", b"\x80", b"\x9f\x98\x80b", b"\xf0", b"\xe4\xbd", b"\xa0",
    b"\xff", b"\xff\xf0\x9f\x98", b"\xef\xbf\xbd", b"\xef\xbf", b"\xbd", b"\xc3", b"\xa9\xc3",
]  # fmt: skip
ODD = odd_tokenizer(ODD_BYTES)


@pytest.mark.parametrize("call", ["encode", "chat"])
def test_lone_surrogates_are_refused(call: str) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate \(U\+D83D\)") as caught:
        if call == "encode":
            BYTE_LEVEL.encode("a\ud83d")
        else:
            BYTE_LEVEL.apply_chat_template([{"role": "user", "content": "a\ud83d"}])
    assert caught.value.param == ("prompt" if call == "encode" else "messages")


def test_a_chat_is_rendered_and_gets_no_second_bos() -> None:
    tokenizer = byte_level(add_bos_token=True)
    messages: list[Message] = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == "<s>user: hello</s><s>assistant:"
    admission = Admission(
        tokenizer=tokenizer, vocab_size=300, context_length=99, rng=np.random.default_rng(0)
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert admission.chat_ids(messages, {}) == tuple(ids)
    assert tokenizer.encode(text) == [0, *ids]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False).endswith("</s>")


def test_text_parts_are_joined_and_absent_assistant_content_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = BYTE_LEVEL.apply_chat_template(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": None}],
        add_generation_prompt=False,
    )
    assert text == "<s>user: ab</s><s>assistant: </s>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (["hi"], r"messages\[0\] must be an object, got 'hi'"),
        ([{"content": "hi"}], r"messages\[0\]\.role must be a string, got None"),
        ([{"role": 3, "content": "hi"}], r"role must be a string, got 3"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string or a list of text parts"),
        ([{"role": "user", "content": 7}], "content must be .*, got 7"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] must be"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\] must be .*image_url",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] must be"),
    ],
)
def test_malformed_messages_are_refused(messages: list[Message], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        BYTE_LEVEL.apply_chat_template(messages)
    assert caught.value.param == "messages"


def with_template(template: str | dict[str, str] | None) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({"x": 0}, []))
    return Tokenizer(backend, eos_ids=[0], chat_template=template)


def render(template: str, **kwargs: object) -> str:
    return with_template(template).apply_chat_template([{"role": "user", "content": "c"}], **kwargs)


def test_a_template_may_trim_the_message_to_be_continued_but_must_write_it() -> None:
    messages: list[Message] = [{"role": "assistant", "content": " c \n"}]
    for template, text in (
        ("{{ messages[0].content | trim }}<end>", "c"),
        ("{{ messages[0].content }} c \n<end>", " c \n"),
    ):
        tokenizer = with_template(template)
        assert tokenizer.apply_chat_template(messages, continue_final_message=True) == text
    with pytest.raises(RequestError, match="writes as it is") as caught:
        with_template("<c>").apply_chat_template(messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "this model has no chat template"),
        ("{% if %}", "cannot be compiled"),
        ("{{ raise_exception('roles must alternate') }}", "refuses .* roles must alternate"),
        ("{{ messages[0]['absent'] + 'x' }}", "refuses these messages"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ range(10 ** 9) | list }}", "refuses these messages"),
    ],
)
def test_template_failures_are_request_errors(template: str | None, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        with_template(template).apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_templates_see_what_transformers_gives_them() -> None:
    assert render("{{ eos_token }}|{{ bos_token }}|{{ absent }}") == "x||"
    assert render("{{ tools | tojson }}", tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert render("{{ tools | tojson(indent=1) }}", tools=[1]) == "[\n 1\n]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert (
        render("{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "c!"


def test_messages_with_tools_take_the_template_for_them() -> None:
    messages: list[Message] = [{"role": "user", "content": "c"}]
    tokenizer = with_template({"default": "plain", "tool_use": "tools"})
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=None) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "tools"
    assert with_template("one").apply_chat_template(messages, tools=[{"name": "f"}]) == "one"
    with pytest.raises(RequestError, match="no default chat template, only those named rag"):
        with_template({"rag": "x"}).apply_chat_template(messages)


@pytest.mark.parametrize("name", ["messages", "bos_token", "raise_exception"])
def test_variables_of_the_server_cannot_be_replaced(name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        render("x", **{name: "mine"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.fixture(scope="module")
def demo_tokenizer(demo_path: Path) -> Tokenizer:
    return GgufCheckpoint(demo_path).tokenizer


@pytest.mark.demo
@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49200), max_size=60))
def test_the_demo_streams_what_it_decodes(demo_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(demo_tokenizer, ids)) == demo_tokenizer.decode(ids)


# Its vocabulary lacks a few control bytes and those of unassigned planes, hence the limits.
@pytest.mark.demo
@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8", min_codepoint=32, max_codepoint=0x3FFFF)))
@example("emoji 👩\u200d👩\u200d👧 and 你好世界 and \u200d\ufeff\n")
def test_the_demo_round_trips_any_text(demo_tokenizer: Tokenizer, text: str) -> None:
    ids = demo_tokenizer.encode(text)
    assert "".join(stream(demo_tokenizer, ids, skip_special_tokens=False)) == text


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_long_texts_have_the_ids_of_their_pipeline(make):
    """They take its calls that let other threads run."""
    tokenizer, text = make(), "hello 123 é<think>ab\n" * 400
    pipeline = tokenizers.Tokenizer.from_str(tokenizer.parts().pipeline)
    for special in (True, False):
        expected = pipeline.encode(text, add_special_tokens=special)
        assert tokenizer.encode(text, add_special_tokens=special) == expected.ids
    assert tokenizer.offsets(text)[-1] == pipeline.encode(text).offsets[-1][0]
    assert tokenizer.encode_pair(text, "ab") == pipeline.encode(text, "ab").ids
    for skip in (True, False):
        found = tokenizer.decode(expected.ids, skip_special_tokens=skip)
        assert found == pipeline.decode(expected.ids, skip_special_tokens=skip)
