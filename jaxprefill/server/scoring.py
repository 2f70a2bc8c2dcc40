"""POST /v1/score, /v1/rerank and /rerank: how well texts answer, as numbers.

/v1/score takes one of two shapes.

`{query, items, label_token_ids}`, as SGLang: how likely each label is as the token after query +
item (`item_first`: item + query), which are joined as texts if they are texts, as ids if they are
ids. `apply_softmax` makes shares of the labels that add up to 1; without it, the default, they are
probabilities among all tokens. Rows stand in the order of the items, numbers in that of the labels,
which may repeat. Query and item may fill the context.

`{text_1, text_2}` or `{queries, documents}`, as vLLM: one number a pair, by a reranker. One text
goes with every text of the other side; two lists of one length go pair by pair.

/rerank sorts `documents`, texts or objects with a `text`, by relevance to `query`, the best first,
those of equal relevance in their order; `top_n` keeps the first. Documents come back only with
`return_documents`. `instruction` says to rerankers that read one what counts as an answer.
"""

from typing import Any

from jaxprefill.errors import RequestError
from jaxprefill.server.body import wrong
from jaxprefill.server.context import Call, check_batch, size_of
from jaxprefill.server.fields import BaseBody
from jaxprefill.server.usage import usage_of_prompts

_LABEL_SHAPE = ("query", "items", "label_token_ids")
_PAIR_SHAPES = (("text_1", "text_2"), ("queries", "documents"))


class ScoreBody(BaseBody, kw_only=True):
    """The fields of both shapes."""

    query: Any = None
    items: Any = None
    label_token_ids: Any = None
    apply_softmax: bool = False
    item_first: bool = False
    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    instruction: str | None = None


class RerankBody(BaseBody, kw_only=True):
    """The fields of Cohere's and Jina's rerankers."""

    query: str | None = None
    documents: Any = None
    top_n: int | None = None
    return_documents: bool = False
    instruction: str | None = None


async def score(call: Call, body: ScoreBody) -> Any:
    """Answers one body of either shape."""
    for names in _PAIR_SHAPES:
        if any(getattr(body, name) is not None for name in names):
            return await _score_pairs(call, body, names)
    return await _score_labels(call, body)


async def _score_labels(call: Call, body: ScoreBody) -> dict[str, Any]:
    if body.query is None or body.items is None:
        missing = "query" if body.query is None else "items"
        shapes = " or ".join(f"{{{', '.join(each)}}}" for each in (_LABEL_SHAPE, *_PAIR_SHAPES))
        raise RequestError(f"{missing} must be given: a body holds {shapes}", param=missing)
    if isinstance(body.items, list) and not body.items:
        raise wrong("items", "a list of at least one text or list of ids", body.items)
    count = len(body.items) if isinstance(body.items, list) else 1
    scores, completions = await call.read(
        lambda readings: readings.score(
            body.query,
            body.items,
            body.label_token_ids,
            apply_softmax=body.apply_softmax,
            item_first=body.item_first,
        ),
        name="items",
        count=count,
        size=size_of(body.query) * count + size_of(body.items),
    )
    return {
        "id": f"score-{call.request_id}",
        "object": "scoring",
        "created": call.created,
        "model": call.served_name(body.model),
        "scores": scores,
        "usage": usage_of_prompts(completions),
    }


async def _score_pairs(call: Call, body: ScoreBody, names: tuple[str, str]) -> dict[str, Any]:
    _check_one_shape(body, names)
    pairs = _pairs(body, names)
    scores, completions = await call.read(
        lambda readings: readings.pairs(pairs, instruction=body.instruction, name=names[1]),
        name=names[1],
        count=len(pairs),
        size=sum(len(first) + len(second) for first, second in pairs),
    )
    return {
        "id": f"score-{call.request_id}",
        "object": "list",
        "created": call.created,
        "model": call.served_name(body.model),
        "data": [
            {"index": index, "object": "score", "score": found}
            for index, found in enumerate(scores)
        ],
        "usage": usage_of_prompts(completions),
    }


def _check_one_shape(body: ScoreBody, names: tuple[str, str]) -> None:
    others = {name for shape in (_LABEL_SHAPE, *_PAIR_SHAPES) for name in shape} - set(names)
    for name in sorted(others):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} must be left out beside {' and '.join(names)}", param=name)


def _pairs(body: ScoreBody, names: tuple[str, str]) -> list[tuple[str, str]]:
    """Every pair, in order."""
    firsts, seconds = (_texts(name, getattr(body, name)) for name in names)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    elif len(seconds) == 1:
        seconds = seconds * len(firsts)
    if len(firsts) != len(seconds):
        raise RequestError(
            f"{names[1]} must hold as many texts as {names[0]}, which holds {len(firsts)}, or one "
            f"of them must be a single text; got {len(seconds)}",
            param=names[1],
        )
    return list(zip(firsts, seconds, strict=True))


def _texts(name: str, value: Any) -> list[str]:
    items: Any = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise wrong(name, "a text or a list of at least one", value)
    check_batch(name, len(items))
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise wrong(name, f"a list of texts (its item {index} is none)", item)
    return items


async def rerank(call: Call, body: RerankBody) -> Any:
    """Answers one body."""
    documents = _documents(body.documents)
    if body.query is None:
        raise wrong("query", "a text", None)
    if body.top_n is not None and body.top_n < 1:
        raise wrong("top_n", "an integer of at least 1", body.top_n)
    scores, completions = await call.read(
        lambda readings: readings.rerank(body.query, documents, body.instruction),
        name="documents",
        count=len(documents),
        size=size_of(documents) + len(body.query) * len(documents),
    )
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results: list[dict[str, Any]] = []
    for index in best:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return {
        "id": f"rerank-{call.request_id}",
        "model": call.served_name(body.model),
        "results": results,
        "usage": usage_of_prompts(completions),
    }


def _documents(given: Any) -> list[str]:
    if not isinstance(given, list):
        raise wrong("documents", "a list of texts", given)
    check_batch("documents", len(given))
    texts = [item.get("text") if isinstance(item, dict) else item for item in given]
    return _texts("documents", texts)
