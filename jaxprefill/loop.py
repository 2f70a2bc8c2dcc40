"""Runs the engine's steps on a thread of its own, for all callers together.

Signals interrupt the main thread alone: with the steps elsewhere, none can stop one half way,
between a donated array and its successor. The thread lives while there is work, and in a group of
ranks until the engine is closed.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from jaxprefill.collector import Collector
from jaxprefill.core import EngineCore
from jaxprefill.errors import EngineUnavailable, JaxPrefillError
from jaxprefill.grammar import NO_MATCHERS, Matchers
from jaxprefill.request import Completion, Request
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.updates import RequestUpdate

logger = logging.getLogger(__name__)

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


@dataclass(eq=False)
class _Live:
    """A listener, and its requests that run."""

    listener: Listener
    names: set[str] = field(default_factory=set[str])


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
        self._live: dict[int, _Live] = {}  # by listener; these two: the serving thread's alone
        self._owners: dict[str, _Live] = {}  # by request
        if core.is_in_group:  # other ranks wait for this one, whether it has work or not
            self._post(lambda: None)

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
        except BaseException as error:  # raised again: Ctrl-C too is to end the requests
            if not answer.done.done():
                self._post(partial(self._interrupt, answer, error))
                answer.done.exception()
            raise

    def submit(
        self, requests: Sequence[Request], listener: Listener, *, matchers: Matchers = NO_MATCHERS
    ) -> None:
        """Starts requests whose results go to `listener`, step by step; all of them, or none.

        A listener may be given more while it listens: it is told the end when none runs any more.
        """
        self._post(partial(self._start, requests, listener, matchers))

    def abort(self, listener: Listener, names: Sequence[str] | None = None) -> None:
        """Stops requests of a listener before the next step; None: all, and it is told no end."""
        self._post(partial(self._forget, listener) if names is None else partial(self._drop, names))

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function between two steps."""
        done: Future[T] = Future()

        def act() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # it is the caller's
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
                if not actions and not self._must_step:
                    self._is_serving = False
                    return
            for action in actions:
                action()
            if self._must_step:
                self._step()

    @property
    def _must_step(self) -> bool:
        return self._core.has_work or self._core.is_in_group

    def _start(self, requests: Sequence[Request], listener: Listener, matchers: Matchers) -> None:
        call = self._live.setdefault(id(listener), _Live(listener))
        try:
            for request in requests:
                self._core.add(request, matchers.get(request.id))
                call.names.add(request.id)
                self._owners[request.id] = call
        except BaseException as error:  # it ends its call alone
            self._end(call, error)
        else:
            self._end_finished()  # a call may ask for nothing

    def _step(self) -> None:
        try:
            updates = self._core.step()
        except BaseException as error:  # it belongs to whoever's requests it took
            calls = list(self._live.values())
            hurt = [c for c in calls if not all(self._core.is_known(name) for name in c.names)]
            for call in hurt or calls:  # a fault that took none would come again
                self._end(call, error)
        else:
            for update in updates:
                self._hand_out(update)
        self._end_finished()

    def _hand_out(self, update: RequestUpdate) -> None:
        call = self._owners.get(update.request_id)
        if call is None:
            return
        try:
            goes_on = call.listener.on_update(update)
        except BaseException as error:  # its listener's own fault
            self._end(call, error)
            return
        if not goes_on or update.finish_reason is not None:
            self._core.abort(update.request_id)
            self._owners.pop(update.request_id)
            call.names.discard(update.request_id)

    def _interrupt(self, listener: Listener, error: BaseException) -> None:
        if id(listener) in self._live:
            self._end(self._live[id(listener)], error)

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._core.abort(name)
            call = self._owners.pop(name, None)
            if call is not None:
                call.names.discard(name)
        self._end_finished()

    def _end_finished(self) -> None:
        for call in [call for call in self._live.values() if not call.names]:
            self._end(call)

    def _end(self, call: "_Live", error: BaseException | None = None) -> None:
        """Answers a call; the last one waits until nothing is in flight."""
        self._forget(call.listener)
        late = self._settle() if not self._live else None
        try:
            call.listener.on_end(error or late)
        except BaseException:  # nobody else is to suffer for it
            logger.exception("a listener failed at its end")

    def _forget(self, listener: Listener) -> None:
        call = self._live.pop(id(listener), None)
        for name in call.names if call is not None else ():
            self._core.abort(name)
            self._owners.pop(name)

    def _settle(self) -> BaseException | None:
        """Runs steps of requests that were aborted to their end; returns the last one's failure."""
        failure: BaseException | None = None
        while self._core.has_work:
            try:
                self._core.step()
            except BaseException as error:  # the step is lost, and the next one is tried
                failure = error
        return failure

    def _shut_down(self) -> None:
        with self._lock:
            self._is_closed = True
        for call in list(self._live.values()):
            error = EngineUnavailable("the engine was closed while the call was running")
            self._end(call, error)
        self._settle()
        try:
            self._core.leave_group()
        finally:
            self._core.close()
