"""The tokenizer described by a GGUF file's `tokenizer.ggml.*` metadata.

Knows byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`) vocabularies; refuses the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxprefill.errors import CheckpointError
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.weights.gguf_file import MetadataValue

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Tokens that end a message where the chat template writes them; files name just one of their ends.
_TURN_ENDS = ("<|end|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")
# Phi-3's other added tokens take the white space after them along, which GGUF cannot say.
_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's stand-in for a space
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# A word changes where small letters end; %s: an ending of it, then a run of digits.
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


@dataclass(frozen=True, kw_only=True)
class _PreTokenizer:
    """How one `tokenizer.ggml.pre` splits text into words before the merges.

    Attributes:
        words: regular expression of a word; None for the one of GPT-2.
        is_digit_alone: split every digit off first.
        is_whole_word_first: take a word that is in the vocabulary without using merges.
    """

    words: str | None = None
    is_digit_alone: bool = False
    is_nfc: bool = False
    is_whole_word_first: bool = False
    has_bos: bool = False


_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(is_digit_alone=True)
_THREE_DIGITS = _WORDS % r"\p{N}{1,3}"
_LLAMA3 = _PreTokenizer(words=_THREE_DIGITS, is_whole_word_first=True, has_bos=True)
_QWEN2 = _PreTokenizer(words=_WORDS % r"\p{N}", is_nfc=True)
_TEKKEN = _PreTokenizer(
    words=_CASED_WORDS % ("", "", r"\p{N}"), is_whole_word_first=True, has_bos=True
)
_GPT4O = _PreTokenizer(words=_CASED_WORDS % (_ENDING, _ENDING, r"\p{N}{1,3}"))
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _PreTokenizer(words=_THREE_DIGITS),  # Phi-4
    "smaug-bpe": _PreTokenizer(words=_THREE_DIGITS),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,  # Mistral Nemo
    "gpt-4o": _GPT4O,  # Phi-4-mini
}


def build_tokenizer(metadata: Mapping[str, MetadataValue], *, path: Path) -> Tokenizer:
    """Builds the tokenizer of a GGUF file.

    Generation ends at the file's own eos, eot and eom ids and where its chat template ends a
    message. llama.cpp guesses end tokens by their text alone, which would stop a base model at a
    token that it may write.

    Args:
        metadata: all of the file's metadata.
        path: the file, for error messages.

    Raises:
        CheckpointError: the kind of tokenizer is not supported, or its tables are malformed.
    """
    fields = _TokenizerFields(metadata, path)
    kind = fields.string("model")
    if kind == "gpt2":
        backend, has_bos = _byte_level_bpe(fields)
        bos_id, eos_id = fields.token_id("bos_token_id"), fields.token_id("eos_token_id")
    elif kind == "llama":
        backend, has_bos = _sentencepiece_bpe(fields), True
        # SentencePiece's own defaults, as in llama.cpp.
        bos_id = fields.token_id("bos_token_id", default=1)
        eos_id = fields.token_id("eos_token_id", default=2)
    else:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama"
        )
    backend.add_tokens(fields.added_tokens())
    _add_post_processor(
        backend,
        bos_id=bos_id if fields.flag("add_bos_token", default=has_bos) else None,
        eos_id=eos_id if fields.flag("add_eos_token", default=False) else None,
    )
    template = metadata.get("tokenizer.chat_template")
    ends = [eos_id, fields.token_id("eot_token_id"), fields.token_id("eom_token_id")]
    if isinstance(template, str):
        added = {token.content for token in fields.added_tokens()}
        ends += [fields.vocab[end] for end in _TURN_ENDS if end in added and end in template]
    return Tokenizer(
        backend,
        eos_ids=[token_id for token_id in ends if token_id is not None],
        bos_id=bos_id,
        chat_template=template if isinstance(template, str) else None,
    )


class _TokenizerFields:
    """Typed look-ups of `tokenizer.ggml.<key>` in the metadata."""

    def __init__(self, metadata: Mapping[str, MetadataValue], path: Path) -> None:
        self._metadata = metadata
        self._path = path
        self.tokens = self.strings("tokens")
        self.vocab = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            raise self.error("tokens", "hold no token twice", f"{len(self.vocab)} different ones")
        self.types = self._per_token("token_type", default=_NORMAL)

    def string(self, key: str, *, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "be a string", value)
        return value

    def strings(self, key: str) -> list[str]:
        value = self._get(key)
        if not isinstance(value, list):
            raise self.error(key, "be a list of strings", value)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "be true or false", value)
        return value

    def token_id(self, key: str, *, default: int | None = None) -> int | None:
        """An id in the vocabulary, or None if the file names none."""
        value = self._get(key)
        if value is None:
            return default if default is not None and default < len(self.tokens) else None
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or not 0 <= value < len(self.tokens)
        ):
            raise self.error(key, f"be an id below {len(self.tokens)}", value)
        return value

    def scores(self) -> list[float]:
        if "scores" not in self:
            raise self.error("scores", "be present", None)
        return self._per_token("scores", default=0.0)

    def merges(self) -> list[tuple[str, str]]:
        merges: list[tuple[str, str]] = []
        for merge in self.strings("merges"):
            left, space, right = merge.partition(" ")
            if not space or " " in right:
                raise self.error("merges", "each be two tokens with a space between", merge)
            # The library does not check the joined token: it aborts in Rust.
            if not {left, right, left + right} <= self.vocab.keys():
                raise self.error("merges", "each join known tokens into a known token", merge)
            merges.append((left, right))
        return merges

    def added_tokens(self) -> list[AddedToken]:
        """Tokens matched whole before any split; control tokens decode to nothing."""
        special = {_UNKNOWN, _CONTROL}
        is_phi3 = self._metadata.get("general.architecture") == "phi3"
        is_stripping = is_phi3 and self.string("model") == "llama"
        return [
            AddedToken(
                token,
                special=kind in special,
                normalized=False,
                rstrip=is_stripping and token not in _PHI3_PLAIN,
            )
            for token, kind in zip(self.tokens, self.types, strict=True)
            if token and (kind in special or kind == _USER_DEFINED)
        ]

    def error(self, key: str, rule: str, value: object) -> CheckpointError:
        shown = "nothing" if value is None else f"{value!r:.80}"
        return CheckpointError(
            f"{self._path}: metadata tokenizer.ggml.{key} must {rule}, got {shown}"
        )

    def __contains__(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self._metadata

    def _get(self, key: str, default: MetadataValue | None = None) -> MetadataValue | None:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _per_token(self, key: str, *, default: float) -> list[float]:
        value = self._get(key)
        if value is None:
            return [default] * len(self.tokens)
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise self.error(key, f"be {len(self.tokens)} numbers, one a token", value)
        return value.tolist()


def _byte_level_bpe(fields: _TokenizerFields) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns the pipeline and whether its kind adds BOS when the file does not say."""
    kind = fields.string("pre", default="default")
    pre = _PRE_TOKENIZERS.get(kind)
    if pre is None:
        raise fields.error("pre", f"be one of {', '.join(_PRE_TOKENIZERS)}", kind)
    model = models.BPE(fields.vocab, fields.merges(), ignore_merges=pre.is_whole_word_first)
    backend = tokenizers.Tokenizer(model)
    if pre.is_nfc:
        backend.normalizer = normalizers.NFC()
    splits: list[pre_tokenizers.PreTokenizer] = []
    if pre.is_digit_alone:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.words is not None:
        splits.append(pre_tokenizers.Split(Regex(pre.words), behavior="isolated"))
    add_prefix_space = fields.flag("add_space_prefix", default=False)
    splits.append(
        pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=pre.words is None)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.has_bos


