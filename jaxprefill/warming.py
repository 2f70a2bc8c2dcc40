"""Warm calls: after them executables run as ever after, and what their graphs take is known.

They come after the last executable was made: making one evicts the recorded graphs of others.
"""

import jax

from jaxprefill.core import EngineCore
from jaxprefill.kernels.device import driver_free_bytes
from jaxprefill.plan import EnginePlan


def warm_up(core: EngineCore, plan: EnginePlan) -> None:
    """Runs executables on empty batches.

    On a GPU each three times: the first call may run op by op, and the graph is recorded on the
    next, which shows what memory it takes. A CPU records nothing, and empty batches take it as long
    as full ones: there the smallest of each kind runs once, which shows whether what was loaded
    runs here at all. A larger one that does not is compiled when it is first called, as
    `LoadedProgram` says.
    """
    is_cpu = plan.device.platform == "cpu"
    for _ in range(1 if is_cpu else 3):
        gauge = _Gauge(core)
        core.prefill.warm(core.state, is_brief=is_cpu, on_ran=gauge.note)
        core.decode.warm(core.state, is_brief=is_cpu, on_ran=gauge.note)
        core.heads.warm(core.state, is_brief=is_cpu)
    jax.block_until_ready(core.state.hidden)


class _Gauge:
    """Adds up what the device loses from executable to executable, as the driver counts it.

    XLA's own statistics leave graphs out.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._free = driver_free_bytes()

    def note(self, name: str) -> None:
        """`name` was dispatched."""
        if self._free is None:
            return
        jax.block_until_ready(self._core.state.hidden)
        before, self._free = self._free, driver_free_bytes()
        if self._free is not None:
            taken = self._core.graph_bytes.get(name, 0) + max(before - self._free, 0)
            self._core.graph_bytes[name] = taken
