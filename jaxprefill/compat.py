"""The one place that touches jax's global config, and that may tell jax versions apart."""

from pathlib import Path
from typing import Any

import jax
import platformdirs

from jaxprefill.errors import ConfigError


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


def program_text(compiled: Any) -> str:
    """A compiled or loaded executable's program after XLA's optimisation, in the form of HLO."""
    modules = compiled.runtime_executable().hlo_modules()
    return "\n".join(module.to_string() for module in modules)
