"""What a latency benchmark measures, as text and as numbers. Imports no jax."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`num_tokens` new tokens of `num_requests`, each behind `prefix` cached ones."""

    num_tokens: int
    num_requests: int
    prefix: int
    is_decode: bool

    @staticmethod
    def parse(text: str) -> "Case":
        """From "30x1+4096" or "d16+512"."""
        body, _, prefix = text.strip().partition("+")
        if body.startswith("d"):
            slots = int(body[1:])
            return Case(slots, slots, int(prefix or 0), True)
        tokens, _, requests = body.partition("x")
        return Case(int(tokens), int(requests or 1), int(prefix or 0), False)

    def lens(self) -> list[int]:
        """New tokens of each request, as even as can be."""
        share, extra = divmod(self.num_tokens, self.num_requests)
        return [share + (index < extra) for index in range(self.num_requests)]
