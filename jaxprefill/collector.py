"""One request's results as they arrive: text, stop strings, logprobs. Host only."""

import numpy as np

from jaxprefill.request import Completion, FinishReason, Request, Vector
from jaxprefill.tokenizer import Detokenizer, Tokenizer
from jaxprefill.updates import RequestUpdate, SampledToken


class Collector:
    """Builds a Completion from updates; says when a stop string ends it early.

    Attributes:
        tokens: those generated so far, with logprobs.
        text: their text so far, whole characters; cut where a stop string was found.
        offsets: characters of the text before each token; tokens inside one share an offset.
        prompt_logprobs: of the prompt's tokens so far, the first None; if they are asked for.
        prompt_top: the likeliest ids in their places, the first None; nothing if not asked for.
        label_scores: one per label id, once the prompt is read.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, *, lead: "Collector | None" = None
    ) -> None:
        """`request.params.stop` is searched in generated text only.

        Args:
            request: what it collects for.
            tokenizer: makes the text.
            lead: of the same prompt, whose logprobs and scores it finds for both.
        """
        self.request = request
        self.tokens: list[SampledToken] = []
        self.text = ""
        self.offsets: list[int] = []
        self.cached_tokens = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._num_taken = 0
        self._searched_from = 0
        self.prompt_logprobs: list[float | None] = [None]
        self.prompt_top: list[dict[int, float] | None] = [None] if request.num_prompt_top else []
        self.label_scores: list[float] = []
        self._lead = lead
        if lead is not None:
            self.prompt_logprobs, self.prompt_top = lead.prompt_logprobs, lead.prompt_top
            self.label_scores = lead.label_scores
        self._hidden_sum: Vector | None = None
        self._class_logits: Vector | None = None
        self._reason: FinishReason | None = None
        self._stop: str | int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether `completion` is final."""
        return self._reason is not None

    @property
    def is_prompt_read(self) -> bool:
        """Whether all is known that is wanted of the prompt."""
        lead = self._lead or self
        return bool(lead.tokens) or lead.is_finished

    def add(self, update: RequestUpdate) -> None:
        """What a step found; a stop string may finish the request, and the rest is ignored."""
        if self.is_finished:
            return
        self.cached_tokens = update.cached_tokens
        self.prompt_logprobs += update.prompt_logprobs
        self.prompt_top += update.prompt_top
        self.label_scores += update.label_scores
        if update.hidden_sum is not None:
            known = self._hidden_sum
            self._hidden_sum = update.hidden_sum if known is None else known + update.hidden_sum
        if update.class_logits is not None:
            self._class_logits = update.class_logits
        for token in update.tokens:
            self._add_token(token)
        if update.finish_reason is not None:
            self._finish(update.finish_reason)

    def take_text(self) -> str:
        """The text that is final and was not taken before.

        Held back is only what a stop string may begin with, and of a stop string found, nothing.
        """
        end = len(self.text) if self.is_finished else self._num_settled()
        taken = self.text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return taken

    def completion(self) -> Completion:
        """What was found; call when finished."""
        assert self._reason is not None, "the request is still running"
        request, wanted = self.request, self.request.params.logprobs
        return Completion(
            token_ids=[token.token for token in self.tokens],
            text=self.text,
            finish_reason=self._reason,
            stop_reason=self._stop,
            logprobs=None if wanted is None else [token.logprob for token in self.tokens],
            top_logprobs=[token.top for token in self.tokens] if wanted else None,
            prompt_logprobs=self.prompt_logprobs if request.wants_prompt_logprobs else None,
            prompt_top_logprobs=self.prompt_top if request.num_prompt_top else None,
            label_scores=self.label_scores if request.label_ids else None,
            embedding=self._embedding(),
            class_logits=self._class_logits,
            cached_tokens=self.cached_tokens,
            prompt_tokens=request.prompt_length,
            index=request.index,
        )

    def _embedding(self) -> Vector | None:
        if self._hidden_sum is None or self.request.pooling != "mean":
            return self._hidden_sum
        return self._hidden_sum / np.float32(self.request.prompt_length)

    def _add_token(self, token: SampledToken) -> None:
        if self.is_finished:
            return
        self.tokens.append(token)
        self.offsets.append(len(self.text))
        if not self.request.is_ended_by(token.token, len(self.tokens)):
            self._add_text(self._detokenizer.push(token.token))

    def _finish(self, reason: FinishReason) -> None:
        """No more tokens come; a stop string found earlier keeps its reason."""
        if self.is_finished:
            return
        self._add_text(self._detokenizer.flush())
        if self.is_finished:
            return
        self._reason = reason
        last = self.tokens[-1].token if self.tokens else None
        if reason == "stop" and last in self.request.params.stop_token_ids:
            self._stop = last

    def _add_text(self, new: str) -> None:
        """Appends, and cuts at the earliest stop string that ends within the new text.

        Text of the first `min_tokens` tokens holds no stop string, as in vLLM.
        """
        start = len(self.text)
        self.text += new
        if len(self.tokens) <= self.request.params.min_tokens:
            self._searched_from = len(self.text)
            return
        found = [
            (at, stop)
            for stop in self.request.params.stop
            if (at := self.text.find(stop, max(start - len(stop) + 1, self._searched_from))) >= 0
        ]
        if found:
            at, self._stop = min(found)
            self.text, self._reason = self.text[:at], "stop"

    def _num_settled(self) -> int:
        """Characters that no stop string can take back: all, but the longest start of one."""
        end = len(self.text)
        longest = max(map(len, self.request.params.stop), default=1) - 1
        for size in range(min(longest, end - self._searched_from), 0, -1):
            tail = self.text[end - size :]
            if any(stop.startswith(tail) for stop in self.request.params.stop):
                return end - size
        return end
