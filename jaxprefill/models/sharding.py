"""Logical axis names of weights and caches, and where each lies on the device mesh."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LogicalAxes = tuple[str | None, ...]

# One mesh axis so far: "model" (tensor parallelism). Axes not listed are replicated.
RULES = {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model"}


def make_mesh(num_devices: int = 1) -> Mesh:
    """A mesh over the first devices of the default backend."""
    return Mesh(np.array(jax.devices()[:num_devices]), ("model",))


def named_sharding(mesh: Mesh, axes: LogicalAxes) -> NamedSharding:
    """Where an array whose dimensions carry these logical names lies."""
    return NamedSharding(mesh, PartitionSpec(*(RULES.get(axis or "") for axis in axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())
