"""Text to token ids and back, whole or streamed, and chat messages to text.

Knows no checkpoint format and no device.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import jinja2
import tokenizers

from jaxprefill.chat_template import (
    TEMPLATE_GLOBALS,
    Message,
    compile_template,
    plain_messages,
    render,
    text_to_mark,
    with_end_marked,
)
from jaxprefill.errors import RequestError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW = 16
_LONG = 4096  # characters or ids from which the pipeline's batch calls are taken: they free the GIL


class Tokenizer:
    """A model's tokenizer: one `tokenizers` pipeline, its special ids and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        """Wraps a ready pipeline.

        Args:
            backend: turns text into ids and back.
            eos_ids: ids that end a text; the first is the one a chat template sees.
            bos_id: the id that begins a text, if there is one.
            chat_template: one, or several by name: `default`, and `tool_use` for messages with
                tools.
        """
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.chat_templates = (
            {"default": chat_template} if isinstance(chat_template, str) else chat_template or {}
        )
        self._compiled_templates: dict[str, jinja2.Template] = {}
        self._backend = backend
        self._eos_id = eos_ids[0] if eos_ids else None
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

    def parts(self) -> "TokenizerParts":
        """What it is made of, to be made again in another process."""
        others = sorted(self.eos_ids - {self._eos_id})
        eos_ids = () if self._eos_id is None else (self._eos_id, *others)
        return TokenizerParts(
            self._backend.to_str(), eos_ids, self.bos_id, dict(self.chat_templates)
        )

    @classmethod
    def from_parts(cls, parts: "TokenizerParts") -> "Tokenizer":
        """The tokenizer that gave these parts."""
        return cls(
            tokenizers.Tokenizer.from_str(parts.pipeline),
            eos_ids=parts.eos_ids,
            bos_id=parts.bos_id,
            chat_template=parts.chat_templates,
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id known; a model's embedding may have more rows."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    @cached_property
    def max_token_characters(self) -> int:
        """Length of the longest token: what a text of n tokens cannot exceed n times."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @cached_property
    def has_byte_tokens(self) -> bool:
        """Whether unknown characters become runs of byte tokens, as in SentencePiece models."""
        return bool(getattr(self._backend.model, "byte_fallback", False))

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text, if there is one."""
        return None if self.bos_id is None else self.token(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        """The token that a chat template ends messages with, if there is one."""
        return None if self._eos_id is None else self.token(self._eos_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, left out of decoded text by default."""
        return token_id in self._special_ids

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id (not its text), or None for an id without one."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text.

        Raises:
            RequestError: the text holds a lone surrogate, which is no character.
        """
        _require_encodable(text, param="prompt")
        if len(text) < _LONG:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def offsets(self, text: str) -> list[int]:
        """For each token of `encode(text)`, the characters of the text before it."""
        found, reached = list[int](), 0
        if len(text) < _LONG:
            encoded = self._backend.encode(text)
        else:
            (encoded,) = self._backend.encode_batch([text])
        for start, _ in encoded.offsets:  # special tokens have none
            reached = max(reached, start)
            found.append(reached)
        return found

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Returns the ids of two texts as the tokenizer joins them, special tokens included.

        Raises:
            RequestError: a text holds a lone surrogate, which is no character.
        """
        for text in (first, second):
            _require_encodable(text, param="prompt")
        if len(first) + len(second) < _LONG:
            return self._backend.encode(first, second).ids
        (found,) = self._backend.encode_batch_fast([(first, second)])
        return found.ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of some ids; ids that the tokenizer does not know have none."""
        if len(ids) < _LONG:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """Renders messages to the text that the model was trained on.

        Args:
            messages: each has a `role` and a `content`: text, or a list of text parts.
            add_generation_prompt: end with the opening of an assistant message; None: unless the
                final message is to be continued.
            continue_final_message: end with the text of the final message.
            **kwargs: further variables of the template, such as `tools`.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        template = self._template("tool_use" if kwargs.get("tools") else "default")
        variables = self._template_variables(kwargs)
        plain: Sequence[Message] = plain_messages(messages)
        variables["messages"] = with_end_marked(plain) if continue_final_message else plain
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt must be false where continue_final_message is true: a "
                "message is continued, or a new one begun",
                param="continue_final_message",
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        text = render(template, variables | {"add_generation_prompt": add_generation_prompt})
        _require_encodable(text, param="messages")
        return text_to_mark(text) if continue_final_message else text

    def _template(self, name: str) -> jinja2.Template:
        """The template of that name, or the default one where there is none."""
        if name not in self.chat_templates:
            name = "default"
        if name not in self._compiled_templates:
            self._compiled_templates[name] = self._compile_template(name)
        return self._compiled_templates[name]

    def _compile_template(self, name: str) -> jinja2.Template:
        source = self.chat_templates.get(name)
        if source is None:
            named = ", ".join(sorted(self.chat_templates))
            raise RequestError(
                f"this model has no {'default ' if named else ''}chat template"
                f"{f', only those named {named}' if named else ''}; send a plain prompt instead "
                "of messages",
                param="messages",
            )
        return compile_template(source)

    def _template_variables(self, extra: Mapping[str, object]) -> dict[str, object]:
        variables: dict[str, object] = {
            "bos_token": self.bos_token or "",
            "eos_token": self.eos_token or "",
        }
        taken = {"messages", *variables, *TEMPLATE_GLOBALS} & extra.keys()
        if taken:
            raise RequestError(
                f"chat template variables {sorted(taken)} are set by jaxprefill; leave them out",
                param="chat_template_kwargs",
            )
        return {**variables, **extra}


