"""Wires the server to an engine in a process of its own, and says on stderr how it goes.

It imports the server's packages, so `serve` imports it when it runs. It imports no jax.
"""

import asyncio
import gc
import time

import uvloop

from jaxprefill.cli.streams import note
from jaxprefill.config import EngineConfig
from jaxprefill.remote.client import EngineProcess
from jaxprefill.remote.messages import Progress, Ready
from jaxprefill.remote.spawn import Spawned
from jaxprefill.server.app import create_app
from jaxprefill.server.run import ServerRun
from jaxprefill.server.settings import ServerSettings


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    spawned: Spawned,
    is_quiet: bool,
    is_verbose: bool,
) -> int:
    """Runs a server to its end, its first engine in the process `spawned`; the exit status."""
    reporter = _Reporter(is_quiet=is_quiet)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, settings, spawned, reporter, is_verbose=is_verbose))


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    spawned: Spawned,
    reporter: "_Reporter",
    *,
    is_verbose: bool,
) -> int:

    def started(message: Progress | Ready) -> None:
        if isinstance(message, Ready):  # what is there now stays: no collection looks at it again
            gc.collect()
            gc.freeze()
        reporter.started(message)

    engine = EngineProcess(
        config,
        on_started=started,
        on_lost=reporter.lost,
        is_verbose=is_verbose,
        spawned=spawned,
    )
    run = ServerRun(create_app(engine, settings), engine, settings)
    reporter.url = run.url
    return await run.run()


class _Reporter:
    """Writes what a person or a script waits for."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.url = ""
        self._is_quiet = is_quiet
        self._began = time.monotonic()

    def started(self, message: Progress | Ready) -> None:
        """An executable is compiled, or the engine is ready: the line to wait for."""
        if isinstance(message, Ready):
            seconds = time.monotonic() - self._began
            if not self._is_quiet:
                note(f"{message.root} on {message.description}")
            note(f"jaxprefill ready at {self.url} after {seconds:.1f} s")
        elif not self._is_quiet:
            note(message.describe())

    def lost(self, reason: str) -> None:
        """The engine is started again."""
        self._began = time.monotonic()
        note(f"jaxprefill: error: {reason}; starting it again")
