"""gzip and Zstandard, by name when writing and by content when reading; streams in bounded memory.

What is written is a row of blocks, each a gzip member or zstd frame of its own: a file that was cut
off is whole up to its last complete block.
"""

import gzip
import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from jaxprefill.errors import ConfigError, JaxPrefillError

_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
_SKIPPED = b"\x2a\x4d\x18"  # of a zstd frame to be skipped, behind a byte that varies
_OTHERS = {
    b"\xfd7zXZ\0": "xz",
    b"BZh91AY&SY": "bzip2",
    b"PK\x03\x04": "zip",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_CHUNK = 2**16


class Decompressor(Protocol):
    """One block of a stream, as zlib's and zstd's objects have it."""

    @property
    def eof(self) -> bool:
        """Whether the block has ended."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What was given beyond its end."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """Takes more of it."""
        ...


@dataclass(frozen=True)
class Codec:
    """How the bytes of a file are packed.

    Attributes:
        compress: makes one block.
        open: the text of a file of blocks.
        decompressor: of one block; None: there are no blocks.
        error: what damaged data raises.
    """

    compress: Callable[[bytes], bytes]
    open: Callable[[BinaryIO], BinaryIO]
    decompressor: Callable[[], Decompressor] | None
    error: type[Exception]


PLAIN = Codec(lambda data: data, lambda raw: raw, None, OSError)


def codec_of(suffix: str) -> Codec:
    """The codec of ".gz" or ".zst"; plain for any other ending.

    Raises:
        ConfigError: the package for zstd is missing.
    """
    if suffix == ".gz":
        return Codec(
            lambda data: gzip.compress(data, 6, mtime=0),
            lambda raw: cast(BinaryIO, gzip.GzipFile(fileobj=raw)),
            lambda: zlib.decompressobj(31),
            zlib.error,
        )
    if suffix == ".zst":
        zstd = _zstd()
        return Codec(
            zstd.compress,
            lambda raw: cast(BinaryIO, zstd.ZstdFile(raw)),
            zstd.ZstdDecompressor,
            zstd.ZstdError,
        )
    return PLAIN


def codec_of_path(path: str) -> Codec:
    """The codec that a name asks for."""
    return codec_of(Path(path).suffix.lower())


def open_text(stream: io.BufferedReader, name: str) -> "TextStream":
    """What a stream holds, unpacked if its first bytes say that it is packed.

    Raises:
        ConfigError: they say that it is of a kind which is not read.
    """
    start = stream.peek(10)
    suffix = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "")
    if start[1:4] == _SKIPPED:
        suffix = ".zst"
    for magic, kind in _OTHERS.items():
        if start.startswith(magic):
            raise ConfigError(
                f"{name} must be text in UTF-8, plain or packed by gzip or zstd, but is {kind}; "
                "convert it first"
            )
    codec = codec_of(suffix)
    return TextStream(codec.open(stream), codec, name)


class TextStream:
    """Reads unpacked bytes; damage is told with the file's name."""

    def __init__(self, stream: BinaryIO, codec: Codec, name: str) -> None:
        """`name` is what errors call the file."""
        self._stream: Any = stream
        self._codec = codec
        self._name = name

    def read(self, size: int = _CHUNK) -> bytes:
        """What there is, at most `size` bytes; none at the end.

        Raises:
            JaxPrefillError: the data is damaged, or ends too early.
        """
        try:
            return self._stream.read1(size)
        except (EOFError, OSError, self._codec.error) as error:
            raise JaxPrefillError(f"{self._name} cannot be read to its end: {error}") from error


def whole_length(stream: BinaryIO, codec: Codec, name: str) -> int:
    """How many bytes of a file, from its start, are whole blocks; of plain text, whole lines.

    Raises:
        JaxPrefillError: a block is damaged.
    """
    if codec.decompressor is None:
        return _whole_lines(stream)
    position = whole = 0
    block, data = codec.decompressor(), b""
    while data or (data := stream.read(_CHUNK)):
        try:
            block.decompress(data)
        except codec.error as error:
            raise JaxPrefillError(f"{name} is damaged behind byte {whole}: {error}") from error
        position += len(data)
        data = b""
        if block.eof:
            data = block.unused_data
            position -= len(data)
            whole, block = position, codec.decompressor()
    return whole


def first_text(stream: BinaryIO, codec: Codec, size: int) -> bytes:
    """The first bytes of a file's text, as far as they are whole."""
    stream.seek(0)
    if codec.decompressor is None:
        return stream.read(size)
    return codec.decompressor().decompress(stream.read(_CHUNK))[:size]


def _whole_lines(stream: BinaryIO) -> int:
    position = end = stream.seek(0, io.SEEK_END)
    while position > 0:
        start = max(position - _CHUNK, 0)
        stream.seek(start)
        found = stream.read(position - start).rfind(b"\n")
        if found >= 0:
            return min(start + found + 1, end)
        position = start
    return 0


def _zstd() -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    raise ConfigError("zstd files need Python 3.14 or pip install backports.zstd")
