"""Options as fields: help beside the default, text read as the command line would, JSON objects.

Knows no option by name.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from jaxprefill.errors import ConfigError
from jaxprefill.integers import parse_count, parse_counts


def option(
    default: Any, help_text: str, metavar: str | None = None, *, is_prefill: bool = False
) -> Any:
    """A field that is also a command-line flag; `is_prefill`: and a key of `prefill_config`."""
    metadata = {"help": help_text, "metavar": metavar, "is_prefill": is_prefill}
    return field(default=default, metadata=metadata)


def coerce(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint` says; text is parsed as the command line would.

    Raises:
        ConfigError: it is neither.
    """
    kinds = set(get_args(hint)) if get_origin(hint) not in (Literal, tuple) else {hint}
    kinds = kinds or {hint}
    if value is None and type(None) in kinds:
        return None
    if value is None and hint == tuple[int, ...]:
        return ()
    if tuple[int, ...] in kinds:
        is_word = isinstance(value, str) and str in kinds and value.isalpha()
        return value if is_word else parse_counts(name, value)
    if hint is bool and isinstance(value, bool):
        return value
    if int in kinds:
        return parse_count(name, value)
    if float in kinds:
        return _parse_float(name, value)
    if isinstance(value, str) and hint is not bool:
        return value
    if get_origin(hint) is Literal:
        raise ConfigError(f"{name} must be one of {', '.join(get_args(hint))}, got {value!r}")
    kind = {bool: "true or false", str: "text"}.get(hint, getattr(hint, "__name__", hint))
    raise ConfigError(f"{name} must be {kind}, got {value!r}")


def read_keys(name: str, given: Any, known: Collection[str]) -> dict[str, Any]:
    """The options in a JSON object: its text, a file that holds it, or the mapping itself.

    Raises:
        ConfigError: it cannot be read, is no object, or has a key that is not known; lists those
            that are.
    """
    keys = f"the keys are {', '.join(known)}"
    found: Any = given
    if isinstance(given, str):
        text = given if given.lstrip()[:1] in ("{", "[") else _read_file(name, given, keys)
        try:
            found = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} must be a JSON object, got {error}; {keys}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} must be a JSON object or a file of one, got {found!r}; {keys}")
    options = cast(Mapping[str, Any], found)
    unknown = sorted(str(key) for key in options if key not in known)
    if unknown:
        raise ConfigError(f"{name} has the unknown key {', '.join(unknown)}; {keys}")
    return dict(options)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _read_file(name: str, path: str, keys: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # some editors begin with a mark
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} must be a JSON object or a file of one, got {path!r}: {error}; {keys}"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [key for key, _ in pairs]
    twice = sorted({key for key in names if names.count(key) > 1})
    if twice:
        raise ValueError(f"the key {', '.join(twice)} twice")
    return dict(pairs)


def _parse_float(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be a number, got {value!r}") from None
