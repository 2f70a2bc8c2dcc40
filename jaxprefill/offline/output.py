"""The file that answers go to: whole lines in whole blocks, so that a killed run can go on."""

import fcntl
import io
import os
import stat
import time
from typing import Literal, Self

from jaxprefill.errors import ConfigError, JaxPrefillError
from jaxprefill.offline.compression import PLAIN, codec_of_path, first_text, whole_length
from jaxprefill.offline.lines import STANDARD

Mode = Literal["new", "overwrite", "resume"]

_BLOCK_BYTES = 2**20  # of text in a packed block
_BLOCK_S = 5.0  # and no older than this


class LineOutput:
    """Appends lines to a file, or to stdout, that is this object's alone meanwhile."""

    def __init__(self, path: str, mode: Mode) -> None:
        """Opens it; `trim` must follow where it is resumed.

        Raises:
            ConfigError: it cannot be written, holds something already, or is being written.
        """
        self.name = "stdout" if path == STANDARD else path
        if path == STANDARD and mode == "resume":
            raise ConfigError("--resume needs an output that is a file, got stdout")
        self._codec = PLAIN if path == STANDARD else codec_of_path(path)
        self._is_packed = self._codec.decompressor is not None
        self._held = bytearray()
        self._held_since = time.monotonic()
        self._file = _open(path)
        try:
            self.is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
            if mode == "resume" and not self.is_regular:
                raise ConfigError(f"--resume needs an output that is a file, got {self.name}")
            if path != STANDARD and self.is_regular:
                self._claim(mode)
        except BaseException:  # raised again: nothing else would close the file
            self._file.close()
            raise

    def trim(self, start: bytes) -> None:
        """Cuts off what a run that was killed had not completed.

        Raises:
            ConfigError: it does not begin with `start`, as every line does: it is something else.
            JaxPrefillError: the file is damaged.
        """
        with open(self.name, "rb") as stream:
            length = whole_length(stream, self._codec, self.name)
            found = first_text(stream, self._codec, 2 * len(start)).replace(b" ", b"")
        if not start.startswith(found[: len(start)]):
            raise ConfigError(
                f"--resume needs an output of an earlier run, but {self.name} is none; name "
                "another output"
            )
        os.ftruncate(self._file.fileno(), length)

    def write(self, lines: bytes) -> None:
        """Appends whole lines; packed ones wait for a block.

        Raises:
            BrokenPipeError: the reader of stdout has gone.
            JaxPrefillError: they cannot be written.
        """
        if not self._held:
            self._held_since = time.monotonic()
        self._held += lines
        is_old = time.monotonic() - self._held_since > _BLOCK_S
        if not self._is_packed or len(self._held) >= _BLOCK_BYTES or is_old:
            self.flush()

    def flush(self) -> None:
        """Writes what waits, as a block."""
        if self._held:
            self._write_held()

    def _write_held(self) -> None:
        block = memoryview(self._codec.compress(bytes(self._held)))
        self._held.clear()
        try:
            while block:
                block = block[self._file.write(block) or 0 :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise JaxPrefillError(
                f"cannot write to {self.name}: {error.strerror or error}"
            ) from error

    def close(self, *, is_whole: bool = True) -> None:
        """Writes what waits, down to the disk; a file that is not whole may stay empty."""
        try:
            self.flush()
            if self.is_regular:
                if is_whole and self._is_packed and not os.fstat(self._file.fileno()).st_size:
                    self._write_held()  # without a block it would be no packed file
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(is_whole=kind is None)

    def _claim(self, mode: Mode) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.name} is being written by another run; wait for it, or name another output"
            ) from None
        if mode == "overwrite":
            os.ftruncate(self._file.fileno(), 0)
        if mode == "new" and os.fstat(self._file.fileno()).st_size:
            raise ConfigError(
                f"{self.name} holds something already; --resume goes on with it, --overwrite "
                "throws it away"
            )


def _open(path: str) -> io.FileIO:
    if path == STANDARD:
        return io.FileIO(1, "wb", closefd=False)
    try:
        return io.FileIO(path, "ab")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
