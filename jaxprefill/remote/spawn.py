"""Starts the engine's process. Imports next to nothing, so that it can come before all imports."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True)
class Spawned:
    """A process that waits to be told what to start, and our end of the connection.

    As a context it is ended on leaving, if it has not ended by itself.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def __enter__(self) -> "Spawned":
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it."""
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def spawn() -> Spawned:
    """The process, in a session of its own: a terminal's Ctrl-C is the server's to handle."""
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        path = os.pathsep.join(folder for folder in sys.path if folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxprefill.remote.worker", str(descriptor)],
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )
    return Spawned(process, ours)
