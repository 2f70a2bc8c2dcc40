"""One request's results as they arrive: text, stop strings, logprobs. Host only."""

import numpy as np

from jaxprefill.request import Completion, FinishReason, Request, Vector
from jaxprefill.tokenizer import Detokenizer, Tokenizer


class Collector:
    """Builds a Completion from tokens; says when a stop string ends it early."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        """`request.params.stop` is searched in generated text only."""
        self.request = request
        self.token_ids: list[int] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._text = ""
        self._searched_from = 0
        self._logprobs: list[float] = []
        self._top: list[dict[int, float]] = []
        self._prompt_logprobs: list[float | None] = [None]
        self._label_scores: list[float] = []
        self._hidden_sum: Vector | None = None
        self._class_logits: Vector | None = None
        self.cached_tokens = 0
        self._reason: FinishReason | None = None
        self._stop: str | int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether `completion` is final."""
        return self._reason is not None

    def add_prompt_logprobs(self, logprobs: tuple[float, ...]) -> None:
        """The next logprobs of the prompt, in order."""
        self._prompt_logprobs.extend(logprobs)

    def add_label_scores(self, scores: tuple[float, ...]) -> None:
        """The scores of the request's label ids."""
        self._label_scores += scores

    def add_vectors(self, hidden_sum: Vector | None, class_logits: Vector | None) -> None:
        """More hidden rows of the prompt, summed; and its class logits, where they are found."""
        if hidden_sum is not None:
            known = self._hidden_sum
            self._hidden_sum = hidden_sum if known is None else known + hidden_sum
        if class_logits is not None:
            self._class_logits = class_logits

    def add_token(self, token: int, logprob: float, top: dict[int, float]) -> None:
        """The next generated token; may finish the request on a stop string."""
        self.token_ids.append(token)
        self._logprobs.append(logprob)
        self._top.append(_with_chosen(top, token, logprob, self.request.params.logprobs or 0))
        if not self.request.is_ended_by(token, len(self.token_ids)):
            self._add_text(self._detokenizer.push(token))

    def finish(self, reason: FinishReason) -> None:
        """No more tokens come; a stop string found earlier keeps its reason."""
        if self.is_finished:
            return
        self._add_text(self._detokenizer.flush())
        if self.is_finished:
            return
        self._reason = reason
        last = self.token_ids[-1] if self.token_ids else None
        if reason == "stop" and last in self.request.params.stop_token_ids:
            self._stop = last

    def completion(self) -> Completion:
        """What was found; call when finished."""
        assert self._reason is not None, "the request is still running"
        params = self.request.params
        wants = params.logprobs is not None
        return Completion(
            token_ids=self.token_ids,
            text=self._text,
            finish_reason=self._reason,
            stop_reason=self._stop,
            logprobs=self._logprobs if wants else None,
            top_logprobs=self._top if params.logprobs else None,
            prompt_logprobs=self._prompt_logprobs if self.request.wants_prompt_logprobs else None,
            label_scores=self._label_scores if self.request.label_ids else None,
            embedding=self._embedding(),
            class_logits=self._class_logits,
            cached_tokens=self.cached_tokens,
            prompt_tokens=self.request.prompt_length,
            index=self.request.index,
        )

    def _embedding(self) -> Vector | None:
        if self._hidden_sum is None or self.request.pooling != "mean":
            return self._hidden_sum
        return self._hidden_sum / np.float32(self.request.prompt_length)

    def _add_text(self, new: str) -> None:
        """Appends, and cuts at the earliest stop string that ends within the new text.

        Text of the first `min_tokens` tokens holds no stop string, as in vLLM.
        """
        start = len(self._text)
        self._text += new
        if len(self.token_ids) <= self.request.params.min_tokens:
            self._searched_from = len(self._text)
            return
        found = [
            (at, stop)
            for stop in self.request.params.stop
            if (at := self._text.find(stop, max(start - len(stop) + 1, self._searched_from))) >= 0
        ]
        if found:
            at, self._stop = min(found)
            self._text, self._reason = self._text[:at], "stop"


def _with_chosen(top: dict[int, float], token: int, logprob: float, count: int) -> dict[int, float]:
    """The `count` likeliest ids, and the chosen one whatever its rank."""
    likeliest = dict(list(top.items())[:count])
    return likeliest if token in likeliest else {token: logprob, **likeliest}
