"""The body as a pure function: token ids -> embeddings -> all layers -> final norm -> hidden rows.

Layers are unrolled through one inner jitted layer function a kind of layer: XLA sees every layer's
own weights (a scan would copy them), and tracing stays as cheap as for one layer of each kind. On a
CPU each run of layers of one kind is a loop that branches at every matrix product (see
`WeightByLayer`): as fast, and compiled four times faster.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.kernels.attention import AttentionBackend, AttentionSpec, RaggedBatch
from jaxprefill.models.decoder import Decoder, LayerInputs, Pools, attention_specs
from jaxprefill.models.tree import LayerLeaves, Leaves, ModelTree
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

    def __init__(
        self,
        tree: ModelTree,
        backend: AttentionBackend,
        layout: BufferLayout,
        *,
        is_looped: bool = False,
    ) -> None:
        """`layout` fixes every static size; `is_looped` makes the layers a loop (CPU)."""
        self.tree = tree
        self.layout = layout
        self.is_looped = is_looped
        self.specs = attention_specs(tree.config)
        self._attends = {spec: backend.make(layout.tiles, spec) for spec in self.specs}

    def layer(
        self,
        spec: AttentionSpec,
        leaves: LayerLeaves,
        norms: Float[Array, "2 E"],
        hidden: Float[Array, "T E"],
        pools: Pools,
        layer: Int32[Array, ""],
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T E"], Pools]:
        """One layer over its own leaves; `spec` is what this kind of layer asks of attention."""
        module = self.tree.bind_layer(leaves)
        return module(hidden, pools, norms, layer, inputs, self._attends[spec])

    def __call__(
        self,
        leaves: Leaves,
        pools: Pools,
        hidden: Shaped[Array, "tokens E"],
        last_tokens: Int32[Array, " C"],
        buffer: Int32[Array, " words"],
    ) -> tuple[Pools, Shaped[Array, "tokens E"]]:
        """(pools, hidden) after the pass; both are donated. Rows past T keep their values."""
        model = self.tree.bind(leaves)
        inputs = unpack(buffer, self.layout)
        ids = resolve_ids(inputs.ids, last_tokens)
        with jax.named_scope("rotary"):
            rotary = model.rotary(inputs.positions)
        layer_inputs = LayerInputs(rotary, inputs.batch, inputs.num_tokens, ids)
        with jax.named_scope("embed"):
            rows = model.embed(ids)
        rows, pools = self._normed_layers(model, leaves, rows, pools, layer_inputs)
        return pools, write_hidden(hidden, rows)

    def _normed_layers(
        self,
        model: Decoder,
        leaves: Leaves,
        rows: Float[Array, "T E"],
        pools: Pools,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T E"], Pools]:
        """All layers and the final norm."""
        layers = self._looped if self.is_looped else self._unrolled
        rows, pools = layers(leaves, rows, pools, inputs)
        with jax.named_scope("final_norm"):
            return model.final_norm(rows), pools

    def _unrolled(
        self,
        leaves: Leaves,
        rows: Float[Array, "T E"],
        pools: Pools,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T E"], Pools]:
        norms = self.tree.leaf(leaves, "norms")
        layer_fn = jax.jit(self.layer, static_argnums=0)
        for index, window in enumerate(self.tree.config.windows):
            own, pair = self.tree.layer_leaves(leaves, index), norms[2 * index : 2 * index + 2]
            spec = AttentionSpec(window)
            rows, pools = layer_fn(spec, own, pair, rows, pools, jnp.int32(index), inputs)
        return rows, pools

    def _looped(
        self,
        leaves: Leaves,
        rows: Float[Array, "T E"],
        pools: Pools,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T E"], Pools]:
        windows = self.tree.config.windows
        for window, run in itertools.groupby(range(len(windows)), windows.__getitem__):
            layers, spec = tuple(run), AttentionSpec(window)
            step = functools.partial(self._looped_layer, spec, leaves, layers, inputs)
            rows, pools = lax.fori_loop(0, len(layers), step, (rows, pools))
        return rows, pools

    def _looped_layer(
        self,
        spec: AttentionSpec,
        leaves: Leaves,
        layers: tuple[int, ...],
        inputs: LayerInputs,
        at: Int32[Array, ""],
        carry: tuple[Float[Array, "T E"], Pools],
    ) -> tuple[Float[Array, "T E"], Pools]:
        """Layer `layers[at]` of consecutive ones over (hidden, pools)."""
        own, layer = self.tree.looped_leaves(leaves, layers, at), layers[0] + at
        pair = lax.dynamic_slice_in_dim(self.tree.leaf(leaves, "norms"), 2 * layer, 2)
        return self.layer(spec, own, pair, *carry, layer, inputs)
