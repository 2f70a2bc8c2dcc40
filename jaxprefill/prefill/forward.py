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
from jaxprefill.models.decoder import (
    Decoder,
    LayerInputs,
    Pools,
    attention_specs,
    layer_rotations,
    layer_specs,
)
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
    if not layout.recent_pages:  # kernels are handed no array of no size
        batch = batch._replace(recent_table=None)
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


class LayerKind(NamedTuple):
    """Layers of one kind are one function.

    Attributes:
        spec: what they ask of attention.
        form: their structure.
        rotation: which pair of rotary tables they read.
    """

    spec: AttentionSpec
    form: int
    rotation: int


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
        self.products: str | None = f"of {layout.key.num_tokens} rows"  # see CompileJob
        self.is_stacked = False  # whether its leaves are those of `models.stacks`
        self.tree = tree
        self.layout = layout
        self._waits_for_batch = not is_looped
        self.is_looped = is_looped and len(tree.layer_graphs) == 1
        each = (layer_specs(tree.config), tree.forms, layer_rotations(tree.config))
        self.kinds = tuple(itertools.starmap(LayerKind, zip(*each, strict=True)))
        self._attends = {
            spec: backend.make(layout.tiles, spec) for spec in attention_specs(tree.config)
        }

    def layer(
        self,
        kind: LayerKind,
        leaves: LayerLeaves,
        norms: Float[Array, "own E"],
        hidden: Float[Array, "T row"],
        pools: Pools,
        layer: Int32[Array, ""],
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T row"], Pools]:
        """One layer over its own leaves."""
        inputs = inputs._replace(rotary=inputs.rotary[2 * kind.rotation :][:2])
        module = self.tree.bind_layer(leaves, kind.form)
        return module(hidden, pools, norms, layer, inputs, self._attends[kind.spec])

    def layer_inputs(
        self, rotary: Float[Array, "tables T half"], inputs: PassInputs, ids: Int32[Array, " T"]
    ) -> LayerInputs:
        """What every layer reads; `ids` are resolved."""
        offsets = jnp.arange(self.layout.tiles.tile_q, dtype=jnp.int32)
        return LayerInputs(rotary, inputs.batch, inputs.num_tokens, ids, offsets)

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
        if self._waits_for_batch:
            # Else XLA launches what needs no batch while that is being copied: a graph of its own.
            buffer, pools, hidden = lax.optimization_barrier((buffer, pools, hidden))
        inputs = unpack(buffer, self.layout)
        ids = resolve_ids(inputs.ids, last_tokens)
        with jax.named_scope("rotary"):
            rotary = model.rotary(inputs.positions)
        layer_inputs = self.layer_inputs(rotary, inputs, ids)
        with jax.named_scope("embed"):
            rows = model.embed(ids)
        rows, pools = self._normed_layers(model, leaves, rows, pools, layer_inputs)
        return pools, write_hidden(hidden, rows)

    def _normed_layers(
        self,
        model: Decoder,
        leaves: Leaves,
        rows: Float[Array, "T row"],
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
        rows: Float[Array, "T row"],
        pools: Pools,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T row"], Pools]:
        norms, count = self.tree.leaf(leaves, "norms"), self.tree.config.norms_per_layer
        layer_fn = jax.jit(self.layer, static_argnums=0)
        for index, kind in enumerate(self.kinds):
            own, its = self.tree.layer_leaves(leaves, index), norms[count * index :][:count]
            rows, pools = layer_fn(kind, own, its, rows, pools, jnp.int32(index), inputs)
        return rows, pools

    def _looped(
        self,
        leaves: Leaves,
        rows: Float[Array, "T row"],
        pools: Pools,
        inputs: LayerInputs,
    ) -> tuple[Float[Array, "T row"], Pools]:
        for kind, run in itertools.groupby(range(len(self.kinds)), self.kinds.__getitem__):
            layers = tuple(run)
            step = functools.partial(self._looped_layer, kind, leaves, layers, inputs)
            with jax.named_scope("layers"):
                rows, pools = lax.fori_loop(0, len(layers), step, (rows, pools))
        return rows, pools

    def _looped_layer(
        self,
        kind: LayerKind,
        leaves: Leaves,
        layers: tuple[int, ...],
        inputs: LayerInputs,
        at: Int32[Array, ""],
        carry: tuple[Float[Array, "T row"], Pools],
    ) -> tuple[Float[Array, "T row"], Pools]:
        """Layer `layers[at]` of consecutive ones over (hidden, pools)."""
        own, layer = self.tree.looped_leaves(leaves, layers, at), layers[0] + at
        norms, count = self.tree.leaf(leaves, "norms"), self.tree.config.norms_per_layer
        its = lax.dynamic_slice_in_dim(norms, count * layer, count)
        return self.layer(kind, own, its, *carry, layer, inputs)
