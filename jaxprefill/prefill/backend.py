"""Which way prefill runs where the user leaves it open. Looks at no device; imports no jax.

A backend that the user named is taken as it is: no rule here is asked.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Literal, NamedTuple

from jaxprefill.config import ModelConfig, PrefillBackend

PrefillPath = Literal["full", "layerwise", "eager"]
_MANY_RUNS = 8


class ChosenBackend(NamedTuple):
    """How prefill runs, and why so; "" where the user said so."""

    path: PrefillPath
    why: str = ""


def choose_prefill_backend(
    asked: PrefillBackend, model: ModelConfig, *, platform: str
) -> ChosenBackend:
    """`full`, unless a rule speaks against it or the user named one."""
    if asked != "auto":
        return ChosenBackend(asked)
    reasons = (rule(model, platform) for rule in _RULES_AGAINST_FULL)
    found = next((reason for reason in reasons if reason), None)
    if found is None:
        return ChosenBackend("full", "one executable a shape is the fastest way")
    return ChosenBackend("layerwise", found)


def _alternating_layers(model: ModelConfig, platform: str) -> str | None:
    """On a CPU a body holds each run of equal layers anew, and XLA compiles every one."""
    latent = model.latent
    kinds = zip(latent.layer_kinds, latent.hash_layers, strict=True) if latent else model.windows
    runs = sum(1 for _ in groupby(kinds))
    if platform != "cpu" or runs <= _MANY_RUNS:
        return None
    return f"its layers change kind {runs - 1} times, and full would compile {runs} parts a shape"


# Each says why the whole pass should not be one executable, or None.
_RULES_AGAINST_FULL: tuple[Callable[[ModelConfig, str], str | None], ...] = (_alternating_layers,)
