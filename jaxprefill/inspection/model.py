"""A model whose executables are compiled to be looked at; weights are not read."""

import re
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxprefill.assembly import Assembly
from jaxprefill.batch import Batch, BatchRow
from jaxprefill.compat import load_executable
from jaxprefill.config import EngineConfig
from jaxprefill.errors import InspectionError
from jaxprefill.inspection.calls import Calls
from jaxprefill.inspection.records import Chip, Inspected, Missing, Stage
from jaxprefill.inspection.thunks import THUNK_DUMPS
from jaxprefill.kernels.device import DeviceInfo, describe_device, known_rates, measure_rates
from jaxprefill.plan import EnginePlan
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.compiler import (
    CPU_OPTIONS,
    GPU_OPTIONS,
    NO_GRAPH,
    Compiled,
    CompileJob,
    CompilerOptions,
    compile_job,
)
from jaxprefill.prefill.padding import pad
from jaxprefill.tuning.chosen import choose_plan, user_results
from jaxprefill.weights.locate import open_checkpoint

# Without it XLA launches kernel by kernel while a profiler records.
KEEP_GRAPHS = "xla_enable_command_buffers_during_profiling"
_DUMP_PTX = "xla_dump_emitter_re"  # of which emitters' kernels; by default of none


class JobSource:
    """Compiles jobs when they are asked for, each once."""

    def __init__(
        self, jobs: list[CompileJob], chip: Chip, options: CompilerOptions | None = None
    ) -> None:
        """`options` are the compiler's, by default those of an engine on this platform."""
        self.chip = chip
        self.jobs = {job.name: job for job in jobs}
        is_cpu = chip.platform == "cpu"
        self._options = (CPU_OPTIONS if is_cpu else GPU_OPTIONS) if options is None else options
        self._compiled: dict[str, Compiled] = {}
        self._dumped: dict[tuple[str, Stage], str | Missing] = {}

    @property
    def names(self) -> list[str]:
        """Every executable, as the engine orders them."""
        return list(self.jobs)

    def compiled(self, name: str) -> Compiled:
        """The executable, compiled now if it was not yet; never taken from a cache of jax's.

        Raises:
            CompileError: it could not be compiled.
        """
        if name not in self._compiled:
            with _no_cache(), tempfile.TemporaryDirectory(prefix="jaxprefill-dump-") as folder:
                dump: CompilerOptions = {}
                if self.chip.platform != "cpu":  # thunks and PTX can be had from a dump alone
                    dump = {"xla_dump_to": folder, _DUMP_PTX: ".*", KEEP_GRAPHS: True}
                self._compiled[name] = compile_job(self.jobs[name], self._options | dump)
                self._dumped[name, "ptx"] = _dumped(folder, ".ptx")
                self._dumped[name, "thunks"] = _dumped(folder, *THUNK_DUMPS)
        return self._compiled[name]

    def calls(self, name: str) -> Calls:
        """Runs of one executable. On a GPU it keeps its graphs under the profiler, too.

        Raises:
            CompileError: it could not be compiled.
        """
        return Calls(self.jobs[name], self.compiled(name), self.full_buffer(name))

    def full_buffer(self, name: str) -> Any:
        """The batch that fills an executable; None where it takes none."""
        return None

    def open(self, name: str) -> Inspected:
        """Compiles one executable, and tells what is known of it.

        Raises:
            CompileError: it could not be compiled.
        """
        compiled, job = self.compiled(name), self.jobs[name]
        record, options = compiled.record, self._options | ({} if job.is_graph else NO_GRAPH)
        return Inspected(
            name=name,
            chip=self.chip,
            read_text=partial(self._text, name),
            facts={"jax": jax.__version__, "options": options},
            temp_bytes=record.temp_bytes,
            argument_bytes=record.argument_bytes,
            output_bytes=record.output_bytes,
            code_bytes=record.code_bytes,
            compile_s=record.compile_s,
        )

    def _text(self, name: str, stage: Stage) -> str | Missing:
        if stage == "hlo":
            return self.compiled(name).hlo
        if stage in ("jaxpr", "stablehlo"):
            job = self.jobs[name]
            traced = jax.jit(job.function, donate_argnums=job.donated).trace(*job.arguments)
            return str(traced.jaxpr) if stage == "jaxpr" else traced.lower().as_text()
        self.compiled(name)
        return self._dumped[name, stage]


