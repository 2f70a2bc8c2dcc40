"""LLM prefill on JAX/XLA from ahead-of-time compiled executables.

Names resolve on first use, so that host-only modules can be imported without jax.
"""

from importlib import import_module
from importlib.metadata import version

__version__ = version("jaxprefill")

_HOMES = {
    "Engine": "jaxprefill.engine",
    "EngineConfig": "jaxprefill.config",
    "SamplingParams": "jaxprefill.request",
    "embedding_query": "jaxprefill.embeddings",
    "Completion": "jaxprefill.request",
    "JaxPrefillError": "jaxprefill.errors",
    "RequestError": "jaxprefill.errors",
}


def __dir__() -> list[str]:
    return ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxprefill' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
