"""One decision for a group of ranks that must run the same executable: data-parallel attention.

Every rank has requests of its own and shares collectives with the others, which would wait for ever
for one that chose another shape. So before each step every rank tells what it has, and all draw the
same conclusion from the same numbers. Host only; imports no jax.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxprefill.batch import Batch
from jaxprefill.errors import ConfigError, EngineUnavailable
from jaxprefill.prefill.policy import Fallback, FallbackReason, PrefillPolicy, Use, decide
from jaxprefill.prefill.transport import Transport


class Ballot(NamedTuple):
    """What a rank brings to a step, or what all of them bring together; integers only.

    Attributes:
        is_busy: 1 if there is anything to run.
        has_prefill: 1 if some row is more than one sampled token.
        is_eligible: 1 if an executable takes it.
        num_tokens, num_requests: real ones.
        max_context: longest kv_len of any row: cached prefix and new tokens; 0 if unknown.
        is_leaving: 1 if the rank's engine is being closed.
    """

    is_busy: int = 0
    has_prefill: int = 0
    is_eligible: int = 1
    num_tokens: int = 0
    num_requests: int = 0
    max_context: int = 0
    is_leaving: int = 0


_PAUSE_S = 0.003  # between votes where no rank has anything to do
IDLE = Ballot()  # a rank with nothing to do is in nobody's way


def ballot_of(policy: PrefillPolicy, batch: Batch | None) -> Ballot:
    """A rank's ballot on its own batch."""
    if batch is None:
        return IDLE
    # How much is padded depends on the others: the group decides on that.
    alone = decide_batch(replace(policy, max_padding_factor=None), batch)
    return Ballot(
        is_busy=1,
        has_prefill=int(not batch.is_decode),
        is_eligible=int(isinstance(alone, Use)),
        num_tokens=batch.num_tokens,
        num_requests=len(batch.rows),
        max_context=batch.max_context,
    )


def tally(ballots: Sequence[Ballot]) -> Ballot:
    """The group's ballot: eligible and leaving if all are, and the greatest count of each kind."""
    greatest = Ballot(*(max(column) for column in zip(*ballots, strict=True)))
    return greatest._replace(
        is_eligible=min(ballot.is_eligible for ballot in ballots),
        is_leaving=min(ballot.is_leaving for ballot in ballots),
    )


def decide_batch(policy: PrefillPolicy, batch: Batch) -> Use | Fallback:
    """`policy.decide` for one rank's batch alone."""
    return decide(
        policy,
        num_tokens=batch.num_tokens,
        num_requests=len(batch.rows),
        max_context=batch.max_context,
    )


def decide_in_group(policy: PrefillPolicy, batch: Batch, group: Ballot) -> Use | Fallback:
    """The group's executable, or eager for all; each rank keeps its own reason where it has one."""
    if group.is_eligible:
        return decide(
            policy,
            num_tokens=group.num_tokens,
            num_requests=group.num_requests,
            max_context=group.max_context,
        )
    alone = decide_batch(replace(policy, max_padding_factor=None), batch)
    return alone if isinstance(alone, Fallback) else Fallback(FallbackReason.GROUP_VOTE)


class GroupVote:
    """A rank's part in the votes of its group.

    Attributes:
        is_leaving: set by a rank that is being closed; it votes on until all of them are.
        is_over: there will be no other vote, as all have left or one is gone.
    """

    def __init__(self, transport: Transport, policy: PrefillPolicy, *, alike: str = "") -> None:
        """Compares policy and `alike`, what else must be the same on every rank.

        Raises:
            ConfigError: on every rank, where one brings others than the first.
            EngineUnavailable: a rank does not come.
        """
        self.is_leaving = False
        self.is_over = False
        self._transport = transport
        self._policy = policy
        digest = zlib.crc32(f"{policy} {alike}".encode())
        digests = [digest for (digest,) in self._gather((digest,))]
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            raise ConfigError(
                "all ranks of a group must be given the same model and prefill options, but ranks "
                f"{others} differ from rank 0; rank {transport.rank} has {policy} {alike}"
            )

    def agree(self, batch: Batch | None) -> Ballot | None:
        """The group's ballot for the next step, the same on every rank; waits for all of them.

        Args:
            batch: this rank's; None: it has nothing to do, and runs padding if others have.

        Returns:
            None where no rank has anything to do.

        Raises:
            EngineUnavailable: a rank does not answer any more.
        """
        own = ballot_of(self._policy, batch)._replace(is_leaving=int(self.is_leaving))
        group = tally([Ballot(*numbers) for numbers in self._gather(own)])
        self.is_over = bool(group.is_leaving)
        if group.is_busy:
            return group
        if not self.is_over:
            time.sleep(_PAUSE_S)
        return None

    def _gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        try:
            return self._transport.gather(numbers)
        except Exception as error:  # the transport may be the caller's own
            self.is_over = True
            raise EngineUnavailable(
                f"every rank of a group must answer, but rank {self._transport.rank} waited for "
                f"one in vain ({error!r}); start the engines of all ranks anew"
            ) from error