def _sentencepiece_bpe(fields: _TokenizerFields) -> tokenizers.Tokenizer:
    unknown_id = fields.token_id("unknown_token_id", default=0)
    model = models.BPE(
        fields.vocab,
        _merges_from_scores(fields),
        unk_token=None if unknown_id is None else fields.tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if fields.flag("add_space_prefix", default=True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(fields: _TokenizerFields) -> list[tuple[str, str]]:
    """All splits of every piece into two pieces, the piece with the best score first.

    SentencePiece keeps no merges: it joins the neighbours whose union scores best, which is the
    same order (and the conversion of transformers).
    """
    scores, vocab = fields.scores(), fields.vocab
    ranked: list[tuple[float, int, str, str]] = []
    for piece, score, kind in zip(fields.tokens, scores, fields.types, strict=True):
        if kind != _NORMAL:
            continue
        for split in range(1, len(piece)):
            left, right = piece[:split], piece[split:]
            if left in vocab and right in vocab:
                ranked.append((-score, -len(left), left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _add_post_processor(
    backend: tokenizers.Tokenizer, *, bos_id: int | None, eos_id: int | None
) -> None:
    # The names BOS and EOS are local to the template: a token's own text could break its syntax.
    named = {"BOS": bos_id, "EOS": eos_id}
    if bos_id is None and eos_id is None:
        return
    pieces = [name for name in ("BOS", "$A", "EOS") if named.get(name, 0) is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=pieces,
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
            for name, token_id in named.items()
            if token_id is not None
        ],
    )
