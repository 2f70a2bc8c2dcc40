"""What callers of the Python API may give, in the one form that the engine takes. Host only."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxprefill.admission import Prompt
from jaxprefill.errors import RequestError
from jaxprefill.request import SamplingParams


def as_prompts(prompts: Any, name: str = "prompts") -> list[Prompt]:
    """A list of prompts from one text, one list of ids, or several of either."""
    param = "prompt" if name == "prompts" else name
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise RequestError(
            f"{name} must be texts or lists of token ids, got {prompts!r:.80}", param=param
        )
    items: list[Any] = list(prompts)
    if items and all(np.isscalar(item) and not isinstance(item, str) for item in items):
        return [items]
    for item in items:
        if not isinstance(item, str) and not is_list(item):
            raise RequestError(
                f"{name} must be texts or lists of token ids, got {item!r:.80} among them",
                param=param,
            )
    return items


def is_list(value: Any) -> bool:
    """Whether the value is a sequence of items; bytes are no token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    is_raw = isinstance(value, (bytes, bytearray, memoryview))
    return isinstance(value, Sequence) and not is_raw


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts."""
    one = SamplingParams() if params is None else params
    many: list[Any] = list(one) if isinstance(one, (list, tuple)) else [one] * count
    if len(many) != count or not all(isinstance(one, SamplingParams) for one in many):
        raise RequestError(
            f"params must be a SamplingParams or {count} of them, got {params!r}", param="params"
        )
    return many


def joined_prompts(query: Any, items: list[Prompt], *, item_first: bool = False) -> list[Prompt]:
    """Query and item as one prompt, in this order or the other: both texts, or both ids."""
    if not isinstance(query, str) and not is_list(query):
        raise RequestError(
            f"query must be a text or a list of token ids, got {query!r:.80}", param="query"
        )
    for item in items:
        if isinstance(item, str) != isinstance(query, str):
            raise RequestError(
                f"items must be texts if the query is one, else token ids, got {item!r:.80} "
                f"beside {query!r:.80}",
                param="items",
            )
    if isinstance(query, str):
        return [f"{item}{query}" if item_first else f"{query}{item}" for item in items]
    joined: list[Any] = [[*item, *query] if item_first else [*query, *item] for item in items]
    return joined


def without_padding(ids: tuple[int, ...], pad_id: int | None) -> tuple[int, ...]:
    """The ids up to the last that is not padding, as transformers' classifiers read them.

    Of nothing but padding the first is left.
    """
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]
