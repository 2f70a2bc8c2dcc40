"""The body as a pure function: token ids -> embeddings -> all layers -> final norm -> hidden rows.

Layers are unrolled through one inner jitted layer function a kind of layer: XLA sees every layer's
own weights (a scan would copy them), and tracing stays as cheap as for one layer of each kind.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.kernels.attention import AttentionBackend, AttentionSpec, RaggedBatch
from jaxprefill.models.decoder import LayerInputs, attention_specs
from jaxprefill.models.tree import Leaves, ModelTree
from jaxprefill.prefill.padding import BufferLayout


class PassInputs(NamedTuple):
    """A buffer, unpacked on the device."""

    num_tokens: Int32[Array, ""]
    ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    batch: RaggedBatch


def unpack(buffer: Int32[Array, " words"], layout: BufferLayout) -> PassInputs:
    """The fields of `padding.pad`'s buffer: static slices, no copy."""
    fields = {name: buffer[at].reshape(layout.shapes[name]) for name, at in layout.slices.items()}
    batch = RaggedBatch(**{name: fields[name] for name in RaggedBatch._fields})
    return PassInputs(fields["num_tokens"], fields["ids"], fields["positions"], batch)


def resolve_ids(ids: Int32[Array, " T"], last_tokens: Int32[Array, " C"]) -> Int32[Array, " T"]:
    """Ids with -(slot + 1) replaced by the last token sampled into that slot."""
    slots = jnp.clip(-ids - 1, 0, len(last_tokens) - 1)
    return jnp.where(ids < 0, last_tokens[slots], ids)


def write_hidden(
    hidden: Shaped[Array, "tokens E"], rows: Float[Array, "T E"]
) -> Shaped[Array, "tokens E"]:
    """The shared hidden buffer with its first T rows replaced."""
    return lax.dynamic_update_slice(hidden, rows.astype(hidden.dtype), (0, 0))


class Body:
    """The forward pass of one shape, ready to be jitted.

    A fresh instance, and so a fresh inner layer function, per shape: kernels close over static
    sizes (jax #40847: a reused kernel may read another grid's sizes).
    """

    def __init__(self, tree: ModelTree, backend: AttentionBackend, layout: BufferLayout) -> None:
        """`layout` fixes every static size."""
        self.tree = tree
        self.layout = layout
        self.specs = attention_specs(tree.config)
        self._attends = {spec: backend.make(layout.tiles, spec) for spec in self.specs}

    def layer(
        self,
        spec: AttentionSpec,
        leaves: Leaves,
        norms: Float[Array, "2 E"],
        hidden: Float[Array, "T E"],
        pool: Shaped[Array, "2 K P S D"],
        layer: Int32[Array, ""],
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T E"], Shaped[Array, "2 K P S D"]]:
        """One layer over its own leaves; `spec` is what this kind of layer asks of attention."""
        module = self.tree.bind_layer(leaves)
        return module(hidden, pool, norms, layer, inputs, self._attends[spec])

    def __call__(
        self,
        leaves: Leaves,
        pool: Shaped[Array, "2 K P S D"],
        hidden: Shaped[Array, "tokens E"],
        last_tokens: Int32[Array, " C"],
        buffer: Int32[Array, " words"],
    ) -> tuple[Shaped[Array, "2 K P S D"], Shaped[Array, "tokens E"]]:
        """(pool, hidden) after the pass; both are donated. Rows past T keep their values."""
        model = self.tree.bind(leaves)
        inputs = unpack(buffer, self.layout)
        layer_inputs = LayerInputs(model.rotary(inputs.positions), inputs.batch)
        with jax.named_scope("embed"):
            rows = model.embed(resolve_ids(inputs.ids, last_tokens))
        norms = self.tree.leaf(leaves, "norms")
        layer_fn = jax.jit(self.layer, static_argnums=0)
        for index, window in enumerate(self.tree.config.windows):
            own, pair = self.tree.layer_leaves(leaves, index), norms[2 * index : 2 * index + 2]
            spec = AttentionSpec(window)
            rows, pool = layer_fn(spec, own, pair, rows, pool, jnp.int32(index), layer_inputs)
        with jax.named_scope("final_norm"):
            return pool, write_hidden(hidden, model.final_norm(rows))
