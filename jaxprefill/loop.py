"""Runs the engine's steps on a thread of its own, for all callers together.

Signals interrupt the main thread alone: with the steps elsewhere, none can stop one half way,
between a donated array and its successor. The thread lives while there is work.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from jaxprefill.collector import Collector
from jaxprefill.core import EngineCore, RequestUpdate
from jaxprefill.errors import JaxPrefillError
from jaxprefill.request import Completion, Request
from jaxprefill.tokenizer import Tokenizer


@dataclass(eq=False)
class _Job:
    """The requests of one call, and where its caller waits."""

    collectors: dict[str, Collector]
    done: "Future[list[Completion]]" = field(default_factory=Future)

    @property
    def is_finished(self) -> bool:
        return all(collector.is_finished for collector in self.collectors.values())


class EngineLoop:
    """Takes calls from any thread; their requests share batches."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        """`core` belongs to this loop from now on."""
        self._core = core
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # of the next three
        self._inbox: list[Callable[[], None]] = []
        self._is_serving = False
        self._is_closed = False
        self._jobs: list[_Job] = []  # these two: the serving thread's alone
        self._collectors: dict[str, Collector] = {}

    def run(self, requests: list[Request]) -> list[Completion]:
        """Runs requests to their end; a caller that is interrupted leaves none behind.

        Raises:
            RequestError: a request can never fit the KV pool; none was run.
            JaxPrefillError: the engine is closed.
        """
        job = _Job({request.id: Collector(request, self._tokenizer) for request in requests})
        self._post(partial(self._start, job))
        try:
            return job.done.result()
        except BaseException as error:
            if not job.done.done():
                self._post(partial(self._end, job, error))
                job.done.exception()
            raise

    def flush_cache(self) -> None:
        """Forgets all prefixes that no running request uses; between two steps."""
        self._call(self._core.cache.flush)

    def close(self) -> None:
        """Ends every call and frees the device's arrays."""
        if not self._is_closed:
            self._call(self._shut_down)

    def _call(self, function: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._post(lambda: done.set_result(function()))
        done.result()

    def _post(self, action: Callable[[], None]) -> None:
        """Has the serving thread do something before its next step."""
        with self._lock:
            if self._is_closed:
                raise JaxPrefillError("the engine is closed; make a new one")
            self._inbox.append(action)
            if not self._is_serving:
                self._is_serving = True
                threading.Thread(target=self._serve, name="engine").start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                actions, self._inbox = self._inbox, []
                if not actions and not self._core.has_work:
                    self._is_serving = False
                    return
            for action in actions:
                action()
            if self._core.has_work:
                self._step()

    def _start(self, job: _Job) -> None:
        self._jobs.append(job)
        self._collectors |= job.collectors
        try:
            for collector in job.collectors.values():
                self._core.add(collector.request)
        except JaxPrefillError as error:
            self._end(job, error)
        else:
            self._end_finished()  # a call may ask for nothing

    def _step(self) -> None:
        try:
            for update in self._core.step():
                self._hand_out(update)
        except Exception as error:  # it belongs to whoever's requests it took
            for job in list(self._jobs):
                if any(
                    not collector.is_finished and not self._core.is_known(name)
                    for name, collector in job.collectors.items()
                ):
                    self._end(job, error)
        self._end_finished()

    def _hand_out(self, update: RequestUpdate) -> None:
        collector = self._collectors.get(update.request.id)
        if collector is None or collector.is_finished:
            return
        collector.cached_tokens = update.cached_tokens
        collector.add_prompt_logprobs(update.prompt_logprobs)
        collector.add_label_scores(update.label_scores)
        collector.add_vectors(update.hidden_sum, update.class_logits)
        for token in update.tokens:
            collector.add_token(*token)
        if update.finish_reason is not None:
            collector.finish(update.finish_reason)
        elif collector.is_finished:  # a stop string, which only the text shows
            self._core.abort(update.request.id)

    def _end_finished(self) -> None:
        for job in [job for job in self._jobs if job.is_finished]:
            self._end(job)

    def _end(self, job: _Job, error: BaseException | None = None) -> None:
        """Answers a call; the last one waits until nothing is in flight."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        for name in job.collectors:
            self._core.abort(name)
            self._collectors.pop(name)
        try:
            while not self._jobs and self._core.has_work:
                self._core.step()
        except Exception as late:  # the caller must not wait for ever
            error = error or late
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result([each.completion() for each in job.collectors.values()])

    def _shut_down(self) -> None:
        with self._lock:
            self._is_closed = True
        for job in list(self._jobs):
            self._end(job, JaxPrefillError("the engine was closed while the call was running"))
        self._core.state.delete()
