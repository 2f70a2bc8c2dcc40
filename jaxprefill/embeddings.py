"""From pooled rows to what a caller gets: embeddings and class scores. Host only."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxprefill.config import ClassActivation, ClassifierConfig, ModelConfig
from jaxprefill.errors import RequestError
from jaxprefill.request import Vector

Matrix = NDArray[np.float32]
_LARGEST = float(np.finfo(np.float32).max)
SEARCH_TASK = "Given a web search query, retrieve relevant passages that answer the query"


def embedding_query(query: str, task: str = SEARCH_TASK) -> str:
    """A search query as Qwen3-Embedding wants it; documents are embedded as they are.

    Args:
        query: what is searched for.
        task: one sentence, best in English, that says what is to be found.
    """
    return f"Instruct: {task}\nQuery:{query}"


def checked_dimensions(dimensions: Any, normalize: Any, hidden_size: int) -> int:
    """How many numbers an embedding has; None: all.

    Raises:
        RequestError: there are not as many, or `normalize` is neither true, false nor None.
    """
    if normalize is not None and not isinstance(normalize, bool):
        raise RequestError(
            f"normalize must be true, false or None, got {normalize!r}", param="normalize"
        )
    wanted = hidden_size if dimensions is None else dimensions
    is_count = isinstance(wanted, (int, np.integer)) and not isinstance(wanted, bool)
    if not is_count or not 1 <= wanted <= hidden_size:
        raise RequestError(
            f"dimensions must be an integer, 1 to the model's {hidden_size}, got {wanted!r}",
            param="dimensions",
        )
    return int(wanted)


def stacked(rows: Sequence[Vector | None], width: int) -> Matrix:
    """Rows as one float32 matrix [n, width]; [0, width] of none."""
    found = [row for row in rows if row is not None]
    assert len(found) == len(rows), "every request was asked for its row"
    return np.stack(found) if found else np.zeros((0, width), np.float32)


def shaped_embeddings(pooled: Matrix, *, dimensions: int, is_normalized: bool) -> Matrix:
    """The first `dimensions` numbers of each row [n, E], then of length 1 (arXiv 2205.13147)."""
    vectors = np.clip(pooled[:, :dimensions].astype(np.float64), -_LARGEST, _LARGEST)
    if is_normalized:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return vectors.astype(np.float32)


def class_scores(logits: Matrix, activation: ClassActivation) -> Matrix:
    """Scores [n, labels]: probabilities that add up to 1, or each by itself, or the logits."""
    values = np.clip(logits.astype(np.float64), -_LARGEST, _LARGEST)
    if activation == "softmax":
        values = _softmax(values)
    if activation == "sigmoid":
        values = np.exp(-np.logaddexp(0, -values))  # never overflows
    return values.astype(np.float32)


def required_classifier(model: ModelConfig) -> ClassifierConfig:
    """The model's classifier.

    Raises:
        RequestError: it has none.
    """
    if model.classifier is None:
        raise RequestError(
            "classify needs a model with a classifier (*ForSequenceClassification), and "
            f"{model.architecture} has none; use score for labels that are tokens",
            param="model",
        )
    return model.classifier


def label_probabilities(
    rows: Sequence[Sequence[float]], *, is_normalised: bool
) -> list[list[float]]:
    """Softmax of each row of logits, or the probabilities of each row of logprobs."""
    if not rows:
        return []
    values = np.asarray(rows, np.float64)
    return (_softmax(values) if is_normalised else np.exp(values)).tolist()


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    finite = np.clip(values, -_LARGEST, _LARGEST)  # of infinite logits none is lost as NaN
    weights = np.exp(finite - finite.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
