"""Runs a pure decode batch in the smallest slot bucket that holds it."""

from collections.abc import Callable, Mapping

from jaxprefill.batch import Batch
from jaxprefill.counters import EngineCounters
from jaxprefill.device_state import DeviceState
from jaxprefill.errors import CapacityError
from jaxprefill.prefill.executable import PrefillExecutable
from jaxprefill.prefill.vote import Ballot


class DecodeRunner:
    """Owns one executable per slot bucket, each of any context up to the engine's."""

    def __init__(
        self, executables: Mapping[int, PrefillExecutable], counters: EngineCounters
    ) -> None:
        """`executables` by number of slots."""
        self._executables = dict(sorted(executables.items()))
        self._counters = counters

    def run(self, state: DeviceState, batch: Batch, group: Ballot | None = None) -> None:
        """Writes one hidden row per request; dispatched, not awaited.

        Of several ranks each runs the shape that holds the longest batch in the `group`.

        Raises:
            CapacityError: more rows than the largest bucket has slots.
        """
        num_rows = len(batch.rows)
        least = num_rows if group is None else group.num_requests
        for num_slots, executable in self._executables.items():
            if num_slots >= least:
                executable.run(state, batch)
                name = f"decode {executable.key}"
                self._counters.count_pass("decode", name, real=num_rows, padded=num_slots)
                return
        raise CapacityError(
            f"the largest decode executable has {max(self._executables)} slots, the batch has "
            f"{least} rows; raise max_running_requests"
        )

    def warm(
        self,
        state: DeviceState,
        *,
        is_brief: bool = False,
        on_ran: Callable[[str], None] | None = None,
    ) -> None:
        """Runs each executable once on an empty batch, uncounted; or the smallest alone.

        `on_ran` is told the name of each.
        """
        executables = list(self._executables.values())
        for executable in executables[:1] if is_brief else executables:
            executable.run(state, Batch(rows=(), is_decode=True))
            if on_ran is not None:
                on_ran(f"decode {executable.key}")
