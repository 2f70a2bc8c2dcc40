"""Open and closed loops of HTTP requests, and what came of them. Needs no jax.

The client is a thin HTTP/1.1 of its own, so that on a small machine the server gets the time.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

Sender = Callable[[int, float], Awaitable["Sample"]]  # a request by number, and when it is due


@dataclass(frozen=True)
class Query:
    """One request: where it goes, what it says, and how many items it counts for."""

    path: str
    body: dict[str, Any]
    num_items: int = 1


@dataclass
class Sample:
    """What became of a request; times in seconds since it was due.

    Attributes:
        status: of HTTP; 0: no answer, or a stream that broke off.
        first_s: to the first event of a stream, or to the whole answer.
    """

    status: int = 0
    first_s: float = math.nan
    total_s: float = math.nan
    num_items: int = 0
    retry_after: str | None = None
    body: bytes = field(default=b"", repr=False)


class Connections:
    """Keep-alive connections to one server; as many as there are requests at a time."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        parts = urlsplit(url)
        assert parts.scheme == "http" and parts.hostname, f"an http:// address is needed, got {url}"
        self._address = (parts.hostname, parts.port or 80)
        self._base = parts.path.rstrip("/")
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, query: Query, due: float | None = None) -> Sample:
        """One request; `due` is when it should have been sent (`time.perf_counter`)."""
        due = time.perf_counter() if due is None else due
        sample = Sample(num_items=query.num_items)
        with suppress(OSError, asyncio.IncompleteReadError):
            await self._exchange(query, due, sample)
        return sample

    async def _exchange(self, query: Query, due: float, sample: Sample) -> None:
        reader, writer = await self._connection()
        is_done = False
        try:
            payload = json.dumps(query.body).encode() if query.body else b""
            head = (
                f"{'POST' if query.body else 'GET'} {self._base}{query.path} HTTP/1.1\r\n"
                f"Host: {self._address[0]}\r\nContent-Type: application/json\r\n{self._key}"
                f"Content-Length: {len(payload)}\r\n\r\n"
            )
            writer.write(head.encode() + payload)
            status, headers = await _head(reader)
            parts: list[bytes] = []
            async for part in _parts(reader, headers):
                if not parts:
                    sample.first_s = time.perf_counter() - due
                parts.append(part)
            sample.total_s = time.perf_counter() - due
            sample.body = b"".join(parts)
            sample.retry_after = headers.get("retry-after")
            is_whole = headers["content-type"][:10] != "text/event" or b"[DONE]" in parts[-1]
            sample.status = status if is_whole else 0
            is_done = True
        finally:
            if is_done:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One that is idle and that the server has not closed for that, or a new one."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(*self._address, limit=2**20)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines[1:] if line]
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _parts(reader: asyncio.StreamReader, headers: dict[str, str]):
    """The body: in chunks as they come, or in one piece."""
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


async def open_loop(send: Sender, *, rate: float, duration_s: float, seed: int) -> list[Sample]:
    """Poisson arrivals at `rate` a second, whatever becomes of them; waits for the last."""
    start = time.perf_counter()
    running: list[asyncio.Task[Sample]] = []
    for index, due in enumerate(arrivals(rate, duration_s, seed)):
        await asyncio.sleep(max(start + due - time.perf_counter(), 0))
        running.append(asyncio.ensure_future(send(index, start + due)))
    return list(await asyncio.gather(*running))


def arrivals(rate: float, duration_s: float, seed: int) -> Iterator[float]:
    """Seconds at which requests are due."""
    source, moment = random.Random(seed), 0.0
    while (moment := moment + source.expovariate(rate)) < duration_s:
        yield moment


async def closed_loop(send: Sender, *, concurrency: int, duration_s: float) -> list[Sample]:
    """Always `concurrency` requests at a time."""
    end = time.perf_counter() + duration_s
    found: list[Sample] = []

    async def one(worker: int) -> None:
        index = worker
        while time.perf_counter() < end:
            found.append(await send(index, time.perf_counter()))
            index += concurrency

    await asyncio.gather(*(one(worker) for worker in range(concurrency)))
    return found


def summary(
    samples: Sequence[Sample], *, elapsed_s: float, max_first_s: float, max_total_s: float
) -> dict[str, Any]:
    """Percentiles in milliseconds and rates by second; good answers keep to both limits."""
    done = [sample for sample in samples if sample.status == 200]
    good = [one for one in done if one.first_s <= max_first_s and one.total_s <= max_total_s]
    statuses: dict[str, int] = {}
    for sample in samples:
        statuses[str(sample.status)] = statuses.get(str(sample.status), 0) + 1
    return {
        "sent": len(samples),
        "statuses": dict(sorted(statuses.items())),
        "ttft_ms": percentiles([sample.first_s for sample in done]),
        "e2e_ms": percentiles([sample.total_s for sample in done]),
        "throughput_per_s": round(len(done) / elapsed_s, 2),
        "goodput_per_s": round(len(good) / elapsed_s, 2),
        "items_per_s": round(sum(sample.num_items for sample in done) / elapsed_s, 2),
        "rejected": sum(sample.status in (429, 503) for sample in samples),
        "rejected_without_retry_after": sum(
            sample.status in (429, 503) and not sample.retry_after for sample in samples
        ),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds, by the nearest rank."""
    ranked = sorted(seconds)
    if not ranked:
        return {}
    return {
        f"p{share}": round(1000 * ranked[math.ceil(share / 100 * len(ranked)) - 1], 2)
        for share in (50, 90, 99)
    }
