"""A dispatched step: which head results it asked for, and how they come apart again by request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.cache.prefix import PrefixNode
from jaxprefill.device_state import DeviceState
from jaxprefill.sampling.pack import RowToSample
from jaxprefill.sampling.runner import (
    HeadRunner,
    PendingScores,
    PendingTokens,
    RowToScore,
    SampledToken,
)
from jaxprefill.scheduler import RequestState


class RowResults(NamedTuple):
    """What one step found for one request.

    Attributes:
        first_position: prompt position of the first of `logprobs`.
        nodes: the prefix pages that may keep the logprobs.
        labels: scores of the request's label ids.
    """

    state: RequestState
    first_position: int
    nodes: Sequence[PrefixNode]
    token: SampledToken | None
    logprobs: list[float]
    labels: list[float]


@dataclass(frozen=True)
class PendingStep:
    """Results on their way to the host; rows as in the batch."""

    rows: list[tuple[RequestState, BatchRow, Sequence[PrefixNode]]]
    tokens: PendingTokens | None
    scores: PendingScores | None
    logits: PendingScores | None

    def read(self) -> Iterator[RowResults]:
        """Waits for the device; one result per row of the batch."""
        tokens = iter(self.tokens.read() if self.tokens is not None else ())
        scores = iter(self.scores.read().tolist() if self.scores is not None else ())
        logits = iter(self.logits.read().tolist() if self.logits is not None else ())
        for state, row, nodes in self.rows:
            offset, targets = row.score_ids
            labels = scores if state.request.is_label_logprob else logits
            yield RowResults(
                state=state,
                first_position=row.kv_len - row.q_len + offset + 1,
                nodes=nodes,
                token=next(tokens) if row.sample is not None else None,
                logprobs=[next(scores) for _ in targets],
                labels=[next(labels) for _ in row.label_ids],
            )


def dispatch_heads(
    heads: HeadRunner, state: DeviceState, batch: Batch, states: list[RequestState]
) -> PendingStep:
    """Dispatches every head that the batch's rows ask for, behind its body."""
    to_sample: list[RowToSample] = []
    to_score: list[RowToScore] = []
    to_logit: list[RowToScore] = []
    at = 0
    for request_state, row in zip(states, batch.rows, strict=True):
        offset, targets = row.score_ids
        to_score += [RowToScore(at + offset + i, target) for i, target in enumerate(targets)]
        at += row.q_len
        labels = [RowToScore(at - 1, label) for label in row.label_ids]
        if request_state.request.is_label_logprob:
            to_score += labels
        else:
            to_logit += labels
        if row.sample is not None:
            _start_slot(heads, state, request_state)
            to_sample.append(RowToSample(at - 1, row.slot, row.sample))
    return PendingStep(
        rows=[(one, row, one.lease.nodes) for one, row in zip(states, batch.rows, strict=True)],
        tokens=heads.sample(state, to_sample) if to_sample else None,
        scores=heads.score(state, to_score) if to_score else None,
        logits=heads.logits(state, to_logit) if to_logit else None,
    )


def _start_slot(heads: HeadRunner, state: DeviceState, request_state: RequestState) -> None:
    """Once per admission: the device learns the request's bias and history."""
    if not request_state.is_slot_ready and request_state.slot is not None:
        heads.start_slot(state, request_state.slot, request_state.request, request_state.output_ids)
        request_state.is_slot_ready = True
