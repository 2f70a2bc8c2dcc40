"""POST /generate: SGLang's own route, whole or streamed.

A single prompt with one answer gets an object, anything else a list, prompt-major. A stream's
events hold the text, ids and logprobs so far, as SGLang's do, with `index` where there are several
answers. With `return_logprob`, `input_token_logprobs` begin at prompt token `logprob_start_len`
(-1, the default: none of them), and each is the true logprob; only a prompt's first has null. Texts
stand beside the ids unless `return_text_in_logprobs` is false. `token_ids_logprob` is answered for
the first place after the prompt, in `output_token_ids_logprobs`, so at most one token may be
generated with it. `max_new_tokens` 0 reads the prompt alone.

`top_logprobs_num` and the other fields of logprobs may be lists, one a prompt, as may
`sampling_params`. Of structured output `json_schema` is known, a text or an object.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from jaxprefill.admission import Prompt, Wants
from jaxprefill.collector import Collector
from jaxprefill.constraints import json_grammar
from jaxprefill.errors import RequestError
from jaxprefill.request import MAX_TOP_LOGPROBS, Completion, SamplingParams
from jaxprefill.server.body import convert, renaming, wrong
from jaxprefill.server.choices import Part, parts, whole_parts
from jaxprefill.server.completions import prompts_of
from jaxprefill.server.context import Call
from jaxprefill.server.fields import BaseBody, SamplingFields
from jaxprefill.server.generation import Generation
from jaxprefill.server.replies import EventStream, floored

DEFAULT_NEW_TOKENS = 128
_OTHER_INPUTS = ("input_embeds", "image_data", "audio_data", "video_data", "lora_path")
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_OTHER_CONSTRAINTS = ("regex", "ebnf", "structural_tag", "stop_regex")


class GenerateBody(BaseBody, kw_only=True):
    """The fields of SGLang's GenerateReqInput that mean something here."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = msgspec.field(default_factory=dict[str, Any])
    return_logprob: Any = False
    logprob_start_len: Any = -1
    top_logprobs_num: Any = 0
    token_ids_logprob: Any = None
    return_text_in_logprobs: bool = True
    stream: bool = False
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None


class GenerateSampling(SamplingFields, kw_only=True):
    """The fields of one of `sampling_params`: some have names of SGLang's."""

    max_tokens: int | None = msgspec.field(default=None, name="max_new_tokens")
    min_tokens: int = msgspec.field(default=0, name="min_new_tokens")
    seed: int | None = msgspec.field(default=None, name="sampling_seed")
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    stop_regex: Any = None

    @property
    def num_new(self) -> int:
        """Most tokens to generate."""
        return DEFAULT_NEW_TOKENS if self.max_tokens is None else self.max_tokens

    def checked_params(self, *, logprobs: int | None) -> SamplingParams:
        """The parameters; raises RequestError where one is out of range."""
        for name in _OTHER_CONSTRAINTS:
            if getattr(self, name):
                raise RequestError(f"{name} must be left out; use json_schema", param=name)
        with renaming(_OTHER_NAMES):
            return self.sampling_params(max_tokens=self.num_new, logprobs=logprobs)

    def grammar(self) -> str | None:
        """The grammar of `json_schema`, if there is one."""
        if self.json_schema is None:
            return None
        schema = self.json_schema
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema)
            except (msgspec.DecodeError, RecursionError) as error:
                message = f"json_schema must be a JSON schema, but {error}"
                raise RequestError(message, param="json_schema") from None
        with renaming({"response_format": "json_schema"}):
            return json_grammar(schema)


class LogprobsWanted(msgspec.Struct, kw_only=True, frozen=True):
    """Which logprobs one prompt's answers bring; none where `is_wanted` is false."""

    is_wanted: bool
    start: int
    num_top: int
    label_ids: tuple[int, ...]


