"""The ordered list of attention backends, and the choice among them at start-up."""

from jaxprefill.errors import ConfigError, KernelUnsupported
from jaxprefill.kernels.attention.api import CAUSAL, AttentionBackend, AttentionSpec
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON
from jaxprefill.kernels.attention.xla import XLA

BACKENDS: tuple[AttentionBackend, ...] = (PALLAS_TRITON, XLA)


def select_backend(
    name: str,
    *,
    platform: str,
    dtype: str,
    page_size: int,
    head_dim: int,
    specs: tuple[AttentionSpec, ...] = (CAUSAL,),
) -> AttentionBackend:
    """The named backend, or with "auto" the first that fits; `specs` lists what layers ask.

    Raises:
        ConfigError: no backend has that name.
        KernelUnsupported: none fits; lists every candidate with its reason.
    """
    candidates = [backend for backend in BACKENDS if name in ("auto", backend.name)]
    if not candidates:
        known = ", ".join(backend.name for backend in BACKENDS)
        raise ConfigError(f"attention_backend must be auto or one of {known}, got {name!r}")
    reasons: list[str] = []
    for backend in candidates:
        lacks = (
            backend.capabilities.lacks(
                platform=platform, dtype=dtype, page_size=page_size, head_dim=head_dim, spec=spec
            )
            for spec in specs
        )
        lack = next((lack for lack in lacks if lack), None)
        if lack is None:
            return backend
        reasons.append(f"{backend.name} {lack}")
    raise KernelUnsupported(
        f"no attention backend can serve {dtype} on {platform} with pages of {page_size} and "
        f"head dim {head_dim}: " + "; ".join(reasons)
    )
