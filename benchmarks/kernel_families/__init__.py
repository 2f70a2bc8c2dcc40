"""What each family of kernels is given to do, and what plain JAX makes of it."""

from importlib import import_module

from benchmarks.kernel_runs import Family

FAMILIES = ("attention", "latent_attention", "top_k", "experts", "products")


def family_of(name: str) -> Family:
    """One of FAMILIES; imports what that one needs alone."""
    return import_module(f"benchmarks.kernel_families.{name}").FAMILY
