"""The engine's process: `python -m jaxprefill.remote.worker FD`, started by `remote.client`.

One thread reads messages, the engine's own runs steps, one writes what they found. Without its
parent it ends at once, whatever it is doing.
"""

import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import BinaryIO

from jaxprefill.constraints import make_grammars
from jaxprefill.engine import Engine
from jaxprefill.errors import JaxPrefillError, RequestError
from jaxprefill.grammar import Grammars
from jaxprefill.logs import stderr_handler
from jaxprefill.prefill.compiler import ExecutableRecord
from jaxprefill.remote.compiling import Compiled, Compiling
from jaxprefill.remote.messages import (
    HEADER,
    TO_ENGINE,
    Abort,
    Answer,
    Ask,
    Ended,
    FromEngine,
    Progress,
    Ready,
    Refused,
    Start,
    Stop,
    Submit,
    ToEngine,
    Updates,
    frame,
)
from jaxprefill.updates import RequestUpdate

logger = logging.getLogger(__name__)

_MAX_BATCH = 4096  # updates in one message
_ACTIONS = ("flush_cache", "start_profile", "stop_profile", "program_text")
_Item = FromEngine | tuple[int, RequestUpdate] | None
Inbox = queue.SimpleQueue[ToEngine | Compiled]


class Outbox:
    """Sends from a thread of its own, so that steps wait for nobody; updates go in bunches."""

    def __init__(self, connection: socket.socket) -> None:
        """Starts the thread."""
        self._connection = connection
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item: "FromEngine | tuple[int, RequestUpdate]") -> None:
        """Sends a message, or an update of a submission, behind all that was put before."""
        self._queue.put(item)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):  # nobody reads any more: the inbox ends the process
            self._send_all()

    def _send_all(self) -> None:
        updates: list[tuple[int, RequestUpdate]] = []
        while (item := self._queue.get()) is not None:
            if isinstance(item, tuple):
                updates.append(item)
                if not self._queue.empty() and len(updates) < _MAX_BATCH:
                    continue
            if updates:
                self._connection.sendall(frame(Updates(updates)))
                updates = []
            if not isinstance(item, tuple):
                self._connection.sendall(frame(item))


class Relay:
    """Listens to one submission for whoever is at the other end."""

    def __init__(self, number: int, outbox: Outbox, relays: "dict[int, Relay]") -> None:
        """It is among `relays` until it ends."""
        self.unwanted: set[str] = set()  # requests that were ended before they began
        self._number = number
        self._outbox = outbox
        self._relays = relays
        relays[number] = self

    def on_update(self, update: RequestUpdate) -> bool:
        """Passes it on."""
        self._outbox.put((self._number, update))
        return True

    def on_end(self, error: BaseException | None) -> None:
        """Passes an error on; without one the last updates have told."""
        self._relays.pop(self._number, None)
        if error is not None:
            if not isinstance(error, JaxPrefillError):
                logger.error("a step failed", exc_info=error)
            param = error.param if isinstance(error, RequestError) else None
            self._outbox.put(Ended(self._number, type(error).__name__, str(error), param))


class Service:
    """Serves one engine to one connection."""

    def __init__(
        self, engine: Engine, outbox: Outbox, inbox: Inbox, make_grammars: Callable[[], Grammars]
    ) -> None:
        """The engine is this service's alone; `make_grammars` is called on another thread."""
        self._engine = engine
        self._outbox = outbox
        self._inbox = inbox
        self._relays: dict[int, Relay] = {}
        self._compiling = Compiling(make_grammars, inbox.put)

    def run(self) -> None:
        """Does what the messages say until one says stop."""
        while True:
            match message := self._inbox.get():
                case Submit():
                    relay = Relay(message.number, self._outbox, self._relays)
                    if any(request.grammar is not None for request in message.requests):
                        self._compiling.submit(message)
                    else:
                        self._engine.submit(message.requests, relay)
                case Compiled():
                    self._start(message)
                case Abort():
                    self._abort(message)
                case Ask():
                    self._answer(message)
                case Stop():
                    return
                case Start():
                    logger.error("the engine was told to start twice")

    def close(self) -> None:
        """Ends the engine."""
        self._compiling.close()
        self._engine.close()

    def _start(self, message: Compiled) -> None:
        """Submits what had to wait for its grammars, unless nobody wants it any more."""
        relay = self._relays.get(message.number)
        if relay is None:
            return
        if message.error is not None:
            relay.on_end(message.error)
        else:
            wanted = [each for each in message.requests if each.id not in relay.unwanted]
            self._engine.submit(wanted, relay, matchers=message.matchers)

    def _abort(self, message: Abort) -> None:
        relay = self._relays.get(message.number)
        if relay is None:  # it ended meanwhile
            return
        if message.request_id is None:
            self._relays.pop(message.number, None)
            self._engine.abort(relay)
        else:
            relay.unwanted.add(message.request_id)
            self._engine.abort(relay, [message.request_id])

    def _answer(self, message: Ask) -> None:
        try:
            if message.name == "stats":
                value = self._engine.stats()
            elif message.name in _ACTIONS:
                value = getattr(self._engine, message.name)(**message.arguments)
            else:
                raise RequestError(f"the engine cannot be asked for {message.name!r}")
            self._outbox.put(Answer(message.number, value))
        except Exception as error:  # it belongs to whoever asked
            self._outbox.put(Answer(message.number, error=str(error) or type(error).__name__))


def serve(connection: socket.socket) -> None:
    """Starts the engine that the first message describes, and serves it."""
    outbox = Outbox(connection)
    inbox = _inbox(connection)
    start = inbox.get()
    assert isinstance(start, Start), "the first message starts the engine"
    handler = stderr_handler(is_verbose=start.is_verbose)
    logging.basicConfig(level=handler.level, handlers=[handler])
    try:
        service = _start(start, outbox, inbox)
    except JaxPrefillError as error:
        outbox.put(Refused(type(error).__name__, str(error)))
        outbox.close()
        return
    service.run()
    service.close()
    outbox.close()


def _start(start: Start, outbox: Outbox, inbox: Inbox) -> Service:
    num_done = 0

    def on_compiled(record: ExecutableRecord, num_all: int) -> None:
        nonlocal num_done
        num_done += 1
        outbox.put(Progress(record.name, record.seconds, num_done, num_all))

    engine = Engine(on_compiled=on_compiled, **start.options)
    plan = engine.plan
    outbox.put(
        Ready(
            root=plan.config.model,
            config=plan.model,
            tokenizer=engine.tokenizer.parts(),
            context_length=plan.context_length,
            max_running=plan.max_running,
            kv_tokens=plan.num_pages * plan.config.page_size,
            description=f"{plan.describe()}; {engine.describe_executables()}",
        )
    )
    grammars = partial(make_grammars, engine.tokenizer, plan.model.vocab_size)
    return Service(engine, outbox, inbox, grammars)


def _inbox(connection: socket.socket) -> Inbox:
    """What the parent says; its end is seen even while nobody asks for the next message."""
    found: Inbox = queue.SimpleQueue()

    def read(stream: BinaryIO) -> None:
        with suppress(OSError):  # a parent that dies with updates unread resets the connection
            while len(header := stream.read(HEADER.size)) == HEADER.size:
                (size,) = HEADER.unpack(header)
                if len(message := stream.read(size)) < size:
                    break  # it died while it was sending
                found.put(TO_ENGINE.decode(message))
        os._exit(0)  # the parent is gone: nobody wants what is being computed

    stream = connection.makefile("rb")
    threading.Thread(target=read, args=(stream,), name="inbox", daemon=True).start()
    return found


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # threads of XLA need not be waited for