class TokenizerParts(NamedTuple):
    """A tokenizer as plain data; the pipeline is the JSON of the tokenizers library."""

    pipeline: str
    eos_ids: tuple[int, ...]
    bos_id: int | None
    chat_templates: dict[str, str]


class Detokenizer:
    """Turns a stream of ids into text, a piece at a time.

    All pieces joined, with `flush()` last, equal `Tokenizer.decode` of all ids. It keeps the
    tokens since a place where the text so far was whole, and decodes only those:

        window   [ context | not yet final ]     text of context and of some more is emitted
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Starts an empty stream."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0  # tokens of the window that were final before the others came
        self._num_emitted = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """Adds an id and returns the text that is now final: "" inside a character."""
        token = self._tokenizer.token(token_id)
        is_skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        if token is None or is_skipped:
            return ""
        self._window.append(token_id)
        if self._tokenizer.has_byte_tokens and _is_byte_token(token):
            return ""  # one bad byte spoils a whole run of byte tokens, so wait for its end
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):  # perhaps a character that later bytes complete
            piece = self._emit(text[:-1])
            self._shorten(text)
            return piece
        piece = self._emit(text)
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_emitted = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """Returns the rest of the text and ends the stream, ready for another."""
        piece = self._emit(self._decode(self._window))
        self._window, self._num_context, self._num_emitted = [], 0, 0
        return piece

    def _emit(self, text: str) -> str:
        piece = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        return piece

    def _shorten(self, text: str) -> None:
        """Bounds the window when ids decode to nothing whole for long.

        Splits it where the parts decode to the same text as the whole, the last part being just
        the unfinished character: then no character lies across the split.
        """
        if len(self._window) < _MAX_WINDOW:
            return
        for split in range(len(self._window) - 1, len(self._window) - 5, -1):
            head, tail = self._window[:split], self._window[split:]
            if self._decode(tail) == _REPLACEMENT and self._decode(head) + _REPLACEMENT == text:
                self._window, self._num_context, self._num_emitted = tail, 0, 0
                return

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _require_encodable(text: str, *, param: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text must be valid Unicode, got a lone surrogate (U+{ord(text[error.start]):04X}) "
            f"at character {error.start}; send whole characters",
            param=param,
        ) from error


def _is_byte_token(token: str) -> bool:
    """Whether a vocabulary entry stands for one byte, such as `<0x0A>`."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
