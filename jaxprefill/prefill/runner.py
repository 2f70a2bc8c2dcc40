"""Runs a prefill or mixed batch: decide, pad, execute, or fall back with a counted reason."""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from jaxprefill.batch import Batch
from jaxprefill.counters import EngineCounters
from jaxprefill.device_state import DeviceState
from jaxprefill.errors import CapacityError, FallbackError
from jaxprefill.prefill.buckets import BucketLadder, ShapeKey
from jaxprefill.prefill.policy import Fallback, PrefillPolicy
from jaxprefill.prefill.vote import Ballot, decide_batch, decide_in_group

logger = logging.getLogger(__name__)


@runtime_checkable
class Executable(Protocol):
    """A forward pass of one shape."""

    key: ShapeKey

    def run(self, state: DeviceState, batch: Batch) -> None:
        """Dispatches the pass over `batch`."""
        ...


class PrefillRunner:
    """Owns the executables of the ladder and of the eager fallback."""

    def __init__(
        self,
        *,
        policy: PrefillPolicy,
        executables: Mapping[ShapeKey, Executable],
        path: str,
        fallback_ladder: BucketLadder,
        fallback: Mapping[ShapeKey, Executable],
        is_strict: bool,
        counters: EngineCounters,
    ) -> None:
        """`path` names what the ladder's executables are: full or layerwise."""
        self._policy = policy
        self._executables = executables
        self._path = path
        self._fallback_ladder = fallback_ladder
        self._fallback = fallback
        self._is_strict = is_strict
        self._counters = counters

    def run(self, state: DeviceState, batch: Batch, group: Ballot | None = None) -> None:
        """Writes the batch's hidden rows; dispatched, not awaited.

        Of several ranks each runs the shape that `group`, the vote of all, gives all of them.

        Raises:
            FallbackError: strict, and no executable takes the batch.
            CapacityError: not even the eager fallback holds it.
        """
        if group is None:
            decision = decide_batch(self._policy, batch)
        else:
            decision = decide_in_group(self._policy, batch, group)
        if isinstance(decision, Fallback):
            self._run_fallback(state, batch, decision, batch if group is None else group)
        else:
            self._run(state, batch, self._executables[decision.key], self._path)

    def warm(
        self,
        state: DeviceState,
        *,
        is_brief: bool = False,
        on_ran: Callable[[str], None] | None = None,
    ) -> None:
        """Runs each executable once on an empty batch, uncounted; or the smallest of each path.

        `on_ran` is told the name of each.
        """
        own = "prefill" if self._path == "full" else self._path
        for path, executables in ((own, self._executables), ("eager", self._fallback)):
            ascending = sorted(executables)
            for key in ascending[:1] if is_brief else ascending:
                executables[key].run(state, Batch(rows=(), is_decode=False))
                if on_ran is not None:
                    on_ran(f"{path} {key}")

    def _run_fallback(
        self, state: DeviceState, batch: Batch, why: Fallback, counts: Batch | Ballot
    ) -> None:
        if self._is_strict:
            raise FallbackError(
                f"strict_prefill: no executable takes this batch: {why}; "
                "widen prefill_buckets, full_prefill_max_req or prefill_max_context"
            )
        key = self._fallback_ladder.pick(counts.num_tokens, counts.max_context)
        if key is None:
            raise CapacityError(
                f"the eager fallback holds {self._fallback_ladder.keys[0]} (tokens x requests x "
                f"context), the batch has {counts.num_tokens} tokens, context {counts.max_context}"
            )
        if why.reason not in self._counters.fallbacks:
            logger.warning("prefill falls back to the eager path: %s", why)
        self._counters.fallbacks[why.reason] += 1
        self._run(state, batch, self._fallback[key], "eager")

    def _run(self, state: DeviceState, batch: Batch, executable: Executable, path: str) -> None:
        executable.run(state, batch)
        key, real = executable.key, batch.num_tokens
        self._counters.count_pass(path, f"{path} {key}", real=real, padded=key.num_tokens)
