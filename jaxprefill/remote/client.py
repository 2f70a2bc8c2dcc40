"""The server's end: starts the engine's process, speaks to it, and starts it again if it dies.

Imports no jax. Everything here runs on one event loop.
"""

import asyncio
import contextlib
import itertools
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from typing import Any

from jaxprefill import errors
from jaxprefill.client import ServedModel
from jaxprefill.config import EngineConfig
from jaxprefill.errors import EngineUnavailable, JaxPrefillError, RequestError
from jaxprefill.remote.messages import (
    FROM_ENGINE,
    HEADER,
    Abort,
    Answer,
    Ask,
    Ended,
    FromEngine,
    Progress,
    Ready,
    Refused,
    Start,
    Stop,
    Submit,
    ToEngine,
    Updates,
    frame,
)
from jaxprefill.remote.spawn import Spawned, spawn
from jaxprefill.request import Request
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.updates import RequestUpdate

_LOST = "the engine's process ended while it worked on this; it is being started again"
_STARTING = "the engine is starting; try again in a while"
_MAX_PAUSE_S = 30.0
_STOP_TIMEOUT_S = 10.0

OnStarted = Callable[[Ready | Progress], None]


class EngineProcess:
    """An `EngineClient` over a process that this object starts, watches and ends."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_started: OnStarted = lambda _: None,
        on_lost: Callable[[str], None] = lambda _: None,
        is_verbose: bool = False,
        spawned: Spawned | None = None,
    ) -> None:
        """Nothing starts before `run`, but what is `spawned` already.

        Args:
            config: options of the engine.
            on_started: told of each compiled executable, and when the engine is ready.
            on_lost: told why an engine that was ready is to be started again.
            is_verbose: the process logs much.
            spawned: the first process to use.
        """
        self.num_restarts = 0
        self.num_compiled = (0, 0)
        self._config = config
        self._on_started = on_started
        self._on_lost = on_lost
        self._is_verbose = is_verbose
        self._spawned = spawned
        self._model: ServedModel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._stopping = asyncio.Event()
        self._numbers = itertools.count(1)
        self._submissions: dict[int, _Submission] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._model is not None and not self._stopping.is_set()

    @property
    def model(self) -> ServedModel:
        """What is served; raises EngineUnavailable."""
        if self._model is None:
            raise EngineUnavailable(_STARTING)
        return self._model

    @property
    def process_id(self) -> int | None:
        """Of the engine's process, if there is one."""
        return self._process.pid if self._process is not None else None

    def submit(self, requests: Sequence[Request]) -> "_Submission":
        """Hands requests over; raises EngineUnavailable."""
        if not self.is_ready:
            raise EngineUnavailable(_STARTING)
        submission = _Submission(self, next(self._numbers), requests)
        self._submissions[submission.number] = submission
        self.send(Submit(submission.number, list(requests)))
        return submission

    async def flush_cache(self) -> None:
        """Forgets all prefixes that no running request uses; raises EngineUnavailable."""
        await self.ask("flush_cache")

    async def stats(self) -> dict[str, Any]:
        """`Engine.stats()`; raises EngineUnavailable."""
        return await self.ask("stats")

    async def program_text(self, name: str) -> str:
        """`Engine.program_text()`; raises EngineUnavailable and JaxPrefillError."""
        return await self.ask("program_text", executable=name)

    async def start_profile(self, folder: str) -> None:
        """Records what the engine's process runs; raises EngineUnavailable and JaxPrefillError."""
        await self.ask("start_profile", folder=folder)

    async def stop_profile(self) -> None:
        """Writes the recording; raises EngineUnavailable and JaxPrefillError."""
        await self.ask("stop_profile")

    async def ask(self, name: str, **arguments: Any) -> Any:
        """Has the engine's process do something, and returns what it says."""
        if not self.is_ready:
            raise EngineUnavailable(_STARTING)
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self.send(Ask(number, name, arguments))
            return await answer
        finally:
            self._answers.pop(number, None)

    def send(self, message: ToEngine) -> None:
        """Sends a message if there is somebody to read it."""
        if self._writer is not None:
            self._writer.write(frame(message))

    def forget(self, number: int) -> None:
        """A submission wants nothing more."""
        self._submissions.pop(number, None)

    async def run(self) -> None:
        """Keeps an engine running until `stop`.

        Raises:
            JaxPrefillError: the first one could not start; a class of its own says why.
        """
        pause, has_been_ready = 0.0, False
        while not self._stopping.is_set():
            reason = JaxPrefillError("the engine's process ended; its log may say why")
            try:
                await self._live()
            except JaxPrefillError as error:
                reason = error
            was_ready = self._model is not None
            has_been_ready |= was_ready
            self._fail_all()
            if self._stopping.is_set():
                return
            if not has_been_ready:
                raise reason
            self.num_restarts += 1
            self._on_lost(str(reason))
            pause = 0.0 if was_ready else min(max(2 * pause, 1.0), _MAX_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def stop(self) -> None:
        """Ends the process, and with it every request."""
        self._stopping.set()
        self.send(Stop())
        process = self._process
        if process is None:
            return
        if self._model is None:  # it reads no message while it starts
            process.kill()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()
        process.wait()

    async def _live(self) -> None:
        """One life of the process, from its start to its end."""
        spawned, self._spawned = self._spawned or spawn(), None
        self._process = spawned.process
        try:
            reader, self._writer = await asyncio.open_connection(sock=spawned.connection)
            self.send(Start(asdict(self._config), self._is_verbose))
            async for message in _messages(reader):
                self._take(message)
        finally:
            if self._writer is not None:
                self._writer.close()
            self._writer = None
            if self._process.poll() is None and not self._stopping.is_set():
                self._process.kill()
            await asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Updates():
                for number, update in message.items:
                    if number in self._submissions:
                        self._submissions[number].put(update)
            case Ended():
                if message.number in self._submissions:
                    self._submissions[message.number].put(_error_of(message))
            case Answer():
                self._settle(message)
            case Refused():
                raise _error_named(message.kind, message.message)
            case Ready():
                self._model = _served_model(message)
                self._on_started(message)
            case Progress():
                self.num_compiled = (message.num_done, message.num_all)
                self._on_started(message)

    def _settle(self, message: Answer) -> None:
        answer = self._answers.get(message.number)
        if answer is None or answer.done():
            return
        if message.error is None:
            answer.set_result(message.value)
        else:
            answer.set_exception(JaxPrefillError(message.error))

    def _fail_all(self) -> None:
        """Whoever waits for a process that is gone is told."""
        self._model, self.num_compiled = None, (0, 0)
        for submission in list(self._submissions.values()):
            submission.put(EngineUnavailable(_LOST))
        self._submissions.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(_LOST))


