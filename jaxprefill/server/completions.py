"""POST /v1/completions: prompts continued, scored, or both.

Choices are prompt-major. `max_tokens` 0 is allowed with `echo`: the prompt alone, and its
logprobs. An output that would pass the context ends there, with finish_reason "length". The
completion tokens of `usage` count the end-of-text token. An echoed prompt is the text that was
sent, or the text of the ids that were, special tokens included. `best_of` other than `n` and
`suffix` are refused; `stream_options` without `stream` is too.
"""

from collections.abc import Sequence
from typing import Any

from jaxprefill.admission import Prompt, Wants
from jaxprefill.collector import Collector
from jaxprefill.errors import RequestError
from jaxprefill.request import MAX_TOP_LOGPROBS, Request
from jaxprefill.server.body import wrong
from jaxprefill.server.choices import Part, chunks, whole_reply
from jaxprefill.server.context import Call, check_batch
from jaxprefill.server.fields import SamplingFields
from jaxprefill.server.logprobs import LogprobWriter, TokenEntry
from jaxprefill.server.replies import EventStream
from jaxprefill.server.structured import grammar_of
from jaxprefill.tokenizer import Detokenizer, Tokenizer

DEFAULT_MAX_TOKENS = 16


class CompletionBody(SamplingFields, kw_only=True):
    """The fields of a completion; `prompt` is a text, ids, or a list of either."""

    prompt: Any = None
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


async def completions(call: Call, body: CompletionBody) -> Any:
    """Answers one body."""
    prompts = prompts_of(body.prompt)
    _check(body)
    with_usage = body.wants_usage()
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.sampling_params(max_tokens=max_tokens, logprobs=body.logprobs)
    scores_prompt = body.echo and body.logprobs is not None
    wants = Wants(
        prompt_logprobs=scores_prompt,
        prompt_top=(body.logprobs or 0) * scores_prompt,
        grammar=await grammar_of(call, body.response_format),
    )
    requests = await call.requests(prompts, params, wants=wants)
    echoes: list[Echo] = []
    if body.echo:
        first = requests[:: body.n]
        echoes = await call.off_loop_if_long(
            sum(request.prompt_length for request in first),
            lambda: _echoes(prompts, first, call.model.tokenizer),
        )
    layout, generation = _Layout(call, body, echoes), call.submit(requests)
    if body.stream:
        return EventStream(chunks(call, generation, layout, with_usage=with_usage))
    return await whole_reply(call, generation, layout)


def prompts_of(prompt: Any, param: str = "prompt") -> list[Prompt]:
    """The prompts of a text, a list of texts, a list of ids, or a list of lists of ids.

    Raises:
        RequestError: it is none of these, or empty. The ids are checked later, by the model.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise wrong(param, "a text, a list of token ids, or a list of either", prompt)
    items: list[Any] = prompt
    kinds = set(map(type, items))
    if kinds in ({str}, {list}):
        check_batch(param, len(items))
        return items
    if kinds & {str, list, dict}:
        raise wrong(param, "a list of texts, of token ids, or of lists of token ids", prompt)
    return [items]


class _Layout:
    """How choices of completions are written."""

    def __init__(self, call: Call, body: CompletionBody, echoes: "list[Echo]") -> None:
        """One echo a prompt, or none at all."""
        self._call = call
        self._body = body
        self._echoes = echoes
        self._model = call.served_name(body.model)
        self._logprobs = LogprobWriter(
            call.context.token_texts(), as_ids=body.return_tokens_as_token_ids
        )

    def envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._call.request_id}",
            "object": "text_completion",
            "created": self._call.created,
            "model": self._model,
            "choices": choices,
        }

    def opening(self, index: int) -> None:
        return None

    def choice(self, part: Part, *, is_chunk: bool) -> dict[str, Any]:
        body = self._body
        echo = self._echoes[part.index // body.n] if body.echo else _NO_ECHO
        choice: dict[str, Any] = {
            "index": part.index,
            "text": (echo.text if part.is_first else "") + part.text,
            "logprobs": None,
            **part.ending,
        }
        if body.logprobs is not None:
            is_scored = body.echo and part.is_first
            entries = _prompt_entries(part.collector, echo) if is_scored else []
            entries += part.entries(shift=len(echo.text))
            choice["logprobs"] = self._logprobs.completion(entries)
        if body.return_token_ids:
            choice["token_ids"] = part.token_ids
            if part.is_first:
                choice["prompt_token_ids"] = list(part.collector.request.prompt_ids)
        return choice


class Echo:
    """A prompt's text, and where its tokens begin in it."""

    def __init__(self, text: str, offsets: list[int]) -> None:
        """One offset a token."""
        self.text = text
        self.offsets = offsets


_NO_ECHO = Echo("", [])


def _prompt_entries(collector: Collector, echo: Echo) -> list[TokenEntry]:
    """The prompt's tokens with their logprobs."""
    ids, logprobs = collector.request.prompt_ids, collector.prompt_logprobs
    tops = collector.prompt_top or [None] * len(ids)
    return [
        TokenEntry(token, logprob, top, offset)
        for token, logprob, top, offset in zip(ids, logprobs, tops, echo.offsets, strict=True)
    ]


def _echoes(
    prompts: Sequence[Prompt], requests: Sequence[Request], tokenizer: Tokenizer
) -> list[Echo]:
    return [
        _echo_text(prompt, request.prompt_ids, tokenizer)
        if isinstance(prompt, str)
        else _echo_ids(request.prompt_ids, tokenizer)
        for prompt, request in zip(prompts, requests, strict=True)
    ]


def _echo_text(prompt: str, ids: tuple[int, ...], tokenizer: Tokenizer) -> Echo:
    offsets = tokenizer.offsets(prompt)
    assert len(offsets) == len(ids), "the same text has the same tokens"
    return Echo(prompt, offsets)


def _echo_ids(ids: tuple[int, ...], tokenizer: Tokenizer) -> Echo:
    detokenizer, text = Detokenizer(tokenizer, skip_special_tokens=False), ""
    offsets: list[int] = []
    for token in ids:
        offsets.append(len(text))
        text += detokenizer.push(token)
    return Echo(text + detokenizer.flush(), offsets)


def _check(body: CompletionBody) -> None:
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
        raise wrong("logprobs", f"an integer, 0 to {MAX_TOP_LOGPROBS}", body.logprobs)
    if body.max_tokens == 0 and not body.echo:
        raise RequestError(
            "max_tokens must be at least 1 unless echo is true, got 0", param="max_tokens"
        )
    if body.best_of is not None and body.best_of != body.n:
        raise wrong("best_of", f"the same as n, which is {body.n}", body.best_of)
    if body.suffix:
        raise RequestError("suffix must be left out: the model continues texts", param="suffix")
