"""Checks and times one variant of a kernel on this process's device, or all of a family in turn.

Calls are chained inside one executable, each waiting for the one before, and take their operands in
turn from sets that together exceed the cache. What the first of them gives is compared with a
float32 reference, in rows spread over the whole result.
"""

import fnmatch
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprefill.kernels.device import known_rates
from jaxprefill.prefill.compiler import CPU_OPTIONS, GPU_OPTIONS

LIMIT = 1e-2  # of the error's norm over the result's, in bfloat16
POISONED = 3  # exit status: the device took no more work from the process after its last row
CACHE_BYTES = 100e6  # two H200's second-level caches
MAX_CALLS = 128
_WANTED_S, _ROUND_S, _FEW_S = 2e-3, 2e-2, 1.0  # of an executable; of a round; of all rounds
_ROUNDS = 7
_PLAIN = "xla"

Overrides = dict[str, int]  # of a tiling's fields


class Variant(NamedTuple):
    """A row of the table. `tiles` are overrides of the kernel's own choice, as text."""

    case: str
    backend: str
    tiles: str = ""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One variant, ready on the device.

    Attributes:
        call: (carry, shared, own) -> carry; one call of the kernel.
        carry: the first; not used up.
        shared: arrays that every call reads.
        own: those that calls take in turn.
        sample: the rows of a carry that are checked.
        errors: of such rows of the first call: (the norm of the error over the result's, largest).
        flops, num_bytes: of a call, at least.
        tiles: those that are used, as text.
    """

    call: Callable[[Any, Any, Any], Any]
    carry: Any
    shared: Any
    own: Sequence[Any]
    sample: Callable[[Any], jax.Array]
    errors: Callable[[np.ndarray], tuple[float, float]]
    flops: float
    num_bytes: float
    tiles: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Kernels of one kind.

    Attributes:
        cases: the most wanted first; `tiny` ones for interpretation.
        backends: the first is the one whose `tiles` are tried.
        tiles: overrides, tried after everything else.
        prepare: (case, is tiny) -> inputs and reference.
        make: (those, variant's backend, overrides, interpret) -> the work.
    """

    cases: Sequence[str]
    tiny: Sequence[str]
    backends: Sequence[str]
    tiles: Sequence[str]
    prepare: Callable[[str, bool], Any]
    make: Callable[[Any, str, Overrides, bool], Work]

    def variants(
        self, pattern: str, backends: Sequence[str], tiles: Sequence[str] | None, *, is_tiny: bool
    ) -> list[Variant]:
        """What is asked for: kernels as they are, then plain JAX, then other tilings."""
        cases = self.tiny if is_tiny else self.cases
        cases = [one for one in cases if fnmatch.fnmatch(one, pattern or "*")]
        wanted = [one for one in self.backends if not backends or one in backends]
        others = self.tiles if tiles is None else [one for one in tiles if one != "default"]
        if self.backends[0] not in wanted or (is_tiny and tiles is None):
            others = []
        first = [Variant(case, one) for case in cases for one in wanted if one != _PLAIN]
        plain = [Variant(case, _PLAIN) for case in cases if _PLAIN in wanted]
        return first + plain + [Variant(c, self.backends[0], one) for c in cases for one in others]


def run_family(
    family: Family,
    variants: Sequence[Variant],
    write: Callable[[dict[str, Any]], None],
    *,
    interpret: bool,
    until: float,
) -> bool:
    """Writes a row for each variant, as long as `time.monotonic` is below `until`.

    Returns:
        Whether the device still answers this process; it may not after a failure, the last row.
    """
    case, inputs = None, None
    for variant in variants:
        if time.monotonic() >= until:
            break
        began, row = time.monotonic(), dict[str, Any](variant._asdict())
        row["is_default"] = not variant.tiles
        try:
            if variant.case != case:
                case, inputs = None, None  # frees the last one's arrays first
                inputs = family.prepare(variant.case, interpret)
                case = variant.case
            overrides = parse_tiles(variant.tiles)
            row |= measure(
                family.make(inputs, variant.backend, overrides, interpret), is_timed_once=interpret
            )
        except Exception as error:  # one case's failure is a row
            row["failure"] = _brief(error)
        write(row | {"took_s": round(time.monotonic() - began, 1)})
        if "failure" in row and not _is_alive():
            return False
    return True


def measure(work: Work, *, is_timed_once: bool = False) -> dict[str, Any]:
    """Error and microseconds a call; a wrong kernel's time is given, and that it failed."""
    floor_s = _floor_s(work)
    count = min(max(int(_WANTED_S / max(floor_s, 1e-6)), 1), 1 if is_timed_once else MAX_CALLS)
    step, sets = jax.jit(work.call), list(work.own)[:count]

    def run(carry: Any, before: Any, shared: Any, own: Any) -> Any:
        del before  # its place is taken, so that no address changes from run to run
        carry = step(carry, shared, own[0])
        carry, sample = lax.optimization_barrier((carry, work.sample(carry)))
        for at in range(1, count):
            carry = step(carry, shared, own[at % len(own)])
        return carry, sample

    kept = jax.eval_shape(lambda carry: work.sample(carry), work.carry)
    held = (jax.tree.map(jnp.copy, work.carry), jnp.zeros(kept.shape, kept.dtype))
    options = CPU_OPTIONS if jax.default_backend() == "cpu" else GPU_OPTIONS
    began = time.perf_counter()
    jitted = jax.jit(run, donate_argnums=(0, 1), keep_unused=True)
    compiled = jitted.lower(*held, work.shared, sets).compile(compiler_options=options)
    compile_s = time.perf_counter() - began

    def go() -> Any:
        nonlocal held
        held = compiled(*held, work.shared, sets)
        return held

    began = time.perf_counter()
    error, largest = work.errors(np.asarray(go()[1]))
    is_slow = time.perf_counter() - began > _FEW_S / 2
    found = [1e6 * s / count for s in _seconds(go, is_once=is_timed_once or is_slow)]
    us = statistics.median(found)
    numbers = {"error": error, "max_error": largest}
    row: dict[str, Any] = {
        "tiles": work.tiles,
        **{name: _digits(one) if math.isfinite(one) else None for name, one in numbers.items()},
        **{"us": _digits(us), "us_min": _digits(min(found)), "us_max": _digits(max(found))},
        "calls": count,
        "sets": len(sets),
        "compile_s": round(compile_s, 2),
        "tflops_per_s": _digits(work.flops / us / 1e6),
        "gb_per_s": _digits(work.num_bytes / us / 1e3),
    }
    if floor_s:
        row |= {"floor_us": _digits(1e6 * floor_s), "share": _digits(1e6 * floor_s / us)}
    if not error <= LIMIT:
        row["failure"] = f"wrong: error {error:.2g} of the result's norm, limit {LIMIT:g}"
    return row


def _seconds(go: Callable[[], Any], *, is_once: bool) -> list[float]:
    """Of one run among some in a row, several times; a graph is recorded on the second run."""
    for _ in range(0 if is_once else 2):
        jax.block_until_ready(go())
    one = _of_some(go, 1)
    if is_once:
        return [one]
    in_a_row = min(max(int(_ROUND_S / one), 1), 10)
    rounds = min(max(int(_FEW_S / (one * in_a_row)), 1), _ROUNDS)
    return [_of_some(go, in_a_row) for _ in range(rounds)]


def _of_some(go: Callable[[], Any], count: int) -> float:
    """Seconds each when none but the last is awaited."""
    began = time.perf_counter()
    for _ in range(count - 1):
        go()
    jax.block_until_ready(go())
    return (time.perf_counter() - began) / count


def _floor_s(work: Work) -> float:
    """What the chip needs at least for a call; 0: its rates are not known."""
    rates = known_rates(jax.local_devices()[0].device_kind)
    if rates is None:
        return 0.0
    return max(work.num_bytes / rates.bytes_per_s, work.flops / rates.flops_per_s["bf16"])


def _is_alive() -> bool:
    """Whether the device still computes: after an illegal address it does not."""
    try:
        return int(jnp.zeros(3, jnp.int32).sum() + 1) == 1
    except Exception:
        return False


def _brief(error: Exception) -> str:
    words = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {words}"[:300]


def _digits(number: float) -> float:
    """Four of them."""
    return float(f"{number:.4g}")


def parse_tiles(text: str) -> Overrides:
    """From "heads=32,block=64".

    Raises:
        ValueError: it is not of that form.
    """
    try:
        pairs = [part.split("=") for part in text.split(",") if part]
        return {name.strip(): int(value) for name, value in pairs}
    except ValueError as error:
        raise ValueError(f"tiles must be like heads=32,block=64, got {text!r}") from error


def cut(default: Any, overrides: Overrides) -> tuple[Any, Overrides]:
    """(the tiling with what of the overrides are fields of it, the others)."""
    known = {name: value for name, value in overrides.items() if name in default._fields}
    rest = {name: value for name, value in overrides.items() if name not in known}
    typed = {name: type(getattr(default, name))(value) for name, value in known.items()}
    return default._replace(**typed), rest


def check_all_used(rest: Overrides, default: Any) -> None:
    """Raises ValueError: some overrides name no field of the tiling."""
    if rest:
        raise ValueError(f"tiles must be of {', '.join(default._fields)}, got {', '.join(rest)}")


def tiles_text(tiles: Any) -> str:
    return ",".join(f"{name}={int(value)}" for name, value in tiles._asdict().items())


def compare(expected: Any) -> Callable[[np.ndarray], tuple[float, float]]:
    """`Work.errors` against rows that are expected."""
    wanted = np.asarray(expected, np.float32)

    def errors(found: np.ndarray) -> tuple[float, float]:
        apart = np.asarray(found, np.float32) - wanted
        return float(np.linalg.norm(apart) / np.linalg.norm(wanted)), float(np.abs(apart).max())

    return errors


def spread(count: int, most: int) -> np.ndarray:
    """Up to `most` of the numbers below `count`, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int32))


def nothing(out: jax.Array) -> jax.Array:
    """Zero, known only when `out` is there: what is added to an integer makes a call wait.

    A launch of its own, of a microsecond or two.
    """
    return (out[(0,) * out.ndim] == -12345).astype(jnp.int32)


def num_sets(call_bytes: float) -> int:
    """Sets of operands, so that all together are not found in the cache."""
    return int(min(max(-(-CACHE_BYTES // max(call_bytes, 1)), 2), MAX_CALLS))


def draw(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    """Random numbers, made on the device."""

    def normal(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)

    return jax.jit(normal)(jax.random.key(seed))
