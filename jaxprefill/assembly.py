"""Turns a plan into compile jobs, and compiled jobs into device state and runners."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Shaped

from jaxprefill.cache.kv_cache import pool_shapes
from jaxprefill.cache.small_blocks import reserve_small_blocks
from jaxprefill.core import EngineCore
from jaxprefill.counters import EngineCounters
from jaxprefill.decode.runner import DecodeRunner
from jaxprefill.device_state import DeviceState, StateShapes
from jaxprefill.kernels.attention import pool_dtype
from jaxprefill.models.sharding import make_mesh, place, replicated, specs_of
from jaxprefill.models.stacks import (
    can_view,
    largest_stack_bytes,
    layer_parts,
    stack_leaves,
    stacked_shapes,
    weight_bytes,
)
from jaxprefill.models.tree import Leaves, ModelTree, model_tree
from jaxprefill.plan import EnginePlan
from jaxprefill.prefill.buckets import BucketLadder, ShapeKey
from jaxprefill.prefill.compiler import Compiled, CompileJob
from jaxprefill.prefill.executable import LayerwiseExecutable, PrefillExecutable
from jaxprefill.prefill.forward import Body
from jaxprefill.prefill.fused import make_body, uses_fused_layers
from jaxprefill.prefill.policy import PrefillPolicy
from jaxprefill.prefill.runner import Executable, PrefillRunner
from jaxprefill.prefill.staging import MARK, Staging, mark_job, pinned_sharding
from jaxprefill.prefill.transport import Transport
from jaxprefill.prefill.vote import GroupVote
from jaxprefill.sampling.head import HeadFunctions, head_jobs
from jaxprefill.sampling.pooling import PoolingRunner, pooling_jobs
from jaxprefill.sampling.runner import HeadRunner
from jaxprefill.sampling.vocabulary import VocabularySplit
from jaxprefill.step import Heads

_ZEROS = "zeros"


class Assembly:
    """Turns a plan into jobs, and compiled jobs into runners."""

    def __init__(self, plan: EnginePlan, tree: ModelTree, mesh: Mesh, *, num_valid: int) -> None:
        """`num_valid` ids may be sampled: those the tokenizer knows."""
        self.plan = plan
        self.tree = tree
        self.mesh = mesh
        self.num_valid = min(num_valid, plan.model.vocab_size)
        self._has_stacks = self._can_stack()
        self.shapes = self._state_shapes()

    @classmethod
    def of(cls, plan: EnginePlan, *, num_valid: int) -> "Assembly":
        """Over the devices and with the kernels that the plan names."""
        mesh = make_mesh(plan.config.tensor_parallel_size)
        tree = model_tree(plan.model, plan.dtype, mesh, kernels=plan.share.kernels)
        return cls(plan, tree, mesh, num_valid=num_valid)

    def jobs(self) -> list[CompileJob]:
        """Every executable the engine will ever run."""
        plan, jobs = self.plan, self._prefill_jobs(self.plan.ladder)
        jobs += self._layerwise_jobs("eager", plan.eager_ladder)
        for slots in plan.decode_slots:
            key = plan.decode_key(slots)
            jobs.append(self._job(f"decode {key}", self._whole(key, is_decode=True)))
        if plan.model.has_lm_head:
            split = VocabularySplit(plan.model.vocab_size, self.mesh.size)
            jobs += head_jobs(
                HeadFunctions(self.num_valid, split, plan.model.logit_soft_cap),
                self.shapes,
                sample_rows=plan.sample_rows,
                score_rows=plan.score_rows,
                is_pinned=self._is_staged and self.mesh.size == 1,
            )
        jobs += [self._zeros_job(), *self._stack_jobs()]
        jobs += pooling_jobs(self.shapes, kind=plan.model.pooling.kind, num_rows=plan.pool_rows)
        return [job.over(self.mesh) for job in jobs]

    def prefill_jobs(self, ladder: BucketLadder) -> list[CompileJob]:
        """The executables of any ladder within the plan's sizes, and what running them needs."""
        return [job.over(self.mesh) for job in self._prefill_jobs(ladder)]

    def prefill_executables(
        self, ladder: BucketLadder, state: DeviceState, compiled: dict[str, Compiled]
    ) -> dict[ShapeKey, Executable]:
        """Runs `prefill_jobs` once they are compiled; none with the eager backend."""
        match self.plan.path:
            case "full":
                return {
                    key: self._executable("prefill", key, state, compiled) for key in ladder.keys
                }
            case "layerwise":
                return {**self._layerwise("layerwise", ladder, state, compiled)}
            case "eager":
                return {}

    def allocate(
        self,
        leaves: Leaves,
        compiled: dict[str, Compiled] | None = None,
        stacked: Leaves = (),
    ) -> DeviceState:
        """The device's arrays: weights, the rest zero, by executables of `jobs`.

        `leaves` are as loaded, and become the state's own; or an earlier state's, with `stacked`.
        """
        if self._has_stacks and not stacked:
            leaves, stacked = stack_leaves(
                self.tree,
                leaves,
                lambda name: _stack if compiled is None else compiled[f"stack {name}"].call,
            )
        job = self._zeros_job().over(self.mesh)
        zeros = jax.jit(job.function) if compiled is None else compiled[job.name].call
        pools, hidden, last_tokens, history, bias = zeros()
        return DeviceState(
            leaves=leaves,
            head=self.tree.head(leaves),
            pools=pools,
            hidden=hidden,
            last_tokens=last_tokens,
            history=history,
            bias=bias,
            classifier=self.tree.classifier(leaves),
            stacked=stacked,
            small_blocks=reserve_small_blocks(replicated(self.mesh)) if self._is_staged else (),
        )

    def assemble(self, state: DeviceState, compiled: dict[str, Compiled]) -> EngineCore:
        """Runners over compiled jobs."""
        plan, counters = self.plan, EngineCounters()
        heads = HeadRunner(
            compiled,
            sample_rows=plan.sample_rows,
            score_rows=plan.score_rows,
            num_valid=self.num_valid,
            put=lambda array: place(array, replicated(self.mesh)),
        )
        heads.prepare(state)
        decode = {
            slots: self._executable("decode", plan.decode_key(slots), state, compiled)
            for slots in plan.decode_slots
        }
        return EngineCore(
            state=state,
            plan=plan,
            prefill=self._prefill_runner(state, compiled, counters),
            decode=DecodeRunner(decode, counters),
            heads=Heads(heads, PoolingRunner(compiled, num_rows=plan.pool_rows)),
            counters=counters,
        )

    def group_vote(self, transport: Transport) -> GroupVote:
        """The vote of the ranks that `transport` leads to; waits for all of them.

        Raises:
            ConfigError: they were given another model or other options.
            EngineUnavailable: one of them does not come.
        """
        plan = self.plan
        shapes = f"{plan.path} {plan.eager_ladder} {plan.decode_slots} {plan.config.strict_prefill}"
        made = f"{plan.dtype.name} {plan.attention} pages of {plan.config.page_size} {plan.model}"
        return GroupVote(transport, self._policy, alike=f"{shapes} {made}")

    @property
    def _policy(self) -> PrefillPolicy:
        return PrefillPolicy(
            ladder=self.plan.ladder,
            is_enabled=self.plan.path != "eager",
            max_padding_factor=self.plan.config.max_padding_factor,
        )

    def _prefill_runner(
        self, state: DeviceState, compiled: dict[str, Compiled], counters: EngineCounters
    ) -> PrefillRunner:
        plan = self.plan
        return PrefillRunner(
            policy=self._policy,
            executables=self.prefill_executables(plan.ladder, state, compiled),
            path=plan.path,
            fallback_ladder=plan.eager_ladder,
            fallback=self._layerwise("eager", plan.eager_ladder, state, compiled),
            is_strict=plan.config.strict_prefill,
            counters=counters,
        )

    def _prefill_jobs(self, ladder: BucketLadder) -> list[CompileJob]:
        jobs = [mark_job(self.shapes.hidden)] if self._is_staged else []
        if self.plan.path == "full":
            jobs += [self._job(f"prefill {key}", self._whole(key)) for key in ladder.keys]
        if self.plan.path == "layerwise":
            jobs += self._layerwise_jobs("layerwise", ladder)
        return jobs

    def _zeros_job(self) -> CompileJob:
        """What makes the arrays of a `DeviceState`; plain jax would compile one for each shape."""
        shapes = self.shapes
        whole = (shapes.hidden, shapes.last_tokens, shapes.history, shapes.bias)
        own = (tuple(map(_shard, shapes.pools)), *map(_shard, whole))

        def zeros() -> Any:
            return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), own)

        specs = (specs_of(shapes.pools), *specs_of(whole))
        return CompileJob(
            name=_ZEROS,
            function=zeros,
            arguments=(),
            is_graph=False,
            out_specs=specs,
            sizes=str(own),
        )

    def _can_stack(self) -> bool:
        """Whether passes shall take stacked weights: views can be had, and there is room."""
        plan = self.plan
        dtype, platform = plan.dtype.name, plan.device.platform
        if not uses_fused_layers(plan.share, plan.backend, platform=platform, dtype=dtype):
            return False
        budget = plan.device.memory_bytes * plan.config.memory_fraction
        is_small = weight_bytes(self.tree) + largest_stack_bytes(self.tree) <= budget
        return is_small and can_view(self.tree, self.mesh.devices.flat[0])

    def _stack_jobs(self) -> list[CompileJob]:
        """What makes the stacks of the layers' weights, one parameter after another."""
        if not self._has_stacks:
            return []
        return [
            CompileJob(
                name=f"stack {name}",
                function=_stack,
                arguments=tuple(self.tree.shapes[index] for index in own),
                is_graph=False,
            )
            for name, own in layer_parts(self.tree).items()
        ]

    def _job(self, name: str, body: Body) -> CompileJob:
        return PrefillExecutable.job(name, body, self.shapes, self._pinned())

    @property
    def _is_staged(self) -> bool:
        """A CPU reads the host's memory as it is."""
        return self.plan.device.platform == "gpu"

    def _pinned(self) -> NamedSharding | None:
        return pinned_sharding(replicated(self.mesh)) if self._is_staged else None

    def _executable(
        self, path: str, key: ShapeKey, state: DeviceState, compiled: dict[str, Compiled]
    ) -> PrefillExecutable:
        body, staging = self._whole(key, is_decode=path == "decode"), None
        if self._is_staged:
            staging = Staging(body.layout, compiled[MARK], replicated(self.mesh))
        executable = PrefillExecutable(body, compiled[f"{path} {key}"], staging)
        executable.bind(state)
        return executable

    def _layerwise_jobs(self, path: str, ladder: BucketLadder) -> list[CompileJob]:
        return [
            job
            for key in ladder.keys
            for job in LayerwiseExecutable.jobs(f"{path} {key}", self._body(key), self.shapes)
        ]

    def _layerwise(
        self, path: str, ladder: BucketLadder, state: DeviceState, compiled: dict[str, Compiled]
    ) -> dict[ShapeKey, LayerwiseExecutable]:
        found: dict[ShapeKey, LayerwiseExecutable] = {}
        for key in ladder.keys:
            found[key] = LayerwiseExecutable(f"{path} {key}", key, self._body(key), compiled)
            found[key].bind(state)
        return found

    def _whole(self, key: ShapeKey, *, is_decode: bool = False) -> Body:
        """The pass as one executable."""
        layout = self.plan.layout(key, is_decode=is_decode)
        platform = self.plan.device.platform
        return make_body(
            self.tree,
            self.plan.attention.at(key.num_tokens, is_decode=is_decode),
            layout,
            platform=platform,
            has_stacks=self._has_stacks,
        )

    def _body(self, key: ShapeKey) -> Body:
        """The pass that is run layer by layer."""
        is_cpu = self.plan.device.platform == "cpu"
        backend = self.plan.attention.at(key.num_tokens, is_decode=False)
        return Body(self.tree, backend, self.plan.layout(key), is_looped=is_cpu)

    def _state_shapes(self) -> StateShapes:
        plan, everywhere = self.plan, replicated(self.mesh)

        def shape(*size: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(size, dtype, sharding=everywhere)

        vocab, rows = plan.model.vocab_size if plan.model.has_lm_head else 1, plan.max_running
        page_size, dtype = plan.config.page_size, plan.dtype
        pool = pool_dtype(dtype, plan.device.platform)
        return StateShapes(
            leaves=self.tree.shapes,
            head=self.tree.head(self.tree.shapes),
            pools=pool_shapes(
                plan.cache_spec,
                plan.num_pages,
                page_size,
                num_recent=plan.num_recent,
                dtype=pool,
                mesh=self.mesh,
            ),
            hidden=shape(plan.hidden_rows, plan.model.hidden_size, dtype=dtype),
            last_tokens=shape(rows),
            history=shape(rows, vocab),
            bias=shape(rows, vocab, dtype=np.float32),
            classifier=self.tree.classifier(self.tree.shapes),
            stacked=stacked_shapes(self.tree) if self._has_stacks else (),
        )


def _stack(*layers: Shaped[Array, "..."]) -> Shaped[Array, "layers ..."]:
    return jnp.stack(layers)


def _shard(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """One device's part of an array."""
    sharding = shape.sharding
    size = shape.shape if sharding is None else sharding.shard_shape(shape.shape)
    return jax.ShapeDtypeStruct(size, shape.dtype)
