"""The three standard streams: UTF-8 whatever the locale, usable when closed, quiet when broken."""

import io
import json
import logging
import math
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxprefill.errors import JaxPrefillError
from jaxprefill.logs import stderr_handler


def prepare_streams() -> None:
    """Makes all three exist and speak UTF-8; only input that is not UTF-8 is refused, when read."""
    for name, mode, errors in (
        ("stdin", "r", "strict"),
        ("stdout", "w", "replace"),
        ("stderr", "w", "backslashreplace"),
    ):
        stream: Any = getattr(sys, name)
        if stream is None:  # the process was started with it closed
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def emit(text: str) -> None:
    """Writes text to stdout at once.

    Raises:
        BrokenPipeError: the reader has gone, which is no fault.
        JaxPrefillError: it cannot be written, to a full disk for instance.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise JaxPrefillError(f"cannot write to stdout: {error.strerror or error}") from error


def emit_json(value: Mapping[str, Any]) -> None:
    """Writes one JSON object on a line; numbers that JSON does not have become null."""
    emit(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False) + "\n")


def note(text: str) -> None:
    """Writes a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def note_error(error: JaxPrefillError) -> None:
    """Writes it to stderr as every command does."""
    note(f"jaxprefill: error: {error}")


def discard_stdout() -> None:
    """Lets the interpreter's own flush at exit succeed after stdout has failed."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file: nothing is flushed at exit
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)


@contextmanager
def logging_to_stderr(*, is_verbose: bool) -> Generator[None]:
    """Shows log records, as `stderr_handler` chooses them."""
    handler = stderr_handler(is_verbose=is_verbose)
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(min(handler.level, before))
    if not is_verbose:  # XLA logs from C++, and reads its level once, when jax is imported
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
