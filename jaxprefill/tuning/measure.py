"""Measures prefill executables on this device: what one full step of each bucket takes.

Builds nothing but the prefill path of a plan: no heads, no decoding, no fallback.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import jax

from jaxprefill.assembly import Assembly
from jaxprefill.batch import Batch, BatchRow
from jaxprefill.device_state import DeviceState
from jaxprefill.errors import ConfigError
from jaxprefill.plan import EnginePlan
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.prefill.compiler import CPU_OPTIONS, GPU_OPTIONS, ExecutableRecord, compile_all
from jaxprefill.prefill.runner import Executable
from jaxprefill.tuning.costs import BucketCost
from jaxprefill.weights.checkpoint import Checkpoint
from jaxprefill.weights.load import check_names, check_shapes, load_leaves

# Calls of each executable: at least so many, then until so much time is spent, at most so many.
_MIN_CALLS, _MAX_CALLS, _SPENT_S = 2, 30, 0.5
_NUM_WARM_CALLS = {"cpu": 0, "gpu": 3}  # a GPU records its graph in the second

OnCompiled = Callable[[ExecutableRecord], None]
OnMeasured = Callable[[BucketCost], None]


class ShapeMeasurer:
    """The weights and caches of a plan on the device, for executables of any bucket up to its top.

    Compiles anew where no persistent compilation cache is set, so that seconds are a cold start's.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: EnginePlan,
        *,
        on_compiled: OnCompiled | None = None,
        on_measured: OnMeasured | None = None,
    ) -> None:
        """Loads the weights.

        Args:
            checkpoint: where they come from.
            plan: all sizes; its own ladder is only an upper limit.
            on_compiled: called after each executable.
            on_measured: called for each bucket, when all that were asked for are measured.

        Raises:
            ConfigError: the plan has no prefill executables.
            CheckpointError: the weights do not fit the architecture.
        """
        if plan.path == "eager":
            raise ConfigError(
                "prefill_backend must be full or layerwise to measure buckets, got 'eager', "
                "which has none"
            )
        check_names(checkpoint)
        assembly = Assembly.of(plan, num_valid=checkpoint.tokenizer.vocab_size)
        check_shapes(checkpoint, assembly.tree)
        self._plan = plan
        self._known: dict[ShapeKey, tuple[Executable, Batch, int]] = {}
        self._on_compiled = on_compiled or _ignore
        self._on_measured = on_measured or _ignore
        self._assembly = assembly
        self._state = assembly.allocate(load_leaves(checkpoint, assembly.tree))

    def measure(self, buckets: Sequence[int]) -> list[BucketCost]:
        """Compiles each bucket and takes the least time of a full step.

        Raises:
            CompileError: a bucket could not be compiled.
        """
        plan, ladder = self._plan, replace(self._plan.ladder, buckets=tuple(buckets))
        jobs = self._assembly.prefill_jobs(ladder)
        compiled = compile_all(
            jobs,
            options=CPU_OPTIONS if plan.device.platform == "cpu" else GPU_OPTIONS,
            num_threads=os.cpu_count() or 1,
            on_done=self._on_compiled,
        )
        executables = self._assembly.prefill_executables(ladder, self._state, compiled)
        steps: dict[ShapeKey, Batch] = {}
        for bucket in ladder.buckets:
            batch = full_batch(plan, bucket)
            key = ladder.pick(bucket, batch.max_context)
            assert key is not None  # the batch is made to fit
            steps[key] = batch
        middle = sorted(buckets)[len(buckets) // 2]
        anchor = min(self._known, key=lambda key: abs(key.num_tokens - middle), default=None)
        if anchor is not None:  # timed again, to tell how fast the machine is now
            executable, steps[anchor], _ = self._known[anchor]
            executables = {**executables, anchor: executable}
        times = time_steps(
            self._state, executables, steps, num_warm=_NUM_WARM_CALLS[plan.device.platform]
        )
        if anchor is not None:
            times = without_drift(times, anchor, self._known[anchor][2])
        self._known |= {key: (executables[key], steps[key], time) for key, time in times.items()}
        records = [one.record for one in compiled.values()]
        costs = [
            _cost(key.num_tokens, nanoseconds, _records_of(key.num_tokens, records))
            for key, nanoseconds in times.items()
        ]
        for cost in costs:
            self._on_measured(cost)
        return costs

    def pair_ns(self) -> Fraction:
        """What a bucket in the middle takes longer at the end of the longest context, by pairs."""
        key = sorted(self._known)[len(self._known) // 2]
        executable, batch, first_ns = self._known[key]
        (row, *_) = batch.rows
        plan = self._plan
        longest = min(key.max_context, plan.context_length, plan.num_pages * plan.config.page_size)
        pages = list(range(-(-longest // plan.config.page_size)))
        later = replace(row, kv_len=longest, pages=pages, recent=pages if row.recent else ())
        num_pairs = row.q_len * (longest - row.kv_len)
        if not num_pairs:
            return Fraction(0)
        steps = {key: replace(batch, rows=(later,))}
        num_warm = _NUM_WARM_CALLS[plan.device.platform]
        taken = time_steps(self._state, {key: executable}, steps, num_warm=num_warm)
        return Fraction(max(0, taken[key] - first_ns), num_pairs)

    def seconds(self, cost: BucketCost) -> float:
        """What measuring a bucket of this cost takes."""
        step_s = cost.time_ns / 1e9
        spent_s = min(max(_MIN_CALLS * step_s, _SPENT_S), _MAX_CALLS * step_s)
        num_warm = _NUM_WARM_CALLS[self._plan.device.platform]
        return cost.compile_s / (os.cpu_count() or 1) + num_warm * step_s + spent_s

    def close(self) -> None:
        """Frees the device's arrays."""
        self._known = {}
        self._state.delete()


def time_steps(
    state: DeviceState,
    executables: Mapping[ShapeKey, Executable],
    steps: Mapping[ShapeKey, Batch],
    *,
    num_warm: int,
) -> dict[ShapeKey, int]:
    """Least nanoseconds of each step, from its batch on the host to its hidden rows.

    The least, as other work on the machine only ever adds time. All shapes take turns, so that a
    machine that slows down slows all of them.
    """
    taken: dict[ShapeKey, list[int]] = {key: [] for key in steps}
    for key, batch in steps.items():
        for _ in range(num_warm):
            executables[key].run(state, batch)
        jax.block_until_ready(state.hidden)
    for _ in range(_MAX_CALLS):
        for key, batch in steps.items():
            if len(taken[key]) >= _MIN_CALLS and sum(taken[key]) >= _SPENT_S * 1e9:
                continue
            began = time.perf_counter_ns()
            executables[key].run(state, batch)
            jax.block_until_ready(state.hidden)
            taken[key].append(time.perf_counter_ns() - began)
    return {key: max(1, min(found)) for key, found in taken.items()}


def without_drift(
    times: Mapping[ShapeKey, int], anchor: ShapeKey, earlier: int
) -> dict[ShapeKey, int]:
    """The times of all but `anchor`, as they would have been when that took `earlier`.

    A machine that other work slows down, or lets go, would otherwise favour what was measured in
    the better hour.
    """
    return {
        key: max(1, time * earlier // times[anchor]) for key, time in times.items() if key != anchor
    }


def full_batch(plan: EnginePlan, num_tokens: int) -> Batch:
    """One prompt of so many tokens; several where the context or the KV pool is shorter."""
    page_size, longest = plan.config.page_size, plan.ladder.max_contexts[-1]
    longest = min(longest, plan.context_length, plan.num_pages * page_size)
    rows: list[BatchRow] = []
    while num_tokens and len(rows) < plan.ladder.num_slots:
        length = min(num_tokens, longest)
        first = sum(len(row.pages) for row in rows)
        pages = [(first + page) % plan.num_pages for page in range(-(-length // page_size))]
        ids = [(7 * index + len(rows)) % plan.model.vocab_size for index in range(length)]
        rows.append(
            BatchRow(
                request_id=str(len(rows)),
                slot=len(rows),
                token_ids=ids,
                kv_len=length,
                pages=pages,
                recent=pages if plan.num_recent else (),
            )
        )
        num_tokens -= length
    return Batch(rows=tuple(rows), is_decode=False)


def _ignore(found: object) -> None:
    pass


def _records_of(num_tokens: int, records: Sequence[ExecutableRecord]) -> list[ExecutableRecord]:
    """Records of a bucket, at all its contexts and of all its layers."""
    return [record for record in records if f" {num_tokens}x" in record.name]


def _cost(num_tokens: int, nanoseconds: int, records: Sequence[ExecutableRecord]) -> BucketCost:
    return BucketCost(
        num_tokens=num_tokens,
        time_ns=nanoseconds,
        compile_s=sum(record.lower_s + record.compile_s for record in records),
        code_bytes=sum(record.code_bytes for record in records),
        temp_bytes=max(record.temp_bytes for record in records),
    )
