"""Lower and compile many shapes in threads, or load what was kept, with a record of each.

The only module that compiles; after start-up nothing does, and `CompilationCounter` proves it.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.monitoring
from jax.sharding import Mesh

from jaxprefill.compat import read_arguments
from jaxprefill.errors import CompileError
from jaxprefill.models.sharding import EVERYWHERE, per_device, spec_of
from jaxprefill.prefill.program import Launch, LoadedProgram, Outputs, launch
from jaxprefill.threads import thread_pool

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

# Names a folder, in which XLA keeps which kernels were fastest; no program depends on its name.
AUTOTUNE = "xla_gpu_per_fusion_autotune_cache_dir"


@dataclass(frozen=True, kw_only=True)
class ExecutableRecord:
    """What is known of a compiled executable. Sizes as XLA's memory analysis gives them.

    Attributes:
        lower_s, compile_s: what they took, in whichever process did it.
        load_s: what loading it took instead; None: this process compiled it.
    """

    name: str
    lower_s: float
    compile_s: float
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    code_bytes: int
    load_s: float | None = None

    @property
    def seconds(self) -> float:
        """What it took in this process."""
        return self.lower_s + self.compile_s if self.load_s is None else self.load_s

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
        mesh: the devices that run it; None: the first.
        sizes: what the function closes over that neither its name nor its arguments tell.
        products: names those of its matrix products that XLA tunes; jobs of one name may have some
            in common.
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
    mesh: Mesh | None = None
    sizes: str = ""
    products: str | None = None

    @property
    def module_name(self) -> str:
        """What XLA calls it, in dumps and profiles."""
        return re.sub(r"\W+", "_", self.name)

    def over(self, mesh: Mesh) -> "CompileJob":
        """The job as each device of `mesh` runs it, on its own shards."""
        function, arguments = per_device(self.function, self.arguments, self.out_specs, mesh)
        return replace(self, function=function, arguments=arguments, mesh=mesh)

    def facts(self, options: CompilerOptions) -> dict[str, Any]:
        """What decides its program beside what all of an engine have in common. Ready for JSON."""
        leaves, structure = jax.tree.flatten(self.arguments)
        own = {name: value for name, value in self.options(options).items() if name != AUTOTUNE}
        return {
            "module": self.module_name,
            "sizes": self.sizes,
            "arguments": list(map(_described, leaves)),
            "structure": str(structure),
            "donated": list(self.donated),
            "pinned": list(self.pinned),
            "read_back": list(self.read_back),
            "out_specs": str(self.out_specs),
            "options": own,
        }

    def options(self, options: CompilerOptions) -> CompilerOptions:
        """The engine's compiler options, and its own."""
        return options if self.is_graph else options | NO_GRAPH


@dataclass(frozen=True)
class Compiled:
    """An executable and its record.

    Attributes:
        call: takes the job's arguments.
        read: positions of the flattened arguments that XLA's program takes; jit drops the others.
        outputs: shapes of its results, nested as they are.
        is_own: XLA compiled it in this process; one from JAX's cache cannot be written down again
            (on a CPU it would load, and miss functions when it runs).
        texts: of the program, by stage, where they were asked for.
    """

    call: jax.stages.Compiled | LoadedProgram
    record: ExecutableRecord
    read: tuple[int, ...]
    outputs: Outputs
    is_own: bool = False
    texts: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def launch(self) -> Launch:
        """Runs it on the flattened operands that the program takes, past jit's handling."""
        if isinstance(self.call, LoadedProgram):
            return self.call.launch
        executable = self.call.runtime_executable()
        assert executable is not None, "a compiled program has one"
        return partial(launch, executable)

    @property
    def hlo(self) -> str:
        """The program after XLA's optimisation."""
        return self.call.as_text() or ""


@runtime_checkable
class Keeper(Protocol):
    """Where executables come from and go to, so that a start need not compile them again."""

    has_texts: bool

    def load(self, job: CompileJob, options: CompilerOptions) -> Compiled | None:
        """The job's executable as it was kept; None: it was not, or is of no use."""
        ...

    def keep(self, job: CompileJob, options: CompilerOptions, compiled: Compiled) -> None:
        """Keeps it, where that can be done."""
        ...


class NoKeeper:
    """Keeps nothing."""

    has_texts = False

    def load(self, job: CompileJob, options: CompilerOptions) -> Compiled | None:
        """Nothing is kept."""

    def keep(self, job: CompileJob, options: CompilerOptions, compiled: Compiled) -> None:
        """Does nothing."""


def compile_job(job: CompileJob, options: CompilerOptions, *, has_texts: bool = False) -> Compiled:
    """Lowers and compiles one job. A donated argument must be read, or jit drops it.

    (`keep_unused` would keep it, and from jax 0.11 on the executable too, for the process's life.)

    Raises:
        CompileError: carries the job's name and XLA's message.
    """
    counter = CompilationCounter()
    try:
        started = time.perf_counter()
        jitted = jax.jit(_named(job), donate_argnums=job.donated)
        traced = jitted.trace(*job.arguments)
        lowered = traced.lower()
        lowered_at = time.perf_counter()
        compiled = lowered.compile(compiler_options=job.options(options))
        done = time.perf_counter()
    except Exception as error:  # XLA's and Pallas', of whatever kind
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
    found = Compiled(
        compiled, record, read_arguments(traced.jaxpr), traced.out_info, not counter.cached
    )
    if not has_texts:
        return found
    return replace(found, texts={"stablehlo": lowered.as_text(), "hlo": found.hlo})


