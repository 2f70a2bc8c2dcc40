"""Classifiers against transformers' numbers, and rerankers of both kinds."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from jaxprefill.config import ClassifierConfig, PoolingConfig
from jaxprefill.embeddings import class_scores
from jaxprefill.errors import CheckpointError, RequestError
from jaxprefill.models.registry import read_config
from jaxprefill.reranking import reranker_text
from jaxprefill.tokenizer import Tokenizer
from tests.oracle.cases import CLASSIFIERS
from tests.reference import reference_hidden, reference_logits
from tests.tiny import TensorsCheckpoint, TinyCheckpoint, byte_tokenizer, tiny_engine

FOLDER = Path(__file__).parent / "data" / "oracle"
POOLINGS = {"qwen3_classifier_of_three_labels": "last", "mistral_classifier_of_one_label": "mean"}


@pytest.fixture(scope="module", params=CLASSIFIERS, ids=str)
def served(request):
    """(case, engine, prompts, what transformers found)."""
    case = request.param
    with np.load(FOLDER / f"{case.name}.npz") as held:
        found = {key: held[key] for key in held.files}
    config = read_config(json.loads(found["config"].tobytes()))
    assert config == read_config(case.hf)
    tensors = {
        key.removeprefix("w:"): value.astype(np.float32)
        for key, value in found.items()
        if key[:2] == "w:"
    }
    pooling = PoolingConfig(kind=POOLINGS[case.name], is_normalized=False)
    checkpoint = TensorsCheckpoint(replace(config, pooling=pooling), tensors)
    checkpoint.tokenizer = pairing_tokenizer()
    prompts = [ids.tolist() for ids in np.split(found["ids"], np.cumsum(case.lengths)[:-1])]
    with tiny_engine(checkpoint, prefill_buckets=(32,), chunked_prefill_size=20) as made:
        yield case, made, prompts, found


def test_class_logits_are_those_of_transformers_alone_together_and_cached(served):
    case, engine, prompts, found = served
    assert engine.labels == tuple(case.config["id2label"].values())
    logits = engine.classify(prompts, apply_activation=False)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, found["class_logits"], atol=1e-4)
    for ids, wanted in zip(prompts, found["class_logits"], strict=True):
        again = engine.classify(ids, apply_activation=False)
        np.testing.assert_allclose(again[0], wanted, atol=1e-4)
    scores, count = engine.classify(prompts), len(engine.labels)
    if count == 1:
        np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), rtol=1e-5)
    else:
        np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)
    assert engine.classify([]).shape == (0, count)
    assert engine.stats()["compilations_after_ready"] == 0


def test_embeddings_of_a_classifiers_body_are_those_of_transformers(served):
    case, engine, prompts, found = served
    np.testing.assert_allclose(engine.embed(prompts), found[POOLINGS[case.name]], atol=1e-4)


def test_a_classifier_of_one_label_scores_pairs_and_others_do_not(served):
    _, engine, _, _ = served
    if len(engine.labels) != 1:
        with pytest.raises(RequestError, match="one label, this model has 3; use classify"):
            engine.rerank("q", ["a"])
        return
    pair = engine.tokenizer.encode_pair("ab", "c")
    assert pair == [*engine.tokenizer.encode("ab"), *engine.tokenizer.encode("c")]
    wanted = engine.classify([pair])[:, 0].tolist()
    assert engine.rerank("ab", ["dd", "c"])[1:] == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(RequestError, match="instruction must be left out"):
        engine.rerank("ab", ["c"], instruction="find")


def test_tokens_need_a_head_and_classes_a_classifier(served, engine):
    _, classifying, _, _ = served
    with pytest.raises(RequestError, match="LM head, which this model lacks"):
        classifying.generate("abc")
    with pytest.raises(RequestError, match="LlamaForCausalLM has none; use score"):
        engine.classify("abc")
    with pytest.raises(RequestError, match=r"texts\[1\].*at least one token"):
        classifying.classify(["a", []])
    assert engine.labels == ()


def pairing_tokenizer(*words: str) -> Tokenizer:
    """Bytes and some more tokens; ends a text, and each of a pair, with EOS."""
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer()._backend.to_str())
    backend.add_tokens(list(words))
    backend.post_processor = processors.TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B <eos>", special_tokens=[("<eos>", 256)]
    )
    return Tokenizer(backend, eos_ids=(256,))


def test_a_language_model_is_asked_for_yes_or_no_in_qwen3_rerankers_words():
    checkpoint = TinyCheckpoint(context_length=640)
    checkpoint.tokenizer = pairing_tokenizer("<|im_start|>", "<|im_end|>", "yes", "no")
    wanted = []
    documents = ["Red paint.", "no <|im_end|> tricks", ""]
    for document in documents:
        text = reranker_text("what is red?", document, "Find colours")
        ids = checkpoint.tokenizer.encode(text, add_special_tokens=False)
        yes, no = reference_logits(checkpoint, ids)[-1][[260, 261]]
        wanted.append(1 / (1 + np.exp(no - yes)))
    options = dict(prefill_buckets=(128,), prefill_backend="eager", kv_cache_tokens=2048)
    with tiny_engine(checkpoint, **options) as made:
        found = made.rerank("what is red?", documents, instruction="Find colours")
        assert found == pytest.approx(wanted, abs=1e-4)
        assert made.stats()["cached_tokens"] > 400  # the beginning is computed once
        assert made.rerank("q", []) == [] and len(made.rerank("q", "one")) == 1
        for arguments, said in (
            ((5, ["a"]), "query must be a text"),
            (("q", [5]), "documents must be a list of texts"),
            (("q", ["x" * 500]), "maximum context length"),
        ):
            with pytest.raises(RequestError, match=said):
                made.rerank(*arguments)
        with pytest.raises(RequestError, match="instruction must be a text"):
            made.rerank("q", ["a"], instruction=5)


def test_the_words_are_those_that_qwen3_reranker_was_trained_on():
    assert reranker_text("Q", "D") == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: Q\n<Document>: D<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
        "</think>\n\n"
    )


def test_a_model_whose_tokenizer_has_no_such_tokens_is_no_reranker(engine):
    with pytest.raises(RequestError, match=r"'<\|im_start\|>' as one token, this model's makes 12"):
        engine.rerank("q", ["a"])


def test_a_qwen3_classifier_of_one_label_reads_the_rerankers_prompt():
    relevance = ClassifierConfig(labels=("relevance",), activation="sigmoid")
    checkpoint = TinyCheckpoint(
        context_length=640, classifier=relevance, has_lm_head=False,
        architecture="Qwen3ForSequenceClassification",
    )  # fmt: skip
    checkpoint.tokenizer = pairing_tokenizer("<|im_start|>", "<|im_end|>")
    ids = checkpoint.tokenizer.encode(reranker_text("who?", "me"), add_special_tokens=False)
    row = reference_hidden(checkpoint, ids)[-1] @ checkpoint.tensors["score.weight"][0]
    options = dict(prefill_buckets=(128,), prefill_backend="eager", kv_cache_tokens=2048)
    with tiny_engine(checkpoint, **options) as made:
        assert made.rerank("who?", ["me"]) == pytest.approx([1 / (1 + np.exp(-row))], abs=1e-4)


CLASSIFIER = dict(CLASSIFIERS[0].hf, architectures=["LlamaForSequenceClassification"])


@pytest.mark.parametrize(
    ("changes", "activation", "labels"),
    [
        ({}, "softmax", ("bad", "fair", "good")),
        (dict(problem_type="single_label_classification"), "softmax", ("bad", "fair", "good")),
        (dict(problem_type="multi_label_classification"), "sigmoid", ("bad", "fair", "good")),
        (dict(problem_type="regression", id2label={"0": "x"}), "none", ("x",)),
        (dict(id2label={"0": "x"}), "sigmoid", ("x",)),
        (dict(id2label=None), "softmax", ("LABEL_0", "LABEL_1")),
    ],
)
def test_the_problem_decides_what_scores_are(changes, activation, labels):
    config = read_config(CLASSIFIER | changes)
    assert config.classifier == ClassifierConfig(labels=labels, activation=activation, pad_id=0)
    assert not config.has_lm_head and not config.has_own_head


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(id2label={"0": "a", "2": "b"}), "id2label must map 0 to 1 to names"),
        (dict(id2label={"0": 5}), "id2label must map 0 to 0 to names"),
        (dict(problem_type="odd"), "problem_type must be one of .*regression, got 'odd'"),
        (dict(is_causal=False), "attention that looks ahead is not supported"),
    ],
)
def test_a_wrong_classifier_is_named(changes, said):
    with pytest.raises(CheckpointError, match=said):
        read_config(CLASSIFIER | changes)


def test_scores_do_not_overflow():
    logits = np.array([[1e4, -1e4], [0, 0]], np.float32)
    np.testing.assert_array_equal(class_scores(logits, "sigmoid"), [[1, 0], [0.5, 0.5]])
    np.testing.assert_array_equal(class_scores(logits, "softmax"), [[1, 0], [0.5, 0.5]])
    np.testing.assert_array_equal(class_scores(logits, "none"), logits)
