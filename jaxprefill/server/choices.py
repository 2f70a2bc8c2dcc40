"""Choices as they grow: one driver for whole replies and streams, whatever their layout."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxprefill.collector import Collector
from jaxprefill.request import Completion
from jaxprefill.server.context import Call
from jaxprefill.server.generation import Generation
from jaxprefill.server.logprobs import TokenEntry
from jaxprefill.server.usage import usage_of


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is new of a choice; of a whole reply, all of it.

    Attributes:
        text: new text.
        start: how many of its tokens were told before.
        is_first: nothing was told before.
        done: the completion, if this is its end.
    """

    index: int
    collector: Collector
    text: str
    start: int
    is_first: bool
    done: Completion | None

    def entries(self, *, shift: int = 0) -> list[TokenEntry]:
        """The new tokens with their logprobs; the text before them has `shift` more characters."""
        collector, end = self.collector, len(self.collector.text)
        pairs = zip(collector.tokens[self.start :], collector.offsets[self.start :], strict=True)
        return [
            TokenEntry(token.token, token.logprob, token.top or None, shift + min(offset, end))
            for token, offset in pairs
        ]

    @property
    def num_logprobs(self) -> int:
        """How many numbers it may tell."""
        request, num_tokens = self.collector.request, len(self.collector.tokens) - self.start
        of_prompt = len(self.collector.prompt_logprobs) * (1 + request.num_prompt_top)
        return of_prompt * self.is_first + num_tokens * (1 + (request.params.logprobs or 0))

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return [token.token for token in self.collector.tokens[self.start :]]

    @property
    def ending(self) -> dict[str, Any]:
        """`finish_reason`, and beside it which stop string or id it was."""
        done = self.done
        return {
            "finish_reason": done.finish_reason if done is not None else None,
            "stop_reason": done.stop_reason if done is not None else None,
        }


class Layout(Protocol):
    """How a route writes choices."""

    def envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        """What stands around choices, of a whole reply or of a chunk."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice that a stream shows before the first part, if there is one."""
        ...

    def choice(self, part: Part, *, is_chunk: bool) -> dict[str, Any]:
        """One choice, or what is new of it."""
        ...


async def whole_reply(call: Call, generation: Generation, layout: Layout) -> dict[str, Any]:
    """The reply when all is there; raises what `Generation.updates` raises."""
    whole = await whole_parts(generation)
    choices = [await _choice(call, layout, part, is_chunk=False) for part in whole]
    envelope = layout.envelope(choices, is_chunk=False)
    return envelope | {"usage": usage_of(generation.collectors)}


async def chunks(
    call: Call, generation: Generation, layout: Layout, *, with_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    """Chunks of one choice each, as steps bring text; raises what `Generation.updates` raises."""
    async for part in parts(generation):
        opening = layout.opening(part.index) if part.is_first else None
        if opening is not None:
            yield layout.envelope([opening], is_chunk=True)
        choice = await _choice(call, layout, part, is_chunk=True)
        yield layout.envelope([choice], is_chunk=True)
    if with_usage:
        usage = usage_of(generation.collectors)
        yield layout.envelope([], is_chunk=True) | {"usage": usage}


async def _choice(call: Call, layout: Layout, part: Part, *, is_chunk: bool) -> dict[str, Any]:
    write = partial(layout.choice, part, is_chunk=is_chunk)
    return await call.off_loop_if_long(part.num_logprobs, write)


async def whole_parts(generation: Generation) -> list[Part]:
    """Every choice, when all are there; raises what `Generation.updates` raises."""
    await generation.completions()
    return [
        _part(index, collector, start=0, is_first=True)
        for index, collector in enumerate(generation.collectors)
    ]


async def parts(generation: Generation) -> AsyncGenerator[Part]:
    """What is new of a choice, as steps bring text; raises what `Generation.updates` raises."""
    num_told: dict[int, int] = {}
    changed: set[int] = set()
    async for changed_one in generation.updates():
        changed.add(changed_one)
        for index in sorted(changed):
            collector = generation.collectors[index]
            has_begun = collector.tokens or collector.is_finished
            if not has_begun or not collector.is_prompt_read:
                continue  # the prompt is still being read, by this choice or for it
            changed.discard(index)
            is_first = index not in num_told
            part = _part(index, collector, start=num_told.get(index, 0), is_first=is_first)
            if not part.text and not part.done:
                continue  # half a character, or perhaps a stop string
            num_told[index] = len(collector.tokens)
            yield part


def _part(index: int, collector: Collector, *, start: int, is_first: bool) -> Part:
    return Part(
        index=index,
        collector=collector,
        text=collector.take_text(),
        start=start,
        is_first=is_first,
        done=collector.completion() if collector.is_finished else None,
    )
