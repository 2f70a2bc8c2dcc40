"""How a model is shared out over a mesh: logical axes, one device's sizes, and the sums between.

Executables run per device (`jax.shard_map` over the whole function): each device holds a share of
the heads, of the MLP and of the vocabulary, computes with those sizes as if they were the model's,
and `all_reduce` adds up what the shares give (tensor parallelism, arXiv 1909.08053).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.config import ModelConfig
from jaxprefill.errors import ConfigError

LogicalAxes = tuple[str | None, ...]

# One mesh axis so far: "model" (tensor parallelism). Axes not listed are replicated.
AXIS = "model"
RULES = {"vocab": AXIS, "heads": AXIS, "kv_heads": AXIS, "mlp": AXIS}
EVERYWHERE = PartitionSpec()


def make_mesh(num_devices: int = 1) -> Mesh:
    """A mesh over the first devices of this process, or over those of all if it has too few."""
    is_local = num_devices <= jax.local_device_count()
    devices = jax.local_devices() if is_local else jax.devices()
    return Mesh(np.array(devices[:num_devices]), (AXIS,))


def named_sharding(mesh: Mesh, axes: LogicalAxes) -> NamedSharding:
    """Where an array whose dimensions carry these logical names lies."""
    return NamedSharding(mesh, PartitionSpec(*(RULES.get(axis or "") for axis in axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, EVERYWHERE)


def spec_of(shape: jax.ShapeDtypeStruct) -> PartitionSpec:
    """How an array lies on its mesh; whole on every device unless it says otherwise."""
    sharding = shape.sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else EVERYWHERE


def specs_of(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[PartitionSpec, ...]:
    """How each of several arrays lies."""
    return tuple(map(spec_of, shapes))


def place(
    array: Shaped[np.ndarray, "..."], sharding: jax.sharding.Sharding
) -> Shaped[Array, "..."]:
    """Host data on the devices; of several processes each fills its own, without asking others."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def share_of(config: ModelConfig, num_shards: int) -> ModelConfig:
    """The sizes of one device's share; the model itself for one device.

    Where there are more devices than KV heads, several hold the same one. The vocabulary is
    rounded up: the last share ends in rows that belong to no id.

    Raises:
        ConfigError: heads, their groups or MLP cannot be shared out evenly.
    """
    if num_shards == 1:
        return config
    kv_heads, latent = config.num_kv_heads, config.latent
    sizes = {"query heads": config.num_q_heads, "MLP columns": config.mlp_size}
    if latent is not None:
        sizes["groups of heads"] = latent.num_groups
        latent = replace(latent, num_groups=latent.num_groups // num_shards)
    for name, size in sizes.items():
        if size % num_shards:
            raise _uneven(name, size, num_shards)
    if kv_heads % num_shards and num_shards % kv_heads:
        raise _uneven("KV heads", kv_heads, num_shards)
    return replace(
        config,
        num_q_heads=config.num_q_heads // num_shards,
        num_kv_heads=max(1, kv_heads // num_shards),
        mlp_size=config.mlp_size // num_shards,
        latent=latent,
        vocab_size=-(-config.vocab_size // num_shards),
        num_shards=num_shards,
    )


def _uneven(name: str, size: int, num_shards: int) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size must share out the model's {size} {name} evenly, got {num_shards}; "
        f"choose a divisor of {size}"
    )


def all_reduce(x: Float[Array, "*shape"], config: ModelConfig) -> Float[Array, "*shape"]:
    """The sum of every device's `x`: what follows a product over a shared-out dimension."""
    return lax.psum(x, AXIS) if config.num_shards > 1 else x


def look_up(
    table: Shaped[Array, "V E"], ids: Int32[Array, " T"], config: ModelConfig
) -> Float[Array, "T E"]:
    """Rows of a table shared out by vocabulary, float32: one share has the row, others add 0."""
    if config.num_shards == 1:
        return table[ids].astype(jnp.float32)
    local = ids - lax.axis_index(AXIS) * len(table)
    is_here = (local >= 0) & (local < len(table))
    rows = table[jnp.where(is_here, local, 0)].astype(jnp.float32)
    return lax.psum(jnp.where(is_here[:, None], rows, 0), AXIS)


def per_device(
    function: Callable[..., Any], arguments: tuple[Any, ...], out_specs: Any, mesh: Mesh
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(function, argument shapes) of a program that every device runs on its own shards.

    Arguments without a sharding lie whole on every device. With one device nothing changes.
    """
    if mesh.size == 1:
        return function, arguments

    def settle(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = shape.sharding or replicated(mesh)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    arguments = jax.tree.map(settle, arguments)
    in_specs = jax.tree.map(spec_of, arguments)
    # Not checked for varying values: Pallas kernels do not say how theirs vary.
    shared = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return shared, arguments