async def generate(call: Call, body: GenerateBody) -> Any:
    """Answers one body."""
    prompts = _prompts(body)
    samplings = _samplings(body.sampling_params, len(prompts))
    wanted = _logprobs_wanted(call, body, len(prompts))
    grammars: list[str | None] = [None] * len(prompts)
    if any(one.json_schema is not None for one in samplings):
        grammars = await call.context.off_loop(lambda: [one.grammar() for one in samplings])
    requests = await call.requests(
        prompts,
        [
            one.checked_params(logprobs=want.num_top if want.is_wanted else None)
            for one, want in zip(samplings, wanted, strict=True)
        ],
        wants=[_wants(*each) for each in zip(samplings, wanted, grammars, strict=True)],
        name="input_ids" if body.text is None else "text",
    )
    each = [want for one, want in zip(samplings, wanted, strict=True) for _ in range(one.n)]
    for request, want in zip(requests, each, strict=True):
        if want.start > request.prompt_length:
            rule = f"at most the prompt's length, which is {request.prompt_length}"
            raise wrong("logprob_start_len", rule, want.start)
    writer, generation = _Writer(call, body, each), call.submit(requests)
    if body.stream:
        return EventStream(_events(call, generation, writer))
    answers = [await _answer(call, writer, part) for part in await whole_parts(generation)]
    return answers if writer.is_list else answers[0]


async def _events(
    call: Call, generation: Generation, writer: "_Writer"
) -> AsyncGenerator[dict[str, Any]]:
    async for part in parts(generation):
        index = {"index": part.index} if writer.is_list else {}
        yield index | await _answer(call, writer, part)


async def _answer(call: Call, writer: "_Writer", part: Part) -> dict[str, Any]:
    whole = replace(part, start=0, is_first=True)  # every event tells all so far
    return await call.off_loop_if_long(whole.num_logprobs, lambda: writer.answer(part))


class _Writer:
    """Writes answers, each with all that is known so far."""

    def __init__(self, call: Call, body: GenerateBody, wanted: list[LogprobsWanted]) -> None:
        """`wanted` of every answer, in order."""
        given = body.input_ids if body.text is None else body.text
        is_batch = isinstance(given, list) and isinstance(given[0], (str, list))
        self.is_list = is_batch or len(wanted) > 1
        self._call = call
        self._wanted = wanted
        self._has_texts = body.return_text_in_logprobs
        self._token_texts = call.context.token_texts()
        self._texts = [""] * len(wanted)
        self._started_at = time.monotonic()

    def answer(self, part: Part) -> dict[str, Any]:
        """One answer, complete if the part is the last."""
        collector = part.collector
        self._texts[part.index] += part.text
        meta: dict[str, Any] = {
            "id": collector.request.id if self.is_list else self._call.request_id,
            "finish_reason": None if part.done is None else _finish_reason(part.done),
            "prompt_tokens": collector.request.prompt_length,
            "completion_tokens": len(collector.tokens),
            "cached_tokens": collector.cached_tokens,
            "e2e_latency": time.monotonic() - self._started_at,
        }
        if self._wanted[part.index].is_wanted:
            meta |= self._logprobs(collector, self._wanted[part.index])
        return {
            "text": self._texts[part.index],
            "output_ids": [token.token for token in collector.tokens],
            "meta_info": meta,
        }

    def _logprobs(self, collector: Collector, wanted: LogprobsWanted) -> dict[str, Any]:
        ids = collector.request.prompt_ids
        places = range(wanted.start, len(ids)) if wanted.start >= 0 else range(0)
        found: dict[str, Any] = {
            "input_token_logprobs": [
                self._triple(ids[at], collector.prompt_logprobs[at]) for at in places
            ],
            "output_token_logprobs": [
                self._triple(token.token, token.logprob) for token in collector.tokens
            ],
        }
        if wanted.num_top:
            found["input_top_logprobs"] = [self._ranked(collector.prompt_top[at]) for at in places]
            found["output_top_logprobs"] = [self._ranked(token.top) for token in collector.tokens]
        if wanted.label_ids:
            labels = zip(wanted.label_ids, collector.label_scores, strict=True)
            found["input_token_ids_logprobs"] = []
            found["output_token_ids_logprobs"] = [[self._triple(*each) for each in labels]]
        return found

    def _ranked(self, top: Mapping[int, float] | None) -> list[list[Any]] | None:
        if top is None:
            return None
        pairs = sorted(top.items(), key=lambda pair: -pair[1])
        return [self._triple(token, logprob) for token, logprob in pairs]

    def _triple(self, token: int, logprob: float | None) -> list[Any]:
        text = self._token_texts.text(token) if self._has_texts else None
        return [None if logprob is None else floored(logprob), token, text]


