"""One pass of a model with random weights, over any number of devices: no engine round it."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.cache.kv_cache import pool_shapes
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.models.registry import model_class
from jaxprefill.models.sharding import (
    EVERYWHERE,
    make_mesh,
    per_device,
    place,
    replicated,
    specs_of,
)
from jaxprefill.models.tree import model_tree
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.compiler import CPU_OPTIONS
from jaxprefill.prefill.forward import Body
from jaxprefill.prefill.padding import BufferLayout, pad
from jaxprefill.weights.load import load_leaves
from tests.tiny import TensorsCheckpoint

KEY, PAGE, NUM_PAGES = ShapeKey(48, 2, 48), 8, 12
LENGTHS = (37, 6)
FLOAT = jnp.dtype(jnp.float32)


def random_checkpoint(config):
    """Every tensor that the architecture is made of."""
    tree, rng, tensors = model_tree(config, FLOAT, make_mesh()), np.random.default_rng(0), {}
    shapes = dict(zip(tree.paths, tree.shapes, strict=True))
    for path, fused in model_class(config).sources(config).items():
        shape, dtype = shapes[path].shape, shapes[path].dtype
        rows = fused.rows or (shape[0],)
        for at, name in enumerate(fused.sources):
            own = shape[1:] if fused.is_stacked else (rows[at], *shape[1:])
            if dtype == np.int32:
                count = config.moe.num_experts
                tensors[name] = np.stack([rng.permutation(count)[: own[1]] for _ in range(own[0])])
            else:
                tensors[name] = rng.normal(size=own).astype(np.float32) * own[-1] ** -0.5
    return TensorsCheckpoint(config, tensors)


def hidden_rows(checkpoint, num_devices):
    """What stands behind the final norm of two prompts of random ids."""
    mesh = make_mesh(num_devices)
    tree = model_tree(checkpoint.config, FLOAT, mesh)
    tiles = XLA.tile_shape(*KEY, page_size=PAGE, is_decode=False)
    spec = model_class(tree.config).cache_spec(tree.share)
    layout = BufferLayout(KEY, tiles, PAGE, spec.recent_pages(PAGE, KEY.num_tokens))
    pools = pool_shapes(spec, NUM_PAGES, PAGE, num_recent=NUM_PAGES, dtype=FLOAT, mesh=mesh)
    rng, rows, first = np.random.default_rng(1), [], 0
    for slot, length in enumerate(LENGTHS):
        pages = list(range(first, first := first + -(-length // PAGE)))
        ids = rng.integers(0, tree.config.vocab_size, length).tolist()
        rows.append(
            BatchRow(
                request_id="",
                slot=slot,
                token_ids=ids,
                kv_len=length,
                pages=pages,
                recent=pages if spec.reach else (),
            )
        )
    beside = (
        np.zeros((KEY.num_tokens, tree.config.hidden_size), np.float32),
        np.zeros(2, np.int32),
        pad(Batch(rows=tuple(rows), is_decode=False), layout),
    )
    arguments = (
        load_leaves(checkpoint, tree),
        tuple(place(np.zeros(pool.shape, pool.dtype), pool.sharding) for pool in pools),
        *(place(one, replicated(mesh)) for one in beside),
    )
    others = (jax.ShapeDtypeStruct(one.shape, one.dtype) for one in beside)
    body, shapes = per_device(
        Body(tree, XLA, layout), (tree.shapes, pools, *others), (specs_of(pools), EVERYWHERE), mesh
    )
    options = CPU_OPTIONS | {"xla_backend_optimization_level": 0}
    return np.array(jax.jit(body).lower(*shapes).compile(options)(*arguments)[1])[: sum(LENGTHS)]
