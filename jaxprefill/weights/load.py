"""Checkpoint tensors -> the model's leaves on the device. Names must match exactly."""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jaxprefill.errors import CheckpointError, listed
from jaxprefill.models.decoder import Fused
from jaxprefill.models.quantized import SCALE, quantize
from jaxprefill.models.registry import model_class
from jaxprefill.models.sharding import place
from jaxprefill.models.tree import Leaves, ModelTree
from jaxprefill.threads import thread_pool
from jaxprefill.weights.checkpoint import Checkpoint, LeafCheckpoint


def load_leaves(checkpoint: Checkpoint, tree: ModelTree) -> Leaves:
    """Every leaf of `tree`, read, fused, cast and placed as its sharding says.

    `check_shapes` must have passed.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    architecture = model_class(tree.config)
    sources, shared = architecture.sources(tree.config), architecture.sources(tree.share)
    shapes = dict(zip(tree.paths, tree.shapes, strict=True))

    def is_shared_by_rows(path: str) -> bool:
        return shapes[path].sharding.spec[0] is not None and tree.share.num_shards > 1

    def load(path: str) -> dict[str, Shaped[Array, "..."]]:
        shape, whole = shapes[path], _read_leaf(checkpoint, sources[path])
        if is_shared_by_rows(path):
            whole = _share_rows(whole, sources[path], shared[path], shape)
        return {
            name: place(part.astype(shapes[name].dtype, copy=False), shapes[name].sharding)
            for name, part in _stored(path, whole, shapes).items()
        }

    whole = {path: shape for path, shape in shapes.items() if not is_shared_by_rows(path)}
    with thread_pool(2) as pool:  # reading and dequantising release the GIL
        found = dict[str, Shaped[Array, "..."]]()
        if isinstance(checkpoint, LeafCheckpoint):
            found = pool.submit(checkpoint.restore, whole).result()
        for loaded in pool.map(load, [path for path in sources if path not in found]):
            found |= loaded
    return tuple(found[path] for path in tree.paths)


def read_leaves(checkpoint: Checkpoint, tree: ModelTree) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Every leaf by its path, in host memory; quantised, or in the type it is read in.

    `check_shapes` must have passed, for one device.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    sources = model_class(tree.config).sources(tree.config)
    shapes = dict(zip(tree.paths, tree.shapes, strict=True))

    def read(path: str) -> dict[str, Shaped[np.ndarray, "..."]]:
        return _stored(path, _read_leaf(checkpoint, sources[path]), shapes)

    found = dict[str, Shaped[np.ndarray, "..."]]()
    with thread_pool(2) as pool:
        for leaves in pool.map(read, sources):
            found |= leaves
    return found


def _stored(
    path: str, whole: Shaped[np.ndarray, "..."], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """What a parameter is kept as: itself, or its values in eight bits and their scales."""
    if path + SCALE not in shapes:
        return {path: whole}
    values, scales = quantize(whole, shapes[path].dtype)
    return {path: values, path + SCALE: scales}


def _read_leaf(checkpoint: Checkpoint, fused: Fused) -> Shaped[np.ndarray, "..."]:
    parts = [checkpoint.read(name) for name in fused.sources]
    if fused.below is not None:
        for name, part in zip(fused.sources, parts, strict=True):
            _check_indices(part, f"{checkpoint.name}: {name}", fused.below)
    if len(parts) == 1 and not fused.is_stacked and parts[0].flags.writeable:
        return parts[0]  # else it may lie in a file, which others can change: it is copied
    return np.stack(parts) if fused.is_stacked else np.concatenate(parts)


def _check_indices(part: Shaped[np.ndarray, "..."], name: str, below: int) -> None:
    """A device takes an index out of range without a word: NaN, or another's row."""
    found = str(part.dtype)
    if np.issubdtype(part.dtype, np.integer):
        wrong = part[(part < 0) | (part >= below)]
        if not wrong.size:
            return
        found = f"{wrong[0]} among its {part.size}"
    raise CheckpointError(
        f"{name}: must hold integers from 0 to {below - 1}, got {found}; the checkpoint is "
        "damaged, or does not match its own configuration"
    )


def _share_rows(
    whole: Shaped[np.ndarray, "..."], fused: Fused, share: Fused, shape: jax.ShapeDtypeStruct
) -> Shaped[np.ndarray, "..."]:
    """Rows in the order that gives each device its own heads, columns or ids.

        [q0 q1 k0 k1 v0 v1]  ->  [q0 k0 v0 | q1 k1 v1]

    A part with fewer shares than devices is repeated; one that does not fill them ends in zeros.
    """
    num_shards = shape.sharding.mesh.size
    lengths = share.rows or (shape.shape[0] // num_shards,)
    parts = np.split(whole, np.cumsum(fused.rows)[:-1]) if fused.rows else [whole]
    shares: list[list[np.ndarray]] = [[] for _ in range(num_shards)]
    for part, length in zip(parts, lengths, strict=True):
        copies = length * num_shards // len(part)
        missing = max(0, length * num_shards - copies * len(part))
        padded = np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1)) if missing else part
        for index, own in enumerate(shares):
            start = index // copies * length
            own.append(padded[start : start + length])
    return np.concatenate([part for own in shares for part in own])


def _part_shapes(fused: Fused, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    if fused.is_stacked:
        return [shape[1:]] * len(fused.sources)
    if len(fused.sources) == 1:
        return [shape]
    return [(rows, *shape[1:]) for rows in fused.rows]


def check_names(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless the checkpoint holds just what its architecture needs."""
    config = checkpoint.config
    sources = model_class(config).sources(config)
    wanted = {name for fused in sources.values() for name in fused.sources}
    missing, unexpected = wanted - checkpoint.names(), checkpoint.names() - wanted
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint.name}: tensors do not match the architecture; "
            f"missing: {listed(missing)}; unexpected: {listed(unexpected)}"
        )


def check_shapes(checkpoint: Checkpoint, tree: ModelTree) -> None:
    """Raises CheckpointError unless every tensor has the shape that its parameter needs."""
    sources = model_class(tree.config).sources(tree.config)
    wrong = [
        f"{name} {list(checkpoint.shape(name))} instead of {list(wanted)}"
        for path, shape in zip(tree.paths, tree.whole_shapes, strict=True)
        if path in sources  # scales are made of what they scale
        for name, wanted in zip(
            sources[path].sources, _part_shapes(sources[path], shape), strict=True
        )
        if checkpoint.shape(name) != wanted
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.name}: tensors have the wrong shape: {listed(wrong)}; the checkpoint "
            "does not match its own configuration"
        )
