"""Tables as files: rows in, and the same rows out with more columns. Here: JSON lines and CSV.

Texts are UTF-8. What stood in a row stays as it was; JSON rows do so byte by byte, unless JSON
cannot hold what they are: then NaN, Infinity and numbers beyond float64 become null, and characters
that are none question marks. A row that is at fault is not scored, but ends nothing.
"""

import csv
import json
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import msgspec

from jaxprefill.errors import ConfigError, JaxPrefillError
from jaxprefill.offline.lines import InputLine, LineReader, Source
from jaxprefill.offline.output import LineOutput

Values = Sequence[Any]

_MAX_ROW_BYTES = 2**28
_BATCH_ROWS, _BATCH_BYTES = 256, 2**18
_BOM = "\ufeff"
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


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
        num_bytes: what it weighs until it is written.
        problem: what is wrong with it, so that it is not scored.
    """

    number: int
    text: str | None
    kept: Any
    position: int
    num_bytes: int
    problem: str | None = None


class Table(Protocol):
    """An open input, its column of texts found."""

    source: Source

    def check(self, columns: Iterable[Column]) -> None:
        """Raises ConfigError where a new column has the name of an old one."""
        ...

    def read(self) -> list[Row] | None:
        """The next rows; None at the end.

        Raises:
            JaxPrefillError: the file is damaged.
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
        """Raises ConfigError, and JaxPrefillError for a first row that is no object."""
        self.source = source
        self._column = text_column
        self._reader = LineReader(self.source, max_bytes=_MAX_ROW_BYTES)
        self._new: frozenset[str] = frozenset()
        self._number = 0
        self._ahead: list[InputLine] | None = []
        while self._ahead == []:
            self._ahead = self._reader.read()
        for line in (self._ahead or ())[:1]:
            row = self._row(line, 1)
            names = _FIELDS.decode(row.kept)
            if row.problem and not names:
                raise JaxPrefillError(f"row 1 of {source.name}: {row.problem}")
            if text_column not in names:
                raise _no_column(text_column, names, source.name)

    def check(self, columns: Iterable[Column]) -> None:
        """Raises ConfigError if one of the first rows has a new name; later ones are at fault."""
        new = frozenset(column.name for column in columns)
        for number, line in enumerate(self._ahead or (), 1):
            clashes = new & _FIELDS.decode(self._row(line, number).kept).keys()
            if clashes:
                raise _clash(sorted(clashes), f"row {number} of {self.source.name}")
        self._new = new

    def read(self) -> list[Row] | None:
        """The next rows."""
        lines, self._ahead = self._ahead or self._reader.read(), None
        if lines is None:
            return None
        first, self._number = self._number + 1, self._number + len(lines)
        return [self._row(line, number) for number, line in enumerate(lines, first)]

    def writer(self, path: str, columns: Sequence[Column]) -> "TableWriter":
        """Begins the output."""
        return _JsonWriter(LineOutput(path, "overwrite"), columns)

    def _row(self, line: InputLine, number: int) -> Row:
        num_bytes = len(line.text or b"")
        row = Row(number=number, text=None, kept=b"{}", position=line.position, num_bytes=num_bytes)
        where = f"line {line.number}"
        if line.text is None:
            return replace(row, problem=f"{where} must be at most {_MAX_ROW_BYTES} bytes")
        try:
            kept, fields = _object(line.text)
        except (ValueError, RecursionError) as error:
            return replace(row, problem=f"{where} must be a JSON object, but {error}")
        if clashes := self._new & fields.keys():
            held = _FIELDS.decode(kept)
            kept = msgspec.json.encode({key: held[key] for key in held if key not in clashes})
            return replace(row, kept=kept, problem=str(_clash(sorted(clashes), where)))
        try:
            text = _json_text(fields.get(self._column))
        except ValueError as error:
            problem = f"{where}: {self._column} must be a text or null, but {error}"
            return replace(row, kept=kept, problem=problem)
        return replace(row, kept=kept, text=text)


