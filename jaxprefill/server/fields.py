"""Body fields that several routes share, and the SamplingParams that they describe."""

from typing import Any

import msgspec

from jaxprefill.errors import RequestError
from jaxprefill.request import SamplingParams
from jaxprefill.server.body import wrong


class BaseBody(msgspec.Struct, kw_only=True):
    """What every body may name. `rid` is SGLang's name for `request_id`."""

    model: str | None = None
    rid: str | None = None
    request_id: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage`: a last chunk without choices tells the usage."""

    include_usage: bool | None = None


class SamplingFields(BaseBody, kw_only=True):
    """How to choose tokens: OpenAI's names and vLLM's additions."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = None

    def sampling_params(self, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The parameters; raises RequestError where one is out of range."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            n=self.n,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_bias(self.logit_bias),
            logprobs=logprobs,
        )

    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage; raises RequestError without a stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options must be left out unless stream is true", param="stream_options"
            )
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """JSON has texts for keys."""
    for token in given or ():
        if not token.isascii() or not token.isdigit() or len(token) > 20:
            raise wrong("logit_bias", "an object whose keys are token ids", token)
    return None if given is None else dict(zip(map(int, given), given.values(), strict=True))
