"""The only place that looks at the chip."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

# From so many rows a GPU's products return their operands' dtype: float32 results cost more to
# write and read again than they are worth (H200, 2048 tokens: 52.4 -> 50.4 ms a pass).
NARROW_ROWS = 512
_SPIN_S = 0.02
_CPU_INFO = Path("/proc/cpuinfo")
# Up to so many rows a CPU multiplies `weight @ rows.T` in less time than `rows @ weight.T` in
# float32 (Eigen's packing; SmolLM2's products at 2, 8, 32, 64, 128 rows: 0.4, 0.5, 0.7, 0.9, 1.0).
WEIGHT_FIRST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """What choices depend on.

    Attributes:
        platform: "cpu" or "gpu".
        kind: the chip's name as its driver gives it.
        memory_bytes: memory a process may use; on a CPU all of the machine's.
        has_bf16_matmul: whether bfloat16 matrix products run faster than float32.
        num_devices: devices of all processes that work together (`jax.distributed`).
        num_processes: how many those are.
    """

    platform: str
    kind: str
    memory_bytes: int
    has_bf16_matmul: bool
    num_devices: int = 1
    num_processes: int = 1


def describe_device() -> DeviceInfo:
    """The first of this process's devices of jax's default backend; the others are alike."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    is_cpu = device.platform == "cpu"
    return DeviceInfo(
        platform=device.platform,
        kind=device.device_kind,
        memory_bytes=_main_memory() if is_cpu else stats["bytes_limit"],
        has_bf16_matmul=_has_amx() if is_cpu else True,
        num_devices=jax.device_count(),
        num_processes=jax.process_count(),
    )


def chip_name() -> str:
    """The chip's name; of a CPU its model as Linux knows it, and how many cores it shows."""
    kind = jax.local_devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return kind
    lines = _CPU_INFO.read_text(errors="replace").splitlines() if _CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or kind}, {os.cpu_count()} cores"


def prefers_narrow_results() -> bool:
    """Whether products of many rows should return their operands' dtype."""
    return jax.default_backend() == "gpu"


def prefers_weight_first(num_rows: int, dtype: jnp.dtype) -> bool:
    """Whether the weight should be the left operand of a product with so many rows."""
    is_few = 1 < num_rows <= WEIGHT_FIRST_ROWS
    return is_few and dtype == jnp.float32 and jax.default_backend() == "cpu"


def spin_until_ready(array: Shaped[Array, "..."]) -> None:
    """Waits for a GPU's result without giving the processor away, for some milliseconds.

    A thread that slept wakes late, and its next dispatch runs on cold caches.
    """
    if next(iter(array.devices())).platform == "cpu":
        return
    until = time.perf_counter() + _SPIN_S
    # jax.Array's type leaves `is_ready` out.
    is_ready: Callable[[], bool] = array.is_ready  # pyright: ignore[reportAttributeAccessIssue]
    while not is_ready() and time.perf_counter() < until:
        time.sleep(0)  # lets other threads of the process run


def free_memory_bytes() -> int | None:
    """Bytes still free on a device, or None where the backend does not say (CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _main_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _has_amx() -> bool:
    return _CPU_INFO.exists() and "amx_bf16" in _CPU_INFO.read_text(errors="replace")
