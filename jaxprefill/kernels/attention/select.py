"""The ordered list of attention backends, and the choice among them at start-up.

One backend serves an engine's shapes, but for those where another was measured to be faster.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jaxprefill.errors import ConfigError, KernelUnsupported
from jaxprefill.kernels.attention.api import AttentionBackend
from jaxprefill.kernels.attention.capabilities import AttentionNeeds
from jaxprefill.kernels.attention.hybrid import hybrid
from jaxprefill.kernels.attention.pallas_mosaic_gpu import PALLAS_MOSAIC_GPU
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON
from jaxprefill.kernels.attention.xla import XLA

BACKENDS: tuple[AttentionBackend, ...] = (PALLAS_TRITON, XLA, PALLAS_MOSAIC_GPU)


class Faster(NamedTuple):
    """Prefill shapes where a backend was measured to be faster than the first that fits.

    Attributes:
        compute_capability, head_dim: of what was measured.
        least_tokens: of a bucket.
    """

    backend: AttentionBackend
    compute_capability: str
    head_dim: int
    least_tokens: int

    def holds_for(self, needs: AttentionNeeds) -> bool:
        """Whether this is what was measured, and can serve it."""
        measured = (self.compute_capability, self.head_dim)
        is_measured = measured == (needs.compute_capability, needs.head_dim)
        return is_measured and self.backend.lacks(needs) is None


# By `benchmarks.kernels attention` and whole passes; of several that hold for a shape the first.
# H200, Qwen3-8B shape, busy ms with Triton and with Mosaic, 1 | 16 requests: 2048 tokens 51.9, 51.0
# | 48.6, 48.8; 4096 tokens 108.4, 104.8 | 97.5, 96.3; 8192 tokens 230.5, 224.3 | 190.3, 190.0.
FASTER: tuple[Faster, ...] = (Faster(PALLAS_MOSAIC_GPU, "9.0", 128, least_tokens=4096),)


@dataclass(frozen=True)
class AttentionChoice:
    """The backend of each compiled shape. All read and write the same pools."""

    first: AttentionBackend
    faster: tuple[Faster, ...] = ()

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        """Those that serve some shape."""
        return (self.first, *dict.fromkeys(row.backend for row in self.faster))

    def __str__(self) -> str:
        rows = (f"{row.backend.name} from {row.least_tokens} tokens" for row in self.faster)
        return ", ".join((self.first.name, *rows))

    def at(self, num_tokens: int, *, is_decode: bool) -> AttentionBackend:
        """The backend of a shape of so many tokens."""
        rows = () if is_decode else self.faster
        held = (row.backend for row in rows if num_tokens >= row.least_tokens)
        return next(held, self.first)


def choose_backends(name: str, needs: AttentionNeeds) -> AttentionChoice:
    """The named backend for all shapes, or with "auto" for each the fastest that is known.

    Raises as `select_backend` does.
    """
    rows = FASTER if name == "auto" else ()
    faster = tuple(row for row in rows if row.holds_for(needs))
    return AttentionChoice(select_backend(name, needs), faster)


def select_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """The named backend, or with "auto" the first that fits.

    Args:
        name: auto, a backend, or two joined by + (layers with a sliding window + other layers).
        needs: what device and model ask.

    Raises:
        ConfigError: no backend has that name.
        KernelUnsupported: none fits; lists every candidate with its reason.
    """
    candidates = BACKENDS if name == "auto" else (_named(name),)
    lacks = {backend.name: backend.lacks(needs) for backend in candidates}
    for backend in candidates:
        if lacks[backend.name] is None:
            return backend
    raise KernelUnsupported(
        f"no attention backend can serve {needs}: "
        + "; ".join(f"{candidate} {lack}" for candidate, lack in lacks.items())
    )


def _named(name: str) -> AttentionBackend:
    known = {backend.name: backend for backend in BACKENDS}
    parts = name.split("+")
    if len(parts) > 2 or not set(parts) <= set(known):
        raise ConfigError(
            f"attention_backend must be auto, one of {', '.join(known)}, or two joined by + for "
            f"layers with a sliding window and for the others, got {name!r}"
        )
    return hybrid(known[parts[0]], known[parts[-1]])
