"""Which shapes are compiled: ladders of token buckets, request slots and max contexts.

Pure integers; imports no jax, so that every executable can be listed before a device is touched.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxprefill.errors import ConfigError

# Below ~64 tokens an H200's step time is flat; above 128, steps of at most 1.5x bound the padding.
# None of 96: 128 rows suit the tiles of products better (8B shape: 5.34 ms, 96 rows 5.46).
GPU_BUCKETS = (
    *(16, 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536),
    *(2048, 2560, 3072, 4096, 5120, 6144, 8192),
)
# On a CPU time grows with the padded tokens; each shape costs two core-seconds of compilation.
CPU_BUCKETS = (16, 32, 64, 128, 256, 512, 1024)


class ShapeKey(NamedTuple):
    """Identity of a compiled shape.

    Attributes:
        num_tokens: the bucket, padding included.
        num_slots: request slots; unused ones hold sentinel requests of length 0.
        max_context: longest kv_len of any row, in tokens.
    """

    num_tokens: int
    num_slots: int
    max_context: int

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.num_slots}x{self.max_context}"


@dataclass(frozen=True)
class BucketLadder:
    """Sorted token buckets, all with the same slots, at one or several max contexts.

    Raises:
        ConfigError: a bucket, slot count or context is not positive.
    """

    buckets: tuple[int, ...]
    num_slots: int
    max_contexts: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("buckets", "max_contexts"):
            values = tuple(sorted(set(getattr(self, name))))
            if not values or values[0] < 1:
                raise ConfigError(f"{name} must be positive counts, got {getattr(self, name)}")
            object.__setattr__(self, name, values)
        if self.num_slots < 1:
            raise ConfigError(f"request slots must be at least 1, got {self.num_slots}")

    @property
    def keys(self) -> tuple[ShapeKey, ...]:
        """Every shape, largest first: the order of compilation, so memory problems show first."""
        return tuple(
            ShapeKey(tokens, self.num_slots, context)
            for tokens in reversed(self.buckets)
            for context in reversed(self.max_contexts)
        )

    def pick(self, num_tokens: int, max_context: int) -> ShapeKey | None:
        """The smallest shape that holds both counts, or None."""
        bucket = at_least(self.buckets, num_tokens)
        context = at_least(self.max_contexts, max_context)
        if bucket is None or context is None:
            return None
        return ShapeKey(bucket, self.num_slots, context)


def at_least(values: Sequence[int], wanted: int) -> int | None:
    """The smallest of ascending `values` that is not below `wanted`, or None."""
    at = bisect_left(values, wanted)
    return values[at] if at < len(values) else None


def upstream_buckets(max_tokens: int) -> tuple[int, ...]:
    """SGLang's prefill ladder up to `max_tokens` (58 buckets at 8192).

    An off-ladder maximum is not added (SGLang PR 27988).
    """
    steps = [(4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256)]
    steps.append((4608, max(max_tokens, 4608), 512))
    ladder = [count for low, high, step in steps for count in range(low, high + 1, step)]
    return tuple(count for count in ladder if count <= max_tokens)


def cut_ladder(buckets: Iterable[int], max_tokens: int) -> tuple[int, ...]:
    """The buckets below `max_tokens`, and `max_tokens` itself as the last one."""
    return (*sorted(bucket for bucket in buckets if bucket < max_tokens), max_tokens)


def coarse_buckets(max_tokens: int, *, smallest: int = 64, factor: int = 16) -> tuple[int, ...]:
    """Few power-of-two counts up to at least `max_tokens`: the shapes of the eager fallback."""
    top = 1 << (max_tokens - 1).bit_length()
    buckets = [top]
    while buckets[-1] // factor >= smallest:
        buckets.append(buckets[-1] // factor)
    return tuple(sorted(buckets))


def slot_buckets(max_slots: int, *, smallest: int = 1, factor: int = 4) -> tuple[int, ...]:
    """Slot counts of the decode executables, and row counts of the heads."""
    slots = [max(max_slots, smallest)]
    while slots[-1] > smallest:
        slots.append(max(slots[-1] // factor, smallest))
    return tuple(sorted(slots))
