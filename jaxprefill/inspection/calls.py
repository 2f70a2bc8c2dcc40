"""Runs a compiled job, to time or to trace it: on random numbers and, if one is given, a batch."""

import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData

from jaxprefill.errors import ConfigError, InspectionError
from jaxprefill.inspection.trace import Event, Trace, summarise_trace
from jaxprefill.prefill.compiler import Compiled, CompileJob

_CONTAINER = re.compile(r"(while|cond|conditional|call)(\.|$)")  # of what is listed itself
_WARM_CALLS = 3  # a GPU's first may run op by op, and its graph is recorded on the next


class Calls:
    """The operands of a job, from call to call: donated ones are the results of the last."""

    def __init__(self, job: CompileJob, compiled: Compiled, buffer: Any = None) -> None:
        """Puts random numbers on the device.

        Args:
            job: what was compiled.
            compiled: the executable.
            buffer: its last argument, where that is a batch; None: zeros.
        """
        self._job = job
        self._call = compiled.call
        numbers = np.random.default_rng(0).standard_normal((1 << 16) - 1).astype(np.float32)
        arguments: list[Any] = jax.tree.map(lambda shape: _operand(shape, numbers), job.arguments)
        self._arguments = list(arguments)
        if buffer is not None:
            self._arguments[-1] = _placed(buffer, job.arguments[-1])
        for _ in range(_WARM_CALLS):
            jax.block_until_ready(self.run())

    def run(self) -> Any:
        """One launch; results are not awaited."""
        results = self._call(*self._arguments)
        donated = self._job.donated
        parts = results if isinstance(results, tuple) and len(donated) else (results,)
        for at, part in zip(donated, parts, strict=False):
            self._arguments[at] = part
        return results

    def median_s(self, repeats: int) -> float:
        """Of single calls, each awaited.

        Raises:
            ConfigError: that is no number of calls.
        """
        _check_repeats(repeats)
        seconds: list[float] = []
        for _ in range(repeats):
            began = time.perf_counter()
            jax.block_until_ready(self.run())
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def trace(self, repeats: int) -> Trace:
        """What the device did in so many calls, none awaited but the last.

        Raises:
            ConfigError: that is no number of calls.
            InspectionError: the profiler recorded no kernel.
        """
        _check_repeats(repeats)
        with tempfile.TemporaryDirectory(prefix="jaxprefill-trace-") as folder:
            with jax.profiler.trace(folder):
                for _ in range(repeats - 1):
                    self.run()
                jax.block_until_ready(self.run())
            files = sorted(Path(folder).rglob("*.xplane.pb"))
            events = read_events(files)
        if not events:
            raise InspectionError(f"{self._job.name}: the profiler has recorded no kernel")
        return summarise_trace(events, repeats)


def _check_repeats(repeats: int) -> None:
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")


def read_events(files: Sequence[Path]) -> list[Event]:
    """Kernels of devices; of a CPU, operations of XLA's threads."""
    found: list[Event] = []
    with warnings.catch_warnings():
        # Python 3.12 warns of the type of `stats`; where warnings are errors, jaxlib aborts.
        warnings.simplefilter("ignore", DeprecationWarning)
        for path in files:
            for plane in ProfileData.from_file(str(path)).planes:
                found += _events_of(plane)
    return found


def _events_of(plane: Any) -> Iterator[Event]:
    is_device = plane.name.startswith("/device:")
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats) if not is_device else {}
            is_whole = _CONTAINER.match(event.name) is not None
            if is_device or ("hlo_op" in stats and not is_whole):
                begin = float(event.start_ns)
                yield Event(event.name, begin, begin + float(event.duration_ns))


def _operand(shape: Any, numbers: np.ndarray) -> Any:
    if not np.issubdtype(shape.dtype, np.integer) and shape.dtype != bool:
        filled = np.resize(numbers, shape.shape).astype(shape.dtype)
        return _placed(filled, shape)
    return _placed(np.zeros(shape.shape, shape.dtype), shape)


def _placed(value: np.ndarray, shape: Any) -> Any:
    sharding = getattr(shape, "sharding", None)
    return jax.device_put(value, sharding) if sharding is not None else value
