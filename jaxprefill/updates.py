"""What a step found, request by request: plain host data that can cross a process border."""

from typing import NamedTuple

from jaxprefill.request import FinishReason, Vector


class SampledToken(NamedTuple):
    """A token, its raw logprob, and the most likely ids with theirs (empty when not computed)."""

    token: int
    logprob: float
    top: dict[int, float]


class RequestUpdate(NamedTuple):
    """What one step found for one request.

    Attributes:
        prompt_logprobs: of the next prompt tokens, in order.
        prompt_top: the most likely ids in their places, where those were asked for.
        hidden_sum: hidden rows of the prompt, added up; several steps' are to be added.
        cached_tokens: prompt tokens that the prefix cache spared.
        finish_reason: there is one in a request's last update.
        times: seconds that it waited for its first step, and from there to its first result, told
            once: with the first token, or with the end.
    """

    request_id: str
    tokens: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top: tuple[dict[int, float], ...] = ()
    label_scores: tuple[float, ...] = ()
    hidden_sum: Vector | None = None
    class_logits: Vector | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    times: tuple[float, float] | None = None


def cut_top(found: SampledToken, count: int) -> dict[int, float]:
    """The `count` likeliest ids, and the token itself whatever its rank, by the same number."""
    likeliest, own = dict(list(found.top.items())[:count]), {found.token: found.logprob}
    return likeliest | own if found.token in likeliest else own | likeliest
