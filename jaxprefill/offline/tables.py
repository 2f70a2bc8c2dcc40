"""Tables as files: rows in, and the same rows out with more columns. Here: JSON lines and CSV.

Texts are UTF-8. What stood in a row stays as it was; JSON rows do so byte by byte.
"""

import csv
import json
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from jaxprefill.errors import ConfigError, JaxPrefillError
from jaxprefill.offline.lines import LineReader, Source
from jaxprefill.offline.output import LineOutput

Values = Sequence[Any]

_MAX_ROW_BYTES = 2**28
_BATCH_ROWS = 256
_BOM = "\ufeff"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A new column; of a row that could not be scored it holds null."""

    name: str
    kind: Literal["text", "float", "int", "vector"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the input.

    Attributes:
        number: from 1; the header of a CSV file is none.
        text: of the column that is asked for; None: null.
        kept: what its table needs to write it.
        position: bytes of the input that are read when it is.
    """

    number: int
    text: str | None
    kept: Any
    position: int


class Table(Protocol):
    """An open input, its column of texts found."""

    source: Source

    def check(self, columns: Iterable[Column]) -> None:
        """Raises ConfigError where a new column has the name of an old one."""
        ...

    def read(self) -> list[Row] | None:
        """The next rows; None at the end.

        Raises:
            JaxPrefillError: a row is malformed; the message names it.
        """
        ...

    def writer(self, path: str, columns: Sequence[Column]) -> "TableWriter":
        """Begins the output, throwing away what it held; raises ConfigError."""
        ...


class TableWriter(Protocol):
    """An output that is begun."""

    def write(self, rows: Sequence[tuple[Row, Values]]) -> None:
        """Appends rows with the values of their new columns; raises JaxPrefillError."""
        ...

    def close(self) -> None:
        """Completes it."""
        ...


