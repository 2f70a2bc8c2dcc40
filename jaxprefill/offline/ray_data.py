"""An engine as Ray Data's actors run it: batches of columns in, the same with new columns out.

    dataset.map_batches(
        RayPredictor,
        fn_constructor_kwargs={"model": "demo", "task": "perplexity"},
        compute=ray.data.ActorPoolStrategy(size=2),
        batch_size=512,
    )

Each actor has an engine of its own (`num_gpus=1` gives each a GPU). Ray gives what a lost actor
worked on to another, so no row is lost. Ray itself (extra `ray`) is not imported here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxprefill.engine import Engine
from jaxprefill.errors import ConfigError, RequestError
from jaxprefill.request import SamplingParams

RayTask = Literal["generate", "perplexity", "label", "embed", "classify"]
Batch = Mapping[str, "np.ndarray[Any, Any]"]
Columns = dict[str, "np.ndarray[Any, Any]"]
# Every batch has them all: Ray takes a table's columns from its first block.
_NEW_COLUMNS: Mapping[RayTask, tuple[str, ...]] = {
    "generate": ("generated", "error"),
    "perplexity": ("perplexity", "num_tokens", "error"),
    "label": ("label", "label_scores", "error"),
    "embed": ("embedding", "error"),
    "classify": ("label", "label_scores", "error"),
}


_NO_TEXT: Mapping[str, Any] = {"error": "the text must not be null"}


class RayPredictor:
    """Adds columns to batches: what an engine says of the texts in one of theirs.

    generate     `generated`: the text that follows
    perplexity   `perplexity`, and `num_tokens` of the text
    label        `label`: the likeliest as the text's next token; `label_scores`, adding up to 1
    embed        `embedding`
    classify     `label` and `label_scores` by the model's own classifier

    A row whose text is at fault, null or too long for instance, has None there and a reason in
    `error`, which is None for all others. The perplexity of a single token is NaN.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        task: RayTask = "generate",
        column: str = "text",
        params: Mapping[str, Any] | None = None,
        labels: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Starts an engine.

        Args:
            model: see `EngineConfig.model`.
            task: which columns to add.
            column: where the texts are.
            params: fields of `SamplingParams`, of the task generate.
            labels: of the task label; each is known by its first token.
            options: fields of `EngineConfig`.

        Raises:
            ConfigError: the task is unknown, or labels do not fit it.
            JaxPrefillError: as `Engine`.
        """
        if task not in get_args(RayTask):
            raise ConfigError(f"task must be one of {', '.join(get_args(RayTask))}, got {task!r}")
        if (task == "label") != bool(labels):
            raise ConfigError(f"labels must be named for the task label alone, got {labels!r}")
        self._column = column
        self._params = SamplingParams(**dict(params or {}))
        self._engine = Engine(model, **options)
        self._labels = tuple(labels) or self._engine.labels
        self._label_ids = [
            self._engine.tokenizer.encode(label, add_special_tokens=False)[0] for label in labels
        ]
        found: dict[RayTask, Callable[[list[str]], list[Mapping[str, Any]]]] = {
            "generate": self._generate,
            "perplexity": self._perplexity,
            "label": self._label,
            "embed": self._embed,
            "classify": self._classify,
        }
        self._run = found[task]
        self._new_columns = _NEW_COLUMNS[task]

    def __call__(self, batch: Batch) -> Columns:
        """The batch with its new columns."""
        texts = list(batch[self._column])
        found = iter(self._rows([str(text) for text in texts if not _is_null(text)]))
        rows = [_NO_TEXT if _is_null(text) else next(found) for text in texts]
        new = {name: _column([row.get(name) for row in rows]) for name in self._new_columns}
        return {**batch, **new}

    def _rows(self, texts: list[str]) -> list[Mapping[str, Any]]:
        """All at once, and one by one only if one of them is at fault."""
        if not texts:
            return []
        try:
            return self._run(texts)
        except RequestError as error:
            if len(texts) == 1:
                return [{"error": str(error)}]
            return [row for text in texts for row in self._rows([text])]

    def _generate(self, texts: list[str]) -> list[Mapping[str, Any]]:
        return [{"generated": one.text} for one in self._engine.generate(texts, self._params)]

    def _perplexity(self, texts: list[str]) -> list[Mapping[str, Any]]:
        rows: list[Mapping[str, Any]] = []
        for found in self._engine.logprobs(texts):
            known = [logprob for logprob in found if logprob is not None]
            mean = sum(known) / len(known) if known else math.nan
            rows.append({"perplexity": math.exp(min(-mean, 700.0)), "num_tokens": len(found)})
        return rows

    def _label(self, texts: list[str]) -> list[Mapping[str, Any]]:
        return [self._scored(row) for row in self._engine.score("", texts, self._label_ids)]

    def _embed(self, texts: list[str]) -> list[Mapping[str, Any]]:
        return [{"embedding": row} for row in self._engine.embed(texts)]

    def _classify(self, texts: list[str]) -> list[Mapping[str, Any]]:
        return [self._scored(row.tolist()) for row in self._engine.classify(texts)]

    def _scored(self, scores: Sequence[float]) -> Mapping[str, Any]:
        best = max(range(len(scores)), key=scores.__getitem__)
        return {"label": self._labels[best], "label_scores": np.array(scores, np.float32)}


def _is_null(value: Any) -> bool:
    """None, or the NaN that pandas writes for it."""
    return value is None or value != value


def _column(values: list[Any]) -> "np.ndarray[Any, Any]":
    """Arrays of one shape are stacked; what has gaps, or texts, is an array of objects."""
    if any(value is None or isinstance(value, str) for value in values):
        held = np.empty(len(values), object)
        for index, value in enumerate(values):
            held[index] = value
        return held
    return np.array(values)
