"""The only place that looks at the chip."""

import ctypes
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

# From so many rows a GPU's products return their operands' dtype: float32 results cost more to
# write and read again than they are worth (H200, 2048 tokens: 52.4 -> 50.4 ms a pass).
NARROW_ROWS = 512
_SPIN_S = 0.02
_CPU_INFO = Path("/proc/cpuinfo")
PINNED = "pinned_host"  # memory of the host that the device writes into
_POLLS = 32  # between two chances for other threads, some 50 us (H200, 30 tokens: 4.85 -> 4.78 ms)
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
        compute_capability: of an NVIDIA GPU, as "9.0".
    """

    platform: str
    kind: str
    memory_bytes: int
    has_bf16_matmul: bool
    num_devices: int = 1
    num_processes: int = 1
    compute_capability: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChipRates:
    """How fast a chip can be at best: what a roofline is drawn from.

    Attributes:
        bytes_per_s: of its own memory.
        flops_per_s: of matrix products by the operands' dtype, sums in float32; no sparsity.
        source: where the numbers are from.
    """

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str


def _rates(bytes_per_s: float, narrow: float, float32: float, source: str) -> ChipRates:
    flops = {"bf16": narrow, "f16": narrow, "f32": float32}
    return ChipRates(bytes_per_s=bytes_per_s, flops_per_s=flops, source=source)


_SHEET = "NVIDIA's data sheet, no sparsity"
# By words of the driver's name for the chip; the first that fits. float32 runs on CUDA cores, as
# products here are not rounded to TensorFloat-32. Sheets often give bfloat16 with sparsity, twice
# as much: H100 Tensor Core GPU (SXM, PCIe, NVL), HGX B200 (an eighth of its eight chips),
# A100 (80GB and 40GB, SXM and PCIe), L40S, L4.
_KNOWN_RATES = (
    # A read-only stream and bfloat16 products of random numbers; the sheet says 4.8e12 and 989e12.
    ("H200", _rates(4.44e12, 790e12, 67e12, "measured on an H200 (float32: data sheet)")),
    ("H100 NVL", _rates(3.9e12, 835e12, 60e12, _SHEET)),
    ("H100 PCIe", _rates(2.0e12, 756e12, 51e12, _SHEET)),
    ("H100", _rates(3.35e12, 989e12, 67e12, _SHEET)),
    ("B200", _rates(8.0e12, 2250e12, 75e12, _SHEET)),
    ("A100-SXM4-80GB", _rates(2.039e12, 312e12, 19.5e12, _SHEET)),
    ("A100 80GB PCIe", _rates(1.935e12, 312e12, 19.5e12, _SHEET)),
    ("A100", _rates(1.555e12, 312e12, 19.5e12, _SHEET)),
    ("L40S", _rates(0.864e12, 362e12, 91.6e12, _SHEET)),
    ("NVIDIA L4", _rates(0.3e12, 121e12, 30.3e12, _SHEET)),
)


def known_rates(kind: str) -> ChipRates | None:
    """The rates of a chip by its driver's name; None for one that is not in the table.

    From NVIDIA's data sheets, the H200's but float32 measured; each says so in `source`.
    """
    if re.search(r"\bMIG\b", kind):  # a part of a chip
        return None
    return next((rates for name, rates in _KNOWN_RATES if re.search(rf"\b{name}\b", kind)), None)


def measure_rates() -> ChipRates:
    """This process's CPU: the best of five reads of 256 MB, and of five float32 products.

    Takes a second. bfloat16 counts as float32 where there are no units for it, else as twice that.
    """
    size, numbers = 1024, jnp.ones(1 << 26, jnp.float32)
    matrix = jnp.ones((size, size), jnp.float32)
    read = jax.jit(jnp.max).lower(numbers).compile()
    multiply = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
    read_s = _best_of(lambda: read(numbers))
    multiply_s = _best_of(lambda: multiply(matrix, matrix))
    flops = 2 * size**3 / multiply_s
    narrow = 2 * flops if _has_amx() else flops
    return _rates(numbers.nbytes / read_s, narrow, flops, "measured on this machine just now")


def _best_of(call: Callable[[], Shaped[Array, "..."]], repeats: int = 5) -> float:
    seconds: list[float] = []
    for _ in range(repeats + 1):  # the first warms up
        began = time.perf_counter()
        call().block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def describe_device(*, is_alone: bool = False) -> DeviceInfo:
    """The first of this process's devices of jax's default backend; the others are alike.

    `is_alone`: other processes' devices are theirs.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    is_cpu = device.platform == "cpu"
    return DeviceInfo(
        platform=device.platform,
        kind=device.device_kind,
        memory_bytes=_main_memory() if is_cpu else stats["bytes_limit"],
        has_bf16_matmul=_has_amx() if is_cpu else True,
        num_devices=jax.local_device_count() if is_alone else jax.device_count(),
        num_processes=1 if is_alone else jax.process_count(),
        compute_capability=device.compute_capability if device.platform == "gpu" else None,
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


def product_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Of products in this type: those of float32 are not rounded to TensorFloat-32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def is_on_cpu(array: Shaped[Array, "..."]) -> bool:
    """Whether its devices are a CPU's."""
    return next(iter(array.devices())).platform == "cpu"


def spin_until_ready(array: Shaped[Array, "..."]) -> None:
    """Waits for a GPU's result without giving the processor away, for some milliseconds.

    A thread that slept wakes late, and its next dispatch runs on cold caches.
    """
    if is_on_cpu(array):
        return
    until = time.perf_counter() + _SPIN_S
    # jax.Array's type leaves `is_ready` out.
    is_ready: Callable[[], bool] = array.is_ready  # pyright: ignore[reportAttributeAccessIssue]
    while not any(is_ready() for _ in range(_POLLS)) and time.perf_counter() < until:
        time.sleep(0)  # lets other threads of the process run


def begin_reading(array: Shaped[Array, "..."]) -> None:
    """Has the device send its numbers to the host, where they do not go there by themselves."""
    if array.sharding.memory_kind != PINNED:
        array.copy_to_host_async()


def read_numbers(array: Shaped[Array, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """The numbers, awaited; those in pinned memory are copied.

    NumPy would be given a view of pinned memory, and jax 0.11.2 now and then ends the process when
    such a view outlives its array ("decrease reference on a buffer with zero reference count").
    """
    if array.sharding.memory_kind != PINNED:
        return np.asarray(array)
    array.block_until_ready()
    # jax.Array's type leaves `unsafe_buffer_pointer` out.
    at: int = array.unsafe_buffer_pointer()  # pyright: ignore[reportAttributeAccessIssue]
    return np.frombuffer(ctypes.string_at(at, array.nbytes), array.dtype).reshape(array.shape)


def free_memory_bytes() -> int | None:
    """Bytes still free on a device, or None where the backend does not say (CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def driver_free_bytes() -> int | None:
    """Free memory of the first NVIDIA GPU as its driver says, or None where there is none.

    What jax's allocator holds back counts as taken, and so do graphs, of which XLA says nothing.
    """
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # another maker's
        return None
    context, number = ctypes.c_void_p(), ctypes.c_int(device.local_hardware_id or 0)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number):
        return None
    driver.cuCtxPushCurrent_v2(context)
    status = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    driver.cuDevicePrimaryCtxRelease_v2(number)
    return None if status else free.value


def _main_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _has_amx() -> bool:
    return _CPU_INFO.exists() and "amx_bf16" in _CPU_INFO.read_text(errors="replace")
