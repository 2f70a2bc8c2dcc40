"""Distributions of prompt lengths: from a file of lengths, a file of prompts, or by name.

Host only; prompts are tokenised as the engine would.
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NoReturn, cast

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
    text = _text(path)
    rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        header = next((row for row in rows if any(row)), [])
        if LENGTH_COLUMN in header:
            at = header.index(LENGTH_COLUMN)
            cells = [(rows.line_num, row[at] if at < len(row) else "") for row in rows if any(row)]
        else:
            cells = [
                (number, cell)
                for number, line in _lines(path, text)
                for cell in line.replace(",", " ").split()
            ]
    except csv.Error as error:
        _refuse(path, rows.line_num, f"a CSV must be well formed: {error}", error)
    lengths: list[int] = []
    for number, cell in cells:
        try:
            lengths.append(parse_count("length", cell))
        except ConfigError as error:
            hint = "" if lengths else f"; of a CSV the column {LENGTH_COLUMN} is read"
            _refuse(path, number, f"{error}{hint}", error)
        if lengths[-1] < 1:
            _refuse(path, number, f"a length must be at least 1 token, got {cell}")
    if not lengths:
        raise ConfigError(f"{path} must hold at least one length, and holds only a header")
    return Distribution(str(path), _counted(lengths))


def read_prompts(path: Path, tokenizer: Tokenizer) -> Distribution:
    """A JSONL of prompts: strings, or objects with `prompt`, `text`, `input` or `messages`.

    A prompt may be a list of token ids, a list may hold several prompts, and each object may stand
    under the key `body`, as in OpenAI's batch files.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line holds no prompt.
    """
    lengths: list[int] = []
    for number, line in _lines(path, _text(path)):
        try:
            found = _count_tokens(json.loads(line), tokenizer)
        except (ValueError, RecursionError, JaxPrefillError) as error:
            _refuse(path, number, f"a line must be a prompt: {error}", error)
        if not found or not min(found):
            _refuse(path, number, "a prompt must hold at least one token")
        lengths += found
    return Distribution(str(path), _counted(lengths))


def _count_tokens(value: Any, tokenizer: Tokenizer) -> list[int]:
    """The lengths of the prompts on a line."""
    if isinstance(value, dict):
        fields: Any = cast(dict[str, Any], value).get("body", value)
        for key, count in _READERS.items() if isinstance(fields, dict) else ():
            if key in fields:
                return count(fields[key], tokenizer)
    if isinstance(value, (str, list)):
        return _count_prompts(value, tokenizer)
    raise ValueError(f"it needs one of the keys {', '.join(_READERS)}, got {_shown(value)}")


def _count_prompts(value: Any, tokenizer: Tokenizer) -> list[int]:
    """Of a text, of a list of token ids, or of a list of several such."""
    several: list[Any] = value if isinstance(value, list) else []
    if any(isinstance(part, (str, list)) for part in several):
        return [_count_one(part, tokenizer) for part in several]
    return [_count_one(value, tokenizer)]


def _count_one(value: Any, tokenizer: Tokenizer) -> int:
    if isinstance(value, str):
        return len(tokenizer.encode(value))
    ids: list[Any] = value if isinstance(value, list) else [None]
    if not all(type(token) is int for token in ids):
        raise ValueError(f"a prompt is a text or a list of token ids, got {_shown(value)}")
    return len(ids)


def _count_messages(value: Any, tokenizer: Tokenizer) -> list[int]:
    text = tokenizer.apply_chat_template(value)
    return [len(tokenizer.encode(text, add_special_tokens=False))]


_READERS: dict[str, Callable[[Any, Tokenizer], list[int]]] = {
    "prompt": _count_prompts,
    "text": _count_prompts,
    "input": _count_prompts,
    "messages": _count_messages,
}


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]


def _counted(lengths: Sequence[int]) -> dict[int, int]:
    return dict(sorted(Counter(lengths).items()))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a text file that can be read: {error}") from error


def _lines(path: Path, text: str) -> list[tuple[int, str]]:
    """Lines that are not blank, and their numbers; JSON may hold other separators than newlines."""
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise ConfigError(f"{path} must hold at least one prompt or length, and is empty")
    return lines


def _refuse(path: Path, number: int, why: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigError(f"{path}, line {number}: {why}") from cause
