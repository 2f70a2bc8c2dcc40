"""The GGUF container (versions 2 and 3, little-endian): metadata and tensors, no model knowledge.

`gguf.GGUFReader` is not used because it makes a NumPy view for every token string, which takes
seconds on a 49k vocabulary; the dequantisation itself is the gguf library's own.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import UInt8

from jaxprefill.errors import CheckpointError

MetadataValue = int | float | bool | str | list[str] | np.ndarray

READABLE_TYPES = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_BLOCKS_PER_ROW = 1024  # keeps the library's temporaries in the CPU's cache
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# The fewest bytes a metadata pair or a tensor entry can take; bounds a count before any loop.
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies in the file.

    Attributes:
        shape: row-major (the reverse of the order in the file), as Hugging Face has it.
        offset: bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """An opened GGUF file: `metadata` read at once, tensor data mapped and read on demand."""

    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            CheckpointError: the file cannot be opened, or is not a whole and valid GGUF file.
        """
        self.path = path
        self._bytes = _map_file(path)
        cursor = _Cursor(path, self._bytes)
        num_tensors, num_pairs = _read_preamble(cursor)
        self.metadata = {}
        for _ in range(num_pairs):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise CheckpointError(
                    f"{path}: metadata key {key!r} appears twice; file is corrupt"
                )
            self.metadata[key] = _read_value(cursor, key)
        self.tensors = _read_tensor_table(cursor, num_tensors, self._alignment())

    def read(self, name: str) -> np.ndarray:
        """Returns tensor `name`, dequantised to float32, in row-major shape.

        Raises:
            CheckpointError: there is no such tensor, or its type is not read.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: no tensor named {name!r}")
        self.require_readable(name)
        raw = self._bytes[info.offset : info.offset + info.num_bytes]
        values = dequantize(_in_long_rows(raw, info.ggml_type), info.ggml_type)
        return np.asarray(values, dtype=np.float32).reshape(info.shape)

    def require_readable(self, name: str) -> None:
        """Raises CheckpointError unless the tensor's type is one that is dequantised."""
        kind = self.tensors[name].ggml_type
        if kind not in READABLE_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {kind.name}, which is not supported; use a "
                f"file with {', '.join(known.name for known in READABLE_TYPES)}"
            )

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(
                f"{self.path}: general.alignment must be a positive integer, got {value!r}; "
                "file is corrupt"
            )
        return value


def _in_long_rows(
    raw: UInt8[np.ndarray, " bytes"], ggml_type: GGMLQuantizationType
) -> UInt8[np.ndarray, "rows bytes"]:
    """Views a tensor's bytes as few long rows: blocks do not care, and the library loops by row."""
    block_bytes = GGML_QUANT_SIZES[ggml_type][1]
    num_blocks = len(raw) // block_bytes
    return raw.reshape(-1, math.gcd(num_blocks, _MAX_BLOCKS_PER_ROW) * block_bytes)


