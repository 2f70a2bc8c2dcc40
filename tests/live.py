"""The application over a fake engine behind a real socket, on a thread of the test's process."""

import asyncio
import threading
from contextlib import contextmanager

import uvicorn

from jaxprefill.server.app import create_app
from jaxprefill.server.settings import ServerSettings
from tests.fake_engine import FakeEngine


@contextmanager
def live(engine: FakeEngine, **settings):
    """The address of a server that answers until the block ends."""
    app = create_app(engine, ServerSettings(**settings))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none", http="h11"))
    started = threading.Event()
    startup = server.startup

    async def start(sockets=None):
        await startup(sockets)
        started.set()

    server.startup = start
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        assert started.wait(30)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
