"""What of this machine and this program decides whether an executable may be used. No jax.

An executable is native code: the processor's instruction set, the GPU's driver and the libraries
that it calls are part of what it was compiled for.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import platformdirs

_ROOT = Path(__file__).parent.parent
# What the compiled functions are made of; every file in these, tests and servers excepted.
_COMPILED = ("cache", "decode", "kernels", "models", "prefill", "sampling")
_ALONE = ("assembly.py", "config.py", "device_state.py", "plan.py")


def user_store() -> Path:
    """The folder in which engines of this user keep executables unless told otherwise."""
    return Path(platformdirs.user_cache_dir("jaxprefill")) / "store"


@functools.cache
def source_digest() -> str:
    """SHA-256 of jaxprefill's own source of the compiled functions, as it is at the first call."""
    found = hashlib.sha256()
    paths = [path for name in _COMPILED for path in (_ROOT / name).rglob("*.py")]
    for path in sorted([*paths, *(_ROOT / name for name in _ALONE)]):
        content = path.read_bytes()
        found.update(f"{path.relative_to(_ROOT).as_posix()} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


def version_of(distribution: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def xla_flags() -> list[str]:
    """XLA_FLAGS, or the content of the file that it names."""
    text = os.environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        path = Path(text)
        return [text, path.read_text(errors="replace") if path.is_file() else ""]
    return text.split()


def processor() -> dict[str, Any]:
    """The instruction set of the host, and the cores that XLA shares work out to."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    # "flags" on x86, "Features" on Arm.
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    model = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(_num_cores())
    return {
        "machine": platform.machine(),
        "model": model[1].strip() if model else platform.processor(),
        "flags": sorted(flags[1].split()) if flags else [],
        "cores": len(cores),
    }


def cuda() -> dict[str, Any]:
    """Versions of the driver and of the libraries that XLA's GPU code calls."""
    names = (name for name in _distributions() if re.match(r"(nvidia-|jax-cuda)", name))
    return {
        "driver": _driver(),
        "cudnn": _cudnn(),
        "cublas": _cublas(),
        "packages": {name: version_of(name) for name in sorted(names)},
    }


def _num_cores() -> int:
    return os.cpu_count() or 1


def _distributions() -> set[str]:
    found = (item.metadata["Name"] for item in importlib.metadata.distributions())
    return {name.lower() for name in found if name}


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        return path.read_text(errors="replace").splitlines()[0].strip()
    library = _library("libcuda.so.1")
    version = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return str(version.value)


def _cudnn() -> int | None:
    for major in (9, 8):
        library = _library(f"libcudnn.so.{major}")
        if library is not None:
            library.cudnnGetVersion.restype = ctypes.c_size_t
            return int(library.cudnnGetVersion())
    return None


def _cublas() -> str | None:
    for major in (13, 12):
        library = _library(f"libcublas.so.{major}")
        if library is not None:
            parts: list[int] = []
            for which in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
                value = ctypes.c_int()
                library.cublasGetProperty(which, ctypes.byref(value))
                parts.append(value.value)
            return ".".join(map(str, parts))
    return None


def _library(name: str) -> ctypes.CDLL | None:
    """A library that is loaded, or that the loader finds: jax has loaded those it brings."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