def _object(line: bytes) -> tuple[bytes, dict[str, Any]]:
    """A row as JSON, which it may be nearly: with NaN, half a surrogate pair, no UTF-8; its fields.

    Raises:
        ValueError, RecursionError: it is no object.
    """
    try:
        line.decode()
        return line, dict(_FIELDS.decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        wrong = error
    try:
        text = line.decode(errors="surrogateescape")
        found = json.loads(text, parse_constant=lambda _: None, parse_float=_float64)
    except json.JSONDecodeError:
        raise wrong from None
    if not isinstance(found, dict):
        raise wrong
    mended = json.dumps(found, ensure_ascii=False, allow_nan=False)
    return mended.encode(errors="replace"), found


def _float64(text: str) -> float | None:
    return number if math.isfinite(number := float(text)) else None


def _json_text(value: Any) -> str | None:
    """Raises ValueError for what is no text, or holds characters that are none."""
    found = msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
    if found is not None and not isinstance(found, str):
        raise ValueError(f"got {found!r:.80}")
    return found and _encodable(found)


def _encodable(text: str) -> str:
    """Raises UnicodeEncodeError for halves of surrogate pairs, which stand for wrong bytes too."""
    text.encode()
    return text


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
    """A header and rows of as many fields; quotes as in RFC 4180. No field is null.

    Of a row that is at fault the fields are kept as far as they can be told, and as many as the
    header has; bytes that are no UTF-8 stay.
    """

    def __init__(self, source: Source, text_column: str, *, delimiter: str = ",") -> None:
        """Raises ConfigError, and JaxPrefillError for a malformed header."""
        csv.field_size_limit(_MAX_ROW_BYTES)
        self.source = source
        self._delimiter = delimiter
        self._has_bom = False
        self._ending = "\n"
        self._record: list[str] = []  # the lines of the row that is being read
        self._reader = csv.reader(self._lines(), delimiter=delimiter, strict=True)
        self._number = 0
        self._header, problem = self._fields() or ([], None)
        if problem is not None:
            raise JaxPrefillError(f"the header of {source.name}: {problem}")
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
        room = _BATCH_BYTES
        while len(rows) < _BATCH_ROWS and room > 0 and (found := self._fields()) is not None:
            self._number += 1
            rows.append(self._row(*found))
            room -= rows[-1].num_bytes
        return rows or None

    def writer(self, path: str, columns: Sequence[Column]) -> "TableWriter":
        """Begins the output with the header; separators and ends of lines are the input's."""
        made = _CsvWriter(LineOutput(path, "overwrite"), self._delimiter, self._ending)
        first, *others = self._header
        header = [_BOM * self._has_bom + first, *others, *(column.name for column in columns)]
        made.write_fields([header])
        return made

    def _row(self, fields: list[str], problem: str | None) -> Row:
        size, position = len(self._header), self.source.position
        if problem is None and len(fields) != size:
            problem = f"{self._where()} must have {size} fields, as the header, got {len(fields)}"
        fields = [*fields, *[""] * size][:size]
        text = fields[self._index]
        try:
            _encodable(text)
        except UnicodeEncodeError:
            problem = problem or f"{self._where()} must be UTF-8, but its text is not"
        text = text if problem is None else None
        return Row(
            number=self._number,
            text=text,
            kept=fields,
            position=position,
            num_bytes=sum(map(len, fields)),
            problem=problem,
        )

    def _where(self) -> str:
        return f"line {self._reader.line_num - len(self._record) + 1}"

    def _fields(self) -> tuple[list[str], str | None] | None:
        """The next row that is not a blank line, and what is wrong with it."""
        while True:
            self._record.clear()
            try:
                fields = next(self._reader, None)
                if fields is None:
                    return None
                if fields:
                    return fields, None
            except csv.Error as error:
                problem = f"{self._where()} is no CSV: {error}"
                if len(self._record) > 1:
                    problem += f"; a quote opened there goes on to line {self._reader.line_num}"
                return self._lenient(), problem

    def _lenient(self) -> list[str]:
        try:
            return next(csv.reader(self._record, delimiter=self._delimiter), [])
        except csv.Error as error:
            raise JaxPrefillError(
                f"{self._where()} of {self.source.name} is no CSV: {error}; mend the quotes there"
            ) from None

    def _lines(self) -> Generator[str]:
        rest, is_first = b"", True
        while True:
            chunk = self.source.stream.read()
            lines = (rest + chunk).splitlines(keepends=True) if not chunk else None
            if lines is None:
                *whole, rest = (rest + chunk).split(b"\n")
                lines = [line + b"\n" for line in whole]
            for line in lines:
                text = line.decode(errors="surrogateescape")
                self._record.append(self._first(text) if is_first else text)
                is_first = False
                yield self._record[-1]
            if not chunk:
                return

    def _first(self, text: str) -> str:
        try:
            _encodable(text)
        except UnicodeEncodeError as error:
            raise JaxPrefillError(
                f"line 1 of {self.source.name} must be UTF-8, but {error}; convert the file first"
            ) from None
        self._has_bom = text.startswith(_BOM)
        self._ending = "\r\n" if text.endswith("\r\n") else "\n"
        return text.removeprefix(_BOM)


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
        text = "".join(line[:-2] + self._ending for line in lines)
        self._output.write(text.encode(errors="surrogateescape"))

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
