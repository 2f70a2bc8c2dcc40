"""JSON and event streams as ASGI messages. Numbers that JSON does not have never come out."""

import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Send

from jaxprefill.server.api_error import ApiError

LOGPROB_FLOOR = -9999.0  # what OpenAI and vLLM write for minus infinity
DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()
# Line separators that many clients split event streams at, though the standard does not.
_SEPARATORS = {b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029", b"\xc2\x85": b"\\u0085"}


@dataclass(frozen=True)
class EventStream:
    """A reply in server-sent events: each item is one JSON value; [DONE] follows the last."""

    items: AsyncGenerator[Any]


def floored(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, LOGPROB_FLOOR) if not math.isnan(logprob) else LOGPROB_FLOOR


def encode(value: Any) -> bytes:
    """A JSON text."""
    return _ENCODER.encode(value)


def event(value: Any) -> bytes:
    """One server-sent event."""
    text = encode(value)
    for separator, escape in _SEPARATORS.items():
        text = text.replace(separator, escape)
    return b"data: " + text + b"\n\n"


async def send_json(
    send: Send, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """A whole reply."""
    await send_bytes(send, encode(value), "application/json", status=status, headers=headers)


async def send_bytes(
    send: Send,
    body: bytes,
    kind: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> None:
    """A whole reply of any kind."""
    lines = {"content-type": kind, "content-length": str(len(body)), **(headers or {})}
    await send({"type": "http.response.start", "status": status, "headers": _raw(lines)})
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send, error: ApiError, *, headers: Mapping[str, str] | None = None
) -> None:
    """An error as its own reply."""
    lines = {**(headers or {}), **error.headers}
    await send_json(send, error.body(), status=error.status, headers=lines)


async def start_events(send: Send, headers: Mapping[str, str]) -> None:
    """The head of an event stream."""
    lines = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        **headers,
    }
    await send({"type": "http.response.start", "status": 200, "headers": _raw(lines)})


async def send_part(send: Send, part: bytes, *, is_last: bool = False) -> None:
    """A part of an event stream."""
    await send({"type": "http.response.body", "body": part, "more_body": not is_last})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]
