"""An engine as Ray Data's actors run it: batches of columns in, the same with new columns out.

    dataset.map_batches(
        RayPredictor,
        fn_constructor_kwargs={"model": "demo", "task": "perplexity"},
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=0,
        batch_size=512,
    )

Each actor has an engine of its own (`num_gpus=1` gives each a GPU). Without `num_cpus=0` each
reserves a CPU too, and where none is left Ray waits for ever for one to read and write with. Ray
gives what a lost actor worked on to another, so no row is lost. Ray itself (extra `ray`) is not
imported here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args

import numpy as np

from jaxprefill.engine import Engine
from jaxprefill.errors import ConfigError, RequestError
from jaxprefill.options import check_choice, read_keys
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

    A row whose text is at fault, null or too long for instance, has None there, in place of a
    vector one of NaN (Ray takes only columns that are all vectors, or none), and a reason in
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
        prefix: str = "",
        **options: Any,
    ) -> None:
        """Starts an engine.

        Args:
            model: see `EngineConfig.model`.
            task: which columns to add.
            column: where the texts are.
            params: fields of `SamplingParams`, of the task generate.
            labels: of the task label; each is known by its first token.
            prefix: stands before the names of new columns.
            options: fields of `EngineConfig`.

        Raises:
            ConfigError: the task or a parameter is unknown, or parameters or labels do not fit.
            JaxPrefillError: as `Engine`.
        """
        self._params = _checked(task, labels, params or {})
        self._column = column
        self._prefix = prefix
        self._engine = Engine(model, **options)
        self._labels = tuple(labels) or self._engine.labels
        self._label_ids = self._first_ids(labels)
        found: dict[RayTask, Callable[[list[str]], list[Mapping[str, Any]]]] = {
            "generate": self._generate,
            "perplexity": self._perplexity,
            "label": self._label,
            "embed": self._embed,
            "classify": self._classify,
        }
        self._run = found[task]
        self._new_columns = _NEW_COLUMNS[task]
        self._no_vector = {
            "label_scores": np.full(len(self._labels), np.nan, np.float32),
            "embedding": np.full(self._engine.plan.model.hidden_size, np.nan, np.float32),
        }

    def __call__(self, batch: Batch) -> Columns:
        """The batch with its new columns.

        Raises:
            ConfigError: the batch is no mapping, lacks the column, or has a new one already.
        """
        self._check(batch)
        texts = list(batch[self._column])
        found = iter(self._rows([str(text) for text in texts if not _is_null(text)]))
        rows = [_NO_TEXT if _is_null(text) else next(found) for text in texts]
        new = {
            self._prefix + name: _column([row.get(name, self._no_vector.get(name)) for row in rows])
            for name in self._new_columns
        }
        return {**batch, **new}

    def _check(self, batch: Batch) -> None:
        if not hasattr(batch, "keys"):
            raise ConfigError(f"batch_format must be numpy, Ray's default, got a {type(batch)}")
        names = list(batch.keys())
        if self._column not in names:
            raise ConfigError(f"column must be one of {', '.join(names)}, got {self._column!r}")
        clashes = [name for each in self._new_columns if (name := self._prefix + each) in names]
        if clashes:
            raise ConfigError(
                f"the rows have {', '.join(clashes)} already; choose another prefix, which is "
                f"{self._prefix!r}, for the new columns"
            )

    def _first_ids(self, labels: Sequence[str]) -> list[int]:
        found = [
            self._engine.tokenizer.encode(label, add_special_tokens=False)[:1] for label in labels
        ]
        if [] in found or len({each for (each,) in found}) < len(found):
            raise ConfigError(f"labels must differ in their first tokens, got {labels!r}")
        return [each for (each,) in found]

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


def _checked(task: str, labels: Sequence[str], params: Mapping[str, Any]) -> SamplingParams:
    check_choice("task", task, get_args(RayTask))
    if (task == "label") != bool(labels):
        raise ConfigError(f"labels must be named for the task label alone, got {labels!r}")
    if task != "generate" and params:
        raise ConfigError(f"params must be given for the task generate alone, got {params!r}")
    known = [item.name for item in fields(SamplingParams)]
    return SamplingParams(**read_keys("params", params, known))


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
