"""Writes any readable model as a converted checkpoint, whole or not at all."""

import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from jaxprefill.config import Quantization
from jaxprefill.errors import CheckpointError
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.weights.checkpoint import Checkpoint
from jaxprefill.weights.converted import is_converted, write_manifest, write_model
from jaxprefill.weights.load import check_names, check_shapes, read_leaves
from jaxprefill.weights.orbax import write_leaves

_REPLACED = "old"

StoredDType = Literal["auto", "float32", "bfloat16", "int8", "float8_e4m3fn"]


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written, ready for JSON."""

    folder: str
    source: str
    dtypes: dict[str, int]  # how many arrays have each
    num_files: int
    num_bytes: int


def convert(
    checkpoint: Checkpoint, folder: Path, *, dtype: StoredDType = "auto", overwrite: bool = False
) -> Converted:
    """Writes a checkpoint's arrays as the model takes them, its config and its tokenizer.

    Args:
        checkpoint: the model; it is held in memory once.
        folder: what to make, `~` allowed; its parent is made too.
        dtype: auto keeps every bit: arrays stay as they are read, float16 becomes float32. int8
            and float8_e4m3fn are those of the layers' matrices, as `quantized.kind_of` says; the
            rest stays as with auto.
        overwrite: replace a converted checkpoint that is there.

    Raises:
        ConfigError: the model cannot be quantised.
        CheckpointError: the model does not fit its architecture, or the folder cannot be written.
    """
    folder = _checked_target(folder, overwrite=overwrite)
    config = checkpoint.config
    if dtype in get_args(Quantization):
        config, dtype = replace(config, quantization=dtype), "auto"
    elif dtype != "auto":
        config = replace(config, quantization=None)
    check_names(checkpoint)
    tree = model_tree(config, jnp.dtype("float32"), make_mesh())
    check_shapes(checkpoint, tree)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _scratch(folder.parent) as scratch:
            made = scratch / "new"
            made.mkdir()
            leaves = read_leaves(checkpoint, tree).items()
            stored = write_leaves(made, {path: _cast(leaf, dtype) for path, leaf in leaves})
            write_model(made, config, checkpoint.tokenizer)
            manifest = write_manifest(made, checkpoint.name, stored)
            if overwrite and folder.exists():
                _put_aside(folder, scratch)
            made.replace(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot write {folder}: {error}; free some space, or choose another place"
        ) from error
    kinds = [leaf.dtype for leaf in stored.values()]
    return Converted(
        folder=str(folder),
        source=checkpoint.name,
        dtypes={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        num_files=len(manifest.files) + 1,
        num_bytes=sum(file.num_bytes for file in manifest.files.values()),
    )


@contextmanager
def _scratch(parent: Path) -> Generator[Path]:
    """A hidden folder that goes with the block; those of conversions that were killed go first.

    Each is locked while its process lives. Locks may not reach other machines that share a disk,
    so the name has this machine's.
    """
    prefix = f".convert-{platform.node()}-"
    for left in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError), _open_folder(left) as place:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _discard(left)
    begun = Path(tempfile.mkdtemp(dir=parent, prefix=".begun-"))
    with _open_folder(begun) as place:
        with suppress(OSError):  # a disk without locks, where none is taken for left either
            fcntl.flock(place, fcntl.LOCK_EX)
        scratch = begun.replace(parent / f"{prefix}{begun.name}")  # locked before others see it
        try:
            yield scratch
        finally:
            _discard(scratch)


@contextmanager
def _open_folder(folder: Path) -> Generator[int]:
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield place
    finally:
        os.close(place)


def _put_aside(folder: Path, scratch: Path) -> None:
    """Moves what is to be replaced to where it goes with the scratch folder."""
    (scratch / _REPLACED).mkdir()
    folder.replace(scratch / _REPLACED / folder.name)


def _discard(scratch: Path) -> None:
    """Removes a scratch folder; what was to be replaced, but is not, goes back to its place."""
    replaced = scratch / _REPLACED
    for path in replaced.iterdir() if replaced.is_dir() else ():
        place = scratch.parent / path.name
        if not (place.exists() or place.is_symlink()):
            path.replace(place)
    shutil.rmtree(scratch)


def _cast(leaf: np.ndarray, dtype: StoredDType) -> np.ndarray:
    if dtype != "auto":
        return leaf.astype(jnp.dtype(dtype), copy=False)
    return leaf.astype(np.float32) if leaf.dtype == np.float16 else leaf


def _checked_target(folder: Path, *, overwrite: bool) -> Path:
    """Raises CheckpointError for a place that is taken, or where it would spoil a checkpoint."""
    try:
        folder = folder.expanduser()
        inside = next(filter(is_converted, folder.resolve().parents), None)
        is_taken = folder.exists() or folder.is_symlink()
        is_own = is_converted(folder) and not folder.is_symlink()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, no such user
        raise CheckpointError(f"cannot write {folder}: {error}; choose another place") from error
    if inside is not None:
        raise CheckpointError(
            f"{folder} must not lie in a converted checkpoint, which is refused if it holds more "
            f"than its own files, but lies in {inside}; name a folder outside"
        )
    if is_taken and not is_own:
        raise CheckpointError(
            f"{folder} is there and no converted checkpoint, so it is not replaced; name another "
            "folder, or remove it"
        )
    if is_taken and not overwrite:
        raise CheckpointError(
            f"{folder} must not exist yet; name another folder, or replace it with --overwrite"
        )
    return folder
