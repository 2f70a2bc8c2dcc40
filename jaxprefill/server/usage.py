"""How many tokens a call took."""

from collections.abc import Sequence
from typing import Any

from jaxprefill.collector import Collector
from jaxprefill.request import Completion


def usage_of(collectors: Sequence[Collector]) -> dict[str, Any]:
    """OpenAI's `usage`: a prompt counts once, however many choices it has."""
    firsts = [collector for collector in collectors if collector.request.index == 0]
    return make_usage(
        prompt=sum(collector.request.prompt_length for collector in firsts),
        generated=sum(len(collector.tokens) for collector in collectors),
        cached=sum(collector.cached_tokens for collector in firsts),
    )


def usage_of_prompts(completions: Sequence[Completion]) -> dict[str, Any]:
    """OpenAI's `usage` of prompts that were only read."""
    return make_usage(
        prompt=sum(one.prompt_tokens for one in completions),
        cached=sum(one.cached_tokens for one in completions),
    )


def make_usage(*, prompt: int, generated: int = 0, cached: int = 0) -> dict[str, Any]:
    """OpenAI's `usage` of these counts."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
