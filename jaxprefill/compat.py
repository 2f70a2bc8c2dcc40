"""The one place that touches jax's global config, and that may tell jax versions apart."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import platformdirs
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval
from jaxlib.xla_client import DeviceList

from jaxprefill.errors import ConfigError


@runtime_checkable
class PjrtExecutable(Protocol):
    """What is used of PJRT's executables, which jax gives no public name."""

    client: Any

    def serialize(self) -> bytes:
        """PJRT's own bytes."""
        ...

    def execute_sharded(self, arguments: Sequence[Any], /) -> Any:
        """Launches it on the operands that the program takes."""
        ...

    def hlo_modules(self) -> list[Any]:
        """The optimised program."""
        ...

    def get_parameter_layouts(self) -> list[Any]:
        """One for each operand."""
        ...


def key_value_client() -> Any:
    """The key-value store that the processes of `jax.distributed` share, which has no public name.

    Raises:
        ConfigError: `jax.distributed.initialize` was not called.
    """
    # The one public module that shows where jax keeps it.
    shared: Any = multihost_utils.distributed  # pyright: ignore
    client = shared.global_state.client
    if client is None:
        raise ConfigError("jax.distributed.initialize must be called before processes can vote")
    return client


def load_executable(payload: bytes, devices: Sequence[Any]) -> PjrtExecutable:
    """The executable that PJRT wrote, on these devices of jax. It is native code: trust its source.

    Raises:
        Exception: XLA's own, where it cannot read it.
    """
    client = devices[0].client
    return client.deserialize_executable(payload, DeviceList(tuple(devices)), None)


def read_arguments(program: ClosedJaxpr) -> tuple[int, ...]:
    """Positions of the arguments that jit leaves in the program: those that a result depends on."""
    jaxpr = program.jaxpr
    _, is_read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return tuple(index for index, one in enumerate(is_read) if one)


def load_fragments(ref: Any, layout: Any) -> Any:
    """A Mosaic GPU array's rows in registers, past shared memory."""
    mosaic = import_module("jax.experimental.pallas.mosaic_gpu")
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return mosaic.load(ref, *index, layout=layout, optimized=False)


def store_fragments(ref: Any, value: Any) -> None:
    """The way back."""
    if jax.__version_info__ < (0, 12):
        ref[...] = value
    else:
        import_module("jax.experimental.pallas.mosaic_gpu").store(ref, value, optimized=False)


# Parts of names of jax's settings that change no program.
_IDLE = (
    *("cache", "log", "dump", "traceback", "timeout", "platform", "visible", "cross_host", "pgle"),
    *("transfer_guard", "pprint", "num_cpu_devices", "garbage", "explain", "default_device"),
    *("coordinat", "source", "debug_info", "preemption", "compilation"),
)


def program_settings() -> dict[str, str]:
    """The settings of jax on which the programs that it makes may depend."""
    found: dict[str, Any] = jax.config.values
    names = sorted(name for name in found if not any(part in name for part in _IDLE))
    return {name: str(found[name]) for name in names}


@contextmanager
def no_compilation_cache(*, is_off: bool = True) -> Generator[None]:
    """Compiles without JAX's persistent cache, process-wide: what comes out of it cannot be stored.

    With `is_off` False it changes nothing.
    """
    before = bool(jax.config.values["jax_enable_compilation_cache"])
    if not (is_off and before):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax looks at its setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def use_compilation_cache(folder: str) -> None:
    """Keeps compiled executables in `folder` ("auto": the user's cache) between processes.

    A folder that the process has already set (by JAX_COMPILATION_CACHE_DIR, say) stays.

    Raises:
        ConfigError: the folder cannot be made.
    """
    if folder == "auto":
        if jax.config.values["jax_compilation_cache_dir"]:
            return
        folder = str(Path(platformdirs.user_cache_dir("jaxprefill")) / "xla")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"compile_cache must be a folder that can be made and written, got {folder}: {error}; "
            "name another, or turn it off with compile_cache='off'"
        ) from error
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
