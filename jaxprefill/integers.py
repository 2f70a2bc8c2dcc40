"""Counts as people write them: `4096`, `200k` (200000), `256K` (262144), `25.6k` (25600).

Lower-case suffixes are decimal, capitals binary, and only the decimal ones take a fraction
(SGLang's rule for --context-bucket, PR 36534).
"""

import re
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from jaxprefill.errors import ConfigError

_SCALES = {"": 1} | {
    suffix: base ** (power + 1)
    for suffixes, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, suffix in enumerate(suffixes)
}
_MOST_DIGITS = 30  # more than any count has; Python refuses to read thousands of them
_COUNT = re.compile(r"([+-]?\d+)(?:\.(\d+))?([kKmMgGtT]?)")


def parse_count(name: str, value: Any) -> int:
    """An integer from an int, NumPy's too, or from text with an optional suffix.

    Raises:
        ConfigError: not a whole number, or a fraction with a binary suffix.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    match = _COUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or len(match.string) > _MOST_DIGITS:
        raise ConfigError(
            f"{name} must be a whole number such as 4096, 200k or 256K, got {value!r:.80}"
        )
    whole, fraction, suffix = match.groups()
    scale = _SCALES[suffix]
    if fraction is None:
        return int(whole) * scale
    digits = 10 ** len(fraction)
    scaled = int(whole + fraction) * scale
    if not suffix.islower() or scaled % digits:
        raise ConfigError(
            f"{name}: a fraction needs a decimal suffix and a whole result (25.6k), got {value!r}"
        )
    return scaled // digits


def parse_counts(name: str, value: Any) -> tuple[int, ...]:
    """Integers from a comma-separated text, anything that lists them, or one integer."""
    if isinstance(value, str):
        parts: list[Any] = [part for part in value.split(",") if part.strip()]
        if not parts:
            raise ConfigError(f"{name} must name at least one count, got {value!r}")
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping)):
        parts = list(value)
    else:
        parts = [value]
    return tuple(parse_count(name, part) for part in parts)
