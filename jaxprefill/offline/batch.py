"""OpenAI's batch files: a request on each line in, an answer on each line out, in input order.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "…",
     "body": {…}}, "error": null}

Every line that is not blank gets one, with the status and body that the server would send; where
the status is not 200, `error` holds code and message too. A line that is no request, repeats a
`custom_id` or asks for a stream is answered so as well. Ids of requests in bodies mean nothing.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxprefill.errors import ConfigError, JaxPrefillError, RequestError
from jaxprefill.offline.lines import InputLine, LineReader, Source
from jaxprefill.offline.output import LineOutput
from jaxprefill.offline.seen import SeenNames
from jaxprefill.offline.session import PATHS, OfflineSession, in_thread
from jaxprefill.offline.window import Window
from jaxprefill.server.api_error import ApiError, as_api_error
from jaxprefill.server.body import wrong
from jaxprefill.server.endpoints import Endpoint
from jaxprefill.server.replies import encode

DEFAULT_WINDOW = 1024
_START = b'{"id":"batch_req_'  # of every answer


class _Envelope(msgspec.Struct):
    """A line as it stands; each field is checked by hand."""

    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Answered(msgspec.Struct):
    """What matters of a line that was written before."""

    custom_id: str | None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class BatchItem:
    """A line and what it asks for.

    Attributes:
        custom_id: None where the line names none.
        endpoint: None where it cannot be answered, for which `error` is the reason.
    """

    line: InputLine
    custom_id: str | None = None
    endpoint: Endpoint | None = None
    body: bytes = b""
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True)
class BatchAnswer:
    """A line of the output, with its end."""

    text: bytes
    position: int
    is_error: bool


@dataclass(kw_only=True)
class BatchProgress:
    """How far a batch is.

    Attributes:
        num_lines: that are in the output; of these
        num_failed: say that something is wrong, and
        num_resumed: were there before.
        position: bytes of the input, packed as it is, up to the last of them.
    """

    num_lines: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    position: int = 0


class BatchJob:
    """One input, one output, one engine."""

    def __init__(self, source: Source, output: LineOutput, *, window: int = DEFAULT_WINDOW) -> None:
        """Reads and writes nothing yet; `window` lines are asked for at once."""
        self.progress = BatchProgress()
        self._source = source
        self._output = output
        self._max_items = window
        self._seen = SeenNames()

    async def run(self, session: OfflineSession, *, resumes: bool = False) -> None:
        """Answers every line, or those that the output lacks.

        Raises:
            ConfigError: the output to be resumed belongs to another input.
            JaxPrefillError: the engine, the input or the output fails; what is written stays.
        """
        window = Window[BatchItem, BatchAnswer](
            work=lambda item: _answer(session, item),
            item_bytes=lambda item: len(item.line.text or b""),
            result_bytes=lambda answer: len(answer.text),
            max_items=self._max_items,
        )
        async with (
            aclosing(self._items(resumes)) as items,
            aclosing(window.results(items)) as found,
        ):
            async for answers in found:
                self._write(answers)

    def _write(self, answers: list[BatchAnswer]) -> None:
        self._output.write(b"".join(answer.text for answer in answers))
        self.progress.num_lines += len(answers)
        self.progress.num_failed += sum(answer.is_error for answer in answers)
        self.progress.position = answers[-1].position

    async def _items(self, resumes: bool) -> AsyncGenerator[list[BatchItem]]:
        reader = LineReader(self._source)
        known = self._known() if resumes else iter(())

        def read() -> list[BatchItem] | None:
            lines = reader.read()
            items = None if lines is None else [self._item(line) for line in lines]
            return self._without(known, items)

        while (items := await in_thread(read)) is not None:
            yield items

    def _item(self, line: InputLine) -> BatchItem:
        """Reads an envelope; must see the lines in order, as an id may stand once."""
        custom_id: str | None = None
        try:
            if line.text is None:
                raise ApiError(413, "the line is too long; send less in one", code="line_too_long")
            try:
                envelope = _decoded(line.text)
            except RequestError:
                custom_id = _custom_id_of(line.text)
                raise
            if not isinstance(envelope.custom_id, str) or not envelope.custom_id:
                raise wrong("custom_id", "a text that is not empty", envelope.custom_id)
            custom_id = envelope.custom_id
            if not self._seen.add(custom_id):
                message = f"custom_id must stand on one line alone, got {custom_id!r:.80} again"
                raise ApiError(400, message, param="custom_id", code="duplicate_custom_id")
            endpoint = _endpoint(envelope)
        except (RequestError, ApiError) as error:
            return BatchItem(line=line, custom_id=custom_id, error=error)
        body = bytes(envelope.body)
        return BatchItem(line=line, custom_id=custom_id, endpoint=endpoint, body=body)

    def _known(self) -> Iterator[_Answered]:
        """The lines that the output holds, after what was not completed is cut off."""
        self._output.trim(_START)
        with Source(self._output.name) as source:
            reader = LineReader(source, max_bytes=2**31)
            while (lines := reader.read()) is not None:
                for line in lines:
                    try:
                        yield msgspec.json.decode(line.text or b"", type=_Answered)
                    except (msgspec.DecodeError, UnicodeDecodeError) as error:
                        raise ConfigError(
                            f"--resume needs an output of an earlier run, but line {line.number} "
                            f"of {self._output.name} is no answer ({error}); name another output"
                        ) from None

    def _without(
        self, known: Iterator[_Answered], items: list[BatchItem] | None
    ) -> list[BatchItem] | None:
        """Leaves out the items that are answered already."""
        for index, item in enumerate(items or ()):
            answered = next(known, None)
            if answered is None:
                return (items or [])[index:]
            if answered.custom_id != item.custom_id:
                raise ConfigError(
                    f"{self._output.name} answers {answered.custom_id!r:.80} where line "
                    f"{item.line.number} of {self._source.name} asks {item.custom_id!r:.80}: it is "
                    "another input's; name another output"
                )
            self.progress.num_lines += 1
            self.progress.num_resumed += 1
            self.progress.num_failed += answered.error is not None
            self.progress.position = item.line.position
        if items is None and next(known, None) is not None:
            raise ConfigError(
                f"{self._output.name} holds more answers than {self._source.name} asks for: it is "
                "another input's; name another output"
            )
        return None if items is None else []


def _decoded(text: bytes) -> _Envelope:
    try:
        return msgspec.json.decode(text, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the line must be a JSON object in UTF-8, but {error}") from None


def _custom_id_of(text: bytes) -> str | None:
    """Of a line that is nearly JSON: with NaN, or half a surrogate pair, in its body."""
    try:
        found: Any = json.loads(text)["custom_id"]
        return found if found and found.encode() else None
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def _endpoint(envelope: _Envelope) -> Endpoint:
    if envelope.method is not None and envelope.method != "POST":
        message = f"method must be POST, got {envelope.method!r:.80}"
        raise ApiError(405, message, param="method", code="method_not_allowed")
    endpoint = PATHS.get(envelope.url) if isinstance(envelope.url, str) else None
    if endpoint is None:
        message = f"url must be one of {', '.join(PATHS)}; got {envelope.url!r:.80}"
        raise ApiError(404, message, param="url", code="not_found")
    return endpoint


async def _answer(session: OfflineSession, item: BatchItem) -> BatchAnswer:
    number = item.line.number
    error = item.error
    status, body = 200, None
    request_id = f"batch-{number}"
    if item.endpoint is not None:
        try:
            body = await session.answer(item.endpoint, item.body, request_id)
        except asyncio.CancelledError:
            raise
        except JaxPrefillError as found:
            await session.ready()  # raises where there will be no engine
            error = found
        except Exception as found:  # a line at fault ends no job
            error = found
    told: dict[str, Any] | None = None
    if error is not None:
        problem = as_api_error(error)
        status, body = problem.status, problem.body()
        told = {"code": problem.code or "invalid_request", "message": problem.message}
    line = {
        "id": f"batch_req_{number}",
        "custom_id": item.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": told,
    }
    return BatchAnswer(
        text=encode(line) + b"\n", position=item.line.position, is_error=error is not None
    )
