"""Scores the texts of a table: labels, perplexities or embeddings become new columns.

A row is asked for as the server's clients would: labels as in /v1/classify, perplexity as an echoed
completion of no tokens, embeddings as in /v1/embeddings. A text that is empty or null gets nulls;
so does a row that is malformed or refused, and the reason is kept with the row's number.
"""

import asyncio
import base64
import math
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxprefill.errors import ConfigError, JaxPrefillError
from jaxprefill.offline.batch import DEFAULT_WINDOW
from jaxprefill.offline.lines import STANDARD, Source
from jaxprefill.offline.parquet import ParquetTable
from jaxprefill.offline.session import PATHS, OfflineSession, in_thread, raw_body
from jaxprefill.offline.tables import Column, CsvTable, JsonTable, Row, Table, Values
from jaxprefill.offline.window import Window
from jaxprefill.server.api_error import as_api_error

FORMATS = ("csv", "tsv", "jsonl", "parquet")

_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_MAX_PROBLEMS = 20
TEXT = "{text}"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What is asked of a text, and the columns that the answer makes."""

    path: str
    body: dict[str, Any]
    field: str
    columns: tuple[Column, ...]
    values: Callable[[Any], Values]


def label_measure(labels: Sequence[str], prefix: str = "", *, is_own: bool = False) -> Measure:
    """The likeliest label and the probability of each; `is_own`: by the model's own classifier."""
    names = [f"{prefix}label", *(f"{prefix}prob_{label.strip()}" for label in labels)]
    if len(set(names)) < len(names):
        raise ConfigError(f"labels must differ, got {', '.join(map(repr, labels))}")

    def values(reply: Any) -> Values:
        found = reply["data"][0]
        return [found["label"].strip(), *found["probs"]]

    return Measure(
        path="/v1/classify",
        body={} if is_own else {"labels": list(labels)},
        field="input",
        columns=(
            Column(name=names[0], kind="text"),
            *(Column(name=name, kind="float") for name in names[1:]),
        ),
        values=values,
    )


def perplexity_measure(prefix: str = "") -> Measure:
    """Perplexity, number of tokens, and the sum of their logprobs but the first's.

    The perplexity of one token alone is null: nothing before it foretells it.
    """

    def values(reply: Any) -> Values:
        logprobs = reply["choices"][0]["logprobs"]["token_logprobs"]
        scored = [each for each in logprobs if each is not None]
        total = math.fsum(scored)
        mean = -total / len(scored) if scored else None
        perplexity = math.exp(min(mean, 700.0)) if mean is not None else None
        return [perplexity, len(logprobs), total if scored else None]

    return Measure(
        path="/v1/completions",
        body={"echo": True, "logprobs": 0, "max_tokens": 0},
        field="prompt",
        columns=(
            Column(name=f"{prefix}perplexity", kind="float"),
            Column(name=f"{prefix}num_tokens", kind="int"),
            Column(name=f"{prefix}sum_logprob", kind="float"),
        ),
        values=values,
    )


def embedding_measure(prefix: str = "", *, dimensions: int | None = None) -> Measure:
    """The embedding, a list of numbers; a JSON text in CSV."""
    return Measure(
        path="/v1/embeddings",
        body={"dimensions": dimensions, "encoding_format": "base64"},
        field="input",
        columns=(Column(name=f"{prefix}embedding", kind="vector"),),
        values=lambda reply: [_vector(reply["data"][0]["embedding"])],
    )


def _vector(text: str) -> list[float]:
    numbers: list[float] = np.frombuffer(base64.b64decode(text), "<f4").tolist()
    return numbers


def open_table(source: Source, text_column: str, kind: str | None = None) -> Table:
    """The table of a file, of a format of `FORMATS` or that which its name tells.

    Raises:
        ConfigError: there is no such format or column.
    """
    match kind or format_of(source.path):
        case "csv":
            return CsvTable(source, text_column)
        case "tsv":
            return CsvTable(source, text_column, delimiter="\t")
        case "jsonl":
            return JsonTable(source, text_column)
        case _:
            return ParquetTable(source, text_column)


