"""What a server needs of an engine, wherever that runs. Knows no transport; imports no jax."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxprefill.config import ModelConfig
from jaxprefill.request import Request
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.updates import RequestUpdate


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that is loaded and ready.

    Attributes:
        root: the name or path that it was loaded by.
        context_length: most tokens of prompt and output together.
        max_running: requests that run at once; the rest wait.
        kv_tokens: tokens that the KV pool holds: more than these no request may need.
        started_at: when it became ready, in seconds since 1970.
    """

    root: str
    config: ModelConfig
    tokenizer: Tokenizer
    context_length: int
    max_running: int
    kv_tokens: int
    started_at: int


class Submission(Protocol):
    """Requests on their way; iterating gives their updates until each has finished.

    Iteration raises RequestError where the engine refuses the requests, EngineUnavailable where it
    is lost, and JaxPrefillError where it failed.
    """

    def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        """The updates of all requests, in the order of the steps."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends one request before the next step; it gets no more updates."""
        ...

    def cancel(self) -> None:
        """Ends those that still run; their last updates say "abort"."""
        ...

    def close(self) -> None:
        """Ends those that still run. Must be called, and may be called again."""
        ...


class EngineClient(Protocol):
    """One engine, used from one event loop."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken; known without asking the engine."""
        ...

    @property
    def num_compiled(self) -> tuple[int, int]:
        """Executables that are compiled, and all that will be; (0, 0) before the first is."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often an engine that was ready was lost and started again."""
        ...

    @property
    def model(self) -> ServedModel:
        """What is served.

        Raises:
            EngineUnavailable: the engine is not ready.
        """
        ...

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Hands validated requests over; all of them run, or none.

        Raises:
            EngineUnavailable: the engine is not ready.
        """
        ...

    async def flush_cache(self) -> None:
        """Forgets all prefixes that no running request uses.

        Raises:
            EngineUnavailable: the engine is not ready, or is lost meanwhile.
        """
        ...

    async def stats(self) -> dict[str, Any]:
        """`Engine.stats()`, with `num_running` and `num_waiting` requests.

        Raises:
            EngineUnavailable: the engine is not ready, or is lost meanwhile.
        """
        ...

    async def program_text(self, name: str) -> str:
        """The optimised HLO of an executable, by its name in `stats()["compiled"]`.

        Raises:
            EngineUnavailable: the engine is not ready, or is lost meanwhile.
            JaxPrefillError: there is none of that name.
        """
        ...

    async def start_profile(self, folder: str) -> None:
        """Records what the engine runs until `stop_profile`.

        Raises:
            EngineUnavailable: the engine is not ready, or is lost meanwhile.
            JaxPrefillError: it is recording already.
        """
        ...

    async def stop_profile(self) -> None:
        """Writes the recording into its folder.

        Raises:
            EngineUnavailable: the engine is not ready, or is lost meanwhile.
            JaxPrefillError: it is not recording.
        """
        ...


class ManagedEngine(EngineClient, Protocol):
    """An engine whose life the server's decides."""

    async def run(self) -> None:
        """Starts it, and again if it is lost; returns after `stop`.

        Raises:
            JaxPrefillError: it could not be started at all.
        """
        ...

    async def stop(self) -> None:
        """Ends it, and every request that it runs; may be called again."""
        ...
