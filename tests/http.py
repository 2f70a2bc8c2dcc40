"""HTTP without a network: an application over a fake engine, and exchanges cut off at will."""

import asyncio
import json

import httpx

from jaxprefill.server.app import create_app
from jaxprefill.server.settings import ServerSettings
from tests.fake_engine import FakeEngine


class Http:
    """Calls an application, each time on an event loop of its own."""

    def __init__(self, engine: FakeEngine | None = None, **settings):
        self.engine = engine or FakeEngine()
        self.app = create_app(self.engine, ServerSettings(**settings))
        self.context = self.app.state.context

    def post(self, path: str, body, **more) -> httpx.Response:
        kind = "content" if isinstance(body, bytes) else "json"
        headers = {"content-type": "application/json"} | more.pop("headers", {})
        return self.request("POST", path, **{kind: body}, headers=headers, **more)

    def get(self, path: str, **more) -> httpx.Response:
        return self.request("GET", path, **more)

    def request(self, method: str, path: str, **more) -> httpx.Response:
        async def send():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await asyncio.wait_for(client.request(method, path, **more), 30)

        return asyncio.run(send())

    def events(self, path: str, body: dict, **more) -> list[dict]:
        """The chunks of a stream, which must end with [DONE]."""
        reply = self.post(path, body | {"stream": True}, **more)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = reply.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def error(self, path: str, body, status: int = 400) -> dict:
        """The error of a call that must fail so, and must leave nothing behind."""
        reply = self.post(path, body)
        assert reply.status_code == status, reply.text
        self.check_idle()
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error

    def check_idle(self):
        assert not self.engine.running and not self.context.calls
        assert self.context.num_sequences == 0


class Exchange:
    """One POST request, message by message."""

    def __init__(self, app, path: str, *, headers=()):
        self.sent: list[dict] = []
        self._to_app: asyncio.Queue = asyncio.Queue()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._to_app.get, self._send))

    def body(self, value, *, more: bool = False):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self._to_app.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def disconnect(self):
        self._to_app.put_nowait({"type": "http.disconnect"})

    async def until(self, condition, what: str):
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"never: {what}")

    async def _send(self, message):
        self.sent.append(message)
        await asyncio.sleep(0)
