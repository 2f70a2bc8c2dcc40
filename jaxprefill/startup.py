"""Start-up: weights are read while every executable compiles; then warm calls; then ready."""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from jaxprefill.assembly import Assembly
from jaxprefill.compat import no_compilation_cache, use_compilation_cache
from jaxprefill.core import EngineCore
from jaxprefill.fingerprint import engine_facts
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.kernels.self_check import (
    check_attention,
    check_choice,
    check_experts,
    check_latent_attention,
    check_products,
)
from jaxprefill.models.decoder import attention_specs
from jaxprefill.models.deepseek_v4.layer import choose_core
from jaxprefill.models.quantized import kind_of
from jaxprefill.models.tree import Leaves
from jaxprefill.plan import EnginePlan
from jaxprefill.prefill.compiler import (
    AUTOTUNE,
    CPU_OPTIONS,
    GPU_OPTIONS,
    CompilationCounter,
    Compiled,
    CompileJob,
    ExecutableRecord,
    compile_all,
)
from jaxprefill.prefill.fused import uses_fused_layers
from jaxprefill.prefill.library import Library, open_library
from jaxprefill.prefill.program import OperandsLostError
from jaxprefill.prefill.transport import Transport
from jaxprefill.processes import check_agreement
from jaxprefill.threads import thread_pool
from jaxprefill.warming import warm_up
from jaxprefill.weights.checkpoint import Checkpoint
from jaxprefill.weights.load import check_names, check_shapes, load_leaves

OnCompiled = Callable[[ExecutableRecord, int], None]
_CHECK, _RUN = "kernel_check", "warm_calls"


@dataclass
class Started:
    """A running engine core and what its start-up found.

    Attributes:
        faults: what was wrong with stores, for people.
        num_lowered, num_compiled: by the whole process while this engine started.
    """

    core: EngineCore
    records: list[ExecutableRecord] = field(default_factory=list[ExecutableRecord])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    programs: dict[str, Compiled] = field(default_factory=dict[str, Compiled])
    faults: list[str] = field(default_factory=list[str])
    num_lowered: int = 0
    num_compiled: int = 0

    def stats(self) -> dict[str, Any]:
        """What `Engine.stats` tells of the start, ready for JSON.

        Each record has what its graph takes where that is known.
        """
        graphs = self.core.graph_bytes
        return {
            "startup_s": self.seconds,
            "lowered_at_start": self.num_lowered,
            "compiled_at_start": self.num_compiled,
            "faults": self.faults,
            "compiled": [
                record.as_dict() | {"graph_bytes": graphs.get(record.name)}
                for record in self.records
            ],
        }

    def describe_executables(self) -> str:
        """How many were loaded, how many compiled, in how many seconds, and what was wrong."""
        num_loaded = sum(record.load_s is not None for record in self.records)
        counts = {"loaded": num_loaded, "compiled": len(self.records) - num_loaded}
        told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        faults = "".join(f"; {fault}" for fault in self.faults)
        return f"executables: {told} in {self.seconds['compile']:.1f} s{faults}"


def start(
    checkpoint: Checkpoint,
    plan: EnginePlan,
    *,
    on_compiled: OnCompiled,
    group: Transport | None = None,
) -> Started:
    """Builds everything `plan` lists.

    Args:
        checkpoint: where the weights come from.
        plan: all sizes.
        on_compiled: called after each executable, with its record and the number of all.
        group: leads to the engines that are to run the same steps; waits for all of them.

    Raises:
        ConfigError: processes, or the engines of a group, do not agree; no folder `executables`.
        CompileError: an executable could not be compiled.
        CheckpointError: the weights do not fit the architecture.
        KernelError: a kernel computes wrong numbers on this device.
    """
    began, counter = time.perf_counter(), CompilationCounter()
    check_agreement(_identity(plan))
    assembly = prepare(checkpoint, plan)
    facts = engine_facts(plan, num_valid=assembly.num_valid)
    library = _open_library(plan, facts)
    with thread_pool(1, "weights") as loader:
        loading = loader.submit(load_leaves, checkpoint, assembly.tree)
        compiled = obtain(assembly, library, assembly.jobs(), on_compiled=on_compiled)
        compiled_at = time.perf_counter()
        leaves = loading.result()
    loaded_at = time.perf_counter()
    core = _warmed(assembly, leaves, compiled, library)
    core.group = None if group is None else assembly.group_vote(group)
    core.mark_ready()
    seconds = {
        "compile": compiled_at - began,
        "weights_after_compile": loaded_at - compiled_at,
        "warm_up": time.perf_counter() - loaded_at,
        "total": time.perf_counter() - began,
    }
    return Started(
        core,
        [library.recompiled.get(one.record.name, one.record) for one in compiled.values()],
        seconds,
        compiled,
        library.faults,
        num_lowered=counter.lowered,
        num_compiled=counter.count,
    )


