"""How a query and a document become one prompt that a reranker scores. Host only.

Qwen3-Reranker (arXiv 2506.05176) answers "yes" or "no" in a chat; other cross-encoders read the
pair as their tokenizer joins it.
"""

from collections.abc import Sequence
from typing import Any

from jaxprefill.admission import Admission, naming_item
from jaxprefill.arguments import is_list
from jaxprefill.config import ModelConfig
from jaxprefill.embeddings import SEARCH_TASK
from jaxprefill.errors import RequestError

_MARKS = ("<|im_start|>", "<|im_end|>")
_ANSWERS = ("yes", "no")
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def reranker_text(query: str, document: str, instruction: str = SEARCH_TASK) -> str:
    """The prompt of Qwen3-Reranker."""
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return f"{_BEFORE}{pair}{_AFTER}"


class RerankFormat:
    """The prompts of one model."""

    def __init__(self, model: ModelConfig, admission: Admission) -> None:
        """Nothing is decided before a query comes: most models are no rerankers."""
        self._model = model
        self._admission = admission

    def prompts(self, query: Any, documents: Any, instruction: Any) -> list[tuple[int, ...]]:
        """One prompt a document, in order.

        Raises:
            RequestError: an argument is invalid, or the model is no reranker.
        """
        self._check_model()
        for name, text in (("query", query), ("instruction", instruction)):
            if not isinstance(text, str) and (name, text) != ("instruction", None):
                raise RequestError(f"{name} must be a text, got {text!r}", param=name)
        texts = [documents] if isinstance(documents, str) else documents
        if not is_list(texts) or not all(isinstance(text, str) for text in texts):
            raise RequestError(
                f"documents must be a list of texts, got {documents!r:.80}", param="documents"
            )
        return self.pair_prompts([(query, text) for text in texts], instruction)

    def pair_prompts(
        self,
        pairs: Sequence[tuple[str, str]],
        instruction: str | None = None,
        name: str = "documents",
    ) -> list[tuple[int, ...]]:
        """One prompt a pair of query and document; errors call the documents `name`.

        Raises:
            RequestError: a text is invalid, or the model is no reranker.
        """
        self._check_model()
        found: list[tuple[int, ...]] = []
        for index, (query, text) in enumerate(pairs):
            with naming_item(name, index, len(pairs)):
                ids = self._prompt(query, text, instruction)
                self._admission.check_length(len(ids))
                found.append(ids)
        return found

    def answer_ids(self) -> tuple[int, ...]:
        """The tokens for "yes" and "no".

        Raises:
            RequestError: the tokenizer has no such tokens.
        """
        return tuple(self._token(answer) for answer in _ANSWERS)

    def _prompt(self, query: str, document: str, instruction: str | None) -> tuple[int, ...]:
        if self._is_chat:
            text = reranker_text(query, document, instruction or SEARCH_TASK)
            return self._admission.plain_ids(text)
        if instruction is not None:
            raise RequestError(
                f"instruction must be left out, as this model's pairs have no place for one, got "
                f"{instruction!r:.80}",
                param="instruction",
            )
        return self._admission.pair_ids(query, document)

    @property
    def _is_chat(self) -> bool:
        return self._model.classifier is None or self._model.architecture.startswith("Qwen3")

    def _check_model(self) -> None:
        classifier = self._model.classifier
        if classifier is not None and len(classifier.labels) != 1:
            raise RequestError(
                f"rerank needs a classifier of one label, this model has "
                f"{len(classifier.labels)}; use classify",
                param="model",
            )
        if classifier is None and not self._model.has_lm_head:
            raise RequestError(
                "rerank needs an LM head or a classifier of one label, and this model has neither; "
                "compare embeddings of query and documents instead",
                param="model",
            )
        for mark in _MARKS if self._is_chat else ():
            self._token(mark)

    def _token(self, text: str) -> int:
        ids = self._admission.plain_ids(text)
        if len(ids) != 1:
            raise RequestError(
                f"rerank needs a tokenizer that has {text!r} as one token, this model's makes "
                f"{len(ids)} of it; use a reranker such as Qwen3-Reranker",
                param="model",
            )
        return ids[0]
