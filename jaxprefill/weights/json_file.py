"""JSON files of a checkpoint, read as objects with errors that name the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxprefill.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: the file cannot be read, or holds no JSON object.
    """
    value = read_value(path)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: must be a JSON object, got {type(value).__name__}; fetch it again"
        )
    return value


def read_value(path: Path) -> Any:
    """Whatever JSON value is in a file.

    Raises:
        CheckpointError: the file cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: must be JSON, but {error}; fetch it again") from error


def read_object_if_there(path: Path) -> dict[str, Any]:
    """As `read_object`, and {} where there is no such file."""
    return read_object(path) if path.is_file() else {}


def token_ids(values: Mapping[str, Any], key: str, path: Path) -> list[int]:
    """The ids under a key that holds one, a list of them, or nothing.

    Raises:
        CheckpointError: something else is there.
    """
    value = values.get(key)
    found = [] if value is None else value if isinstance(value, list) else [value]
    for item in found:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise CheckpointError(
                f"{path}: {key} must be a token id or a list of them, got {value!r:.80}"
            )
    return found
