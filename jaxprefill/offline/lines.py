"""The lines of a file of any size, a few at a time; one that is too long is told, not held."""

import io
import os
import stat
from dataclasses import dataclass
from typing import Self

from jaxprefill.errors import ConfigError
from jaxprefill.offline.compression import TextStream, open_text

STANDARD = "-"  # stdin or stdout
MAX_LINE_BYTES = 32 * 2**20  # what the server takes for a body
_CHUNK = 2**18
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputLine:
    """A line that is not blank.

    Attributes:
        number: in its file, from 1; blank ones count.
        text: without its end; None: it is too long.
        position: bytes of the file, packed as it is, that were read when it was complete.
    """

    number: int
    text: bytes | None
    position: int


class Source:
    """A file, or stdin, that is read once."""

    def __init__(self, path: str) -> None:
        """Opens it.

        Raises:
            ConfigError: it cannot be opened, or is of a kind that is not read.
        """
        self.path = path
        self.name = "stdin" if path == STANDARD else path
        self._raw = _open(path)
        try:
            self.stream: TextStream = open_text(self._raw, self.name)
        except BaseException:  # raised again: nothing else would close the file
            self._raw.close()
            raise

    @property
    def size(self) -> int | None:
        """Bytes of the file, packed as it is; None where nobody knows."""
        status = os.fstat(self._raw.fileno())
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    @property
    def position(self) -> int:
        """Bytes of the file that were read; 0 where nobody knows."""
        return self._raw.tell() if self._raw.seekable() else 0

    def leads_to(self, path: str) -> bool:
        """Whether what is written to a path, or to stdout, would be written into this file."""
        try:
            target = os.fstat(1) if path == STANDARD else os.stat(path)
        except OSError:
            return False
        return stat.S_ISREG(target.st_mode) and os.path.samestat(
            target, os.fstat(self._raw.fileno())
        )

    def close(self) -> None:
        """Closes it."""
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LineReader:
    """Splits at newlines alone; a byte order mark in front and carriage returns are no content."""

    def __init__(self, source: Source, *, max_bytes: int = MAX_LINE_BYTES) -> None:
        """Reads nothing yet."""
        self._source = source
        self._max_bytes = max_bytes
        self._rest: list[bytes] = []  # of a line that has not ended
        self._rest_size = 0
        self._number = 0

    def read(self) -> list[InputLine] | None:
        """The next lines, as many as there are at hand and perhaps none; None at the end.

        Raises:
            JaxPrefillError: the file is damaged.
        """
        chunk = self._source.stream.read(_CHUNK)
        if not chunk:
            return self._take([b""]) if self._rest_size else None
        first, *others = chunk.split(b"\n")
        if not others:
            self._keep(first)
            return []
        *whole, last = others
        found = self._take([first, *whole])
        self._keep(last)
        return found

    def _keep(self, part: bytes) -> None:
        self._rest_size += len(part)
        if self._rest_size > self._max_bytes:
            self._rest.clear()
        elif part:
            self._rest.append(part)

    def _take(self, lines: list[bytes]) -> list[InputLine]:
        """Ends the line that was begun, and adds those that follow."""
        self._keep(lines[0])
        is_too_long = self._rest_size > self._max_bytes
        texts = [None if is_too_long else b"".join(self._rest), *lines[1:]]
        self._rest, self._rest_size = [], 0
        found: list[InputLine] = []
        for text in texts:
            self._number += 1
            if text is not None and self._number == 1:
                text = text.removeprefix(_BOM)
            text = text if text is None else text.strip()
            if text is None or text:
                found.append(InputLine(self._number, text, self._source.position))
        return found


def _open(path: str) -> io.BufferedReader:
    if path == STANDARD:
        return io.BufferedReader(io.FileIO(0, closefd=False))
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
