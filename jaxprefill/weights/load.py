"""Checkpoint tensors -> the model's leaves on the device. Names must match exactly."""

from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jaxprefill.errors import CheckpointError
from jaxprefill.models.decoder import Fused
from jaxprefill.models.registry import model_class
from jaxprefill.models.tree import Leaves, ModelTree
from jaxprefill.weights.checkpoint import Checkpoint


def load_leaves(checkpoint: Checkpoint, tree: ModelTree) -> Leaves:
    """Every leaf of `tree`, read, fused, cast and placed as its sharding says.

    Raises:
        CheckpointError: tensors have the wrong shape; they are named.
    """
    sources = model_class(tree.config).sources(tree.config)
    with ThreadPoolExecutor(max_workers=2) as pool:  # reading and dequantising release the GIL
        return tuple(
            pool.map(
                lambda path, shape: _load_leaf(checkpoint, sources[path], path, shape),
                tree.paths,
                tree.shapes,
            )
        )


def _load_leaf(
    checkpoint: Checkpoint, fused: Fused, path: str, shape: jax.ShapeDtypeStruct
) -> Shaped[Array, "..."]:
    parts = [checkpoint.read(name) for name in fused.sources]
    wanted = _part_shapes(fused, shape.shape)
    if [part.shape for part in parts] != wanted:
        found = ", ".join(
            f"{name} {list(part.shape)} instead of {list(want)}"
            for name, part, want in zip(fused.sources, parts, wanted, strict=True)
            if part.shape != want
        )
        raise CheckpointError(
            f"{checkpoint.name}: {path} is made of tensors of the wrong shape: {found}; "
            "the checkpoint does not match its own configuration"
        )
    whole = np.stack(parts) if fused.is_stacked else np.concatenate(parts)
    return jax.device_put(whole.astype(shape.dtype, copy=False), shape.sharding)


def _part_shapes(fused: Fused, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    if fused.is_stacked:
        return [shape[1:]] * len(fused.sources)
    return [(rows, *shape[1:]) for rows in fused.rows or shape[:1]]


def check_names(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless the checkpoint holds just what its architecture needs."""
    config = checkpoint.config
    sources = model_class(config).sources(config)
    wanted = {name for fused in sources.values() for name in fused.sources}
    missing, unexpected = wanted - checkpoint.names(), checkpoint.names() - wanted
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint.name}: tensors do not match the architecture; "
            f"missing: {_some(missing)}; unexpected: {_some(unexpected)}"
        )


def _some(names: Set[str], limit: int = 12) -> str:
    shown = sorted(names)[:limit]
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(shown) or "none") + rest
