"""The KV pool on the device: one array for all layers and pages.

Shape [2, K, P, S, D]: K then V, KV heads, layers * pages, tokens a page, head dim. Layer l owns
pages l * num_pages onwards, so that one page id serves every layer.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxprefill.config import ModelConfig
from jaxprefill.models.sharding import named_sharding, share_of

POOL_AXES = (None, "kv_heads", None, None, None)


def pool_shape(
    config: ModelConfig, num_pages: int, page_size: int, *, dtype: jnp.dtype, mesh: Mesh
) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the pool."""
    kv_heads = share_of(config, mesh.size).num_kv_heads * mesh.size
    shape = (2, kv_heads, config.num_layers * num_pages, page_size, config.head_dim)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, POOL_AXES))


def token_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of K and V that one token takes in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
