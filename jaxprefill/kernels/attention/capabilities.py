"""What attention backends can do, and what a model asks of one. Imports no jax.

A capability is a field of `Capabilities` and nothing else: what a backend does not declare it does
not have, and what is made of several backends can do what all of them can, whatever the field.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple


class AttentionSpec(NamedTuple):
    """What a kind of layer asks of attention beyond causality; static, so compiled in.

    Attributes:
        window: the most recent keys a query sees, its own among them; None: all.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); None: as they are.
        has_sinks: every query head has a score that takes part in the softmax and has no value.
    """

    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


CAUSAL = AttentionSpec()


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What is asked of a backend at start-up.

    Attributes:
        specs: of every kind of layer.
        group: query heads of one KV head.
        compute_capability: of an NVIDIA GPU, as "9.0"; None: no such device.
        has_max_context: some executables are bounded by a context below the longest.
    """

    platform: str
    dtype: str
    page_size: int
    head_dim: int
    specs: tuple[AttentionSpec, ...] = (CAUSAL,)
    group: int = 1
    compute_capability: str | None = None
    has_max_context: bool = False

    def __str__(self) -> str:
        return (
            f"{self.dtype} on {self.platform} with pages of {self.page_size} and "
            f"head dim {self.head_dim}"
        )


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can serve. Sets, limits and flags only: `combined` knows how these join.

    Attributes:
        compute_capabilities: of NVIDIA GPUs; None: any device of the platforms.
        page_sizes: None: any up to `max_page_size`.
        head_dims: None: any.
        has_odd_groups: takes an odd number of query heads a KV head.
        has_max_context: what it compiles is bounded by a shape's max_context.
        takes_any_tiles: works through a tile list that another backend planned.
    """

    platforms: frozenset[str]
    dtypes: frozenset[str]
    max_page_size: int
    compute_capabilities: frozenset[str] | None = None
    page_sizes: frozenset[int] | None = None
    head_dims: frozenset[int] | None = None
    has_odd_groups: bool = False
    has_window: bool = False
    has_soft_cap: bool = False
    has_sinks: bool = False
    has_max_context: bool = False
    takes_any_tiles: bool = False

    def lacks(self, needs: AttentionNeeds) -> str | None:
        """The first need that is not met, in words, or None."""
        return next(self._lacking(needs), None)

    def _lacking(self, needs: AttentionNeeds) -> Iterator[str]:
        if needs.platform not in self.platforms:
            yield f"runs on {_joined(self.platforms)}, not on {needs.platform}"
        chips, chip = self.compute_capabilities, needs.compute_capability
        if chips is not None and chip not in chips:
            yield f"runs on compute capability {_joined(chips)}, not on {chip or 'another chip'}"
        if needs.dtype not in self.dtypes:
            yield f"takes {_joined(self.dtypes)}, not {needs.dtype}"
        if needs.page_size > self.max_page_size:
            yield f"takes pages of up to {self.max_page_size} tokens, not {needs.page_size}"
        if self.page_sizes is not None and needs.page_size not in self.page_sizes:
            yield f"takes pages of {_joined(self.page_sizes)} tokens, not {needs.page_size}"
        if needs.group % 2 and not self.has_odd_groups:
            yield f"takes an even number of query heads a KV head, not {needs.group}"
        if self.head_dims is not None and needs.head_dim not in self.head_dims:
            yield f"takes head dims {_joined(self.head_dims)}, not {needs.head_dim}"
        for spec in needs.specs:
            yield from self._lacking_of(spec)
        if needs.has_max_context and not self.has_max_context:
            yield "is not bounded by prefill_max_context, and it is set"

    def _lacking_of(self, spec: AttentionSpec) -> Iterator[str]:
        if spec.window is not None and not self.has_window:
            yield f"has no sliding window, and {spec.window} is asked"
        if spec.soft_cap is not None and not self.has_soft_cap:
            yield f"caps no scores, and {spec.soft_cap:g} is asked"
        if spec.has_sinks and not self.has_sinks:
            yield "has no attention sinks, and they are asked"


def combined(*parts: Capabilities) -> Capabilities:
    """What all of several backends can do, field by field.

    Raises:
        TypeError: a field is neither a set, a limit nor a flag.
    """
    joined = {
        item.name: _meet(item.name, [getattr(part, item.name) for part in parts])
        for item in fields(Capabilities)
    }
    return Capabilities(**joined)


def _meet(name: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]  # None: no limit
    if not known:
        return None
    if all(isinstance(value, frozenset) for value in known):
        return frozenset.intersection(*known)
    if all(isinstance(value, (bool, int)) for value in known):
        return min(known)  # of flags: whether all are set
    raise TypeError(f"capability {name} must be a set, a limit or a flag, got {known}")


def _joined(values: frozenset[Any]) -> str:
    return ", ".join(map(str, sorted(values)))
