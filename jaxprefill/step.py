"""A dispatched step: which head results it asked for, and how they come apart again by request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxprefill.batch import Batch, BatchRow
from jaxprefill.cache.prefix import PrefixNode
from jaxprefill.device_state import DeviceState
from jaxprefill.request import Vector
from jaxprefill.sampling.pack import RowToSample
from jaxprefill.sampling.pooling import HiddenSpan, PoolingRunner
from jaxprefill.sampling.runner import (
    HeadRunner,
    PendingScores,
    PendingTokens,
    RowToScore,
)
from jaxprefill.scheduler import RequestState
from jaxprefill.updates import SampledToken, cut_top


class RowResults(NamedTuple):
    """What one step found for one request.

    Attributes:
        first_position: prompt position of the first of `logprobs`.
        nodes: the prefix pages that may keep the logprobs.
        tops: the likeliest ids beside each of `logprobs`, where the request wants them.
        labels: scores of the request's label ids.
        hidden_sum: the sum of the hidden rows that the request's embedding reads.
        class_logits: what the classifier says of the request's last token.
    """

    state: RequestState
    first_position: int
    nodes: Sequence[PrefixNode]
    token: SampledToken | None
    logprobs: list[float]
    tops: list[dict[int, float]]
    labels: list[float]
    hidden_sum: Vector | None
    class_logits: Vector | None

    @property
    def has_nan(self) -> bool:
        """Whether any number found is none."""
        numbers = [*self.logprobs, *self.labels, *([self.token.logprob] if self.token else [])]
        vectors = [one for one in (self.hidden_sum, self.class_logits) if one is not None]
        return any(bool(np.isnan(each).any()) for each in (numbers, *vectors))


@dataclass(frozen=True)
class PendingStep:
    """Results on their way to the host; rows as in the batch."""

    rows: list[tuple[RequestState, BatchRow, Sequence[PrefixNode]]]
    tokens: PendingTokens | None
    scores: PendingScores | None
    ranks: PendingTokens | None
    logits: PendingScores | None
    sums: PendingScores | None
    classes: PendingScores | None

    def read(self) -> Iterator[RowResults]:
        """Waits for the device; one result per row of the batch."""
        tokens = iter(self.tokens.read() if self.tokens is not None else ())
        scores = iter(self.scores.read().tolist() if self.scores is not None else ())
        ranks = iter(self.ranks.read() if self.ranks is not None else ())
        logits = iter(self.logits.read().tolist() if self.logits is not None else ())
        sums = iter(self.sums.read() if self.sums is not None else ())
        classes = iter(self.classes.read() if self.classes is not None else ())
        for state, row, nodes in self.rows:
            offset, targets = row.score_ids
            labels = scores if state.request.is_label_logprob else logits
            num_top = state.request.num_prompt_top
            ranked = [next(ranks) for _ in targets] if num_top else []
            yield RowResults(
                state=state,
                first_position=row.kv_len - row.q_len + offset + 1,
                nodes=nodes,
                token=next(tokens) if row.sample is not None else None,
                logprobs=[one.logprob for one in ranked] or [next(scores) for _ in targets],
                tops=[cut_top(one, num_top) for one in ranked],
                labels=[next(labels) for _ in row.label_ids],
                hidden_sum=next(sums) if row.pool_span[1] else None,
                class_logits=next(classes) if row.is_classified else None,
            )


@dataclass(frozen=True)
class Heads:
    """All that reads hidden rows."""

    lm: HeadRunner
    pooling: PoolingRunner

    def warm(self, state: DeviceState, *, is_brief: bool = False) -> None:
        """Runs each executable once, for nobody; or the smallest of each kind."""
        self.lm.warm(state, is_brief=is_brief)
        self.pooling.warm(state)


def dispatch_heads(
    heads: Heads, state: DeviceState, batch: Batch, states: list[RequestState]
) -> PendingStep:
    """Dispatches every head that the batch's rows ask for, behind its body.

    The first chunks of a long prompt ask for none. One sum tells when they are done: else the host
    would dispatch all of them at once, and aborts and requests of higher priority come behind them.
    """
    to_sample: list[RowToSample] = []
    to_score: list[RowToScore] = []
    to_rank: list[RowToScore] = []
    to_logit: list[RowToScore] = []
    to_sum: list[HiddenSpan] = []
    to_classify: list[HiddenSpan] = []
    at = 0
    for request_state, row in zip(states, batch.rows, strict=True):
        offset, targets = row.score_ids
        scored = to_rank if request_state.request.num_prompt_top else to_score
        scored += [RowToScore(at + offset + i, target) for i, target in enumerate(targets)]
        start, count = row.pool_span
        to_sum += [HiddenSpan(at + start, count)] if count else []
        at += row.q_len
        to_classify += [HiddenSpan(at - 1, 1)] if row.is_classified else []
        labels = [RowToScore(at - 1, label) for label in row.label_ids]
        if request_state.request.is_label_logprob:
            to_score += labels
        else:
            to_logit += labels
        if row.sample is not None:
            _start_slot(heads.lm, state, request_state)
            to_sample.append(RowToSample(at - 1, row.slot, row.sample))
    if not (to_sample or to_score or to_rank or to_logit or to_sum or to_classify):
        to_sum.append(HiddenSpan(0, 1))  # nobody's: what gives nothing to read is not waited for
    return PendingStep(
        rows=[(one, row, one.lease.nodes) for one, row in zip(states, batch.rows, strict=True)],
        tokens=heads.lm.sample(state, to_sample) if to_sample else None,
        scores=heads.lm.score(state, to_score) if to_score else None,
        ranks=heads.lm.rank(state, to_rank) if to_rank else None,
        logits=heads.lm.logits(state, to_logit) if to_logit else None,
        sums=heads.pooling.sum_hidden(state, to_sum) if to_sum else None,
        classes=heads.pooling.classify(state, to_classify) if to_classify else None,
    )


def _start_slot(heads: HeadRunner, state: DeviceState, request_state: RequestState) -> None:
    """Once per admission: the device learns the request's bias and history."""
    if not request_state.is_slot_ready and request_state.slot is not None:
        heads.start_slot(state, request_state.slot, request_state.request, request_state.output_ids)
        request_state.is_slot_ready = True
