"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer, without the model.

/tokenize takes a `prompt`, a text or a list of texts, or `messages`, to which the chat template
alone adds special tokens. It takes texts far longer than the context, but not without limit.
/detokenize leaves special tokens out unless `skip_special_tokens` is false, and says the text
twice, as `text` (SGLang) and as `prompt` (vLLM); ids of the model that the tokenizer lacks have no
text. A list of texts or of lists gets lists of answers. The text of the ids of a text is that text,
leading spaces included, where the tokenizer keeps all characters.
"""

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxprefill.admission import as_ids, check_ids
from jaxprefill.errors import RequestError
from jaxprefill.server.body import wrong
from jaxprefill.server.context import Call, ServerContext, check_batch, size_of
from jaxprefill.server.fields import BaseBody
from jaxprefill.server.health import json_response
from jaxprefill.server.route import post
from jaxprefill.server.templating import template_options

_CHARACTERS_A_TOKEN = 32  # so ten times the context is taken, of any text


class TokenizeBody(BaseBody, kw_only=True):
    """The fields of vLLM's and SGLang's /tokenize; a chat's ids are those of a chat's prompt."""

    prompt: Any = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    messages: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    tools: list[Any] = msgspec.field(default_factory=list[Any])
    tool_choice: Any = None
    documents: list[Any] = msgspec.field(default_factory=list[Any])


class DetokenizeBody(BaseBody, kw_only=True):
    """The fields of vLLM's and SGLang's /detokenize."""

    tokens: Any = None
    skip_special_tokens: bool = True


async def tokenize(call: Call, body: TokenizeBody) -> dict[str, Any]:
    """Answers one body."""
    if (body.prompt is None) == (body.messages is None):
        what = "neither" if body.prompt is None else "both"
        raise RequestError(f"one of prompt and messages must be given, got {what}", param="prompt")
    tokenizer = call.model.tokenizer
    texts = [""] if body.prompt is None else _texts(call, body.prompt)

    def encode() -> list[list[int]]:
        if body.prompt is None:
            return [list(call.context.admission().chat_ids(body.messages, template_options(body)))]
        return [
            tokenizer.encode(text, add_special_tokens=body.add_special_tokens) for text in texts
        ]

    is_short = body.prompt is not None and size_of(texts) < 1000
    rows = encode() if is_short else await call.context.off_loop(encode)
    is_list = isinstance(body.prompt, list)
    counts = [len(ids) for ids in rows]
    reply: dict[str, Any] = {
        "tokens": rows if is_list else rows[0],
        "count": counts if is_list else counts[0],
        "max_model_len": call.model.context_length,
    }
    if body.return_token_strs:
        strings = [[tokenizer.token(token) or "" for token in ids] for ids in rows]
        reply["token_strs"] = strings if is_list else strings[0]
    return reply


async def detokenize(call: Call, body: DetokenizeBody) -> dict[str, Any]:
    """Answers one body."""
    given = body.tokens
    is_list = isinstance(given, list) and list in set(map(type, given))
    rows: list[Any] = given if is_list else [given]
    check_batch("tokens", len(rows))
    most = call.model.context_length * _CHARACTERS_A_TOKEN
    if (size := size_of(given)) > most:
        raise RequestError(
            f"tokens must hold at most {most} ids, got {size}; split them", param="tokens"
        )

    def decode() -> list[str]:
        decode_one = call.model.tokenizer.decode
        checked = [_ids(row, call.model.config.vocab_size) for row in rows]
        return [decode_one(row, skip_special_tokens=body.skip_special_tokens) for row in checked]

    texts = await call.off_loop_if_long(size, decode)
    text = texts if is_list else texts[0]
    return {"text": text, "prompt": text}


def tokenizer_routes(context: ServerContext) -> list[Route]:
    """All routes of this module; clients that tokenize by themselves read the GET one."""

    async def info(_: HttpRequest) -> Response:
        """What the tokenizer is: its special tokens and chat template."""
        model = context.client.model
        tokenizer = model.tokenizer
        templates = tokenizer.chat_templates
        value: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "eos_token_ids": sorted(tokenizer.eos_ids),
            "chat_template": templates.get("default", next(iter(templates.values()), None)),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": model.context_length,
        }
        return json_response(value)

    return [
        *(post(f"{at}/tokenize", context, TokenizeBody, tokenize) for at in ("", "/v1")),
        *(post(f"{at}/detokenize", context, DetokenizeBody, detokenize) for at in ("", "/v1")),
        Route("/tokenizer_info", info),
    ]


def _texts(call: Call, prompt: Any) -> list[str]:
    texts: Any = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(texts, list) or set(map(type, texts)) - {str}:
        raise wrong("prompt", "a text or a list of texts", prompt)
    check_batch("prompt", len(texts))
    a_token = max(call.model.tokenizer.max_token_characters, _CHARACTERS_A_TOKEN)
    most = call.model.context_length * a_token
    for text in texts:
        if len(text) > most:
            raise RequestError(
                f"prompt must have at most {most} characters, got {len(text)}; split it",
                param="prompt",
            )
    return texts


def _ids(given: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise wrong("tokens", "a list of token ids, or of such lists", given)
    ids = as_ids(given, "tokens")
    check_ids("tokens", ids, vocab_size)
    return ids
