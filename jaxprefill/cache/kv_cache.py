"""The pools on the device, as a model's CacheSpec lists them: one array each, for all layers.

Shape [parts, K, P, S, D]: K then V, KV heads, layers * pages, tokens a page, head dim. Layer l owns
pages l * num_pages onwards, so that one page id serves every layer.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxprefill.cache.spec import CacheSpec
from jaxprefill.models.sharding import named_sharding

POOL_AXES = (None, "kv_heads", None, None, None)


def pool_shapes(
    spec: CacheSpec,
    num_pages: int,
    page_size: int,
    *,
    num_recent: int = 0,
    dtype: jnp.dtype,
    mesh: Mesh,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape, dtype and sharding of each pool; `spec` is of one device's share of the model.

    Pools of recent tokens have `num_recent` pages a layer.
    """
    sharding = named_sharding(mesh, POOL_AXES)
    return tuple(
        jax.ShapeDtypeStruct(
            (
                pool.num_parts,
                pool.num_heads * mesh.size,
                pool.num_layers * (num_recent if pool.is_recent else num_pages),
                pool.rows(page_size),
                pool.width,
            ),
            jnp.float32 if pool.is_exact else dtype,
            sharding=sharding,
        )
        for pool in spec.pools
    )