def _dumped(folder: str, *endings: str) -> str | Missing:
    """The files with the first of these endings that any has."""
    for ending in endings:
        found = sorted(Path(folder).rglob(f"*{ending}"))
        if found:
            return "\n".join(path.read_text(errors="replace") for path in found)
    return Missing(f"XLA has dumped no file that ends in {endings[0]}")


class ModelSource(JobSource):
    """All executables of an engine with these options, on this machine."""

    def __init__(self, config: EngineConfig) -> None:
        """Reads the model's config, and no weights.

        Raises:
            ConfigError: options contradict the model or each other.
            CheckpointError: the model cannot be had.
        """
        checkpoint = open_checkpoint(config.model)
        device = describe_device()
        self.plan = choose_plan(config, checkpoint.config, device, user_results())
        super().__init__(plan_jobs(self.plan, checkpoint.tokenizer.vocab_size), chip_of(device))

    def full_buffer(self, name: str) -> Any:
        """See `JobSource.full_buffer`: requests as long as fit, ids that begin at zero."""
        found = re.fullmatch(r"(\w+) (\d+)x(\d+)x(\d+)(/\w.*)?", name)
        if found is None or found[5] == "/finish":
            return None
        is_decode, key = found[1] == "decode", ShapeKey(*map(int, found.groups()[1:4]))
        layout = self.plan.layout(key, is_decode=is_decode)
        return pad(full_batch(self.plan, key, is_decode=is_decode), layout)


def full_batch(plan: EnginePlan, key: ShapeKey, *, is_decode: bool) -> Batch:
    """As many tokens as the shape and the pool hold, each request from its first token on."""
    page_size = plan.config.page_size
    longest = 1 if is_decode else min(key.max_context, plan.num_pages * page_size)
    lens = [min(longest, key.num_tokens - at) for at in range(0, key.num_tokens, longest)]
    rows: list[BatchRow] = []
    next_page = 0
    for slot, length in enumerate(lens[: key.num_slots]):
        num_pages = -(-length // page_size)
        if next_page + num_pages > plan.num_pages:
            break
        pages = list(range(next_page, next_page + num_pages))
        ids = None if is_decode else [at % plan.model.vocab_size for at in range(length)]
        rows.append(
            BatchRow(
                request_id=str(slot),
                slot=slot,
                token_ids=ids,
                kv_len=length,
                pages=pages,
                recent=pages if plan.num_recent else (),
            )
        )
        next_page += num_pages
    return Batch(rows=tuple(rows), is_decode=is_decode)


def plan_jobs(plan: EnginePlan, num_valid: int) -> list[CompileJob]:
    """Every job of an engine; `num_valid` ids may be sampled."""
    return Assembly.of(plan, num_valid=num_valid).jobs()


def chip_of(device: DeviceInfo) -> Chip:
    """The chip and its rates: a CPU's are measured, a known GPU's are in a table."""
    if device.platform != "cpu":
        return distant_chip(device.platform, device.kind)
    rates = measure_rates()
    return Chip("cpu", device.kind, rates.bytes_per_s, rates.flops_per_s, rates.source)


def distant_chip(platform: str, kind: str) -> Chip:
    """A chip that may be in another machine, by its driver's name."""
    rates = known_rates(kind)
    if rates is not None:
        return Chip(platform, kind, rates.bytes_per_s, rates.flops_per_s, rates.source)
    is_cpu = platform == "cpu"
    why = "a CPU's rates are measured on the machine itself" if is_cpu else f"{kind} is not known"
    return Chip(platform, kind, source=why)


def load_hlo(payload: bytes) -> str:
    """The program of PJRT's own bytes, which are native code for a device of this process.

    Raises:
        InspectionError: they are for another device or another version of XLA.
    """
    try:
        executable = load_executable(payload, jax.local_devices()[:1])
        return "\n".join(module.to_string() for module in executable.hlo_modules())
    except Exception as error:  # XLA's own, of several classes
        raise InspectionError(
            f"the store kept no hlo, and this machine cannot load the executable: {error}; "
            "inspect it where it was compiled, or compile it with its texts"
        ) from error


@contextmanager
def _no_cache() -> Generator[None]:
    """An executable out of jax's cache has no compile time, no dump, and another's op names."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
