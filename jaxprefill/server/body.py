"""Request bodies: read within a limit, decoded from JSON, checked against a Struct's fields.

Unknown fields are ignored and nulls mean absent. What is wrong is said with rule and value.
"""

import logging
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from jaxprefill.errors import RequestError
from jaxprefill.server.api_error import ApiError

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=msgspec.Struct)

_MISMATCH = re.compile(r"Expected `(?P<kinds>[^`]+)`, got `[^`]+`(?: - at `\$(?P<path>.*)`)?")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]+)\]")
_OLD_CONSTRAINTS = {
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("regex", "ebnf", "structural_tag"),
}
_warned: set[str] = set()
_MAX_VALUES = 2**20  # of one body: while more are decoded, everybody else would wait
_RULES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """The whole body, which is read no further than `max_bytes`.

    Raises:
        ApiError: 413 or 415.
        ClientDisconnect: the client went away.
    """
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        message = f"Content-Encoding must be left out: bodies are taken plain, got {coding!r:.80}"
        raise ApiError(415, message, code="unsupported_media_type")
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"Content-Type must be application/json, got {kind!r:.80}"
        raise ApiError(415, message, code="unsupported_media_type")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(length, max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(f"at least {size}", max_bytes)
        if not message.get("more_body", False):
            return b"".join(parts)


def decode(body: bytes, kind: type[B]) -> B:
    """The fields of a JSON object.

    Raises:
        ApiError: 413, it holds too many values.
        RequestError: this is no JSON object, or a field has a wrong type.
    """
    if len(body) > _MAX_VALUES and body.count(b",") >= _MAX_VALUES:
        message = f"the body must hold at most {_MAX_VALUES} values; send less at a time"
        raise ApiError(413, message, code="body_too_large")
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body must be a JSON object in UTF-8, but {error}") from None
    if not isinstance(data, dict):
        raise RequestError(f"the body must be a JSON object, got {_brief(data)!r:.80}")
    return convert(data, kind)


def convert(data: dict[str, Any], kind: type[B]) -> B:
    """The fields of an object that is decoded already.

    Raises:
        RequestError: a field has a wrong type.
    """
    _warn_of_constraints(data)
    given = {name: value for name, value in data.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), given) from None
    except RecursionError:
        raise RequestError("the body must not be nested this deeply") from None


def _warn_of_constraints(data: dict[str, Any]) -> None:
    """Ignoring most unknown fields does no harm; ignoring these changes the answer."""
    for name in (_OLD_CONSTRAINTS & data.keys()) - _warned:
        _warned.add(name)
        logger.warning("%s is not known and is ignored; use response_format", name)


def wrong(param: str, rule: str, value: object) -> RequestError:
    """The error for a field whose value breaks a rule."""
    return RequestError(f"{param} must be {rule}, got {_brief(value)!r:.80}", param=param)


def _brief(value: Any, depth: int = 3) -> Any:
    """As much of a value as an error shows: to write a large one out takes long."""
    if isinstance(value, str):
        return value[:80]
    if isinstance(value, list):
        items: list[Any] = value
        return [_brief(item, depth - 1) for item in items[: 40 * bool(depth)]]
    if isinstance(value, dict):
        pairs: list[tuple[Any, Any]] = list(islice(value.items(), 40 * bool(depth)))
        return {key: _brief(item, depth - 1) for key, item in pairs}
    return value


@contextmanager
def renaming(names: Mapping[str, str]) -> Generator[None]:
    """Calls fields, in a RequestError, what this route calls them."""
    try:
        yield
    except RequestError as error:
        message = str(error)
        for old, new in names.items():
            message = message.replace(old, new)
        param = names.get(error.param or "", error.param)
        raise RequestError(message, param=param) from None


def _explained(message: str, data: dict[str, Any]) -> RequestError:
    """Msgspec's complaint in the words of all our errors."""
    found = _MISMATCH.match(message)
    if found is None or not found["path"]:
        return RequestError(message)
    value: Any = data
    names: list[str] = []
    is_of_value = False
    for name, index in _STEP.findall(found["path"]):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            is_of_value = True  # "..." stands for a key that the message does not name
            break
        names.append(name or f"[{index}]")
    where = ".".join(names).replace(".[", "[")
    kinds = [kind for kind in found["kinds"].split(" | ") if kind != "null"]
    rule = " or ".join(_RULES.get(kind, kind) for kind in kinds)
    if is_of_value:
        rule = f"an object of {rule.partition(' ')[2]}s"
    error = wrong(where, rule, value)
    error.param = names[0] if names else None
    return error


def _too_large(size: str, limit: int) -> ApiError:
    message = f"the body must be at most {limit} bytes, got {size}; send less at a time"
    return ApiError(413, message, code="body_too_large")
