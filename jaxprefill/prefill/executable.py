"""A compiled body behind its guard, and the layer-by-layer form of the same pass."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int32, Shaped

from jaxprefill.batch import Batch
from jaxprefill.device_state import DeviceState, StateShapes
from jaxprefill.kernels.device import is_on_cpu
from jaxprefill.models.decoder import Pools, rotary_tables, row_size
from jaxprefill.models.sharding import EVERYWHERE, place, specs_of
from jaxprefill.models.tree import Leaves
from jaxprefill.prefill.bound import BoundExecutable
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.compiler import Compiled, CompileJob
from jaxprefill.prefill.forward import Body, LayerKind, resolve_ids, unpack, write_hidden
from jaxprefill.prefill.padding import Buffer, pad
from jaxprefill.prefill.staging import Staging


class PrefillExecutable:
    """One whole forward pass, one XLA executable."""

    def __init__(self, body: Body, compiled: Compiled, staging: Staging | None = None) -> None:
        """`compiled` is the job of `body`; with no `staging` it takes host memory."""
        self.key = body.layout.key
        self._layout = body.layout
        self._is_stacked = body.is_stacked
        self._compiled = compiled
        self._staging = staging
        self._bound: BoundExecutable | None = None

    def bind(self, state: DeviceState) -> None:
        """Takes the weights of `state` for good: each call then costs the host less.

        Where a buffer is staged, on one device; otherwise nothing changes.
        """
        if self._staging is not None and len(state.hidden.sharding.device_set) == 1:
            leaves = state.stacked if self._is_stacked else state.leaves
            self._bound = BoundExecutable(self._compiled, leaves)

    def run(self, state: DeviceState, batch: Batch) -> None:
        """Writes the batch's hidden rows and KV; dispatched, not awaited.

        Raises:
            CapacityError: the batch exceeds the shape.
        """
        self.execute(state, pad(batch, self._layout))

    def execute(self, state: DeviceState, buffer: Buffer) -> None:
        """The same for a buffer already padded to this shape."""
        words = buffer if self._staging is None else self._staging.put(buffer)
        if self._bound is None:
            leaves = state.stacked if self._is_stacked else state.leaves
            state.pools, state.hidden = self._compiled.call(
                leaves, state.pools, state.hidden, state.last_tokens, words
            )
        else:
            *pools, state.hidden = self._bound(*state.pools, state.hidden, state.last_tokens, words)
            state.pools = tuple(pools)
        if self._staging is not None:
            self._staging.launched(state.hidden)

    @staticmethod
    def job(
        name: str, body: Body, state: StateShapes, pinned: NamedSharding | None = None
    ) -> CompileJob:
        """What must be compiled; `pinned` is where a staged buffer lies."""
        buffer = jax.ShapeDtypeStruct((body.layout.num_words,), np.int32, sharding=pinned)
        leaves = state.stacked if body.is_stacked else state.leaves
        arguments = (leaves, state.pools, state.hidden, state.last_tokens, buffer)
        cost = body.layout.key.num_tokens * body.tree.config.num_layers
        return CompileJob(
            name=name,
            function=body,
            arguments=arguments,
            donated=(1, 2),
            cost=cost,
            pinned=() if pinned is None else (4,),
            out_specs=(specs_of(state.pools), EVERYWHERE),
            products=body.products,
        )


class LayerwiseExecutable:
    """The same pass as L + 2 launches of small executables: embed, one a kind of layer, finish.

    At the ladder's shapes it is the `layerwise` backend, at coarse shapes the eager fallback.
    """

    def __init__(self, name: str, key: ShapeKey, body: Body, compiled: dict[str, Compiled]) -> None:
        """`compiled` holds the executables of `jobs(name, ...)`."""
        self.key = key
        self._body = body
        self._embed = compiled[f"{name}/embed"].call
        self._kinds = {kind: compiled[f"{name}/{_layer_part(kind)}"].call for kind in body.kinds}
        self._finish = compiled[f"{name}/finish"].call
        self._layers: list[tuple[Callable[..., Any], Leaves, Array]] = []
        self._must_wait = False

    def bind(self, state: DeviceState) -> None:
        """Splits the weights by layer, once.

        From 32 launches that wait for one another on, a device of a CPU takes none, and keeps the
        thread that the other devices need: there each layer is awaited.
        """
        tree = self._body.tree
        self._must_wait = len(state.hidden.devices()) > 1 and is_on_cpu(state.hidden)
        self._layers = [
            (
                self._kinds[kind],
                tree.layer_leaves(state.leaves, index),
                place(np.array(index, np.int32), state.last_tokens.sharding),
            )
            for index, kind in enumerate(self._body.kinds)
        ]

    def run(self, state: DeviceState, batch: Batch) -> None:
        """See `PrefillExecutable.run`."""
        buffer = place(pad(batch, self._body.layout), state.last_tokens.sharding)
        rows, rotary, ids = self._embed(state.leaves, state.last_tokens, buffer)
        norms = self._body.tree.leaf(state.leaves, "norms")
        for layer, leaves, index in self._layers:
            rows, state.pools = layer(leaves, norms, rows, state.pools, index, rotary, ids, buffer)
            if self._must_wait:
                rows.block_until_ready()
        state.hidden = self._finish(state.leaves, state.hidden, rows)

    @staticmethod
    def jobs(name: str, body: Body, state: StateShapes) -> tuple[CompileJob, ...]:
        """What must be compiled."""
        config, tokens = body.tree.config, body.layout.key.num_tokens
        buffer = jax.ShapeDtypeStruct((body.layout.num_words,), np.int32)
        rows = jax.ShapeDtypeStruct((tokens, row_size(config)), np.float32)
        tables = (rotary_tables(config), tokens, config.rotary_dim // 2)
        rotary = jax.ShapeDtypeStruct(tables, np.float32)
        index = jax.ShapeDtypeStruct((), np.int32)
        norms = body.tree.leaf(state.leaves, "norms")
        ids = jax.ShapeDtypeStruct((tokens,), np.int32)
        layer = (norms, rows, state.pools, index, rotary, ids, buffer)
        firsts = {kind: body.kinds.index(kind) for kind in body.kinds}
        layer_specs = (EVERYWHERE, specs_of(state.pools))
        steps: list[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...], Any]] = [
            ("embed", _Embed(body), (state.leaves, state.last_tokens, buffer), (), EVERYWHERE),
            *(
                (
                    _layer_part(kind),
                    _Layer(body, kind),
                    (body.tree.layer_leaves(state.leaves, first), *layer),
                    (2, 3),
                    layer_specs,
                )
                for kind, first in firsts.items()
            ),
            ("finish", _Finish(body), (state.leaves, state.hidden, rows), (1,), EVERYWHERE),
        ]
        return tuple(
            CompileJob(
                name=f"{name}/{part}",
                function=function,
                arguments=arguments,
                donated=donated,
                cost=tokens,
                out_specs=specs,
                products=body.products if isinstance(function, _Layer) else None,
            )
            for part, function, arguments, donated, specs in steps
        )


def _layer_part(kind: LayerKind) -> str:
    window = "" if kind.spec.window is None else f" with window {kind.spec.window}"
    return f"layer{window}" + (f" of form {kind.form}" if kind.form else "")


class _Step:
    def __init__(self, body: Body) -> None:
        self.body = body


class _Embed(_Step):
    def __call__(
        self, leaves: Leaves, last_tokens: Int32[Array, " C"], buffer: Int32[Array, " words"]
    ) -> tuple[Float[Array, "T row"], Float[Array, "tables T half"], Int32[Array, " T"]]:
        model, inputs = self.body.tree.bind(leaves), unpack(buffer, self.body.layout)
        ids = resolve_ids(inputs.ids, last_tokens)
        return model.embed(ids), model.rotary(inputs.positions), ids


class _Layer(_Step):
    def __init__(self, body: Body, kind: LayerKind) -> None:
        super().__init__(body)
        self.kind = kind

    def __call__(
        self,
        leaves: Leaves,
        norms: Float[Array, "norms E"],
        rows: Float[Array, "T row"],
        pools: Pools,
        index: Int32[Array, ""],
        rotary: Float[Array, "tables T half"],
        ids: Int32[Array, " T"],
        buffer: Int32[Array, " words"],
    ) -> tuple[Float[Array, "T row"], Pools]:
        count = self.body.tree.config.norms_per_layer
        own = jax.lax.dynamic_slice_in_dim(norms, count * index, count)
        inputs = self.body.layer_inputs(rotary, unpack(buffer, self.body.layout), ids)
        return self.body.layer(self.kind, leaves, own, rows, pools, index, inputs)


class _Finish(_Step):
    def __call__(
        self, leaves: Leaves, hidden: Shaped[Array, "tokens E"], rows: Float[Array, "T row"]
    ) -> Shaped[Array, "tokens E"]:
        return write_hidden(hidden, self.body.tree.bind(leaves).final_norm(rows))
