"""A request and what comes back: plain host data, validated where it is made."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jaxprefill.config import PoolingKind
from jaxprefill.errors import RequestError

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
_MAX_INTEGER = 2**63 - 1  # what a message to another process can hold
FinishReason = Literal["stop", "length", "abort", "error"]
Vector = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens; OpenAI's names and vLLM's additions.

    `temperature` 0 is greedy on raw logits, ties to the lowest id. `logprobs` is the number of
    alternatives wanted beside each generated token (0: the token's own logprob alone; None:
    none); logprobs are of the raw logits, whatever temperature and filters do. NumPy's numbers
    count as numbers, and are kept as Python's.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, value in tuple(vars(self).items()):
            if isinstance(value, (np.integer, np.floating)):
                object.__setattr__(self, name, value.item())
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        stop_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_ids)
        self._check_numbers()
        self._check_stops()
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", "true or false", self.ignore_eos)

    def _check_numbers(self) -> None:
        _check_int("max_tokens", self.max_tokens, 0, None)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, is_low_open=True)
        _check_int("top_k", self.top_k, -1, None)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("n", self.n, 1, 1024)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            rule = f"at most max_tokens, which is {self.max_tokens}"
            raise _wrong("min_tokens", rule, self.min_tokens)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 10.0, is_low_open=True)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _wrong("stop", f"at most {MAX_STOP_STRINGS} strings", len(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise _wrong("stop", "non-empty strings", text)
        ids = self.stop_token_ids
        if ids and not (set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) <= _MAX_INTEGER):
            for token in ids:
                _check_int("stop_token_ids", token, 0, None)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty needs the tokens seen so far."""
        neutral = (self.presence_penalty, self.frequency_penalty) == (0.0, 0.0)
        return not neutral or self.repetition_penalty != 1.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the engine is asked to do with one prompt.

    Attributes:
        prompt_ids: at least one token id, each within the vocabulary.
        seed: 64 bits that fix this request's random stream.
        stop_ids: ids that end the request, EOS included unless it is ignored.
        wants_prompt_logprobs: score every prompt token but the first.
        num_prompt_top: how many of the likeliest ids are wanted beside each of those.
        label_ids: ids whose score is wanted as the token after the prompt.
        is_label_logprob: their scores are logprobs; else raw logits, which is cheaper and enough
            for a softmax over the labels.
        pooling: which hidden rows make the prompt's embedding, or None where none is wanted.
        wants_class_logits: read the classifier at the last token.
        priority: a higher one is served first.
        grammar: the output's, as text; None: any output.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    wants_prompt_logprobs: bool = False
    num_prompt_top: int = 0
    label_ids: tuple[int, ...] = ()
    is_label_logprob: bool = True
    pooling: PoolingKind | None = None
    wants_class_logits: bool = False
    priority: int = 0
    grammar: str | None = None
    index: int = 0

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_ids)

    @property
    def is_spared_by_prefix(self) -> bool:
        """Whether less is to be computed where a prefix is known: a mean needs every row."""
        return self.pooling != "mean"

    def is_ended_by(self, token: int, num_generated: int) -> bool:
        """Whether this token, the `num_generated`-th of the output, ends the request."""
        return token in self.stop_ids and num_generated > self.params.min_tokens


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One generated continuation.

    Attributes:
        logprobs: one raw logprob per generated token, or None when not asked for.
        top_logprobs: per generated token {id: logprob}, the chosen token always among them.
        prompt_logprobs: one per prompt token, the first None; None when not asked for.
        prompt_top_logprobs: per prompt token {id: logprob}, the token itself among them, the
            first None; None when not asked for.
        label_scores: one per label id of the request, in its order; None when there are none.
        embedding: the pooled hidden rows [E], float32, not normalised; None when not asked for.
        class_logits: one per label of the classifier; None when not asked for.
        stop_reason: the stop string or id that ended it, None for EOS or length.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        index: which of the `n` continuations of its prompt this is.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = field(default=None, repr=False)
    prompt_top_logprobs: list[dict[int, float] | None] | None = field(default=None, repr=False)
    label_scores: list[float] | None = None
    embedding: Vector | None = field(default=None, repr=False, compare=False)
    class_logits: Vector | None = field(default=None, repr=False, compare=False)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    index: int = 0


def _as_tuple(param: str, value: Any) -> tuple[Any, ...]:
    if type(value) not in (list, tuple):  # as nearly always
        is_text = isinstance(value, (str, bytes, bytearray, Mapping))
        if is_text or not isinstance(value, Iterable):
            raise _wrong(param, "a list", value)
    return tuple(_plain_number(item) for item in value)


def _plain_number(value: Any) -> Any:
    """A NumPy integer or float as Python's; anything else as it is, booleans too."""
    return value.item() if isinstance(value, (np.integer, np.floating)) else value


def _wrong(param: str, rule: str, value: Any) -> RequestError:
    shown = value if isinstance(value, (int, float)) else f"{value!r:.200}"
    return RequestError(f"{param} must be {rule}, got {shown}", param=param.partition("[")[0])


def _check_int(param: str, value: Any, low: int, high: int | None) -> None:
    most = _MAX_INTEGER if high is None else high
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
        raise _wrong(param, f"an integer, {low} to {most}", value)


def _check_float(
    param: str, value: Any, low: float, high: float, *, is_low_open: bool = False
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_within = is_number and low <= value <= high  # NaN is within no range
    if not is_within or (is_low_open and value == low):
        limits = f"above {low} and up to {high}" if is_low_open else f"{low} to {high}"
        raise _wrong(param, f"a number{' ' if is_low_open else ', '}{limits}", value)


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _wrong("logit_bias", "a mapping from token id to a number", bias)
    if _is_plain_bias(bias):
        return dict(bias)
    plain = {_plain_number(token): _plain_number(value) for token, value in bias.items()}
    for token, value in plain.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise _wrong("logit_bias", "a mapping whose keys are token ids", token)
        _check_float(f"logit_bias[{token}]", value, -100.0, 100.0)
    return plain


def _is_plain_bias(bias: Mapping[int, float]) -> bool:
    """Whether all is as it must be, found quickly: a bias may name the whole vocabulary."""
    values = bias.values()
    is_typed = set(map(type, bias)) <= {int} and set(map(type, values)) <= {int, float}
    if not bias or not is_typed:
        return not bias
    is_within = min(bias) >= 0 and min(values) >= -100.0 and max(values) <= 100.0
    return is_within and not any(map(math.isnan, values))
