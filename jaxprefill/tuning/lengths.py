"""Distributions of prompt lengths: from a file of lengths, a file of prompts, or by name.

Host only; prompts are tokenised as the engine would.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NoReturn

from jaxprefill.errors import ConfigError, JaxPrefillError
from jaxprefill.integers import parse_count
from jaxprefill.tokenizer import Tokenizer

_NUM_SAMPLES = 1000
# Median and spread (standard deviation of the logarithm) of lognormal prompt lengths, in tokens.
_LOGNORMAL = {"chat": (150, 1.2), "scoring": (48, 0.6), "retrieval": (1500, 0.6)}
DISTRIBUTIONS = (*_LOGNORMAL, "uniform")
LENGTH_COLUMN = "prompt_tokens"


@dataclass(frozen=True)
class Distribution:
    """Prompt lengths in tokens and how many prompts have each.

    Attributes:
        name: what it came from, for people.
        num_left_out: prompts longer than the model's context, which an engine would refuse.
    """

    name: str
    lengths: dict[int, int]
    num_left_out: int = 0


def within(distribution: Distribution, context_length: int) -> Distribution:
    """Without the prompts that the engine would refuse.

    Raises:
        ConfigError: that is all of them.
    """
    kept = {n: count for n, count in distribution.lengths.items() if n <= context_length}
    num_left_out = sum(distribution.lengths.values()) - sum(kept.values())
    if not kept:
        raise ConfigError(
            f"{distribution.name}: at least one prompt must fit the context of {context_length} "
            f"tokens, and none does; the shortest has {min(distribution.lengths)}"
        )
    return Distribution(distribution.name, kept, num_left_out)


def named(name: str, context_length: int) -> Distribution:
    """A thousand lengths of a named distribution, the same each time; longer ones are cut.

    `chat`: mostly short, with a long tail; `scoring`: short ones alone, as guards, rerankers and
    classifiers see them; `retrieval`: questions behind documents; `uniform`: every length alike.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in DISTRIBUTIONS:
        raise ConfigError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {name!r}")
    shares = [(index + 0.5) / _NUM_SAMPLES for index in range(_NUM_SAMPLES)]
    if name == "uniform":
        drawn = [share * context_length for share in shares]
    else:
        median, spread = _LOGNORMAL[name]
        normal = NormalDist(sigma=spread)
        drawn = [median * math.exp(normal.inv_cdf(share)) for share in shares]
    return Distribution(name, _counted([min(int(x) + 1, context_length) for x in drawn]))


def read_lengths(path: Path) -> Distribution:
    """A text of lengths, one or several a line, or a CSV with a column `prompt_tokens`.

    Raises:
        ConfigError: the file cannot be read, is empty, or holds something that is no length.
    """
    lines = _lines(path)
    if LENGTH_COLUMN in lines[0][1].split(","):
        column = lines[0][1].split(",").index(LENGTH_COLUMN)
        rows = zip(lines[1:], csv.reader(text for _, text in lines[1:]), strict=True)
        cells = [(number, row[column] if column < len(row) else "") for (number, _), row in rows]
    else:
        cells = [
            (number, cell) for number, text in lines for cell in text.replace(",", " ").split()
        ]
    lengths: list[int] = []
    for number, cell in cells:
        try:
            lengths.append(parse_count("length", cell))
        except ConfigError as error:
            _refuse(path, number, str(error), error)
        if lengths[-1] < 1:
            _refuse(path, number, f"a length must be at least 1 token, got {cell}")
    if not lengths:
        raise ConfigError(f"{path} must hold at least one length, and holds only a header")
    return Distribution(str(path), _counted(lengths))


def read_prompts(path: Path, tokenizer: Tokenizer) -> Distribution:
    """A JSONL of prompts: strings, or objects with `prompt`, `text` or `messages`.

    A `prompt` may be a list of token ids, and each object may stand under the key `body`, as in
    OpenAI's batch files.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line holds no prompt.
    """
    lengths: list[int] = []
    for number, text in _lines(path):
        try:
            lengths.append(_num_tokens(json.loads(text), tokenizer))
        except (ValueError, JaxPrefillError) as error:
            _refuse(path, number, f"a line must be a prompt: {error}", error)
        if not lengths[-1]:
            _refuse(path, number, "a prompt must hold at least one token")
    return Distribution(str(path), _counted(lengths))


def _num_tokens(value: Any, tokenizer: Tokenizer) -> int:
    if isinstance(value, dict):
        fields: dict[str, Any] = value
        value = fields.get("body", fields)
        for key, count in _READERS.items():
            if key in value:
                return count(value[key], tokenizer)
    if isinstance(value, (str, list)):
        return _count_prompt(value, tokenizer)
    raise ValueError(
        f"it needs one of the keys {', '.join(_READERS)}, got {json.dumps(value)[:80]}"
    )


def _count_prompt(value: Any, tokenizer: Tokenizer) -> int:
    if isinstance(value, str):
        return len(tokenizer.encode(value))
    ids: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"a prompt is a text or a list of token ids, got {json.dumps(value)[:80]}")
    return len(ids)


def _count_messages(value: Any, tokenizer: Tokenizer) -> int:
    text = tokenizer.apply_chat_template(value)
    return len(tokenizer.encode(text, add_special_tokens=False))


_READERS: dict[str, Callable[[Any, Tokenizer], int]] = {
    "prompt": _count_prompt,
    "text": _count_prompt,
    "messages": _count_messages,
}


def _counted(lengths: Sequence[int]) -> dict[int, int]:
    return dict(sorted(Counter(lengths).items()))


def _lines(path: Path) -> list[tuple[int, str]]:
    """Lines that are not blank, and their numbers."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a text file that can be read: {error}") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise ConfigError(f"{path} must hold at least one prompt or length, and is empty")
    return lines


def _refuse(path: Path, number: int, why: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigError(f"{path}, line {number}: {why}") from cause
