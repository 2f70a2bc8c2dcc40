"""POST /v1/chat/completions: messages through the model's chat template, and the answer.

The template alone adds special tokens. Parts of text are joined, parts of other kinds refused, as
are templates sent along. `max_completion_tokens` wins over `max_tokens`; without either an answer
may fill the context, as far as the KV pool holds it. `tools` go to the template; a `tool_choice`
that demands a call is refused. `top_logprobs` needs `logprobs`. With `return_token_ids` the
prompt's ids stand beside the choices, in a stream of the first chunk; the answer's inside them.
"""

import math
from typing import Any

import msgspec

from jaxprefill.admission import Wants
from jaxprefill.errors import RequestError
from jaxprefill.request import MAX_TOP_LOGPROBS
from jaxprefill.server.body import renaming, wrong
from jaxprefill.server.choices import Part, chunks, whole_reply
from jaxprefill.server.context import Call, check_batch
from jaxprefill.server.fields import SamplingFields
from jaxprefill.server.logprobs import LogprobWriter
from jaxprefill.server.replies import EventStream
from jaxprefill.server.structured import grammar_of
from jaxprefill.server.templating import template_options


class ChatBody(SamplingFields, kw_only=True):
    """The fields of a chat."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    tools: list[Any] = msgspec.field(default_factory=list[Any])
    tool_choice: Any = None
    documents: list[Any] = msgspec.field(default_factory=list[Any])


async def chat(call: Call, body: ChatBody) -> Any:
    """Answers one body."""
    _check(body)
    with_usage = body.wants_usage()
    options = template_options(body)
    admission = call.context.admission()
    prompt = await call.off_loop_if_long(
        _size(body), lambda: admission.chat_ids(body.messages, options)
    )
    max_tokens = _max_tokens(body, call, len(prompt))
    with renaming({"max_tokens": _name_of_max_tokens(body)}):
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.sampling_params(max_tokens=max_tokens, logprobs=logprobs)
    wants = Wants(grammar=await grammar_of(call, body.response_format))
    requests = await call.requests([prompt], params, wants=wants, name="messages")
    layout, generation = _Layout(call, body, prompt), call.submit(requests)
    if body.stream:
        return EventStream(chunks(call, generation, layout, with_usage=with_usage))
    return await whole_reply(call, generation, layout)


class _Layout:
    """How choices of chats are written."""

    def __init__(self, call: Call, body: ChatBody, prompt: tuple[int, ...]) -> None:
        self._call = call
        self._body = body
        self._prompt = prompt
        self._has_told_prompt = False
        self._model = call.served_name(body.model)
        self._logprobs = LogprobWriter(
            call.context.token_texts(), as_ids=body.return_tokens_as_token_ids
        )

    def envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": f"chatcmpl-{self._call.request_id}",
            "object": "chat.completion.chunk" if is_chunk else "chat.completion",
            "created": self._call.created,
            "model": self._model,
            "choices": choices,
        }
        if self._body.return_token_ids and not self._has_told_prompt:
            envelope["prompt_token_ids"] = list(self._prompt)
            self._has_told_prompt = True
        return envelope

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, part: Part, *, is_chunk: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"content": part.text}
        if not is_chunk:
            message = {"role": "assistant", "content": part.text, "refusal": None}
        choice: dict[str, Any] = {
            "index": part.index,
            "delta" if is_chunk else "message": message,
            "logprobs": self._logprobs.chat(part.entries()) if self._body.logprobs else None,
            **part.ending,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice


def _check(body: ChatBody) -> None:
    if not isinstance(body.messages, list):
        raise wrong("messages", "a list of messages", body.messages)
    check_batch("messages", len(body.messages))
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError(
                "top_logprobs must be left out unless logprobs is true", param="top_logprobs"
            )
        if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise wrong("top_logprobs", f"an integer, 0 to {MAX_TOP_LOGPROBS}", body.top_logprobs)


def _max_tokens(body: ChatBody, call: Call, prompt_length: int) -> int:
    """As asked, or all the room there is."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked is None:
        # The last token's KV is never needed, so the pool may be one short.
        room = min(call.model.context_length, call.model.kv_tokens + 1) - prompt_length
        return max(room, 1)  # a prompt too long is refused for its length
    if asked < 1:
        raise wrong(_name_of_max_tokens(body), "an integer of at least 1", asked)
    return asked


def _name_of_max_tokens(body: ChatBody) -> str:
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _size(body: ChatBody) -> float:
    """Characters at the first level: enough to know what takes long."""
    if body.tools or body.documents or body.chat_template_kwargs:
        return math.inf  # whatever the template makes of them
    contents = [each.get("content") for each in body.messages if isinstance(each, dict)]
    return sum(len(content) if isinstance(content, str) else 1000 for content in contents)