def format_of(path: str) -> str:
    """The format that a file's name tells, before .gz or .zst.

    Raises:
        ConfigError: it tells none.
    """
    name = Path(path)
    is_packed = name.suffix.lower() in (".gz", ".zst")
    found = _SUFFIXES.get((name.with_suffix("") if is_packed else name).suffix.lower())
    if found is None or (is_packed and found == "parquet"):  # Parquet packs its own columns
        raise ConfigError(
            f"the name of a table must end in {', '.join(_SUFFIXES)} (text also .gz or .zst), or "
            f"--format must be given, got {path}"
        )
    return found


@dataclass(kw_only=True)
class ScoringProgress:
    """How far a table is.

    Attributes:
        num_lines: rows that are written; of these
        num_failed: were malformed or refused, and
        num_empty: had no text.
        problems: the first refusals, with their rows.
    """

    num_lines: int = 0
    num_failed: int = 0
    num_empty: int = 0
    position: int = 0
    problems: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class _Scored:
    row: Row
    values: Values
    problem: str | None = None


class ScoringJob:
    """One table, one measure."""

    def __init__(
        self,
        table: Table,
        measure: Measure,
        *,
        template: str = TEXT,
        progress: ScoringProgress | None = None,
    ) -> None:
        """The prompt of a row is `template` with its text in the place of {text}.

        Raises:
            ConfigError: the template has no place, or a new column's name is taken.
        """
        if TEXT not in template:
            raise ConfigError(f"--template must hold {TEXT}, got {template!r:.80}")
        table.check(measure.columns)
        self.progress = progress or ScoringProgress()
        self._table = table
        self._measure = measure
        self._template = template

    async def run(
        self, session: OfflineSession, path: str, *, window: int = DEFAULT_WINDOW
    ) -> None:
        """Writes the table. A file appears under its name when it is complete.

        Raises:
            JaxPrefillError: the engine or a file fails.
        """
        path = os.path.realpath(path) if os.path.islink(path) else path
        part = part_of(path)
        writer = self._table.writer(part, self._measure.columns)
        try:
            await self._write(session, writer.write, window)
        finally:
            writer.close()
        if part != path:
            try:
                os.replace(part, path)
            except OSError as error:
                raise JaxPrefillError(
                    f"{part} is complete, but cannot be named {path}: {error.strerror}"
                ) from error

    async def _write(
        self,
        session: OfflineSession,
        write: Callable[[Sequence[tuple[Row, Values]]], None],
        window: int,
    ) -> None:
        found = Window[Row, _Scored](
            work=lambda row: self._score(session, row),
            item_bytes=lambda row: row.num_bytes,
            result_bytes=lambda scored: scored.row.num_bytes + 32 * len(scored.values),
            max_items=window,
        )
        async with aclosing(self._rows()) as rows, aclosing(found.results(rows)) as results:
            async for scored in results:
                write([(each.row, each.values) for each in scored])
                for each in scored:
                    self._count(each)

    async def _rows(self) -> AsyncGenerator[list[Row]]:
        while (rows := await in_thread(self._table.read)) is not None:
            yield rows

    def _count(self, scored: _Scored) -> None:
        progress = self.progress
        progress.num_lines += 1
        progress.position = scored.row.position
        progress.num_empty += not (scored.row.text or scored.problem)
        if scored.problem is not None:
            progress.num_failed += 1
            if len(progress.problems) < _MAX_PROBLEMS:
                progress.problems.append(f"row {scored.row.number}: {scored.problem}")

    async def _score(self, session: OfflineSession, row: Row) -> _Scored:
        measure = self._measure
        nothing = [None] * len(measure.columns)
        if row.problem or not row.text:
            return _Scored(row, nothing, row.problem)
        prompt = self._template.replace(TEXT, row.text)
        body = raw_body(measure.body | {measure.field: prompt})
        try:
            reply = await session.answer(PATHS[measure.path], body, f"row-{row.number}")
        except asyncio.CancelledError:
            raise
        except JaxPrefillError as error:
            await session.ready()  # raises where there will be no engine
            return _Scored(row, nothing, str(error))
        except Exception as error:  # a row at fault ends no job
            return _Scored(row, nothing, as_api_error(error).message)
        return _Scored(row, measure.values(reply))


def part_of(path: str) -> str:
    """Where an output grows until it is complete; devices and pipes are written as they are."""
    name = Path(path)
    if path == STANDARD or (name.exists() and not name.is_file()):
        return path
    return str(name.with_name(f"{name.stem}.part{name.suffix}"))
