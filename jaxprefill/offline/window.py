"""Works on many items at once and gives their results in order, in bounded memory."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MAX_HELD_BYTES = 2**28


@dataclass(frozen=True)
class Window(Generic[T, R]):
    """How much is worked on at once: the wider, the better short prompts are packed.

    Attributes:
        work: what is done with an item.
        item_bytes, result_bytes: what an item weighs while it is worked on, and its result until
            all before it are there too.
        max_items, max_bytes: beyond these no item is begun.
    """

    work: Callable[[T], Awaitable[R]]
    item_bytes: Callable[[T], int]
    result_bytes: Callable[[R], int]
    max_items: int
    max_bytes: int = MAX_HELD_BYTES

    async def results(self, batches: AsyncIterator[list[T]]) -> AsyncGenerator[list[R]]:
        """All results, in the order of the items, as many at a time as are ready.

        Raises what `work` and `batches` raise; nothing runs any more then.
        """
        run = _Run(self, batches)
        try:
            while await run.step():
                if ready := run.take():
                    yield ready
        finally:
            await run.stop()


class _Run(Generic[T, R]):
    def __init__(self, window: Window[T, R], batches: AsyncIterator[list[T]]) -> None:
        self._window = window
        self._batches = batches
        self._fetched: deque[T] = deque()
        self._running: deque[asyncio.Task[R]] = deque()
        self._fetching: asyncio.Task[list[T] | None] | None = None
        self._has_more = True
        self._held_bytes = 0

    async def step(self) -> bool:
        """Begins what there is room for, and waits until something changes; False at the end."""
        self._begin()
        waits: list[asyncio.Task[R] | asyncio.Task[list[T] | None]] = []
        if self._running:
            waits.append(self._running[0])
        if not self._fetched and self._has_more:
            if self._fetching is None:
                self._fetching = asyncio.create_task(self._fetch())
            waits.append(self._fetching)
        if not waits:
            return False
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._fetching is not None and self._fetching.done():
            found, self._fetching = self._fetching.result(), None
            self._has_more = found is not None
            self._fetched.extend(found or ())
        return True

    def take(self) -> list[R]:
        """The results at the head that are there."""
        ready: list[R] = []
        while self._running and self._running[0].done():
            ready.append(self._running.popleft().result())
            self._held_bytes -= self._window.result_bytes(ready[-1])
        return ready

    async def stop(self) -> None:
        """Ends what still runs."""
        tasks: list[asyncio.Task[Any]] = [*self._running]
        tasks += [self._fetching] if self._fetching else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        window = self._window
        while self._fetched and (
            not self._running
            or (len(self._running) < window.max_items and self._held_bytes < window.max_bytes)
        ):
            item = self._fetched.popleft()
            self._held_bytes += window.item_bytes(item)
            self._running.append(asyncio.create_task(self._work(item)))

    async def _work(self, item: T) -> R:
        result = await self._window.work(item)
        self._held_bytes += self._window.result_bytes(result) - self._window.item_bytes(item)
        return result

    async def _fetch(self) -> list[T] | None:
        return await anext(self._batches, None)
