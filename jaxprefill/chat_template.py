"""Chat messages to text by a model's own template, in the environment templates are written for."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxprefill.errors import RequestError

Message = Mapping[str, object]

_MARK = "END_OF_WHAT_IS_TO_BE_CONTINUED "  # the space is lost where a template trims messages

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


def compile_template(source: str) -> jinja2.Template:
    """A template, ready to render.

    Raises:
        RequestError: it is none.
    """
    try:
        return _chat_environment().from_string(source, globals=dict(TEMPLATE_GLOBALS))
    except jinja2.TemplateError as error:
        raise RequestError(
            f"the model's chat template cannot be compiled: {error}; send a plain prompt",
            param="messages",
        ) from error


def render(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    """The text of `variables["messages"]`.

    Raises:
        RequestError: the template refuses them.
    """
    try:
        return template.render(variables)
    except _TEMPLATE_FAILURES as error:
        raise RequestError(
            f"the model's chat template refuses these messages: {error}", param="messages"
        ) from error


def with_end_marked(messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark behind the final one's words: `text_to_mark` finds it again.

    The words alone could not be found: "<" also begins what closes a message.
    """
    final = messages[-1]
    return [*messages[:-1], {**final, "content": f"{final['content']}{_MARK}"}]


def text_to_mark(text: str) -> str:
    """A rendered text as far as the final message's own words go, trimmed if the template trims.

    Raises:
        RequestError: the template did not write the message as it is.
    """
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise RequestError(
            "continue_final_message needs a final message whose text the chat template writes as "
            "it is; leave it out, or send a plain prompt",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def plain_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Checks chat messages and joins text parts, so that every content is a string.

    Raises:
        RequestError: the list is empty, or a message has no role or no text.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages:
        raise RequestError(
            f"messages must be a list of at least one message, got {messages!r:.80}",
            param="messages",
        )
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


TEMPLATE_GLOBALS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
