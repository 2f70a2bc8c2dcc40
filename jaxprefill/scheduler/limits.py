"""The sizes that a batch must keep to."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What the executables hold; the scheduler forms no batch beyond it when splitting would do.

    Attributes:
        max_batch_tokens: tokens of a prefill or mixed step.
        max_batch_requests: request slots of a prefill executable.
        max_running: requests that hold a slot at once.
        prefill_context: longest context a prefill executable takes; longer rows go together.
        context_length: longest prompt plus output.
    """

    max_batch_tokens: int
    max_batch_requests: int
    max_running: int
    prefill_context: int
    context_length: int