def prepare(checkpoint: Checkpoint, plan: EnginePlan) -> Assembly:
    """What knows the engine's executables; reads shapes, no weights.

    Raises:
        CheckpointError: the weights will not fit the architecture.
    """
    check_names(checkpoint)  # at once, as shapes below: reading ends after the compilations
    if plan.config.compile_cache != "off":
        use_compilation_cache(plan.config.compile_cache)
    assembly = Assembly.of(plan, num_valid=checkpoint.tokenizer.vocab_size)
    check_shapes(checkpoint, assembly.tree)
    return assembly


def obtain(
    assembly: Assembly, library: Library, jobs: list[CompileJob], *, on_compiled: OnCompiled
) -> dict[str, Compiled]:
    """Every job's executable, loaded or compiled, the kernels checked meanwhile.

    Raises:
        CompileError: an executable could not be compiled.
        KernelError: a kernel computes wrong numbers on this device.
    """
    plan = assembly.plan
    options, check = CPU_OPTIONS, None
    if plan.device.platform == "gpu":
        if not library.has_passed(_CHECK):
            check = partial(check_kernels, plan)
        folder = library.autotune_folder()
        options = GPU_OPTIONS if folder is None else GPU_OPTIONS | {AUTOTUNE: str(folder)}
    # One mechanism: what is kept in a store goes past JAX's own cache, unless that was asked for.
    is_kept = library.target is not None and plan.config.compile_cache == "off"
    with no_compilation_cache(is_off=is_kept):
        compiled = compile_all(
            jobs,
            options=options,
            num_threads=os.cpu_count() or 1,
            on_done=lambda record: on_compiled(record, len(jobs)),
            keeper=library,
            check=check,
        )
    if check is not None:
        library.note_passed(_CHECK)
    library.tell_missing([entry.record for entry in compiled.values()])
    library.prune()
    return compiled


def _open_library(plan: EnginePlan, facts: dict[str, Any]) -> Library:
    config = plan.config
    if jax.process_count() > 1:
        # Each would load or compile for itself, and their collectives must match.
        library = Library(facts, config.model)
        if config.executables is not None:
            library.report("executables are not loaded where several processes run one engine")
        return library
    return open_library(
        facts,
        label=config.model,
        folder=config.executables,
        has_store=config.store,
        is_trusted=config.trust_executables,
    )


def check_kernels(plan: EnginePlan) -> None:
    """Compares the kernels that this plan uses with plain JAX.

    Raises:
        KernelError: one of them computes wrong numbers on this device.
    """
    model = plan.share
    heads = (model.num_q_heads, model.num_kv_heads, model.head_dim)
    kernels = [backend for backend in plan.attention.backends if backend is not XLA]
    for backend, spec in itertools.product(kernels, attention_specs(model)):
        check_attention(
            backend,
            heads=heads,
            page_size=plan.config.page_size,
            dtype=plan.dtype,
            spec=spec,
        )
    if uses_fused_layers(model, plan.backend, platform=plan.device.platform, dtype=plan.dtype.name):
        kind = model.quantization  # beside float8 there is int8
        for own in {kind and kind_of(matrix, kind) for matrix in ("qkv", "gate_up")}:
            check_products(plan.dtype, quantization=own)
    if model.kernels == "pallas_triton":
        check_experts(plan.dtype)
        if model.latent is not None and choose_core(model) == "pallas_triton":
            check_choice(plan.dtype)
            check_latent_attention(plan.dtype, num_heads=model.num_q_heads, dim=model.head_dim)


def _identity(plan: EnginePlan) -> str:
    """What decides every step of every process; folders may differ from machine to machine."""
    config = replace(plan.config, model="", compile_cache="", executables=None, store=False)
    parts = (plan.dtype.name, str(plan.attention), plan.device.kind, f"jax {jax.__version__}")
    return f"{plan.num_pages} pages, {', '.join(parts)}, {plan.model}, {config}"


def _warmed(
    assembly: Assembly, leaves: Leaves, compiled: dict[str, Compiled], library: Library
) -> EngineCore:
    """A core whose executables have run; a loaded one that does not is compiled meanwhile.

    Warm calls of a CPU show just that what was loaded runs: once these very bytes have, they are
    left out.
    """
    is_all_loaded = library.loaded.keys() == compiled.keys()
    is_proof = is_all_loaded and assembly.plan.device.platform == "cpu"
    stacked: Leaves = ()
    while True:
        state = assembly.allocate(leaves, compiled, stacked)
        leaves, stacked = state.leaves, state.stacked
        core = assembly.assemble(state, compiled)
        if is_proof and library.has_passed(_RUN, loaded=library.loaded):
            return core
        try:
            warm_up(core, assembly.plan)
        except OperandsLostError:
            state.delete(has_weights=False)  # before they are made anew
        else:
            if is_proof and not library.recompiled:
                library.note_passed(_RUN, loaded=library.loaded)
            return core
