"""Parquet files as tables, some rows at a time; types and metadata of the columns stay.

pyarrow is found when a file is opened, as it is an extra.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from jaxprefill.errors import ConfigError, JaxPrefillError
from jaxprefill.offline.lines import STANDARD, Source
from jaxprefill.offline.tables import Column, Row, TableWriter, Values

_BATCH_ROWS = 256
_GROUP_ROWS = 2**16
_GROUP_BYTES = 2**26
_READ_BYTES = 2**20  # of a column at once: otherwise a row group is read whole


class ParquetTable:
    """A Parquet file; its column of texts may be of any string type, dictionaries too."""

    def __init__(self, source: Source, text_column: str) -> None:
        """Reads the schema.

        Raises:
            ConfigError: pyarrow is missing, or the file or its column is at fault.
        """
        path = source.path
        if path == STANDARD:
            raise ConfigError("a Parquet file must be named: it cannot be read from stdin")
        if source.size is None:  # it is read from its end, and would wait for ever on a pipe
            raise ConfigError(f"a Parquet file must be a file, no pipe, got {path}; save it first")
        self._arrow, parquet = _arrow()
        self.source = source
        try:
            self._file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)
        except (self._arrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path} is no Parquet file: {error}") from error
        self._schema = self._file.schema_arrow
        self._index = self._schema.get_field_index(text_column)
        if self._schema.names.count(text_column) != 1:
            names = ", ".join(map(repr, self._schema.names))
            raise ConfigError(
                f"--text-column must be a column that {path} has once, got {text_column!r}; it has "
                f"{names}"
            )
        kind = self._schema.field(self._index).type
        if not self._is_text(kind):
            raise ConfigError(f"{text_column} must hold texts, but holds {kind}; cast it first")
        self._batches = self._file.iter_batches(batch_size=_BATCH_ROWS)
        self._number = 0

    def check(self, columns: Iterable[Column]) -> None:
        """Raises ConfigError if the file has a new name."""
        clashes = [column.name for column in columns if column.name in self._schema.names]
        if clashes:
            raise ConfigError(
                f"{self.source.name} has {', '.join(map(repr, clashes))} already; choose another "
                "--prefix for the new columns"
            )

    def read(self) -> list[Row] | None:
        """The next rows; of each batch the last one keeps it."""
        try:
            batch = next(self._batches, None)
            if batch is None:
                return None
            held = batch.column(self._index).cast(self._arrow.string())
            texts = held.cast(self._arrow.binary()).to_pylist()  # others may write no UTF-8
        except (self._arrow.ArrowException, OSError) as error:
            raise JaxPrefillError(
                f"{self.source.name} is damaged behind row {self._number}: {error}"
            ) from error
        first, self._number = self._number, self._number + len(texts)
        size, total = self.source.size or 0, max(self._file.metadata.num_rows, 1)
        return [
            Row(
                number=number,
                kept=batch if number == self._number else None,
                position=size * number // total,
                num_bytes=batch.nbytes // len(texts),
                **_checked(text),
            )
            for number, text in enumerate(texts, first + 1)
        ]

    def writer(self, path: str, columns: Sequence[Column]) -> TableWriter:
        """Begins the output, compressed as the input is."""
        if path == STANDARD:
            raise ConfigError("a Parquet file must be named: it cannot be written to stdout")
        kinds = self._types()
        schema = self._schema
        for column in columns:
            schema = schema.append(self._arrow.field(column.name, kinds[column.kind]))
        metadata = self._file.metadata
        packing = "snappy"
        if metadata.num_row_groups and metadata.num_columns:
            packing = metadata.row_group(0).column(0).compression.lower()
        return _ParquetWriter(path, schema, packing, len(columns))

    def _types(self) -> dict[str, Any]:
        arrow = self._arrow
        return {
            "text": arrow.string(),
            "float": arrow.float64(),
            "int": arrow.int64(),
            "vector": arrow.list_(arrow.float32()),
        }

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        if types.is_dictionary(kind):
            return self._is_text(kind.value_type)
        views = getattr(types, "is_string_view", None)
        is_view = views is not None and views(kind)
        return (
            types.is_string(kind) or types.is_large_string(kind) or is_view or types.is_null(kind)
        )


class _ParquetWriter:
    def __init__(self, path: str, schema: Any, packing: str, num_new: int) -> None:
        self._arrow, parquet = _arrow()
        self._name = path
        self._schema = schema
        self._num_new = num_new
        try:
            packing = "none" if packing == "uncompressed" else packing
            self._file = parquet.ParquetWriter(path, schema, compression=packing)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        self._values: list[Values] = []
        self._group: list[Any] = []

    def write(self, rows: Sequence[tuple[Row, Values]]) -> None:
        for row, values in rows:
            self._values.append(values)
            if row.kept is not None:
                self._add(row.kept)

    def close(self) -> None:
        with self._told():
            self._flush()
            self._file.close()

    def _add(self, batch: Any) -> None:
        """A batch whose rows are all there, with the new columns."""
        arrow, new = self._arrow, len(self._schema) - self._num_new
        arrays = list(batch.columns)
        for at in range(self._num_new):
            column = [values[at] for values in self._values]
            arrays.append(arrow.array(column, type=self._schema.field(new + at).type))
        self._values = []
        self._group.append(arrow.record_batch(arrays, schema=self._schema))
        rows = sum(each.num_rows for each in self._group)
        if rows >= _GROUP_ROWS or sum(each.nbytes for each in self._group) >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._group:
            return
        table = self._arrow.Table.from_batches(self._group, schema=self._schema)
        self._group = []
        with self._told():
            self._file.write_table(table)

    @contextmanager
    def _told(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise JaxPrefillError(
                f"cannot write to {self._name}: {error.strerror or error}"
            ) from error


def _checked(text: bytes | None) -> dict[str, Any]:
    try:
        return {"text": None if text is None else text.decode()}
    except UnicodeDecodeError as error:
        return {"text": None, "problem": f"the text must be UTF-8, but {error}"}


def _arrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError("Parquet files need pip install 'jaxprefill[parquet]'") from None
