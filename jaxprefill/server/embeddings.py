"""POST /v1/embeddings: a vector for every text.

Texts are embedded as they are, at their true lengths, up to the whole context. Lists of ids are
taken as this model's, whatever tokenizer made them. Vectors are pooled, and scaled to length 1, as
the model's files say; `normalize` overrules the second. `dimensions` keeps the first numbers, which
is of use with models trained for that. With `encoding_format` "base64" a vector is the base64 of
its float32 numbers, low byte first: exactly the numbers of "float".
"""

import base64
from typing import Any

import msgspec

from jaxprefill.request import Vector
from jaxprefill.server.body import wrong
from jaxprefill.server.completions import prompts_of
from jaxprefill.server.context import Call, size_of
from jaxprefill.server.fields import BaseBody
from jaxprefill.server.replies import encode
from jaxprefill.server.usage import usage_of_prompts


class EmbeddingBody(BaseBody, kw_only=True):
    """`input` is a text, ids, or a list of either."""

    input: Any = None
    encoding_format: str = "float"
    dimensions: int | None = None
    normalize: bool | None = None


async def embeddings(call: Call, body: EmbeddingBody) -> Any:
    """Answers one body."""
    texts = prompts_of(body.input, "input")
    if body.encoding_format not in ("float", "base64"):
        raise wrong("encoding_format", "float or base64", body.encoding_format)
    vectors, completions = await call.read(
        lambda readings: readings.embed(
            texts, dimensions=body.dimensions, normalize=body.normalize, name="input"
        ),
        name="input",
        count=len(texts),
        size=size_of(texts),
    )
    write = _base64 if body.encoding_format == "base64" else _numbers
    rows = await call.off_loop_if_long(vectors.size, lambda: [write(row) for row in vectors])
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ],
        "model": call.served_name(body.model),
        "usage": usage_of_prompts(completions),
    }


def _numbers(vector: Vector) -> msgspec.Raw:
    """One vector's JSON by itself: all of them in one go would hold up other calls."""
    return msgspec.Raw(encode(vector.tolist()))


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