class _Submission:
    """Requests in the engine's process."""

    def __init__(self, engine: EngineProcess, number: int, requests: Sequence[Request]) -> None:
        self.number = number
        self._engine = engine
        self._live = {request.id for request in requests}
        self._arrived: asyncio.Queue[RequestUpdate | JaxPrefillError] = asyncio.Queue()

    def put(self, item: RequestUpdate | JaxPrefillError) -> None:
        """Called as messages come."""
        self._arrived.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        while self._live:
            item = await self._arrived.get()
            if isinstance(item, JaxPrefillError):
                self._live.clear()
                self._engine.forget(self.number)
                raise item
            if item.request_id in self._live:
                if item.finish_reason is not None:
                    self._live.discard(item.request_id)
                yield item
        self._engine.forget(self.number)

    def abort(self, request_id: str) -> None:
        """Ends one request."""
        if request_id in self._live:
            self._live.discard(request_id)
            self._engine.send(Abort(self.number, request_id))

    def cancel(self) -> None:
        """Ends those that still run; whoever iterates hears of it."""
        for request_id in self._live:
            self.put(RequestUpdate(request_id, finish_reason="abort"))
        self._engine.send(Abort(self.number))

    def close(self) -> None:
        """Ends those that still run."""
        if self._live:
            self._live.clear()
            self._engine.send(Abort(self.number))
        self._engine.forget(self.number)


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[FromEngine]:
    """What the process says, until it says no more."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            yield FROM_ENGINE.decode(await reader.readexactly(size))


def _served_model(ready: Ready) -> ServedModel:
    return ServedModel(
        root=ready.root,
        config=ready.config,
        tokenizer=Tokenizer.from_parts(ready.tokenizer),
        context_length=ready.context_length,
        max_running=ready.max_running,
        kv_tokens=ready.kv_tokens,
        started_at=int(time.time()),
    )


def _error_of(ended: Ended) -> JaxPrefillError:
    if ended.kind == RequestError.__name__:
        return RequestError(ended.message, param=ended.param)
    return _error_named(ended.kind, ended.message)


def _error_named(kind: str, message: str) -> JaxPrefillError:
    """An error of the class of that name, or of the root where it is none of ours."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, JaxPrefillError):
        return found(message)
    return JaxPrefillError(f"{kind}: {message}")
