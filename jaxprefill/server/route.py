"""One route that the engine works for: checks the body, runs its handler, ends with its client.

A client that goes away, before or during the answer, ends what the engine does for it.
"""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxprefill.server import replies
from jaxprefill.server.api_error import ApiError, as_api_error
from jaxprefill.server.body import decode, read_body, wrong
from jaxprefill.server.context import Call, ServerContext
from jaxprefill.server.fields import BaseBody
from jaxprefill.server.replies import EventStream

B = TypeVar("B", bound=BaseBody)
Handler = Callable[[Call, B], Awaitable[Any]]

_REQUEST_ID = re.compile(r"[!-~]{1,256}")
_REASONS = {400: "invalid", 404: "invalid", 409: "duplicate", 413: "too_large", 429: "queue_full"}


class JsonRoute(Generic[B]):
    """An ASGI application around a handler.

    The handler takes the call and the decoded body, and returns what is to be sent as JSON, or an
    `EventStream`. It raises RequestError, ApiError or EngineUnavailable; anything else is a 500.
    """

    def __init__(self, context: ServerContext, kind: type[B], handler: Handler[B]) -> None:
        """Bodies are objects of the fields of `kind`."""
        self._context = context
        self.kind = kind
        self.summary = handler.__doc__ or ""
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        headers = Headers(scope=scope)
        answer = _Answer(send, headers.get("x-request-id"))
        try:
            async with asyncio.timeout(self._context.settings.request_timeout or None):
                body = await self._read(scope, receive, headers)
                call = Call(self._context, _request_id(body, headers))
                answer.headers["x-request-id"] = call.request_id
                try:
                    await _until_gone(self._answer(call, body, answer), receive)
                finally:
                    call.close()
        except ClientDisconnect:
            pass  # nobody to answer
        except Exception as error:  # answered, as a 500 where it is not the client's fault
            await self._fail(answer, as_api_error(error))

    async def _read(self, scope: Scope, receive: Receive, headers: Headers) -> B:
        self._context.check_open()
        if scope["method"] in ("GET", "HEAD"):
            return self.kind()
        body = await read_body(receive, headers, self._context.settings.max_body_bytes)
        return decode(body, self.kind)

    async def _answer(self, call: Call, body: B, answer: "_Answer") -> None:
        call.served_name(body.model)
        reply = await self._handler(call, body)
        if isinstance(reply, EventStream):
            await answer.stream(reply)
        else:
            await answer.json(reply)
        call.is_answered = True

    async def _fail(self, answer: "_Answer", error: ApiError) -> None:
        self._context.observer.rejected(_REASONS.get(error.status, error.code or "error"))
        await answer.fail(error)


def post(path: str, context: ServerContext, kind: type[B], handler: Handler[B]) -> Route:
    """The Starlette route of a handler."""
    return Route(path, JsonRoute(context, kind, handler), methods=["POST"])


class _Answer:
    """What was sent so far: an error after the head of a stream becomes its last event."""

    def __init__(self, send: Send, request_id: str | None) -> None:
        is_echoed = request_id is not None and _REQUEST_ID.fullmatch(request_id)
        self.headers = {"x-request-id": request_id} if request_id and is_echoed else {}
        self._send = send
        self._has_started = False

    async def json(self, value: Any) -> None:
        self._has_started = True
        await replies.send_json(self._send, value, headers=self.headers)

    async def stream(self, reply: EventStream) -> None:
        async with aclosing(reply.items) as items:
            async for item in items:
                if not self._has_started:  # not before: until then an error has its own status
                    self._has_started = True
                    await replies.start_events(self._send, self.headers)
                await replies.send_part(self._send, replies.event(item))
        await replies.send_part(self._send, replies.DONE, is_last=True)

    async def fail(self, error: ApiError) -> None:
        if not self._has_started:
            await replies.send_error(self._send, error, headers=self.headers)
            return
        last = replies.event(error.body()) + replies.DONE
        await replies.send_part(self._send, last, is_last=True)


async def _until_gone(work: Awaitable[None], receive: Receive) -> None:
    """Waits for the work, and cancels it when the client goes away."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(body: BaseBody, headers: Headers) -> str:
    """The client's id for the request, or a new one."""
    header = headers.get("x-request-id")
    given = {"rid": body.rid, "request_id": body.request_id, "x-request-id": header}
    return check_request_ids(given) or uuid.uuid4().hex


def check_request_ids(given: Mapping[str, str | None]) -> str | None:
    """The first id of those that are given, by the name of the field.

    Raises:
        RequestError: one cannot be an id.
    """
    for name, value in given.items():
        if value and not _REQUEST_ID.fullmatch(value):
            raise wrong(name, "1 to 256 printable ASCII characters without spaces", value)
    return next(filter(None, given.values()), None)
