"""What can be read of prompts that are not continued: which to run, and what their answers mean.

Host only; an engine runs the prompts itself, a server has them run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from jaxprefill.admission import Admission, Prompt, Wants, naming_item
from jaxprefill.arguments import as_prompts, is_list, joined_prompts, without_padding
from jaxprefill.config import ModelConfig
from jaxprefill.embeddings import (
    Matrix,
    checked_dimensions,
    class_scores,
    label_probabilities,
    required_classifier,
    shaped_embeddings,
    stacked,
)
from jaxprefill.errors import RequestError
from jaxprefill.request import Completion
from jaxprefill.reranking import RerankFormat

T = TypeVar("T")
U = TypeVar("U")


class ScoredToken(NamedTuple):
    """A token of a prompt: its logprob, and whether no other was likelier in its place."""

    logprob: float
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T]):
    """Prompts to run with `admission.NOTHING_GENERATED`.

    Attributes:
        wants: what is asked of each.
        name: what errors call the prompts.
        result: of the completions, in the order of the prompts.
    """

    prompts: Sequence[Prompt]
    wants: Wants
    name: str
    result: Callable[[Sequence[Completion]], T]

    def then(self, function: Callable[[T], U]) -> "Reading[U]":
        """The same prompts, and something made of their result."""
        made: Any = replace(self, result=lambda completions: function(self.result(completions)))
        return made


class Readings:
    """Everything that can be read with one model; the methods raise RequestError."""

    def __init__(self, model: ModelConfig, admission: Admission) -> None:
        """Decides nothing before it is asked."""
        self._model = model
        self._admission = admission
        self._format = RerankFormat(model, admission)

    def logprobs(self, prompts: Any) -> Reading[list[list[float | None]]]:
        """The logprob of every token of a prompt; the first is None."""
        return Reading(
            prompts=as_prompts(prompts),
            wants=Wants(prompt_logprobs=True),
            name="prompts",
            result=lambda found: [one.prompt_logprobs or [] for one in found],
        )

    def likeliest(self, prompts: Any) -> Reading[list[list[ScoredToken | None]]]:
        """Every token of a prompt; the first is None."""

        def result(found: Sequence[Completion]) -> list[list[ScoredToken | None]]:
            return [
                [
                    None if logprob is None else ScoredToken(logprob, logprob >= max(top.values()))
                    for logprob, top in zip(
                        one.prompt_logprobs or [],
                        (top or {} for top in one.prompt_top_logprobs or []),
                        strict=True,
                    )
                ]
                for one in found
            ]

        return Reading(
            prompts=as_prompts(prompts),
            wants=Wants(prompt_logprobs=True, prompt_top=1),
            name="prompts",
            result=result,
        )

    def score(
        self,
        query: Any,
        items: Any,
        label_token_ids: Any,
        *,
        apply_softmax: bool,
        item_first: bool = False,
    ) -> Reading[list[list[float]]]:
        """How likely each label is as the token after query and item; see `Engine.score`."""
        if not isinstance(apply_softmax, bool):
            raise RequestError(
                f"apply_softmax must be true or false, got {apply_softmax!r:.80}",
                param="apply_softmax",
            )
        labels = self._admission.label_ids(label_token_ids)
        prompts = joined_prompts(query, as_prompts(items, "items"), item_first=item_first)
        return self._labels(prompts, labels, apply_softmax=apply_softmax, name="items")

    def embed(
        self,
        texts: Any,
        *,
        dimensions: Any = None,
        normalize: Any = None,
        name: str = "texts",
    ) -> Reading[Matrix]:
        """Embeddings [n, dimensions]; see `Engine.embed`."""
        pooling, size = self._model.pooling, self._model.hidden_size
        count = checked_dimensions(dimensions, normalize, size)
        return Reading(
            prompts=as_prompts(texts, name),
            wants=Wants(pooling=pooling.kind),
            name=name,
            result=lambda found: shaped_embeddings(
                stacked([one.embedding for one in found], size),
                dimensions=count,
                is_normalized=pooling.is_normalized if normalize is None else normalize,
            ),
        )

    def classify(
        self, texts: Any, *, apply_activation: bool = True, name: str = "texts"
    ) -> Reading[Matrix]:
        """Scores [n, labels] by the model's classifier; see `Engine.classify`."""
        head = required_classifier(self._model)
        prompts: list[Prompt] = []
        many = as_prompts(texts, name)
        for index, text in enumerate(many):
            with naming_item(name, index, len(many)):
                ids = without_padding(self._admission.prompt_ids(text), head.pad_id)
                self._admission.check_length(len(ids))
                prompts.append(ids)

        def result(found: Sequence[Completion]) -> Matrix:
            logits = stacked([one.class_logits for one in found], len(head.labels))
            return class_scores(logits, head.activation) if apply_activation else logits

        return Reading(prompts=prompts, wants=Wants(class_logits=True), name=name, result=result)

    def label_shares(
        self, texts: Any, label_token_ids: Any, *, name: str = "texts"
    ) -> Reading[list[list[float]]]:
        """How likely each label is as the token after each text, in shares of 1."""
        labels = self._admission.label_ids(label_token_ids)
        return self._labels(as_prompts(texts, name), labels, apply_softmax=True, name=name)

    def choose(self, texts: Any, labels: Any, *, name: str = "texts") -> Reading[list[list[float]]]:
        """How likely each label, a text, is to follow each text, in shares of 1.

        A label's tokens are those of its text alone, and all of them count.
        """
        ids, many = self._label_tokens(labels), as_prompts(texts, name)
        if all(len(tokens) == 1 for tokens in ids):
            firsts = tuple(tokens[0] for tokens in ids)
            return self._labels(many, firsts, apply_softmax=True, name=name)
        prompts: list[Prompt] = []
        for index, text in enumerate(many):
            with naming_item(name, index, len(many)):
                start = self._admission.prompt_ids(text)
                self._admission.check_length(len(start) + max(map(len, ids)))
                prompts += [(*start, *tokens) for tokens in ids]

        def result(found: Sequence[Completion]) -> list[list[float]]:
            sums = [
                sum(score for score in (one.prompt_logprobs or [])[-len(tokens) :] if score)
                for one, tokens in zip(found, ids * len(many), strict=True)
            ]
            rows = [sums[at : at + len(ids)] for at in range(0, len(sums), len(ids))]
            return label_probabilities(rows, is_normalised=True)

        return Reading(prompts=prompts, wants=Wants(prompt_logprobs=True), name=name, result=result)

    def rerank(self, query: Any, documents: Any, instruction: Any = None) -> Reading[list[float]]:
        """How well each document answers the query; see `Engine.rerank`."""
        return self._rank(self._format.prompts(query, documents, instruction), "documents")

    def pairs(
        self, pairs: Sequence[tuple[str, str]], *, instruction: str | None = None, name: str
    ) -> Reading[list[float]]:
        """As `rerank`, for pairs of any query and document."""
        return self._rank(self._format.pair_prompts(pairs, instruction, name), name)

    def _rank(self, prompts: list[tuple[int, ...]], name: str) -> Reading[list[float]]:
        if self._model.classifier is not None:
            return self.classify(prompts, name=name).then(
                lambda scores: [float(score) for score in scores[:, 0]]
            )
        answers = self._format.answer_ids()
        reading = self._labels(prompts, answers, apply_softmax=True, name=name)
        return reading.then(lambda scores: [yes for yes, _ in scores])

    def _labels(
        self, prompts: Sequence[Prompt], labels: tuple[int, ...], *, apply_softmax: bool, name: str
    ) -> Reading[list[list[float]]]:
        return Reading(
            prompts=prompts,
            wants=Wants(label_ids=labels, is_label_logprob=not apply_softmax),
            name=name,
            result=lambda found: label_probabilities(
                [one.label_scores or [] for one in found], is_normalised=apply_softmax
            ),
        )

    def _label_tokens(self, labels: Any) -> list[tuple[int, ...]]:
        if isinstance(labels, str) or not is_list(labels) or not len(labels):
            raise RequestError(
                f"labels must be a list of at least one text, got {labels!r:.80}", param="labels"
            )
        found: list[tuple[int, ...]] = []
        for index, label in enumerate(labels):
            with naming_item("labels", index, len(labels)):
                tokens = self._admission.plain_ids(label) if isinstance(label, str) else ()
            if not tokens:
                raise RequestError(
                    f"labels[{index}] must be a text of at least one token, got {label!r:.80}",
                    param="labels",
                )
            found.append(tokens)
        return found
