"""From the first socket to the last: listens, keeps the engine running, drains, and leaves."""

import asyncio
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from jaxprefill.client import ManagedEngine
from jaxprefill.errors import ConfigError
from jaxprefill.server.context import ServerContext
from jaxprefill.server.settings import ServerSettings

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.02


class _HttpServer(uvicorn.Server):
    """Uvicorn, which leaves signals to us."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none."""
        yield


class ServerRun:
    """One run of a server.

    The first SIGTERM or SIGINT drains: health says 503, new requests get 503, and those that run
    have `drain_timeout` to finish. The second ends them. After its end the process ignores both.
    """

    def __init__(self, app: Starlette, engine: ManagedEngine, settings: ServerSettings) -> None:
        """Listens from now on, so that a port in use is known before anything is loaded.

        Raises:
            ConfigError: the address cannot be listened on, or a TLS file cannot be read.
        """
        self._engine = engine
        self._settings = settings
        self._context: ServerContext = app.state.context
        self._num_signals = 0
        self._was_told = asyncio.Event()
        self._socket = _listen(settings.host, settings.port)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            http="h11",  # httptools loses the body beside "Upgrade: h2c", which Java's clients send
            timeout_keep_alive=settings.keep_alive_timeout,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            backlog=2048,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one
            self._socket.close()
            raise ConfigError(
                f"ssl_certfile and ssl_keyfile must be PEM files that belong together: {error}"
            ) from error
        self._http = _HttpServer(config)

    @property
    def url(self) -> str:
        """Where the server listens."""
        scheme = "https" if self._settings.ssl_certfile else "http"
        host, port = self._socket.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self) -> int:
        """Serves until told to stop; the exit status: 0, or 1 if requests had to be ended.

        Raises:
            JaxPrefillError: the engine could not start.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._hear))
        serving = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        engine = asyncio.create_task(self._engine.run())
        told = asyncio.create_task(self._was_told.wait())
        try:
            await asyncio.wait((serving, engine, told), return_when=asyncio.FIRST_COMPLETED)
            has_drained = await self._drain()
            await self._engine.stop()
            await self._close(serving)
            await engine  # raises what kept it from starting
        finally:
            told.cancel()
            for number in _SIGNALS:  # what comes now would only spoil the exit status
                signal.signal(number, signal.SIG_IGN)
        return 0 if has_drained else 1

    def _hear(self) -> None:
        self._num_signals += 1
        self._was_told.set()

    async def _drain(self) -> bool:
        """Waits for the calls that run; whether all could finish."""
        self._context.is_draining = True
        deadline = time.monotonic() + self._settings.drain_timeout
        while self._context.calls and self._num_signals < 2 and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        return all(call.is_answered for call in self._context.calls.values())

    async def _close(self, serving: "asyncio.Task[None]") -> None:
        """Lets the last answers out, and closes the port."""
        self._http.should_exit = True
        await asyncio.wait((serving,), timeout=2.0)
        self._http.force_exit = True
        await serving


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(2048)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"host and port must be an address of this machine that is free, got {host}:{port} "
            f"({error.strerror or error}); choose another --port"
        ) from error
    found.setblocking(False)
    return found