def _finish_reason(done: Completion) -> dict[str, Any]:
    if done.finish_reason == "stop":
        matched = done.token_ids[-1] if done.stop_reason is None else done.stop_reason
        return {"type": "stop", "matched": matched}
    if done.finish_reason == "length":
        return {"type": "length", "length": len(done.token_ids)}
    return {"type": "abort", "message": "the request was ended"}


def _prompts(body: GenerateBody) -> list[Prompt]:
    for name in _OTHER_INPUTS:
        if getattr(body, name):
            raise RequestError(
                f"{name} must be left out: one model is served, and it reads texts and ids",
                param=name,
            )
    if (body.text is None) == (body.input_ids is None):
        what = "neither" if body.text is None else "both"
        raise RequestError(f"one of text and input_ids must be given, got {what}", param="text")
    if body.text is None:
        prompts = prompts_of(body.input_ids, "input_ids")
        if any(isinstance(prompt, str) for prompt in prompts):
            raise wrong("input_ids", "a list of token ids, or of such lists", body.input_ids)
        return prompts
    prompts = prompts_of(body.text, "text")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise wrong("text", "a text or a list of texts", body.text)
    return prompts


def _samplings(given: Any, count: int) -> list[GenerateSampling]:
    rows: Any = given if isinstance(given, list) else [given]
    if len(rows) != (count if rows is given else 1) or not all(isinstance(x, dict) for x in rows):
        raise wrong("sampling_params", f"an object, or a list of {count} of them", given)
    found = [convert(row, GenerateSampling) for row in rows]
    return found if rows is given else found * count


def _wants(sampling: GenerateSampling, wanted: LogprobsWanted, grammar: str | None) -> Wants:
    if wanted.label_ids and sampling.num_new > 1:
        raise RequestError(
            "token_ids_logprob is answered for the first place after the prompt, so max_new_tokens "
            f"must be 0 or 1 with it, got {sampling.num_new}",
            param="token_ids_logprob",
        )
    is_scored = wanted.is_wanted and wanted.start >= 0
    return Wants(
        prompt_logprobs=is_scored,
        prompt_top=wanted.num_top * is_scored,
        label_ids=wanted.label_ids,
        grammar=grammar,
    )


def _logprobs_wanted(call: Call, body: GenerateBody, count: int) -> list[LogprobsWanted]:
    """One a prompt; of fields that are no lists all have the same."""
    flags = _each("return_logprob", body.return_logprob, count)
    starts = _each("logprob_start_len", body.logprob_start_len, count)
    tops = _each("top_logprobs_num", body.top_logprobs_num, count)
    given = body.token_ids_logprob
    is_nested = isinstance(given, list) and any(isinstance(item, list) for item in given)
    labels = _each("token_ids_logprob", given if is_nested else [given] * count, count)
    found: list[LogprobsWanted] = []
    for flag, start, top, ids in zip(flags, starts, tops, labels, strict=True):
        if not isinstance(flag, bool):
            raise wrong("return_logprob", "true or false", flag)
        _check_integer("logprob_start_len", start, -1, None)
        _check_integer("top_logprobs_num", top, 0, MAX_TOP_LOGPROBS)
        asked = ids if flag and ids else None
        found.append(
            LogprobsWanted(
                is_wanted=flag,
                start=start if flag else -1,
                num_top=top if flag else 0,
                label_ids=_label_ids(call, asked) if asked is not None else (),
            )
        )
    return found


def _label_ids(call: Call, ids: Any) -> tuple[int, ...]:
    with renaming({"label_token_ids": "token_ids_logprob"}):
        return call.context.admission().label_ids(ids)


def _each(name: str, value: Any, count: int) -> list[Any]:
    values: list[Any] = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise wrong(name, f"one value, or a list of {count} of them", value)
    return values


def _check_integer(name: str, value: Any, low: int, high: int | None) -> None:
    is_within = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not is_within or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"{low} to {high}"
        raise wrong(name, f"an integer, {limits}", value)
