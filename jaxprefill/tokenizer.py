"""Text to token ids and back, whole or streamed, and chat messages to text.

Knows no checkpoint format and no device.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import NoReturn

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxprefill.errors import RequestError

Message = Mapping[str, object]

# What a template's own Python operations can raise on messages it was not written for.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW = 16


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
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Returns the ids of two texts as the tokenizer joins them, special tokens included.

        Raises:
            RequestError: a text holds a lone surrogate, which is no character.
        """
        for text in (first, second):
            _require_encodable(text, param="prompt")
        return self._backend.encode(first, second).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of some ids; ids that the tokenizer does not know have none."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """Renders messages to the text that the model was trained on.

        Args:
            messages: each has a `role` and a `content`: text, or a list of text parts.
            add_generation_prompt: end with the opening of an assistant message.
            **kwargs: further variables of the template, such as `tools`.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        template = self._template("tool_use" if kwargs.get("tools") else "default")
        variables = self._template_variables(kwargs)
        variables["messages"] = plain_messages(messages)
        try:
            text = template.render(variables, add_generation_prompt=add_generation_prompt)
        except _TEMPLATE_FAILURES as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        _require_encodable(text, param="messages")
        return text

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
        try:
            return _chat_environment().from_string(source, globals=dict(_TEMPLATE_GLOBALS))
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the model's chat template cannot be compiled: {error}; send a plain prompt",
                param="messages",
            ) from error

    def _template_variables(self, extra: Mapping[str, object]) -> dict[str, object]:
        variables: dict[str, object] = {
            "bos_token": self._token_text(self.bos_id),
            "eos_token": self._token_text(self._eos_id),
        }
        taken = {"messages", *variables, *_TEMPLATE_GLOBALS} & extra.keys()
        if taken:
            raise RequestError(
                f"chat template variables {sorted(taken)} are set by jaxprefill; leave them out",
                param="chat_template_kwargs",
            )
        return {**variables, **extra}

    def _token_text(self, token_id: int | None) -> str:
        return "" if token_id is None else (self.token(token_id) or "")


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


def plain_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Checks chat messages and joins text parts, so that every content is a string.

    Raises:
        RequestError: the list is empty, or a message has no role or no text.
    """
    if isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _plain_message(message: object, index: int) -> dict[str, object]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {message!r:.80}", param="messages")
    plain: dict[str, object] = {str(key): value for key, value in message.items()}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a string, got {role!r:.80}", param="messages")
    content = plain.get("content")
    if content is None and role == "assistant":  # a message of tool calls alone
        content = ""
    plain["content"] = _plain_content(content, f"{where}.content")
    return plain


def _plain_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{where} must be a string or a list of text parts, got {content!r:.80}",
            param="messages",
        )
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f'{where}[{index}] must be {{"type": "text", "text": ...}}, the only kind of part '
                f"that this model reads; got {part!r:.80}",
                param="messages",
            )
        texts.append(text)
    return "".join(texts)


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


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, which only training code gives a meaning."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance-typed set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _chat_environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for: that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, LoopControlExtension],
    )
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter; the signature is transformers'."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_TEMPLATE_GLOBALS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
