"""Turns what a caller gives into validated requests.

Host only, and before any device sees it: JAX would clamp a bad id silently.
"""

import operator
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxprefill.config import PoolingKind
from jaxprefill.errors import RequestError
from jaxprefill.request import Request, SamplingParams
from jaxprefill.tokenizer import Tokenizer

Prompt = str | Sequence[int]
_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Wants:
    """What is asked beside generation; see `Request` for the meaning of each."""

    prompt_logprobs: bool = False
    prompt_top: int = 0
    label_ids: tuple[int, ...] = ()
    is_label_logprob: bool = True
    pooling: PoolingKind | None = None
    class_logits: bool = False
    priority: int = 0
    grammar: str | None = None

    def __post_init__(self) -> None:
        is_integer = isinstance(self.priority, (int, np.integer))
        if isinstance(self.priority, bool) or not is_integer:
            raise RequestError(
                f"priority must be an integer, got {self.priority!r}", param="priority"
            )


NOTHING_MORE = Wants()
NOTHING_GENERATED = SamplingParams(max_tokens=0)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What a request must keep to.

    Attributes:
        vocab_size: ids the model knows; the tokenizer may know fewer.
        context_length: most tokens of prompt and output together.
        has_lm_head: whether the model can say anything about tokens.
        rng: seeds of requests that bring none.
    """

    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    rng: np.random.Generator
    has_lm_head: bool = True

    def requests(
        self,
        prompt_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        wants: Wants = NOTHING_MORE,
    ) -> list[Request]:
        """The `params.n` requests of one prompt; what is wanted of the prompt, the first one finds.

        Raises:
            RequestError: an id is out of range, or the prompt is empty or too long, or the model
                has no LM head and one is needed.
        """
        self._check_head(params, wants)
        ids = self.prompt_ids(prompt, params)
        self.check_length(len(ids), params)
        check_params(params, self.vocab_size)
        ends = () if params.ignore_eos else self.tokenizer.eos_ids
        eos = frozenset(token for token in ends if token < self.vocab_size)
        seed = params.seed
        if seed is None:  # what is only read needs none
            seed = int(self.rng.integers(2**64, dtype=np.uint64)) if params.max_tokens else 0
        each_wants = [wants]
        if params.n > 1:
            of_output = replace(wants, prompt_logprobs=False, prompt_top=0, label_ids=())
            each_wants += [of_output] * (params.n - 1)
        return [
            Request(
                id=f"{prompt_id}-{index}",
                prompt_ids=ids,
                params=params,
                seed=_stream_seed(seed, index),
                stop_ids=eos | frozenset(params.stop_token_ids),
                wants_prompt_logprobs=each.prompt_logprobs,
                num_prompt_top=each.prompt_top,
                label_ids=each.label_ids,
                is_label_logprob=each.is_label_logprob,
                pooling=each.pooling,
                wants_class_logits=each.class_logits,
                priority=each.priority,
                grammar=each.grammar,
                index=index,
            )
            for index, each in enumerate(each_wants)
        ]

    def prompt_ids(
        self, prompt: Prompt, params: SamplingParams = NOTHING_GENERATED
    ) -> tuple[int, ...]:
        """A prompt's token ids, validated; text gets the special tokens its tokenizer adds."""
        if isinstance(prompt, str):
            self._check_characters(prompt)
            ids = tuple(self.tokenizer.encode(prompt))
        else:
            if len(prompt) > self.context_length:  # perhaps by far: its ids need no look
                self.check_length(len(prompt), params)
            ids = as_ids(prompt)
        if not ids:
            raise RequestError(
                f"prompt must hold at least one token, got {prompt!r:.80}", param="prompt"
            )
        check_ids("prompt", ids, self.vocab_size)
        return ids

    def label_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Ids whose score is wanted, validated."""
        is_list = isinstance(ids, (Sequence, np.ndarray)) and not isinstance(ids, (str, bytes))
        if not is_list or len(ids) == 0:
            raise RequestError(
                f"label_token_ids must be a list of at least one token id, got {ids!r:.80}",
                param="label_token_ids",
            )
        labels = as_ids(ids, "label_token_ids")
        check_ids("label_token_ids", labels, self.vocab_size)
        return labels

    def chat_ids(self, messages: Any, template_options: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids of a rendered conversation; only the template adds special tokens."""
        text = self.tokenizer.apply_chat_template(messages, **template_options)
        return self.plain_ids(text, param="messages")

    def plain_ids(self, text: str, *, param: str = "prompt") -> tuple[int, ...]:
        """The ids of a text that names all its special tokens itself; `param` holds it."""
        self._check_characters(text, param)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def pair_ids(self, first: str, second: str) -> tuple[int, ...]:
        """The ids of two texts that the model reads together."""
        self._check_characters(first + second)
        return tuple(self.tokenizer.encode_pair(first, second))

    def _check_head(self, params: SamplingParams, wants: Wants) -> None:
        if not self.has_lm_head and (params.max_tokens or wants.prompt_logprobs or wants.label_ids):
            raise RequestError(
                "tokens and their logprobs need an LM head, which this model lacks; use embed or "
                "classify, or load a model for causal language modelling",
                param="model",
            )

    def _check_characters(self, prompt: str, param: str = "prompt") -> None:
        """A token covers a bounded number of characters, so absurd texts need no tokenizing."""
        most = self.context_length * self.tokenizer.max_token_characters
        if len(prompt) > most:
            raise RequestError(
                f"prompt has {len(prompt)} characters, and cannot fit the maximum context length "
                f"of {self.context_length} tokens; shorten it",
                param=param,
            )

    def check_length(self, num_tokens: int, params: SamplingParams = NOTHING_GENERATED) -> None:
        """Raises RequestError where a prompt of so many tokens does not fit the context."""
        room = self.context_length - (params.max_tokens > 0)
        if num_tokens > room:
            raise RequestError(
                f"prompt has {num_tokens} tokens, but the maximum context length is "
                f"{self.context_length} tokens and {'one is' if params.max_tokens else 'none is'} "
                f"to be generated; shorten the prompt to {room}",
                param="prompt",
            )


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if parameters name an id that a model of this vocabulary lacks."""
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_ids("logit_bias", tuple(params.logit_bias or ()), vocab_size)


@contextmanager
def naming_item(name: str, index: int, count: int) -> Generator[None]:
    """Puts `name[index]` before the message of a RequestError about one of several items.

    A prompt is what the caller calls `name`.
    """
    try:
        yield
    except RequestError as error:
        if error.param == "prompt":
            error.param = name
        if count == 1:
            raise
        raise RequestError(f"{name}[{index}]: {error}", param=error.param) from error


def check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError if an id is none of a model of this vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    for token in ids:
        if not 0 <= token < vocab_size:
            raise _wrong_id(param, f"0 to {vocab_size - 1}", token)


def as_ids(given: Sequence[Any], param: str = "prompt") -> tuple[int, ...]:
    """Ids as Python's integers; raises RequestError for other things, booleans among them."""
    ids = tuple(given)
    if set(map(type, ids)) <= {int}:  # as nearly always; bool is another type
        return ids
    return tuple(_as_id(token, param) for token in ids)


def _as_id(token: Any, param: str) -> int:
    try:
        if isinstance(token, (bool, np.bool_)):
            raise TypeError
        return operator.index(token)
    except TypeError:
        raise _wrong_id(param, "integers", token) from None


def _wrong_id(param: str, rule: str, token: Any) -> RequestError:
    what = param if param.endswith(("ids", "tokens")) else f"{param} ids"
    return RequestError(f"{what} must be {rule}, got {token!r:.80}", param=param)


def _stream_seed(seed: int, index: int) -> int:
    """64 bits for the index-th continuation; index 0 keeps the seed (splitmix64 for the rest)."""
    mixed = seed & _MASK
    for _ in range(1 if index else 0):
        mixed = (mixed + index * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed
