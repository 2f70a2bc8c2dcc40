"""What the engine counts while it runs. Host data; imports no jax."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class EngineCounters:
    """Totals since start-up.

    Attributes:
        passes: forward passes by path: full, layerwise, eager, decode.
        executables: forward passes by executable, e.g. "full 64x16x8192".
        padding: tokens computed in vain, by executable.
        fallbacks: passes that fell back, by reason.
        real_tokens: tokens of requests that passes computed.
        padding_tokens: tokens computed beyond those.
        cached_tokens: prompt tokens that the prefix cache spared.
        preemptions: requests that gave their pages back and started again.
        corrupted_requests: requests ended because the model gave a value that is not a number.
    """

    passes: Counter[str] = field(default_factory=Counter[str])
    executables: Counter[str] = field(default_factory=Counter[str])
    padding: Counter[str] = field(default_factory=Counter[str])
    fallbacks: Counter[str] = field(default_factory=Counter[str])
    real_tokens: int = 0
    padding_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    corrupted_requests: int = 0

    def count_pass(self, path: str, executable: str, *, real: int, padded: int) -> None:
        """One forward pass of `real` tokens in a shape of `padded`."""
        self.passes[path] += 1
        self.executables[executable] += 1
        self.padding[executable] += padded - real
        self.real_tokens += real
        self.padding_tokens += padded - real
