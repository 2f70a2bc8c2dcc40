"""Compiles an engine's executables into a store, without weights and without an engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxprefill.config import EngineConfig
from jaxprefill.errors import ConfigError, StoreError, listed
from jaxprefill.fingerprint import engine_facts
from jaxprefill.kernels.device import describe_device
from jaxprefill.prefill.compiler import CompileJob, ExecutableRecord
from jaxprefill.prefill.library import Library, make_store
from jaxprefill.startup import OnCompiled, obtain, prepare
from jaxprefill.tuning.chosen import choose_plan, user_results
from jaxprefill.weights.locate import open_checkpoint


@dataclass(frozen=True)
class Precompiled:
    """What a store has now."""

    records: list[ExecutableRecord]
    seconds: float

    def describe(self) -> str:
        """One line."""
        num_old = sum(record.load_s is not None for record in self.records)
        num_new = len(self.records) - num_old
        return f"{num_new} executables compiled in {self.seconds:.1f} s, {num_old} were there"


def precompile(
    config: EngineConfig,
    folder: Path,
    *,
    shapes: Sequence[str] = (),
    has_texts: bool = True,
    on_compiled: OnCompiled,
) -> Precompiled:
    """Writes what `folder` lacks of the executables that an engine of this `config` runs.

    Args:
        config: options, and the model, whose weights are not read.
        folder: made if it is missing.
        shapes: of the prefill and decode executables just these; see `jaxprefill compile --help`.
        has_texts: keep StableHLO and HLO beside each.
        on_compiled: called after each, with its record and the number of all.

    Raises:
        ConfigError: an option is at fault, or there is no such shape.
        StoreError: the folder cannot be written.
        JaxPrefillError: as an engine's start.
    """
    began = time.perf_counter()
    checkpoint = open_checkpoint(config.model)
    plan = choose_plan(config, checkpoint.config, describe_device(), user_results())
    if plan.device.num_processes > 1:
        raise ConfigError(
            f"executables must be compiled by one process, not {plan.device.num_processes}: those "
            "of engines over several processes are not kept"
        )
    store = make_store(folder.expanduser(), is_trusted=config.trust_executables)
    assembly = prepare(checkpoint, plan)
    facts = engine_facts(plan, num_valid=assembly.num_valid)
    library = Library(facts, config.model, (store,), store, has_texts=has_texts)
    jobs = _chosen(assembly.jobs(), shapes)

    def note(record: ExecutableRecord, total: int) -> None:
        on_compiled(record, total)
        if library.target is None:  # the rest would be compiled for nothing
            raise StoreError("; ".join(library.faults))

    compiled = obtain(assembly, library, jobs, on_compiled=note)
    return Precompiled([entry.record for entry in compiled.values()], time.perf_counter() - began)


def _chosen(jobs: list[CompileJob], shapes: Sequence[str]) -> list[CompileJob]:
    """Jobs whose shape is among `shapes`, and those without one."""
    if not shapes:
        return jobs
    by_shape: dict[str, list[CompileJob]] = {}
    rest: list[CompileJob] = []
    for job in jobs:
        path, _, shape = job.name.partition(" ")
        if path in ("prefill", "decode", "layerwise"):
            by_shape.setdefault(shape.partition("/")[0], []).append(job)
        else:
            rest.append(job)
    chosen: dict[str, list[CompileJob]] = {}
    for wanted in shapes:
        found = [shape for shape in by_shape if wanted in (shape, shape.partition("x")[0])]
        if not found:
            raise ConfigError(
                f"shapes must be among those of the engine, got {wanted}; they are "
                f"{listed(by_shape)}"
            )
        chosen |= {shape: by_shape[shape] for shape in found}
    return rest + [job for some in chosen.values() for job in some]
