"""Lower and compile many shapes in threads, and keep a record of each.

The only module that compiles; after start-up nothing does, and `CompilationCounter` proves it.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.monitoring
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from jaxprefill.errors import CompileError
from jaxprefill.models.sharding import EVERYWHERE, per_device

# Level 1 takes a third off compile time on the CPU at the same speed or better: matrix products
# are library calls either way.
CompilerOptions = dict[str, bool | str]
CPU_OPTIONS: CompilerOptions = {"xla_backend_optimization_level": "1"}
# One graph: every kind of command an executable holds may be captured, however few there are.
GPU_OPTIONS: CompilerOptions = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
    ),
    "xla_gpu_graph_min_graph_size": "1",
}
# For executables with operands or results at a new address each call: a graph would be recorded
# again each time, and a few launches cost less.
NO_GRAPH: CompilerOptions = {"xla_gpu_graph_min_graph_size": "1000000"}


@dataclass(frozen=True, kw_only=True)
class ExecutableRecord:
    """What is known of a compiled executable. Sizes as XLA's memory analysis gives them."""

    name: str
    lower_s: float
    compile_s: float
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    code_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One executable to be. `cost` orders the jobs, largest first.

    Attributes:
        is_graph: on a GPU, captured as one CUDA graph; all its operands and results keep their
            addresses from call to call.
        pinned: arguments that lie in pinned host memory; moved to the device before all else.
        read_back: results that are left in pinned host memory, where the host reads them.
        out_specs: how each output lies on the mesh, where there is more than one device.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    cost: int = 0
    is_graph: bool = True
    pinned: tuple[int, ...] = ()
    read_back: tuple[int, ...] = ()
    out_specs: Any = EVERYWHERE

    @property
    def module_name(self) -> str:
        """What XLA calls it, in dumps and profiles."""
        return re.sub(r"\W+", "_", self.name)

    def over(self, mesh: Mesh) -> "CompileJob":
        """The job as each device of `mesh` runs it, on its own shards."""
        function, arguments = per_device(self.function, self.arguments, self.out_specs, mesh)
        return replace(self, function=function, arguments=arguments)


@dataclass(frozen=True)
class Compiled:
    """An executable and its record.

    Attributes:
        read: positions of the flattened arguments that XLA's program takes; jit drops the others.
    """

    call: jax.stages.Compiled
    record: ExecutableRecord
    read: tuple[int, ...]


def compile_job(job: CompileJob, options: CompilerOptions) -> Compiled:
    """Lowers and compiles one job. A donated argument must be read, or jit drops it.

    (`keep_unused` would keep it, and from jax 0.11 on the executable too, for the process's life.)

    Raises:
        CompileError: carries the job's name and XLA's message.
    """
    try:
        started = time.perf_counter()
        jitted = jax.jit(_named(job), donate_argnums=job.donated)
        traced = jitted.trace(*job.arguments)
        lowered = traced.lower()
        lowered_at = time.perf_counter()
        compiled = lowered.compile(compiler_options=options if job.is_graph else options | NO_GRAPH)
        done = time.perf_counter()
    except Exception as error:
        raise CompileError(
            f"executable {job.name} could not be compiled: {error}; "
            "leave this shape out, or lower chunked_prefill_size or max_running_requests"
        ) from error
    memory = compiled.memory_analysis()
    assert memory is not None, "CPU and GPU backends analyse memory"
    record = ExecutableRecord(
        name=job.name,
        lower_s=lowered_at - started,
        compile_s=done - lowered_at,
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
    )
    return Compiled(compiled, record, _read(traced.jaxpr))


def _read(program: ClosedJaxpr) -> tuple[int, ...]:
    """Positions of the arguments that any equation or result reads."""
    jaxpr = program.jaxpr
    values = [*jaxpr.outvars, *(value for equation in jaxpr.eqns for value in equation.invars)]
    found = {id(value) for value in values}
    return tuple(index for index, value in enumerate(jaxpr.invars) if id(value) in found)


def _named(job: CompileJob) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        moved = {
            index: jax.device_put(arguments[index], jax.memory.Space.Device) for index in job.pinned
        }
        results = job.function(*(moved.get(index, x) for index, x in enumerate(arguments)))
        if not job.read_back:
            return results
        return tuple(
            jax.device_put(x, jax.memory.Space.Host) if index in job.read_back else x
            for index, x in enumerate(results)
        )

    call.__name__ = job.module_name
    return call


def compile_all(
    jobs: Sequence[CompileJob],
    *,
    options: CompilerOptions,
    num_threads: int,
    on_done: Callable[[ExecutableRecord], None],
) -> dict[str, Compiled]:
    """Every job by name, largest first; the first failure stops the rest and is raised."""
    ordered = sorted(jobs, key=lambda job: -job.cost)
    done: dict[str, Compiled] = {}
    pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="compile")
    is_interrupted = False
    try:
        futures = [pool.submit(compile_job, job, options) for job in ordered]
        for future in as_completed(futures):
            compiled = future.result()
            done[compiled.record.name] = compiled
            on_done(compiled.record)
    except KeyboardInterrupt:
        is_interrupted = True  # XLA cannot be stopped; do not wait for it
        raise
    finally:
        pool.shutdown(wait=not is_interrupted, cancel_futures=True)
    return done


class CompilationCounter:
    """Counts backend compilations of the whole process (jax.monitoring has no per-caller view)."""

    _lock = threading.Lock()
    _total = 0
    _is_listening = False

    def __init__(self) -> None:
        """Starts at zero from now on."""
        with CompilationCounter._lock:
            if not CompilationCounter._is_listening:
                jax.monitoring.register_event_duration_secs_listener(self._on_event)
                CompilationCounter._is_listening = True
            self._start = CompilationCounter._total

    @property
    def count(self) -> int:
        """Compilations since this counter was made, persistent-cache hits included."""
        return CompilationCounter._total - self._start

    @staticmethod
    def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with CompilationCounter._lock:
                CompilationCounter._total += 1
