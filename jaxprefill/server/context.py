"""What all routes of one server share, and what one call to it may do."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from jaxprefill.admission import (
    NOTHING_GENERATED,
    NOTHING_MORE,
    Admission,
    Prompt,
    Wants,
    naming_item,
)
from jaxprefill.client import EngineClient, ServedModel
from jaxprefill.errors import RequestError
from jaxprefill.readings import Reading, Readings
from jaxprefill.request import Completion, Request, SamplingParams
from jaxprefill.server.api_error import ApiError, unavailable
from jaxprefill.server.generation import Generation
from jaxprefill.server.observer import Observer
from jaxprefill.server.settings import ServerSettings
from jaxprefill.server.token_text import TokenTexts
from jaxprefill.tokenizer import Tokenizer

T = TypeVar("T")

_OFF_LOOP_SIZE = 4096  # characters or ids from which the event loop does not wait for tokenizing
_MAX_SEQUENCES = 65536  # of one call, so that no body of a few bytes takes all memory
_MAX_SIZE = 2**26  # characters and ids of one call, when what stands once is repeated


def size_of(value: Any) -> int:
    """Characters and ids of a text, a list of ids, or a list of either."""
    if not isinstance(value, list):
        return len(value) if isinstance(value, str) else 1
    items: list[Any] = value
    if not {str, list} & set(map(type, items)):
        return len(items)
    return sum(len(item) if isinstance(item, (str, list)) else 1 for item in items)


def check_batch(name: str, count: int, size: int = 0) -> None:
    """Raises RequestError where one call asks for absurdly much."""
    for found, most, what in (
        (count, _MAX_SEQUENCES, "sequences"),
        (size, _MAX_SIZE, "characters"),
    ):
        if found > most:
            raise RequestError(
                f"{name} must make at most {most} {what}, got {found}; send several requests",
                param=name,
            )


class ServerContext:
    """Engine, settings, and the calls that run.

    Attributes:
        is_draining: no new work is taken; what runs may finish.
        calls: those being answered, by request id.
        num_sequences: those that the engine has been given and has not finished.
    """

    def __init__(self, client: EngineClient, settings: ServerSettings, observer: Observer) -> None:
        """Starts no work."""
        self.client = client
        self.settings = settings
        self.observer = observer
        self.is_draining = False
        self.calls: dict[str, Call] = {}
        self.num_sequences = 0
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="tokenize")
        self._rng = np.random.default_rng()
        self._admission: tuple[ServedModel, Admission] | None = None
        self._texts: tuple[Tokenizer, TokenTexts] | None = None

    def sequence_ended(self) -> None:
        """The engine has one less to work on."""
        self.num_sequences -= 1

    @property
    def is_serving(self) -> bool:
        """Whether new requests are taken."""
        return self.client.is_ready and not self.is_draining

    def check_open(self) -> None:
        """Refuses a call that could not be served now.

        Raises:
            ApiError: 503 while starting or draining, 429 when the queue is full.
        """
        if self.is_draining:
            raise unavailable("the server is shutting down; send the request elsewhere")
        if not self.client.is_ready:
            raise unavailable("the engine is starting; try again in a while")
        waiting = self.num_sequences - self.client.model.max_running
        if waiting >= self.settings.max_queued_requests:
            raise ApiError(
                429,
                f"the queue holds at most {self.settings.max_queued_requests} prompts, and "
                f"{waiting} wait already; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model.

        Raises:
            EngineUnavailable: the engine is not ready.
        """
        return self.settings.names(self.client.model.root)

    def admission(self) -> Admission:
        """What requests must keep to.

        Raises:
            EngineUnavailable: the engine is not ready.
        """
        model = self.client.model
        if self._admission is None or self._admission[0] is not model:
            admission = Admission(
                tokenizer=model.tokenizer,
                vocab_size=model.config.vocab_size,
                context_length=model.context_length,
                rng=self._rng,
                has_lm_head=model.config.has_lm_head,
            )
            self._admission = (model, admission)
        return self._admission[1]

    def token_texts(self) -> TokenTexts:
        """How the model's tokens are written; raises EngineUnavailable."""
        tokenizer = self.client.model.tokenizer
        if self._texts is None or self._texts[0] is not tokenizer:
            self._texts = (tokenizer, TokenTexts(tokenizer))
        return self._texts[1]

    async def off_loop(self, function: Callable[[], T]) -> T:
        """Runs what takes a while without holding up other calls."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def close(self) -> None:
        """Lets go of the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Call:
    """One HTTP request that is being answered.

    Attributes:
        is_answered: the last of the answer is on its way.
    """

    def __init__(self, context: ServerContext, request_id: str) -> None:
        """It is among the context's calls until it is closed.

        Raises:
            ApiError: 409, a request of this id runs.
        """
        if request_id in context.calls:
            message = f"request id {request_id!r} is in use; wait for it, or send another id"
            raise ApiError(409, message, param="request_id", code="duplicate_request_id")
        self.context = context
        self.request_id = request_id
        self.is_answered = False
        self.created = int(time.time())
        self._arrived_at = time.monotonic()
        self._generations: list[Generation] = []
        self._is_cancelled = False
        context.calls[request_id] = self

    @property
    def model(self) -> ServedModel:
        """What is served; raises EngineUnavailable."""
        return self.context.client.model

    def served_name(self, asked: str | None) -> str:
        """The model's name as the client calls it.

        Raises:
            ApiError: 404, there is no such model.
        """
        names = self.context.names
        if asked is not None and asked not in names:
            message = f"model must be {' or '.join(map(repr, names))}, got {asked!r:.120}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked or names[0]

    async def off_loop_if_long(self, size: float, function: Callable[[], T]) -> T:
        """Runs a function; on a thread where it goes through many characters or ids."""
        return function() if size < _OFF_LOOP_SIZE else await self.context.off_loop(function)

    async def requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        wants: Wants | Sequence[Wants] = NOTHING_MORE,
        name: str = "prompt",
    ) -> list[Request]:
        """Validated requests, prompt-major; an error says which of `name` is at fault."""
        admission, count = self.context.admission(), len(prompts)
        each = [params] * count if isinstance(params, SamplingParams) else params
        asked = [wants] * count if isinstance(wants, Wants) else wants
        check_batch(name, sum(one.n for one in each))

        def build() -> list[Request]:
            found: list[Request] = []
            for index, (prompt, one, want) in enumerate(zip(prompts, each, asked, strict=True)):
                with naming_item(name, index, count):
                    prompt_id = f"{self.request_id}-{index}"
                    found += admission.requests(prompt_id, prompt, one, wants=want)
            return found

        return await self.off_loop_if_long(sum(map(len, prompts)), build)

    async def read(
        self, make: Callable[[Readings], Reading[T]], *, name: str, count: int, size: int
    ) -> tuple[T, list[Completion]]:
        """Runs `count` prompts for what their rows tell, of `size` characters and ids altogether.

        Raises:
            RequestError: `make` or a prompt is at fault; nothing ran.
            JaxPrefillError: as `run`.
        """
        check_batch(name, count, size)
        readings = Readings(self.model.config, self.context.admission())
        reading = await self.off_loop_if_long(size, lambda: make(readings))
        requests = await self.requests(
            reading.prompts, NOTHING_GENERATED, wants=reading.wants, name=reading.name
        )
        completions = await self.run(requests)
        return reading.result(completions), completions

    def submit(self, requests: Sequence[Request]) -> Generation:
        """Hands requests to the engine; they end with the call at the latest.

        Raises:
            ApiError: 429 or 503, as `ServerContext.check_open`.
        """
        self.context.check_open()
        generation = Generation(
            self.context.client.submit(requests),
            requests,
            self.model.tokenizer,
            observer=self.context.observer,
            arrived_at=self._arrived_at,
            on_end=self.context.sequence_ended,
        )
        self.context.num_sequences += len(requests)
        self._generations.append(generation)
        if self._is_cancelled:
            generation.cancel()
        return generation

    async def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Submits requests and waits for them; raises what `Generation.updates` raises."""
        return await self.submit(requests).completions()

    def cancel(self) -> None:
        """Ends whatever runs, or will; the client is told."""
        self._is_cancelled = True
        for generation in self._generations:
            generation.cancel()

    def close(self) -> None:
        """Ends whatever still runs."""
        for generation in self._generations:
            generation.close()
        self.context.calls.pop(self.request_id, None)
