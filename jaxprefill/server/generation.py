"""The sequences of one call while they run: updates become text, stop strings end them early."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence

from jaxprefill.client import Submission
from jaxprefill.collector import Collector
from jaxprefill.errors import JaxPrefillError
from jaxprefill.request import Completion, Request
from jaxprefill.server.api_error import ApiError
from jaxprefill.server.observer import FinishedRequest, Observer
from jaxprefill.tokenizer import Tokenizer


class Generation:
    """Requests that were submitted together, in order; closing it ends those that still run."""

    def __init__(
        self,
        submission: Submission,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        *,
        observer: Observer,
        arrived_at: float,
        on_end: Callable[[], None],
    ) -> None:
        """`arrived_at` is a time of `time.monotonic`; `on_end` hears of each sequence's end."""
        self.collectors = _collectors(requests, tokenizer)
        self._submission = submission
        self._observer = observer
        self._arrived_at = arrived_at
        self._on_end = on_end
        self._positions = {request.id: index for index, request in enumerate(requests)}
        self._times: dict[int, tuple[float, float]] = {}
        self._first_token_at: dict[int, float] = {}
        self._last_token_at: dict[int, float] = {}
        self._live = set(range(len(requests)))

    async def updates(self) -> AsyncGenerator[int]:
        """The position of each sequence whose collector has just taken an update.

        Raises:
            RequestError: the engine refuses a request; none runs.
            EngineUnavailable: the engine is lost.
            JaxPrefillError: the model gave values that are not numbers.
            ApiError: it was cancelled before its first token.
        """
        if not self._live:
            return
        async for update in self._submission:
            index = self._positions[update.request_id]
            if index not in self._live:
                continue
            collector = self.collectors[index]
            if update.times is not None:
                self._times[index] = update.times
            if update.tokens:
                self._time(index)
            collector.add(update)
            if update.finish_reason == "abort" and not collector.tokens:
                raise ApiError(400, "the request was aborted on demand", code="aborted")
            if update.finish_reason == "error":
                raise JaxPrefillError("the model gave values that are not numbers")
            if collector.is_finished:
                if update.finish_reason is None:  # a stop string, which only the text shows
                    self._submission.abort(update.request_id)
                self._end(index, collector.completion().finish_reason)
            yield index
            if not self._live:
                return

    async def completions(self) -> list[Completion]:
        """Waits for all; raises what `updates` raises."""
        async for _ in self.updates():
            pass
        return [collector.completion() for collector in self.collectors]

    def cancel(self) -> None:
        """Ends what still runs; whoever waits gets what there is of it."""
        self._submission.cancel()

    def close(self) -> None:
        """Ends what still runs."""
        self._submission.close()
        for index in list(self._live):
            self._end(index, "abort")

    def _time(self, index: int) -> None:
        now = time.monotonic()
        if index in self._last_token_at:
            self._observer.tokens_apart(now - self._last_token_at[index])
        self._first_token_at.setdefault(index, now)
        self._last_token_at[index] = now

    def _end(self, index: int, reason: str) -> None:
        self._live.discard(index)
        self._on_end()
        collector = self.collectors[index]
        queue_s, prefill_s = self._times.get(index, (None, None))
        self._observer.finished(
            FinishedRequest(
                reason=reason,
                prompt_tokens=collector.request.prompt_length,
                cached_tokens=collector.cached_tokens,
                generated_tokens=len(collector.tokens),
                queue_s=queue_s,
                prefill_s=prefill_s,
                first_token_s=self._since(self._first_token_at.get(index)),
                total_s=time.monotonic() - self._arrived_at,
            )
        )

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._arrived_at


def _collectors(requests: Sequence[Request], tokenizer: Tokenizer) -> list[Collector]:
    """One a request; of several with one prompt, the first finds what is wanted of the prompt."""
    found: list[Collector] = []
    for request in requests:
        lead = found[-request.index] if request.index else None
        is_read = lead is not None and (
            lead.request.wants_prompt_logprobs or lead.request.label_ids
        )
        found.append(Collector(request, tokenizer, lead=lead if is_read else None))
    return found
