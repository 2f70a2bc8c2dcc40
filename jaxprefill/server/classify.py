"""POST /v1/classify: which label each text has, and how likely each is.

With `labels`, texts, or `label_token_ids`, a language model says how likely each is to follow the
text, in shares that add up to 1; a label's tokens are those of its text alone, so a leading space
is part of it. Without them the model's own classifier answers, if its checkpoint has one;
`use_activation` false then asks for its logits. The label told is the likeliest, of equals the
first. Input, in all forms that embeddings take, may fill the context.
"""

from collections.abc import Callable
from typing import Any

from jaxprefill.admission import Prompt
from jaxprefill.errors import RequestError
from jaxprefill.readings import Reading, Readings
from jaxprefill.server.completions import prompts_of
from jaxprefill.server.context import Call, size_of
from jaxprefill.server.fields import BaseBody
from jaxprefill.server.usage import usage_of_prompts


class ClassifyBody(BaseBody, kw_only=True):
    """`input` is a text, ids, or a list of either."""

    input: Any = None
    labels: Any = None
    label_token_ids: Any = None
    use_activation: bool = True


async def classify(call: Call, body: ClassifyBody) -> Any:
    """Answers one body."""
    texts = prompts_of(body.input, "input")
    names, make = _names(call, body), _reading(call, body, texts)
    labels = body.labels if isinstance(body.labels, list) else []
    rows, completions = await call.read(
        make,
        name="input",
        count=len(texts),
        size=size_of(texts) * max(len(labels), 1) + size_of(labels) * len(texts),
    )
    return {
        "id": f"classify-{call.request_id}",
        "object": "list",
        "created": call.created,
        "model": call.served_name(body.model),
        "data": [
            {
                "index": index,
                "label": names[row.index(max(row))],
                "probs": row,
                "num_classes": len(row),
            }
            for index, row in enumerate(rows)
        ],
        "usage": usage_of_prompts(completions),
    }


def _reading(
    call: Call, body: ClassifyBody, texts: list[Prompt]
) -> Callable[[Readings], Reading[list[list[float]]]]:
    if body.labels is not None:
        return lambda readings: readings.choose(texts, body.labels, name="input")
    if body.label_token_ids is not None:
        return lambda readings: readings.label_shares(texts, body.label_token_ids, name="input")
    if call.model.config.classifier is None:
        raise RequestError(
            "labels or label_token_ids must be given, as this model has no classifier of its own",
            param="labels",
        )
    return lambda readings: readings.classify(
        texts, apply_activation=body.use_activation, name="input"
    ).then(lambda scores: scores.tolist())


def _names(call: Call, body: ClassifyBody) -> list[str]:
    """What the labels are called, in the order of the numbers."""
    if body.labels is not None and body.label_token_ids is not None:
        raise RequestError(
            "label_token_ids must be left out beside labels", param="label_token_ids"
        )
    if body.labels is not None:
        return body.labels
    if body.label_token_ids is not None:
        ids = call.context.admission().label_ids(body.label_token_ids)
        return [call.context.token_texts().text(token) for token in ids]
    classifier = call.model.config.classifier
    return list(classifier.labels) if classifier is not None else []
