"""Typed look-ups in a config.json; errors name key, rule and value. Imports no jax."""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxprefill.errors import CheckpointError, ConfigError


@contextmanager
def config_errors() -> Generator[None]:
    """What is made of a config.json finds a value out of range: the file is at fault."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"config.json: {error}") from error


class HfValues:
    """The mapping of a config.json over an architecture's defaults; null counts as absent."""

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        *,
        where: str = "config.json",
    ) -> None:
        """Defaults stand in for keys that are missing, not for those that are null."""
        self._values = {**(defaults or {}), **values}
        self._where = where

    def get(self, name: str) -> Any:
        """The value as it is, or None."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, most: int = 2**53) -> int:
        """A positive integer of at most `most`; without a default it is required.

        Raises:
            CheckpointError: it is missing or something else.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(name, "a positive integer", value)
        if value > most:
            raise self._error(name, f"at most {most}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; see `integer`."""
        value = self._value(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self._error(name, "a positive number", value)
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers; required."""
        items = self._list(name, "positive numbers")
        listed = HfValues(dict(items), where=f"{self._where}: {name}")
        return tuple(listed.number(at) for at, _ in items)

    def text_list(self, name: str) -> tuple[str, ...]:
        """A list of at least one string; required."""
        values = tuple(value for _, value in self._list(name, "strings"))
        if not values or not all(isinstance(value, str) for value in values):
            raise self._error(name, "a list of strings", list(values))
        return values

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._error(name, "true or false", value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A mapping; empty where there is none."""
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self._error(name, "a mapping", value)
        return dict(value)

    def _list(self, name: str, kind: str) -> list[tuple[str, Any]]:
        value = self.get(name)
        if not isinstance(value, (list, tuple)):
            raise self._error(name, f"a list of {kind}", value)
        return [(str(index), item) for index, item in enumerate(value)]

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        return default if value is None else value

    def _error(self, name: str, rule: str, value: object) -> CheckpointError:
        shown = "nothing" if value is None else repr(value)
        return CheckpointError(f"{self._where}: {name} must be {rule}, got {shown}")
