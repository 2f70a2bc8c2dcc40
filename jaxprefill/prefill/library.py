"""Loads executables from stores, and keeps new ones there; what goes wrong is said, not raised."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxprefill.compat import PjrtExecutable, load_executable, no_compilation_cache
from jaxprefill.errors import ConfigError, StoreError, listed
from jaxprefill.prefill.compiler import (
    Compiled,
    CompileJob,
    CompilerOptions,
    ExecutableRecord,
    compile_job,
)
from jaxprefill.prefill.program import LoadedProgram, outputs_as_json, outputs_of_json
from jaxprefill.store.files import check_trusted, make_folder
from jaxprefill.store.folder import Store
from jaxprefill.store.machine import user_store
from jaxprefill.store.manifest import StoredExecutable, StoredFile

logger = logging.getLogger(__name__)

_NOTHING_YET = StoredFile(name="-", sha256="", num_bytes=0)
_UNUSED_S = 60 * 86400.0  # after so long unused, an executable goes from the user's own store
_RECORDED = {item.name for item in fields(ExecutableRecord)} - {"load_s"}


@dataclass
class Library:
    """A `Keeper` over stores.

    Attributes:
        facts: what all executables of the engine have in common that makes them valid.
        label: what the user calls the model; for people.
        sources: stores to load from, the first that has an executable first.
        target: the store to write to, if any.
        named: the store that the user named, if any: what it lacks is reported.
        has_texts: keep the programs' texts too.
        unused_s: what no start has used for so long goes from `target`, once that has grown.
        loaded: SHA-256 of what was loaded, by name.
        recompiled: records of those that were loaded, and failed when they first ran.
        faults: what went wrong, for people; each was logged as a warning.
    """

    facts: dict[str, Any]
    label: str
    sources: tuple[Store, ...] = ()
    target: Store | None = None
    named: Store | None = None
    has_texts: bool = False
    unused_s: float | None = None
    loaded: dict[str, str] = field(default_factory=dict[str, str])
    recompiled: dict[str, ExecutableRecord] = field(default_factory=dict[str, ExecutableRecord])
    faults: list[str] = field(default_factory=list[str])
    _has_grown: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, job: CompileJob, options: CompilerOptions) -> Compiled | None:
        """See `Keeper.load`."""
        facts = job.facts(options)
        for store in self.sources:
            try:
                entry = store.find(job.name, self.facts, facts)
                if entry is not None:
                    return self._load(store, entry, job, options)
            except StoreError as error:
                self.report(f"{job.name} in {store.folder} is of no use: {error}")
        return None

    def keep(self, job: CompileJob, options: CompilerOptions, compiled: Compiled) -> None:
        """See `Keeper.keep`; after the first failure nothing more is written."""
        if self.target is None:
            return
        if not compiled.is_own:
            logger.info("%s is in JAX's own cache, and not kept here", job.name)
            return
        try:
            payload = _serialize(job, compiled)
            entry = StoredExecutable(
                name=job.name,
                label=self.label,
                facts=self.facts,
                job=job.facts(options),
                read=compiled.read,
                outputs=outputs_as_json(compiled.outputs),
                record={name: getattr(compiled.record, name) for name in _RECORDED},
                payload=_NOTHING_YET,
            )
            self.target.write(entry, payload, compiled.texts)
            self._has_grown = True
        except StoreError as error:
            self.target = None
            self.report(f"executables are not kept: {error}")

    def tell_missing(self, records: Sequence[ExecutableRecord]) -> None:
        """Reports what the store that the user named does not have, and why."""
        names = [record.name for record in records if record.load_s is None]
        if self.named is None or not names:
            return
        store = self.named
        others = [self._differing(other.facts) for other in store.entries()]
        nearest = min(others, key=len, default=None)
        why = "it is empty" if nearest is None else "other shapes or options, or damage"
        if nearest:
            why = f"made for another {', '.join(nearest)}"
        self.report(
            f"{len(names)} of {len(records)} executables are not in {store.folder} ({why}) and "
            f"were compiled: {listed(names, limit=4)}; `jaxprefill compile --out` adds them"
        )

    def _differing(self, facts: dict[str, Any]) -> list[str]:
        return sorted(key for key, wanted in self.facts.items() if facts.get(key) != wanted)

    def prune(self) -> None:
        """Deletes what has long been of no use, where anything was written."""
        if self.target is None or self.unused_s is None or not self._has_grown:
            return
        try:
            self.target.prune(unused_s=self.unused_s, is_verified=False)
        except OSError as error:
            self.report(f"{self.target.folder} cannot be pruned: {error}")

    def has_passed(self, kind: str, **more: Any) -> bool:
        """Whether a check that depends on `facts` and `more` has passed in an earlier process."""
        return any(store.read_result(kind, self.facts | more) is True for store in self.sources)

    def note_passed(self, kind: str, **more: Any) -> None:
        """Keeps that it has, where that can be kept: else the next start checks again."""
        if self.target is not None:
            try:
                self.target.write_result(kind, self.facts | more, True)
            except StoreError as error:
                logger.info("that the %s passed is not kept: %s", kind, error)

    def autotune_folder(self) -> Path | None:
        """Where XLA may keep which kernels were fastest; None: nowhere."""
        if self.target is None:
            return None
        folder = self.target.autotune_folder
        try:
            make_folder(folder)
            if not self.target.is_trusted:
                check_trusted(folder)  # XLA reads what is in it
        except (OSError, StoreError) as error:
            self.report(f"{folder} is of no use: {error}")
            return None
        return folder

    def report(self, fault: str) -> None:
        """Logs it, and remembers it for the start-up text."""
        logger.warning("%s", fault)
        with self._lock:
            self.faults.append(fault)

    def _load(
        self, store: Store, entry: StoredExecutable, job: CompileJob, options: CompilerOptions
    ) -> Compiled:
        assert job.mesh is not None, "jobs of an engine are over its mesh"
        began = time.perf_counter()
        payload = store.payload(entry)
        try:
            executable = load_executable(payload, tuple(job.mesh.devices.flat))
            _check_operands(executable, entry, job)
            outputs = outputs_of_json(entry.outputs)
            program = LoadedProgram(
                executable,
                read=entry.read,
                outputs=outputs,
                out_specs=job.out_specs,
                mesh=job.mesh,
                recompile=partial(self._recompile, store, job, options),
            )
            record = ExecutableRecord(**entry.record, load_s=time.perf_counter() - began)
        except Exception as error:  # XLA's, of whatever kind; the job is compiled instead
            raise StoreError(f"it cannot be loaded: {error}") from error
        store.touch(entry)
        self.loaded[job.name] = entry.payload.sha256
        return Compiled(program, record, entry.read, outputs)

    def _recompile(
        self, store: Store, job: CompileJob, options: CompilerOptions, error: Exception
    ) -> PjrtExecutable:
        """Takes the place of an executable of `store` that loads and does not run."""
        self.report(
            f"{job.name} in {store.folder} fails when it runs, and was compiled anew: {error}"
        )
        with no_compilation_cache():
            compiled = compile_job(job, options, has_texts=self.has_texts)
        self.recompiled[job.name] = compiled.record
        self.keep(job, options, compiled)
        executable: Any = compiled.call.runtime_executable()
        return executable


def open_library(
    facts: dict[str, Any],
    *,
    label: str,
    folder: str | None,
    has_store: bool,
    is_trusted: bool,
) -> Library:
    """The stores that the options name; one that cannot be used is a fault, and left out.

    Args:
        facts: see `Library`.
        label: see `Library`.
        folder: a store to load from, which is not written to.
        has_store: load from the user's own store too, and write there.
        is_trusted: take what is in them whoever wrote it.

    Raises:
        ConfigError: there is no such folder.
    """
    library, sources = Library(facts, label, unused_s=_UNUSED_S), list[Store]()
    if folder is not None:
        if not Path(folder).expanduser().is_dir():
            raise ConfigError(
                f"executables must be a folder that `jaxprefill compile --out` wrote, got {folder}"
            )
        try:
            library.named = Store.open(folder, is_trusted=is_trusted)
            sources.append(library.named)
        except StoreError as error:
            library.report(str(error))
    if has_store:
        try:
            library.target = make_store(user_store(), is_trusted=is_trusted)
            sources.append(library.target)
        except StoreError as error:
            library.report(f"executables are not kept: {error}")
    library.sources = tuple(sources)
    return library


def make_store(folder: Path, *, is_trusted: bool = False) -> Store:
    """A store to write to, made if it is missing.

    Raises:
        StoreError: it cannot be made, or others could write into it.
    """
    try:
        make_folder(folder)
    except OSError as error:
        raise StoreError(f"{folder} cannot be made: {error.strerror or error}") from error
    return Store.open(folder, is_trusted=is_trusted)


def _check_operands(executable: PjrtExecutable, entry: StoredExecutable, job: CompileJob) -> None:
    """Raises StoreError unless the manifest picks operands as the program takes them."""
    num_taken, num_given = (
        len(executable.get_parameter_layouts()),
        len(jax.tree.leaves(job.arguments)),
    )
    if len(entry.read) != num_taken or max(entry.read, default=-1) >= num_given:
        raise StoreError(
            f"it takes {num_taken} of {num_given} operands, and its manifest names {entry.read}"
        )


def _serialize(job: CompileJob, compiled: Compiled) -> bytes:
    executable: Any = compiled.call.runtime_executable()
    try:
        payload = bytes(executable.serialize())
        num_read = len(executable.get_parameter_layouts())
    except Exception as error:  # XLA's, of whatever kind; the engine has its executable
        raise StoreError(f"{job.name} cannot be written down: {error}") from error
    if num_read != len(compiled.read):
        raise StoreError(
            f"{job.name} takes {num_read} operands, and {len(compiled.read)} were expected"
        )
    return payload
