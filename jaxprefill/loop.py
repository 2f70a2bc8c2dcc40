"""Runs the engine's steps on a thread of its own, for all callers together.

Signals interrupt the main thread alone: with the steps elsewhere, none can stop one half way,
between a donated array and its successor. The thread lives while there is work.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from jaxprefill.collector import Collector
from jaxprefill.core import EngineCore
from jaxprefill.errors import EngineUnavailable, JaxPrefillError
from jaxprefill.request import Completion, Request
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.updates import RequestUpdate

T = TypeVar("T")


class Listener(Protocol):
    """Who hears what steps find for the requests of one call; told on the engine's thread."""

    def on_update(self, update: RequestUpdate) -> bool:
        """Takes what a step found; returns whether the request shall go on."""
        ...

    def on_end(self, error: BaseException | None) -> None:
        """No request of the call runs any more; `error` is what ended them, if something did."""
        ...


class _Answer:
    """Listens until all requests have their completions."""

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer) -> None:
        self.collectors = {request.id: Collector(request, tokenizer) for request in requests}
        self.done: Future[list[Completion]] = Future()

    def on_update(self, update: RequestUpdate) -> bool:
        collector = self.collectors[update.request_id]
        collector.add(update)
        return not collector.is_finished  # by a stop string, which only the text shows

    def on_end(self, error: BaseException | None) -> None:
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result([each.completion() for each in self.collectors.values()])


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
        self._live: dict[Listener, set[str]] = {}  # these two: the serving thread's alone
        self._owners: dict[str, Listener] = {}

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Runs requests to their end; a caller that is interrupted leaves none behind.

        Raises:
            RequestError: a request can never fit the KV pool; none was run.
            JaxPrefillError: the engine is closed.
        """
        answer = _Answer(requests, self._tokenizer)
        self.submit(requests, answer)
        try:
            return answer.done.result()
        except BaseException as error:
            if not answer.done.done():
                self._post(partial(self._end, answer, error))
                answer.done.exception()
            raise

    def submit(self, requests: Sequence[Request], listener: Listener) -> None:
        """Starts requests whose results go to `listener`, step by step; all of them, or none."""
        self._post(partial(self._start, requests, listener))

    def abort(self, listener: Listener, names: Sequence[str] | None = None) -> None:
        """Stops requests of a listener before the next step; None: all, and it is told no end."""
        self._post(partial(self._forget, listener) if names is None else partial(self._drop, names))

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function between two steps."""
        done: Future[T] = Future()

        def act() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # it is the caller's
                done.set_exception(error)

        self._post(act)
        return done.result()

    def flush_cache(self) -> None:
        """Forgets all prefixes that no running request uses."""
        self.call(self._core.cache.flush)

    def close(self) -> None:
        """Ends every call and frees the device's arrays."""
        if not self._is_closed:
            self.call(self._shut_down)

    def _post(self, action: Callable[[], Any]) -> None:
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

    def _start(self, requests: Sequence[Request], listener: Listener) -> None:
        self._live[listener] = set()
        try:
            for request in requests:
                self._core.add(request)
                self._live[listener].add(request.id)
                self._owners[request.id] = listener
        except JaxPrefillError as error:
            self._end(listener, error)
        else:
            self._end_finished()  # a call may ask for nothing

    def _step(self) -> None:
        try:
            for update in self._core.step():
                self._hand_out(update)
        except Exception as error:  # it belongs to whoever's requests it took
            for listener, names in list(self._live.items()):
                if not all(self._core.is_known(name) for name in names):
                    self._end(listener, error)
        self._end_finished()

    def _hand_out(self, update: RequestUpdate) -> None:
        listener = self._owners.get(update.request_id)
        if listener is None:
            return
        goes_on = listener.on_update(update)
        if not goes_on or update.finish_reason is not None:
            self._core.abort(update.request_id)
            self._owners.pop(update.request_id)
            self._live[listener].discard(update.request_id)

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._core.abort(name)
            listener = self._owners.pop(name, None)
            if listener is not None:
                self._live[listener].discard(name)
        self._end_finished()

    def _end_finished(self) -> None:
        for listener in [listener for listener, names in self._live.items() if not names]:
            self._end(listener)

    def _end(self, listener: Listener, error: BaseException | None = None) -> None:
        """Answers a call; the last one waits until nothing is in flight."""
        if listener not in self._live:
            return
        self._forget(listener)
        try:
            while not self._live and self._core.has_work:
                self._core.step()
        except Exception as late:  # the caller must not wait for ever
            error = error or late
        listener.on_end(error)

    def _forget(self, listener: Listener) -> None:
        for name in self._live.pop(listener, ()):
            self._core.abort(name)
            self._owners.pop(name)

    def _shut_down(self) -> None:
        with self._lock:
            self._is_closed = True
        for listener in list(self._live):
            error = EngineUnavailable("the engine was closed while the call was running")
            self._end(listener, error)
        while self._core.has_work:  # a step of requests that were aborted
            self._core.step()
        self._core.state.delete()
