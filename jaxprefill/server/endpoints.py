"""What the engine can be asked for in JSON: paths, bodies and handlers, whatever carries them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from jaxprefill.server.chat import ChatBody, chat
from jaxprefill.server.classify import ClassifyBody, classify
from jaxprefill.server.completions import CompletionBody, completions
from jaxprefill.server.context import Call
from jaxprefill.server.embeddings import EmbeddingBody, embeddings
from jaxprefill.server.fields import BaseBody
from jaxprefill.server.generate import GenerateBody, generate
from jaxprefill.server.scoring import RerankBody, ScoreBody, rerank, score


@dataclass(frozen=True)
class Endpoint:
    """A path, the fields of its bodies, and what answers them."""

    path: str
    kind: type[BaseBody]
    handler: Callable[[Call, Any], Awaitable[Any]]


ENDPOINTS = (
    Endpoint("/v1/completions", CompletionBody, completions),
    Endpoint("/v1/chat/completions", ChatBody, chat),
    Endpoint("/v1/embeddings", EmbeddingBody, embeddings),
    Endpoint("/v1/score", ScoreBody, score),
    Endpoint("/v1/rerank", RerankBody, rerank),
    Endpoint("/rerank", RerankBody, rerank),
    Endpoint("/v1/classify", ClassifyBody, classify),
    Endpoint("/generate", GenerateBody, generate),
)
