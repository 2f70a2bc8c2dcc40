"""Calls the head executables and reads their results back; one small array a call."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int32, Shaped

from jaxprefill.device_state import DeviceState
from jaxprefill.kernels.device import begin_reading, read_numbers, spin_until_ready
from jaxprefill.prefill.compiler import Compiled
from jaxprefill.request import Request
from jaxprefill.sampling.head import history_row
from jaxprefill.sampling.pack import (
    RowToSample,
    full_mask,
    is_plain,
    needs_mask,
    pack_rows,
    restrict,
)
from jaxprefill.updates import SampledToken


class RowToScore(NamedTuple):
    """A hidden row and the id whose logprob is wanted there."""

    row: int
    target: int


class HeadRunner:
    """Owns the head executables; picks the smallest row count that holds the rows."""

    def __init__(
        self,
        compiled: Mapping[str, Compiled],
        *,
        sample_rows: Sequence[int],
        score_rows: Sequence[int],
        num_valid: int,
        put: Callable[..., Array],
    ) -> None:
        """`compiled` holds the jobs of `head.head_jobs`; `put` places host data on the device."""
        self._call = {name: entry.call for name, entry in compiled.items()}
        self._sample_rows = sorted(sample_rows)
        self._score_rows = sorted(score_rows)
        self._num_valid = num_valid
        self._put = put
        self._masks: dict[int, Array] = {}

    def prepare(self, state: DeviceState) -> None:
        """Puts the default token masks on the device, once."""
        for rows in self._sample_rows:
            self._masks[rows] = self._put(self._full_mask(state, rows))

    def warm(self, state: DeviceState, *, is_brief: bool = False) -> None:
        """Runs each head once, on rows that write nowhere; or the smallest of each kind.

        Results are read: a copy to the host that outlives the interpreter would end it with an
        abort.
        """
        num_sizes = 1 if is_brief else None
        for size in self._sample_rows[:num_sizes]:
            for is_greedy in (True, False):
                self._sample(state, (), size, is_greedy=is_greedy).read()
        for size in self._score_rows[:num_sizes]:
            self.score(state, [RowToScore(0, 0)] * size).read()
            self.logits(state, [RowToScore(0, 0)] * size).read()
            self.rank(state, [RowToScore(0, 0)] * size).read()

    def start_slot(
        self, state: DeviceState, slot: int, request: Request, generated: list[int]
    ) -> None:
        """Fills the slot's history and bias where the request needs them."""
        vocab = state.bias.shape[1]
        index = np.int32(slot)
        if request.params.has_penalties:
            row = history_row(request.prompt_ids, generated, vocab)
            state.history = self._call["set_history"](state.history, index, row)
        if request.params.logit_bias:
            bias = np.zeros(vocab, np.float32)
            for token, value in request.params.logit_bias.items():
                bias[token] = value
            state.bias = self._call["set_bias"](state.bias, index, bias)

    def sample(self, state: DeviceState, rows: Sequence[RowToSample]) -> "PendingTokens":
        """Dispatches the choice of each row's next token; the device keeps it too."""
        size = next(size for size in self._sample_rows if size >= len(rows))
        is_greedy = all(is_plain(row.spec) for row in rows)
        return self._sample(state, rows, size, is_greedy=is_greedy)

    def _sample(
        self, state: DeviceState, rows: Sequence[RowToSample], size: int, *, is_greedy: bool
    ) -> "PendingTokens":
        buffer = pack_rows(rows, size, no_slot=len(state.last_tokens))
        base = (state.head, state.hidden, state.last_tokens)
        if is_greedy:
            state.last_tokens, out = self._call[f"greedy {size}"](*base, buffer)
        else:
            mask = self._mask(state, rows, size)
            state.last_tokens, state.history, out = self._call[f"general {size}"](
                *base, state.history, state.bias, mask, buffer
            )
        begin_reading(out)
        return PendingTokens(PendingScores([out], len(rows), size))

    def score(self, state: DeviceState, rows: Sequence[RowToScore]) -> "PendingScores":
        """Dispatches the logprobs of rows' targets, in blocks of rows."""
        return self._score(state, rows, "score")

    def logits(self, state: DeviceState, rows: Sequence[RowToScore]) -> "PendingScores":
        """Dispatches the raw logits of rows' targets, in blocks of rows."""
        return self._score(state, rows, "logits")

    def rank(self, state: DeviceState, rows: Sequence[RowToScore]) -> "PendingTokens":
        """Dispatches the logprobs of rows' targets, with the likeliest ids beside each."""
        return PendingTokens(self._score(state, rows, "rank"))

    def _score(self, state: DeviceState, rows: Sequence[RowToScore], kind: str) -> "PendingScores":
        def call(buffer: Int32[np.ndarray, "r 2"]) -> Array:
            return self._call[f"{kind} {len(buffer)}"](state.head, state.hidden, buffer)

        return dispatch_pairs(call, rows, self._score_rows)

    def _mask(
        self, state: DeviceState, rows: Sequence[RowToSample], size: int
    ) -> Array | Int32[np.ndarray, "rows words"]:
        if not any(needs_mask(row.spec) for row in rows):
            return self._masks[size]
        mask = self._full_mask(state, size)
        for line, row in enumerate(rows):
            if needs_mask(row.spec):
                restrict(mask, line, row.spec)
        return mask

    def _full_mask(self, state: DeviceState, rows: int) -> Int32[np.ndarray, "rows words"]:
        return full_mask(rows, num_valid=self._num_valid, vocab_size=state.bias.shape[1])


def dispatch_pairs(
    call: Callable[[Int32[np.ndarray, "r 2"]], Array],
    pairs: Sequence[tuple[int, int]],
    sizes: Sequence[int],
) -> "PendingScores":
    """Calls an executable on pairs of numbers, in blocks of its row counts `sizes`, ascending.

    A block takes the smallest count that holds it; the rest of its lines are zero.
    """
    blocks: list[Array] = []
    for start in range(0, len(pairs), sizes[-1]):
        part = pairs[start : start + sizes[-1]]
        buffer = np.zeros((next(size for size in sizes if size >= len(part)), 2), np.int32)
        buffer[: len(part)] = part
        block = call(buffer)
        begin_reading(block)
        blocks.append(block)
    return PendingScores(blocks, len(pairs), sizes[-1])


class PendingTokens(NamedTuple):
    """Tokens on their way to the host."""

    lines: "PendingScores"

    def read(self) -> list[SampledToken]:
        """Waits for the device."""
        words = self.lines.read()
        num_top = (words.shape[1] - 2) // 2
        floats = words.view(np.float32)
        return [
            SampledToken(
                int(line[0]),
                float(values[1]),
                dict(
                    zip(line[2 : 2 + num_top].tolist(), values[2 + num_top :].tolist(), strict=True)
                ),
            )
            for line, values in zip(words, floats, strict=True)
        ]


class PendingScores(NamedTuple):
    """Numbers of rows on their way to the host."""

    blocks: list[Array]
    num_rows: int
    block_rows: int

    def read(self) -> Shaped[np.ndarray, "rows ..."]:
        """Waits for the device."""
        if self.blocks:
            spin_until_ready(self.blocks[-1])
        parts = [read_numbers(block) for block in self.blocks]
        whole = [part[: self.block_rows] for part in parts[:-1]]
        tail = self.num_rows - self.block_rows * len(whole)
        return np.concatenate([*whole, parts[-1][:tail]]) if parts else np.zeros(0, np.float32)
