"""Start-up: weights are read while every executable compiles; then warm calls; then ready."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import jax

from jaxprefill.assembly import Assembly
from jaxprefill.compat import use_compilation_cache
from jaxprefill.core import EngineCore
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.kernels.self_check import check_attention, check_products
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.plan import EnginePlan
from jaxprefill.prefill.compiler import (
    CPU_OPTIONS,
    GPU_OPTIONS,
    Compiled,
    ExecutableRecord,
    compile_all,
)
from jaxprefill.prefill.fused import uses_fused_layers
from jaxprefill.processes import check_agreement
from jaxprefill.weights.checkpoint import Checkpoint
from jaxprefill.weights.load import check_names, check_shapes, load_leaves

OnCompiled = Callable[[ExecutableRecord, int], None]


@dataclass
class Started:
    """A running engine core and what its start-up found."""

    core: EngineCore
    records: list[ExecutableRecord] = field(default_factory=list[ExecutableRecord])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    programs: dict[str, Compiled] = field(default_factory=dict[str, Compiled])


def start(checkpoint: Checkpoint, plan: EnginePlan, *, on_compiled: OnCompiled) -> Started:
    """Builds everything `plan` lists.

    Args:
        checkpoint: where the weights come from.
        plan: all sizes.
        on_compiled: called after each executable, with its record and the number of all.

    Raises:
        ConfigError: processes that run one engine do not agree on it.
        CompileError: an executable could not be compiled.
        CheckpointError: the weights do not fit the architecture.
        KernelError: a kernel computes wrong numbers on this device.
    """
    began = time.perf_counter()
    check_agreement(_identity(plan))
    check_names(checkpoint)  # at once, as shapes below: reading ends after the compilations
    if plan.config.compile_cache != "off":
        use_compilation_cache(plan.config.compile_cache)
    if plan.device.platform == "gpu":
        check_kernels(plan)
    mesh = make_mesh(plan.config.tensor_parallel_size)
    tree = model_tree(plan.model, plan.dtype, mesh)
    check_shapes(checkpoint, tree)
    assembly = Assembly(plan, tree, mesh, num_valid=checkpoint.tokenizer.vocab_size)
    jobs = assembly.jobs()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights") as loader:
        loading = loader.submit(load_leaves, checkpoint, tree)
        compiled = compile_all(
            jobs,
            options=CPU_OPTIONS if plan.device.platform == "cpu" else GPU_OPTIONS,
            num_threads=os.cpu_count() or 1,
            on_done=lambda record: on_compiled(record, len(jobs)),
        )
        compiled_at = time.perf_counter()
        state = assembly.allocate(loading.result())
    core = assembly.assemble(state, compiled)
    loaded_at = time.perf_counter()
    warm_up(core, plan)
    core.mark_ready()
    seconds = {
        "compile": compiled_at - began,
        "weights_after_compile": loaded_at - compiled_at,
        "warm_up": time.perf_counter() - loaded_at,
        "total": time.perf_counter() - began,
    }
    return Started(core, [entry.record for entry in compiled.values()], seconds, compiled)


def check_kernels(plan: EnginePlan) -> None:
    """Compares the kernels that this plan uses with plain JAX.

    Raises:
        KernelError: one of them computes wrong numbers on this device.
    """
    model = plan.model
    heads = (model.num_q_heads, model.num_kv_heads, model.head_dim)
    if plan.backend is not XLA:
        check_attention(
            plan.backend, heads=heads, page_size=plan.config.page_size, dtype=plan.dtype
        )
    if uses_fused_layers(model, plan.backend, platform=plan.device.platform, dtype=plan.dtype.name):
        check_products(plan.dtype)


def _identity(plan: EnginePlan) -> str:
    """What decides every step of every process; folders may differ from machine to machine."""
    config = replace(plan.config, model="", compile_cache="")
    parts = (plan.dtype.name, plan.backend.name, plan.device.kind, f"jax {jax.__version__}")
    return f"{plan.num_pages} pages, {', '.join(parts)}, {plan.model}, {config}"


def warm_up(core: EngineCore, plan: EnginePlan) -> None:
    """Runs executables on empty batches.

    On a GPU each three times: the first call may run op by op, and the graph is recorded on the
    next. On a CPU the small ones once, to show faults.
    """
    is_cpu = plan.device.platform == "cpu"
    for _ in range(1 if is_cpu else 3):
        core.prefill.warm(core.state, max_tokens=64 if is_cpu else None)
        core.decode.warm(core.state)
        core.heads.warm(core.state)
    jax.block_until_ready(core.state.hidden)
