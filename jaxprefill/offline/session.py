"""An engine for the length of a job, asked as the server's clients ask, through the same handlers.

An engine that is lost is started again, and what it worked on is asked anew.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

import msgspec

from jaxprefill.client import ManagedEngine
from jaxprefill.errors import ConfigError, EngineUnavailable, JaxPrefillError, RequestError
from jaxprefill.server.api_error import ApiError
from jaxprefill.server.body import decode
from jaxprefill.server.context import Call, ServerContext
from jaxprefill.server.endpoints import ENDPOINTS, Endpoint
from jaxprefill.server.observer import FinishedRequest, Observer
from jaxprefill.server.settings import ServerSettings

T = TypeVar("T")

PATHS: dict[str, Endpoint] = {endpoint.path: endpoint for endpoint in ENDPOINTS}

_MAX_LOSSES = 3  # in a row, without an answer between
_POLL_S = 0.02
_NO_QUEUE_LIMIT = 2**31


class TokenCounter(Observer):
    """Counts tokens of sequences that have ended."""

    def __init__(self) -> None:
        """Nothing has ended."""
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def finished(self, record: FinishedRequest) -> None:
        """A sequence has ended."""
        self.prompt_tokens += record.prompt_tokens
        self.generated_tokens += record.generated_tokens


class OfflineSession:
    """Runs an engine while it is entered.

    Attributes:
        tokens: what was read and generated so far.
    """

    def __init__(self, engine: ManagedEngine, *, model_names: tuple[str, ...] = ()) -> None:
        """Starts nothing; `model_names` are those that bodies may use, by default the model's."""
        self.tokens = TokenCounter()
        settings = ServerSettings(
            served_model_name=model_names, max_queued_requests=_NO_QUEUE_LIMIT
        )
        self._engine = engine
        self._context = ServerContext(engine, settings, self.tokens)
        self._running: asyncio.Task[None] | None = None
        self._num_losses = 0  # when the last answer came

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._engine.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.stop()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        self._context.close()

    async def ready(self) -> None:
        """Waits for the engine.

        Raises:
            JaxPrefillError: it cannot be started, or is lost again and again.
        """
        while not self._engine.is_ready:
            if self._running is None or self._running.done():
                if self._running is not None:
                    self._running.result()
                raise JaxPrefillError("the engine has stopped")
            if self._engine.num_restarts - self._num_losses >= _MAX_LOSSES:
                raise JaxPrefillError(
                    f"the engine was lost {_MAX_LOSSES} times while it worked on the same prompts"
                )
            await asyncio.sleep(_POLL_S)

    async def answer(self, endpoint: Endpoint, body: bytes, request_id: str) -> Any:
        """What the server would answer to a body.

        Raises:
            RequestError, ApiError: the body is at fault, or an answer cannot be given.
            JaxPrefillError: the engine failed, as for `ready` if for good.
        """
        while True:
            await self.ready()
            try:
                found = await self._answer(endpoint, body, request_id)
            except EngineUnavailable:
                continue
            except ApiError as error:
                if error.status == 503:
                    continue
                raise
            self._num_losses = self._engine.num_restarts
            return found

    def labels(self) -> tuple[str, ...]:
        """Of the model's own classifier; call when the engine is ready.

        Raises:
            ConfigError: it has none.
        """
        classifier = self._engine.model.config.classifier
        if classifier is None:
            raise ConfigError("this model has no classifier of its own; name labels instead")
        return classifier.labels

    async def stats(self) -> dict[str, Any] | None:
        """`Engine.stats()`; None while there is no engine."""
        try:
            return await self._engine.stats()
        except JaxPrefillError:
            return None

    async def _answer(self, endpoint: Endpoint, data: bytes, request_id: str) -> Any:
        body = decode(data, endpoint.kind)
        if getattr(body, "stream", False):
            raise RequestError("stream must be false or left out in a file", param="stream")
        call = Call(self._context, request_id)
        try:
            call.served_name(body.model)
            return await endpoint.handler(call, body)
        finally:
            call.close()


async def in_thread(function: Callable[[], T]) -> T:
    """Runs what may wait for long, such as reading stdin, on a thread that holds up no exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not done.cancelled():
            outcome()

    def run() -> None:
        try:
            outcome = partial(done.set_result, function())
        except BaseException as error:  # it is the caller's
            outcome = partial(done.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="reader", daemon=True).start()
    return await done


def raw_body(fields: dict[str, Any]) -> bytes:
    """A body as it would be sent."""
    return msgspec.json.encode(fields)
