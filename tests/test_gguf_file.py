"""The GGUF container reader: values, every dequantiser, and malformed files of all kinds."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxprefill.errors import CheckpointError
from jaxprefill.weights.gguf_file import GgufFile

QUANTISED = (T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1)

K_QUANTS = (T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K)
# Where a block of 256 weights keeps its float16 scales: random bytes there could be NaN.
_SCALES = {T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,)}


def random_blocks(kind: T, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Rows of quantised blocks [rows, blocks x bytes], scales of ordinary size."""
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (*shape, num_bytes), dtype=np.uint8)
    for at in _SCALES[kind]:
        scale = rng.uniform(0.001, 0.02, shape).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_sample(path: Path, *, alignment: int | None = None) -> dict[str, np.ndarray]:
    """Writes one tensor of each writable type and returns the exact values."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.ratio", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "naïve 😀")
    writer.add_array("a.strings", ["x", "", "é"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.bools", [True, False])
    exact: dict[str, np.ndarray] = {}
    for kind in K_QUANTS:  # the library cannot quantise to these: any bytes are valid blocks
        writer.add_tensor(kind.name, random_blocks(kind, rng, (4, 3)), raw_dtype=kind)
    for kind in (T.F32, T.F16, T.BF16, *QUANTISED):
        values = rng.standard_normal((4, 96), dtype=np.float32)
        exact[kind.name] = values
        raw = gguf.quants.quantize(values, kind)
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    write_sample(path)
    return path.read_bytes()


def header(*, version: int = 3, num_tensors: int = 0, num_pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def open_bytes(tmp_path: Path, data: bytes) -> GgufFile:
    path = tmp_path / "made.gguf"
    path.write_bytes(data)
    return GgufFile(path)


def test_metadata_has_plain_values(tmp_path: Path) -> None:
    write_sample(tmp_path / "a.gguf")
    metadata = GgufFile(tmp_path / "a.gguf").metadata
    assert metadata["a.count"] == 7
    assert metadata["a.ratio"] == 0.5
    assert metadata["a.flag"] is True
    assert metadata["a.text"] == "naïve 😀"
    assert metadata["a.strings"] == ["x", "", "é"]
    np.testing.assert_array_equal(metadata["a.numbers"], [1, -2, 3])
    np.testing.assert_array_equal(metadata["a.bools"], [True, False])
    assert {type(metadata[key]) for key in ("a.count", "a.ratio")} == {int, float}


@pytest.mark.parametrize("alignment", [None, 64, 8])
def test_tensors_agree_with_the_library_reader(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "a.gguf"
    write_sample(path, alignment=alignment)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for expected in theirs.tensors:
        read = ours.read(expected.name)
        assert read.dtype == np.float32
        assert read.shape == tuple(int(size) for size in reversed(expected.shape))
        np.testing.assert_array_equal(
            read.ravel(), gguf.quants.dequantize(expected.data, expected.tensor_type).ravel()
        )


def test_dequantised_values_are_near_the_originals(tmp_path: Path) -> None:
    exact = write_sample(tmp_path / "a.gguf")
    file = GgufFile(tmp_path / "a.gguf")
    tolerance = {"F32": 0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 3e-2, "Q5_0": 0.2, "Q5_1": 0.2}
    for name, values in exact.items():
        error = np.abs(file.read(name) - values).max()
        assert error <= tolerance.get(name, 0.4), name


def test_version_2_is_read(tmp_path: Path, sample: bytes) -> None:
    data = sample[:4] + struct.pack("<I", 2) + sample[8:]
    assert "F32" in open_bytes(tmp_path, data).tensors


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GG", "truncated"),
        (header(version=1), "version must be one of"),
        (header(version=99), "got 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(num_tensors=1 << 60), "can hold"),
        (header(num_pairs=1 << 63), "can hold"),
        (header(num_pairs=1) + struct.pack("<Q", 1 << 62) + bytes(20), "truncated"),
        (header(num_pairs=1) + text("k") + struct.pack("<I", 77) + bytes(9), "metadata type 77"),
        (header(num_pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 61), "can hold"),
        (header(num_pairs=1) + text("k") + struct.pack("<IIQ", 9, 5, 1 << 61), "can hold"),
        (header(num_pairs=1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "array of arrays"),
        (header(num_pairs=1) + text("k") + struct.pack("<IIQ", 9, 44, 1), "metadata type 44"),
        (header(num_pairs=1) + struct.pack("<Q", 2) + b"\xff\xff" + bytes(9), "not UTF-8"),
        (header(num_pairs=2) + 2 * (text("k") + struct.pack("<II", 4, 1)), "twice"),
        (header(num_tensors=1) + tensor("t", (4,), 999), "unknown type 999"),
        (header(num_tensors=1) + tensor("t", (4,), 5), "unknown type 5"),
        (header(num_tensors=1) + tensor("t", (4, 0), 0), "empty shape"),
        (header(num_tensors=1) + tensor("t", (1, 1, 1, 1, 1), 0), "1 to 4 dimensions"),
        (header(num_tensors=1) + tensor("t", (33,), int(T.Q8_0)) + bytes(99), "block size 32"),
        (header(num_tensors=1) + tensor("t", (1 << 63, 1 << 63), 0) + bytes(99), "file ends at"),
        (header(num_tensors=1) + tensor("t", (1,), 0, offset=1 << 63) + bytes(99), "file ends at"),
        (header(num_tensors=2) + 2 * tensor("t", (1,), 0) + bytes(99), "appears twice"),
    ],
)
def test_malformed_files_are_refused_by_name_and_value(
    tmp_path: Path, data: bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_bytes(tmp_path, data)
    assert "made.gguf" in str(caught.value)


@pytest.mark.parametrize("value", [struct.pack("<II", 4, 0), struct.pack("<IQ", 8, 0)])
def test_a_bad_alignment_is_refused(tmp_path: Path, value: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"general\.alignment must be"):
        open_bytes(tmp_path, header(num_pairs=1) + text("general.alignment") + value)


@pytest.mark.parametrize("kind", [T.I32, T.IQ4_NL, T.MXFP4, T.TQ1_0], ids=lambda kind: kind.name)
def test_other_types_are_refused_with_the_supported_ones(tmp_path: Path, kind: T) -> None:
    file = open_bytes(
        tmp_path, header(num_tensors=1) + tensor("t", (256,), int(kind)) + bytes(2000)
    )
    with pytest.raises(CheckpointError, match=rf"'t' has type {kind.name}, .* F32, .*, Q6_K$"):
        file.read("t")


def test_an_absent_tensor_or_file_is_named(tmp_path: Path, sample: bytes) -> None:
    with pytest.raises(CheckpointError, match="no tensor named 'absent'"):
        open_bytes(tmp_path, sample).read("absent")
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf: cannot be read: No such file"):
        GgufFile(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        GgufFile(tmp_path)


def read_everything(path: Path) -> None:
    """What a caller would do; only CheckpointError may come out of a damaged file."""
    try:
        file = GgufFile(path)
        for name in file.tensors:
            file.read(name)
    except CheckpointError:
        return


def test_every_truncation_is_refused(tmp_path: Path, sample: bytes) -> None:
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 1200, 7), *range(1200, len(sample) - 32, 199)]:
        path.write_bytes(sample[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GgufFile(path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    changes=st.lists(st.tuples(st.integers(0, 1300), st.integers(0, 255)), min_size=1, max_size=4)
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN in damaged scales
def test_flipped_header_bytes_never_escape(
    tmp_path: Path, sample: bytes, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(sample)
    for position, value in changes:
        data[position] = value
    path = tmp_path / "flipped.gguf"
    path.write_bytes(data)
    read_everything(path)
