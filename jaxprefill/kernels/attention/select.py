"""The ordered list of attention backends, and the choice among them at start-up."""

from jaxprefill.errors import ConfigError, KernelUnsupported
from jaxprefill.kernels.attention.api import AttentionBackend
from jaxprefill.kernels.attention.capabilities import AttentionNeeds
from jaxprefill.kernels.attention.hybrid import hybrid
from jaxprefill.kernels.attention.pallas_mosaic_gpu import PALLAS_MOSAIC_GPU
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON
from jaxprefill.kernels.attention.xla import XLA

BACKENDS: tuple[AttentionBackend, ...] = (PALLAS_TRITON, XLA, PALLAS_MOSAIC_GPU)


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
