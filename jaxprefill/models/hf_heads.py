"""What stands on top of the body, from architecture name and config.json. Imports no jax."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxprefill.config import ClassActivation, ClassifierConfig
from jaxprefill.errors import CheckpointError
from jaxprefill.models.hf_values import HfValues

LM_SUFFIX, BARE_SUFFIX, CLASSIFIER_SUFFIX = "ForCausalLM", "Model", "ForSequenceClassification"
_PROBLEMS: dict[str | None, ClassActivation] = {
    None: "softmax",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}


class Head(NamedTuple):
    """Fields of ModelConfig."""

    has_lm_head: bool
    classifier: ClassifierConfig | None


def with_lm_head(architecture: str) -> str:
    """The name of the same family with an LM head: `Qwen3Model` is `Qwen3ForCausalLM`'s body."""
    for suffix in (BARE_SUFFIX, CLASSIFIER_SUFFIX):
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix) + LM_SUFFIX
    return architecture


def read_head(architecture: str, hf: Mapping[str, Any]) -> Head:
    """The head that the architecture's name promises.

    Raises:
        CheckpointError: labels or problem type are wrong, or attention looks ahead.
    """
    if hf.get("is_causal") is False or hf.get("use_bidirectional_attention"):
        raise CheckpointError(
            "config.json: is_causal must be true and use_bidirectional_attention false, as "
            "attention that looks ahead is not supported; use a model with causal attention"
        )
    if architecture.endswith(CLASSIFIER_SUFFIX):
        return Head(False, _read_classifier(HfValues(hf)))
    return Head(architecture.endswith(LM_SUFFIX), None)


def _read_classifier(hf: HfValues) -> ClassifierConfig:
    """The labels of `id2label`; where it is missing there are two, as for transformers."""
    named = hf.mapping("id2label")
    count = len(named) or hf.integer("num_labels", 2)
    labels = [named.get(str(index), f"LABEL_{index}") for index in range(count)]
    if not all(isinstance(label, str) for label in labels) or set(named) - set(
        map(str, range(count))
    ):
        raise CheckpointError(
            f"config.json: id2label must map 0 to {count - 1} to names, got {named!r:.200}"
        )
    problem, pad_id = hf.get("problem_type"), hf.get("pad_token_id")
    if problem not in _PROBLEMS:
        raise CheckpointError(
            f"config.json: problem_type must be one of {', '.join(map(str, _PROBLEMS))}, "
            f"got {problem!r}"
        )
    activation = _PROBLEMS[problem]
    return ClassifierConfig(
        labels=tuple(labels),
        activation="sigmoid" if count == 1 and activation == "softmax" else activation,
        pad_id=pad_id if isinstance(pad_id, int) else None,
    )
