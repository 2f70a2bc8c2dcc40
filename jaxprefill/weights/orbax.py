"""A converted checkpoint: the model's own arrays, read by Orbax straight onto the devices.

Only what opens or writes such a checkpoint imports this module, as Orbax takes a while to import.
"""

import functools
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Shaped

from jaxprefill.config import ModelConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.quantized import SCALE, dequantize, is_quantized
from jaxprefill.models.registry import model_class
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.weights.converted import (
    WEIGHTS,
    StoredLeaf,
    check_hashes,
    read_manifest,
    read_model,
)

_FILE_BYTES = 1 << 27  # or one array: files are hashed side by side


class OrbaxCheckpoint:
    """A converted checkpoint; implements `LeafCheckpoint`."""

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        """Reads config, tokenizer and manifest, no weights.

        Raises:
            CheckpointError: a file is missing, truncated or edited; names it.
        """
        self._folder = folder.resolve()
        self.name = name or self._folder.name
        self._manifest = read_manifest(self._folder)
        found = read_model(self._folder, self._manifest)
        self.config: ModelConfig = found[0]
        self.tokenizer: Tokenizer = found[1]
        self._places = _places(self.config)
        self._verify = functools.cache(self._compare_weights)
        self._lock = threading.Lock()
        self._leaf = functools.lru_cache(maxsize=2)(self._read_leaf)  # a tensor is a part of one

    def names(self) -> frozenset[str]:
        """All tensors; an array that the architecture lacks under its parameter path."""
        leaves = self._manifest.leaves.keys()
        known = {path for path, _ in self._places.values()}
        known |= {path + SCALE for path in known if self._is_quantized(path)}
        held = {name for name, (path, _) in self._places.items() if path in leaves}
        return frozenset(held | (leaves - known))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        path, part = self._place(name)
        whole = self._manifest.leaves[path].shape
        if isinstance(part, int):
            return whole[1:]
        return (len(range(whole[0])[part]), *whole[1:])

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in the type it is stored in; float32 where that is eight bits."""
        path, part = self._place(name)
        return self._leaf(path)[part]

    def restore(
        self, shapes: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Shaped[Array, "..."]]:
        """Arrays by parameter path, cast and placed as asked; every file is compared meanwhile.

        Those that are stored in eight bits, or asked for, are left out unless it is the same type.

        Raises:
            CheckpointError: a file is not what was written, or cannot be read.
        """
        wanted = {
            path: ocp.ArrayRestoreArgs(
                sharding=shape.sharding, global_shape=shape.shape, dtype=shape.dtype
            )
            for path, shape in shapes.items()
            if self._is_held(path, shape.dtype.name)
        }
        return self._restore(wanted)

    def _is_quantized(self, path: str) -> bool:
        leaf = self._manifest.leaves.get(path)
        return leaf is not None and is_quantized(leaf.dtype)

    def _is_held(self, path: str, dtype: str) -> bool:
        """Whether an array can be had in this type by a cast."""
        leaf = self._manifest.leaves.get(path)
        if leaf is None:
            return False
        return leaf.dtype == dtype or not (is_quantized(leaf.dtype) or is_quantized(dtype))

    def _read_leaf(self, path: str) -> np.ndarray:
        paths = (path, path + SCALE) if self._is_quantized(path) else (path,)
        found = self._restore(dict.fromkeys(paths, ocp.RestoreArgs(restore_type=np.ndarray)))
        return dequantize(*(found[one] for one in paths)) if len(paths) > 1 else found[path]

    def _restore(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        arguments = ocp.args.PyTreeRestore(
            item=dict.fromkeys(wanted, 0), restore_args=dict(wanted), partial_restore=True
        )
        with ThreadPoolExecutor(max_workers=1) as pool:
            checking = pool.submit(self._check_weights)
            try:
                if not wanted:
                    return {}
                with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                    return reader.restore(self._folder / WEIGHTS, args=arguments)
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"{self._folder / WEIGHTS}: cannot be read: {error}; convert the model again"
                ) from error
            finally:
                checking.result()  # a damaged file is named, whatever came of reading it

    def _check_weights(self) -> None:
        with self._lock:
            self._verify()

    def _compare_weights(self) -> None:
        names = [name for name in self._manifest.files if name.startswith(f"{WEIGHTS}/")]
        check_hashes(self._folder, self._manifest, names)

    def _place(self, name: str) -> tuple[str, int | slice]:
        path, part = self._places.get(name, (name, slice(None)))
        if path not in self._manifest.leaves:
            raise CheckpointError(f"{self._folder}: no tensor named {name!r}")
        return path, part


def write_leaves(folder: Path, leaves: Mapping[str, np.ndarray]) -> dict[str, StoredLeaf]:
    """Writes arrays by parameter path into `folder`/weights, which must not exist.

    Raises:
        OSError, ValueError: they cannot be written.
    """
    # Weights hardly compress, and are read twice as fast as they are.
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
    with ocp.Checkpointer(handler) as writer:
        arguments = ocp.args.PyTreeSave(dict(leaves), ocdbt_target_data_file_size=_FILE_BYTES)
        writer.save((folder / WEIGHTS).resolve(), args=arguments)
    return {
        path: StoredLeaf(leaf.shape, jnp.dtype(leaf.dtype).name) for path, leaf in leaves.items()
    }


def _places(config: ModelConfig) -> dict[str, tuple[str, int | slice]]:
    """Canonical tensor name -> (parameter path, its rows or its place in the stack)."""
    found: dict[str, tuple[str, int | slice]] = {}
    for path, fused in model_class(config).sources(config).items():
        start = 0
        for index, name in enumerate(fused.sources):
            if fused.is_stacked:
                found[name] = (path, index)
            elif len(fused.sources) == 1:
                found[name] = (path, slice(None))
            else:
                found[name] = (path, slice(start, start + fused.rows[index]))
                start += fused.rows[index]
    return found
