"""Per-row sampling parameters as one int32 buffer. Host integers; imports no jax."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxprefill.batch import SampleSpec

# Words of a row; floats are stored by their bits.
INT_FIELDS = (
    "row",
    "slot",
    "top_k",
    "seed_low",
    "seed_high",
    "position",
    "has_history",
    "has_bias",
)
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
NUM_WORDS = len(INT_FIELDS) + len(FLOAT_FIELDS)


class RowToSample(NamedTuple):
    """A hidden row whose next token is wanted."""

    row: int
    slot: int
    spec: SampleSpec


def is_plain(spec: SampleSpec) -> bool:
    """Whether argmax of the raw logits is all that is asked: the greedy head serves it."""
    params = spec.params
    return (
        params.temperature == 0
        and not params.has_penalties
        and not params.logit_bias
        and not params.logprobs
        and not needs_mask(spec)
    )


def needs_mask(spec: SampleSpec) -> bool:
    """Whether ids are banned at this step: by a grammar, or stop ids before min_tokens."""
    return spec.allowed is not None or bans_stops(spec)


def bans_stops(spec: SampleSpec) -> bool:
    """Whether stop ids are banned at this step."""
    return spec.num_generated < spec.params.min_tokens and bool(spec.stop_ids)


def restrict(mask: Int32[np.ndarray, "rows words"], line: int, spec: SampleSpec) -> None:
    """Clears what the row may not choose; its grammar goes before min_tokens."""
    if spec.allowed is not None:
        mask[line] &= spec.allowed
    before = mask[line].copy()
    if bans_stops(spec):
        ban(mask, line, sorted(spec.stop_ids))
    if not mask[line].any():
        mask[line] = before


def pack_rows(
    rows: Sequence[RowToSample], num_rows: int, *, no_slot: int
) -> Int32[np.ndarray, "rows words"]:
    """One line per row; unused lines sample greedily from row 0 and write to `no_slot`."""
    buffer = np.zeros((num_rows, NUM_WORDS), np.int32)
    floats = buffer[:, len(INT_FIELDS) :].view(np.float32)
    buffer[:, INT_FIELDS.index("slot")] = no_slot
    floats[:] = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    for line, (row, slot, spec) in enumerate(rows):
        params = spec.params
        seed = np.array([spec.seed & (2**64 - 1)], np.uint64).view(np.int32)  # low, high
        buffer[line, : len(INT_FIELDS)] = (
            row,
            slot,
            min(max(params.top_k, 0), 2**31 - 1),
            seed[0],
            seed[1],
            spec.position,
            params.has_penalties,
            bool(params.logit_bias),
        )
        floats[line] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
    buffer.flags.writeable = False
    return buffer


def mask_words(vocab_size: int) -> int:
    """int32 words of a token mask: one bit an id."""
    return -(-vocab_size // 32)


def full_mask(num_rows: int, *, num_valid: int, vocab_size: int) -> Int32[np.ndarray, "rows words"]:
    """A mask that allows the ids the tokenizer knows and no others."""
    bits = np.zeros(mask_words(vocab_size) * 32, np.uint8)
    bits[:num_valid] = 1
    words = np.packbits(bits, bitorder="little").view(np.int32)
    return np.tile(words, (num_rows, 1))


def ban(mask: Int32[np.ndarray, "rows words"], line: int, ids: Sequence[int]) -> None:
    """Clears the bits of `ids` in one line of a mask."""
    words = mask[line].view(np.uint32)
    for token in ids:
        words[token // 32] &= np.uint32(~(1 << (token % 32)) & 0xFFFFFFFF)