class _Cursor:
    """Reads forwards through the mapped file; every length is checked before it is used."""

    def __init__(self, path: Path, data: UInt8[np.ndarray, " bytes"]) -> None:
        self.path = path
        self.position = 0
        self._view = data.data
        self.size = len(data)

    def take(self, num_bytes: int, what: str) -> memoryview:
        start = self.position
        if num_bytes > self.size - start:
            raise CheckpointError(
                f"{self.path}: {what} at byte {start} needs {num_bytes} bytes but the file ends "
                f"at {self.size}; it is truncated or corrupt, fetch it again"
            )
        self.position = start + num_bytes
        return self._view[start : self.position]

    def u32(self, what: str) -> int:
        return _U32.unpack(self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack(self.take(8, what))[0]

    def count(self, what: str, *, min_bytes_each: int) -> int:
        """Reads a count and refuses one that the rest of the file could not hold."""
        start = self.position
        value = self.u64(what)
        if value * min_bytes_each > self.size - self.position:
            raise CheckpointError(
                f"{self.path}: {what} at byte {start} is {value}, more than the file's "
                f"{self.size} bytes can hold; it is truncated or corrupt, fetch it again"
            )
        return value

    def string(self, what: str) -> str:
        raw = self.take(self.u64(what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}: {what} before byte {self.position} is not UTF-8 ({error.reason}); "
                "file is corrupt"
            ) from error


def _map_file(path: Path) -> np.ndarray:
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: not a GGUF file, it is empty")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # a plain view slices faster
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Returns the number of tensors and of metadata pairs."""
    path = cursor.path
    magic = bytes(cursor.take(4, "the magic number"))
    if magic != _MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file, it starts with {magic!r}, not {_MAGIC!r}")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise CheckpointError(
            f"{path}: big-endian GGUF is not supported; convert it with gguf-convert-endian"
        )
    if version not in _VERSIONS:
        raise CheckpointError(f"{path}: GGUF version must be one of {_VERSIONS}, got {version}")
    num_tensors = cursor.count("the number of tensors", min_bytes_each=_MIN_TENSOR_BYTES)
    num_pairs = cursor.count("the number of metadata pairs", min_bytes_each=_MIN_PAIR_BYTES)
    return num_tensors, num_pairs


def _read_value(cursor: _Cursor, key: str) -> MetadataValue:
    kind = cursor.u32(f"the type of {key!r}")
    if kind == _STRING:
        return cursor.string(f"the value of {key!r}")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    dtype = _scalar_type(cursor, kind, key)
    raw = cursor.take(dtype.itemsize, f"the value of {key!r}")
    if kind == _BOOL:
        return raw[0] != 0
    return np.frombuffer(raw, dtype=dtype)[0].item()


def _read_array(cursor: _Cursor, key: str) -> list[str] | np.ndarray:
    kind = cursor.u32(f"the element type of {key!r}")
    what = f"the length of {key!r}"
    if kind == _STRING:
        num_items = cursor.count(what, min_bytes_each=8)
        label = f"an item of {key!r}"
        return [cursor.string(label) for _ in range(num_items)]
    if kind == _ARRAY:
        raise CheckpointError(
            f"{cursor.path}: {key!r} is an array of arrays, which is not supported"
        )
    dtype = _scalar_type(cursor, kind, key)
    num_items = cursor.count(what, min_bytes_each=dtype.itemsize)
    raw = cursor.take(num_items * dtype.itemsize, what)
    if kind == _BOOL:
        return np.frombuffer(raw, dtype=np.uint8) != 0
    return np.frombuffer(raw, dtype=dtype).copy()


def _scalar_type(cursor: _Cursor, kind: int, key: str) -> np.dtype[np.generic]:
    dtype = _SCALARS.get(kind)
    if dtype is None:
        raise CheckpointError(
            f"{cursor.path}: {key!r} has unknown metadata type {kind}; file is corrupt"
        )
    return dtype


def _read_tensor_table(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    relative = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    file_size = cursor.size
    tensors: dict[str, TensorInfo] = {}
    for info in relative:
        end = data_start + info.offset + info.num_bytes
        if end > file_size:
            raise CheckpointError(
                f"{cursor.path}: tensor {info.name!r} ends at byte {end} but the file ends at "
                f"{file_size}; it is truncated or corrupt, fetch it again"
            )
        if info.name in tensors:
            raise CheckpointError(
                f"{cursor.path}: tensor {info.name!r} appears twice; file is corrupt"
            )
        tensors[info.name] = TensorInfo(
            name=info.name,
            shape=info.shape,
            ggml_type=info.ggml_type,
            offset=data_start + info.offset,
            num_bytes=info.num_bytes,
        )
    return tensors


def _read_tensor_info(cursor: _Cursor) -> TensorInfo:
    """Reads one entry of the table; its offset still counts from the start of the data."""
    path = cursor.path
    name = cursor.string("a tensor name")
    num_dims = cursor.u32(f"the number of dimensions of {name!r}")
    if not 1 <= num_dims <= _MAX_DIMENSIONS:
        raise CheckpointError(
            f"{path}: tensor {name!r} must have 1 to {_MAX_DIMENSIONS} dimensions, got {num_dims}"
        )
    shape = tuple(cursor.u64(f"the shape of {name!r}") for _ in range(num_dims))[::-1]
    if min(shape) < 1:
        raise CheckpointError(f"{path}: tensor {name!r} has an empty shape {shape}")
    kind = cursor.u32(f"the type of {name!r}")
    if kind not in GGML_QUANT_SIZES:
        raise CheckpointError(f"{path}: tensor {name!r} has unknown type {kind}")
    ggml_type = GGMLQuantizationType(kind)
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if shape[-1] % block_size:
        raise CheckpointError(
            f"{path}: rows of tensor {name!r} ({shape[-1]}) must be a multiple of the "
            f"{ggml_type.name} block size {block_size}; file is corrupt"
        )
    return TensorInfo(
        name=name,
        shape=shape,
        ggml_type=ggml_type,
        offset=cursor.u64(f"the offset of {name!r}"),
        num_bytes=math.prod(shape) // block_size * block_bytes,
    )