class JsonTable:
    """An object on each line. A row may lack the column, which is null then; the first may not."""

    def __init__(self, source: Source, text_column: str) -> None:
        """Raises ConfigError, and JaxPrefillError for a first row that is malformed."""
        self.source = source
        self._column = text_column
        self._reader = LineReader(self.source, max_bytes=_MAX_ROW_BYTES)
        self._new: frozenset[str] = frozenset()
        self._number = 0
        first: list[Row] | None = []
        while first == []:
            first = self._next()
        self._first = first
        if first and text_column not in (names := msgspec.json.decode(first[0].kept)):
            raise _no_column(text_column, names, source.name)

    def check(self, columns: Iterable[Column]) -> None:
        """Raises ConfigError if the first row has a new name; later ones are checked when read."""
        self._new = frozenset(column.name for column in columns)
        for row in self._first or ():
            self._check_names(row.number, msgspec.json.decode(row.kept))

    def read(self) -> list[Row] | None:
        """The next rows."""
        if self._first:
            first, self._first = self._first, []
            return first
        return self._next()

    def writer(self, path: str, columns: Sequence[Column]) -> "TableWriter":
        """Begins the output."""
        return _JsonWriter(LineOutput(path, "overwrite"), columns)

    def _next(self) -> list[Row] | None:
        lines = self._reader.read()
        if lines is None:
            return None
        rows: list[Row] = []
        for line in lines:
            self._number += 1
            where = f"row {self._number} (line {line.number}) of {self.source.name}"
            if line.text is None:
                raise JaxPrefillError(f"{where} must be at most {_MAX_ROW_BYTES} bytes")
            try:
                fields = msgspec.json.decode(line.text, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise JaxPrefillError(f"{where} must be a JSON object, but {error}") from None
            self._check_names(self._number, fields)
            text = fields.get(self._column)
            if text is not None and not isinstance(text, str):
                raise JaxPrefillError(f"{where}: {self._column} must be a text, got {text!r:.80}")
            rows.append(Row(number=self._number, text=text, kept=line.text, position=line.position))
        return rows

    def _check_names(self, number: int, fields: dict[str, Any]) -> None:
        clashes = self._new & fields.keys()
        if clashes:
            raise _clash(sorted(clashes), f"row {number} of {self.source.name}")


class _JsonWriter:
    def __init__(self, output: LineOutput, columns: Sequence[Column]) -> None:
        self._output = output
        self._names = [column.name for column in columns]

    def write(self, rows: Sequence[tuple[Row, Values]]) -> None:
        self._output.write(b"".join(self._line(*each) for each in rows))

    def close(self) -> None:
        self._output.close()

    def _line(self, row: Row, values: Values) -> bytes:
        old: bytes = row.kept
        body = old[:-1].rstrip()  # an object, so it ends in a brace
        new = msgspec.json.encode(dict(zip(self._names, map(_finite, values), strict=True)))
        return body + (b", " if body != b"{" else b"") + new[1:] + b"\n"


class CsvTable:
    """A header and rows of as many fields; quotes as in RFC 4180. No field is null."""

    def __init__(self, source: Source, text_column: str, *, delimiter: str = ",") -> None:
        """Raises ConfigError, and JaxPrefillError for a malformed header."""
        csv.field_size_limit(_MAX_ROW_BYTES)
        self.source = source
        self._delimiter = delimiter
        self._has_bom = False
        self._ending = "\n"
        self._reader = csv.reader(self._lines(), delimiter=delimiter, strict=True)
        self._number = 0
        self._header = self._fields() or []
        if self._header.count(text_column) != 1:
            raise _no_column(text_column, self._header, source.name)
        self._index = self._header.index(text_column)

    def check(self, columns: Iterable[Column]) -> None:
        """Raises ConfigError if the header has a new name."""
        clashes = [column.name for column in columns if column.name in self._header]
        if clashes:
            raise _clash(clashes, self.source.name)

    def read(self) -> list[Row] | None:
        """The next rows."""
        rows: list[Row] = []
        while len(rows) < _BATCH_ROWS and (fields := self._fields()) is not None:
            self._number += 1
            if len(fields) != len(self._header):
                raise JaxPrefillError(
                    f"row {self._number} (line {self._reader.line_num}) of {self.source.name} must "
                    f"have {len(self._header)} fields, as the header, got {len(fields)}"
                )
            position = self.source.position
            text = fields[self._index]
            rows.append(Row(number=self._number, text=text, kept=fields, position=position))
        return rows or None

    def writer(self, path: str, columns: Sequence[Column]) -> "TableWriter":
        """Begins the output with the header; separators and ends of lines are the input's."""
        made = _CsvWriter(LineOutput(path, "overwrite"), self._delimiter, self._ending)
        first, *others = self._header
        header = [_BOM * self._has_bom + first, *others, *(column.name for column in columns)]
        made.write_fields([header])
        return made

    def _fields(self) -> list[str] | None:
        """The next row that is not a blank line."""
        try:
            return next((fields for fields in self._reader if fields), None)
        except csv.Error as error:
            where = f"row {self._number + 1} (line {self._reader.line_num}) of {self.source.name}"
            raise JaxPrefillError(f"{where} is no CSV: {error}") from None

    def _lines(self) -> Generator[str]:
        rest, number = b"", 0
        while True:
            chunk = self.source.stream.read()
            lines = (rest + chunk).splitlines(keepends=True) if not chunk else None
            if lines is None:
                *whole, rest = (rest + chunk).split(b"\n")
                lines = [line + b"\n" for line in whole]
            for line in lines:
                number += 1
                yield self._decoded(line, number)
            if not chunk:
                return

    def _decoded(self, line: bytes, number: int) -> str:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise JaxPrefillError(
                f"line {number} of {self.source.name} is no UTF-8: {error}"
            ) from None
        if number == 1:
            self._has_bom = text.startswith(_BOM)
            self._ending = "\r\n" if text.endswith("\r\n") else "\n"
            return text.removeprefix(_BOM)
        return text


class _Lines(list[str]):
    """The lines of csv.writer; they end in CR LF, as else it would not quote a lone CR."""

    def write(self, text: str, /) -> None:
        self.append(text)


class _CsvWriter:
    def __init__(self, output: LineOutput, delimiter: str, ending: str) -> None:
        self._output = output
        self._delimiter = delimiter
        self._ending = ending

    def write(self, rows: Sequence[tuple[Row, Values]]) -> None:
        self.write_fields([[*row.kept, *map(_as_text, values)] for row, values in rows])

    def write_fields(self, rows: Sequence[Sequence[str]]) -> None:
        lines = _Lines()
        csv.writer(lines, delimiter=self._delimiter).writerows(rows)
        self._output.write("".join(line[:-2] + self._ending for line in lines).encode())

    def close(self) -> None:
        self._output.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list) else str(value)


def _no_column(name: str, names: Iterable[str], where: str) -> ConfigError:
    return ConfigError(
        f"--text-column must be a column that {where} has once, got {name!r}; it has "
        f"{', '.join(map(repr, names)) or 'none'}"
    )


def _clash(names: Sequence[str], where: str) -> ConfigError:
    return ConfigError(
        f"{where} has {', '.join(map(repr, names))} already; choose another --prefix for the new "
        "columns"
    )