def _obtain(job: CompileJob, options: CompilerOptions, keeper: Keeper) -> Compiled:
    """Loads the job's executable, or else compiles and keeps it."""
    loaded = keeper.load(job, options)
    if loaded is not None:
        return loaded
    compiled = compile_job(job, options, has_texts=keeper.has_texts)
    keeper.keep(job, options, compiled)
    return replace(compiled, texts={})


def _described(shape: jax.ShapeDtypeStruct) -> str:
    """Shape, dtype and place of an argument."""
    sharding = shape.sharding
    where = "" if sharding is None else f" {spec_of(shape)} {sharding.memory_kind}"
    return f"{shape.dtype.name}{list(shape.shape)}{where}"


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


NO_KEEPER = NoKeeper()


def compile_all(
    jobs: Sequence[CompileJob],
    *,
    options: CompilerOptions,
    num_threads: int,
    on_done: Callable[[ExecutableRecord], None],
    keeper: Keeper = NO_KEEPER,
    check: Callable[[], None] | None = None,
) -> dict[str, Compiled]:
    """Every job by name; the first failure stops the rest and is raised.

    Those that `keeper` has are loaded instead, in the same threads, and `check` runs beside them.
    Jobs with products in common follow one another: in two threads at once XLA may tune a product
    twice, and choose two kernels for it, of which the next process would find only one.
    """
    tasks: list[Sequence[Callable[[], Compiled | None]]] = [[check]] if check is not None else []
    tasks += [[partial(_obtain, job, options, keeper) for job in own] for own in _chains(jobs)]
    done: dict[str, Compiled] = {}
    found, is_over = SimpleQueue[Compiled | BaseException | None](), threading.Event()
    with thread_pool(num_threads, "compile") as pool:
        try:
            for chain in tasks:
                pool.submit(_follow, chain, found, is_over)
            for _ in range(sum(map(len, tasks))):
                result = found.get()
                if isinstance(result, BaseException):
                    raise result
                if result is not None:
                    done[result.record.name] = result
                    on_done(result.record)
        finally:
            is_over.set()
    return done


def _chains(jobs: Sequence[CompileJob]) -> list[list[CompileJob]]:
    """The jobs that follow one another: the largest first, to show whether memory is enough.

    Then the longest, as they would end last.
    """
    by_products: dict[str, list[CompileJob]] = {}
    for job in sorted(jobs, key=lambda job: -job.cost):
        by_products.setdefault(job.products or job.name, []).append(job)
    first, rest = list(by_products.values())[:1], list(by_products.values())[1:]
    return first + sorted(rest, key=len, reverse=True)


def _follow(
    chain: Sequence[Callable[[], Compiled | None]],
    found: "SimpleQueue[Compiled | BaseException | None]",
    is_over: threading.Event,
) -> None:
    """Runs one task after another, in a thread of the pool."""
    try:
        for task in chain:
            if not is_over.is_set():
                found.put(task())
    except BaseException as error:  # raised where the results are awaited
        found.put(error)


_COMPILED = "/jax/core/compile/backend_compile_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_CACHED = "/jax/compilation_cache/cache_hits"
_own = threading.local()  # jax tells of a hit in the thread that had it


class CompilationCounter:
    """Counts compilations and lowerings of the whole process (jax.monitoring shows no callers)."""

    _lock = threading.Lock()
    _total: ClassVar[Counter[str]] = Counter()
    _is_listening = False

    def __init__(self) -> None:
        """Starts at zero from now on."""
        with CompilationCounter._lock:
            if not CompilationCounter._is_listening:
                jax.monitoring.register_event_duration_secs_listener(self._on_duration)
                jax.monitoring.register_event_listener(self._on_event)
                CompilationCounter._is_listening = True
            self._start = CompilationCounter._total.copy()
            self._start_cached = getattr(_own, "cached", 0)

    @property
    def count(self) -> int:
        """Compilations since this counter was made, persistent-cache hits included."""
        return self._since(_COMPILED)

    @property
    def lowered(self) -> int:
        """Functions lowered since this counter was made."""
        return self._since(_LOWERED)

    @property
    def cached(self) -> int:
        """Executables that this thread took from JAX's own cache since this counter was made."""
        return getattr(_own, "cached", 0) - self._start_cached

    def _since(self, event: str) -> int:
        return CompilationCounter._total[event] - self._start[event]

    @staticmethod
    def _on_event(event: str, **kwargs: str | int) -> None:
        if event == _CACHED:
            _own.cached = getattr(_own, "cached", 0) + 1

    @staticmethod
    def _on_duration(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in (_COMPILED, _LOWERED):
            with CompilationCounter._lock:
                CompilationCounter._total[event] += 1
