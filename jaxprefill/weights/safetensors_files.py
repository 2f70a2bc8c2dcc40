"""The safetensors files of a folder, one or sharded by an index: tensors by their stored names.

Files are mapped, and a tensor is copied when it is read. Pickles are never opened.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxprefill.errors import CheckpointError, listed
from jaxprefill.models.decoder import TensorIndex
from jaxprefill.weights.json_file import read_object

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_READABLE = ("F32", "F16", "BF16")
_TABLE, _WHOLE_NUMBERS = ".tid2eid", ("I32", "I64")  # experts of each token id
# Types that the safetensors library has no NumPy array for.
_EIGHT_BITS = {"F8_E4M3": jnp.dtype("float8_e4m3fn"), "F8_E8M0": jnp.dtype("float8_e8m0fnu")}
_SOME = 8  # names that a message lists


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of an opened file.

    Attributes:
        dtype: as the format names it: F32, BF16 and so on.
        values: of an eight-bit float, mapped; None: `handle` has them.
    """

    shape: tuple[int, ...]
    dtype: str
    handle: Any
    values: np.ndarray | None = None


class SafetensorsFiles:
    """Every tensor of a model's folder. `tensors` is known at once, values when read."""

    tensors: dict[str, StoredTensor]

    def __init__(self, folder: Path) -> None:
        """Opens all files and reads their headers.

        Raises:
            CheckpointError: there are none, or one is missing, damaged or not what the index says.
        """
        self.folder = folder
        self.tensors = {}
        for path, indexed in _shards(folder).items():
            held = _open(path)
            if indexed is not None and indexed - held.keys():
                raise CheckpointError(
                    f"{path}: must hold the tensors that {_INDEX} places there, but lacks "
                    f"{_listed(indexed - held.keys())}; fetch both again"
                )
            twice = held.keys() & self.tensors.keys()
            if twice:
                raise CheckpointError(
                    f"{folder}: each tensor must be in one file, but {_listed(twice)} is in several"
                )
            self.tensors |= held

    def read(self, name: str, at: TensorIndex = ()) -> np.ndarray:
        """A tensor's values, or some of them, in the type they are stored in.

        Raises:
            CheckpointError: the file is damaged.
        """
        tensor = self.tensors[name]
        try:
            if tensor.values is not None:
                return tensor.values[at]
            handle = tensor.handle
            return handle.get_slice(name)[at] if at else handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder}: cannot read {name!r}: {error}") from error

    def require_readable(self, name: str) -> None:
        """Raises CheckpointError unless the tensor's type is one that is computed with."""
        dtype = self.tensors[name].dtype
        if name.endswith(_TABLE) and dtype in _WHOLE_NUMBERS:
            return
        if dtype not in _READABLE:
            raise CheckpointError(
                f"{self.folder}: tensor {name!r} has type {dtype}, which is not supported; use "
                f"weights in {', '.join(_READABLE)}"
            )


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """Each file and the tensors the index promises in it; None where nothing promises any."""
    index = folder / _INDEX
    if index.is_file() and not (folder / _SINGLE).is_file():
        return dict(_indexed(index))
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    loose = sorted(folder.glob("*.safetensors"))
    if len(loose) == 1:
        return {loose[0]: None}
    if loose:
        raise CheckpointError(
            f"{folder}: {len(loose)} safetensors files need a {_INDEX}, which is missing; "
            "fetch it too"
        )
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{folder}: weights must be safetensors, found {_listed(set(pickles))}: pickles can "
            "run code, so they are not read; convert them to safetensors, with transformers' "
            "save_pretrained for instance"
        )
    raise CheckpointError(
        f"{folder}: must hold {_SINGLE}, or {_INDEX} and its files; neither is there; fetch them"
    )


def _indexed(index: Path) -> dict[Path, set[str]]:
    placed = read_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(
            f"{index}: weight_map must map tensor names to files, got {placed!r:.80}; "
            "fetch it again"
        )
    shards: dict[Path, set[str]] = defaultdict(set)
    for tensor, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index}: weight_map must name files of the same folder, got {file!r:.80} "
                f"for {tensor!r}"
            )
        shards[index.parent / file].add(tensor)
    absent = {path.name for path in shards if not path.is_file()}
    if absent:
        raise CheckpointError(
            f"{index}: must name files that are there, but {_listed(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} missing ({len(absent)} of {len(shards)}); "
            "fetch them too"
        )
    return shards


def _open(path: Path) -> dict[str, StoredTensor]:
    try:
        handle: Any = safe_open(path, framework="numpy")
        found: dict[str, StoredTensor] = {}
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            piece = handle.get_slice(name)
            shape = tuple(piece.get_shape())
            found[name] = StoredTensor(shape=shape, dtype=piece.get_dtype(), handle=handle)
        eight = {name: tensor for name, tensor in found.items() if tensor.dtype in _EIGHT_BITS}
        return found | (_mapped(path, eight) if eight else {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: must be a whole safetensors file, but {error}; fetch it again"
        ) from error


def _mapped(path: Path, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same with their values: a file is the length of its header, the header, and bytes."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        first, end = header[name]["data_offsets"]
        values = data[start + first : start + end].view(_EIGHT_BITS[tensor.dtype])
        found[name] = replace(tensor, values=values.reshape(tensor.shape))
    return found


def _listed(names: set[str]) -> str:
    return listed(names, limit=_SOME)
