import math

import numpy as np
import pytest

from jaxprefill.config import ClassifierConfig
from tests.fake_engine import FakeEngine
from tests.http import Http

SCORE, RERANK, CLASSIFY = "/v1/score", "/v1/rerank", "/v1/classify"
LABELS = {"query": "q", "items": ["x", "y"], "label_token_ids": [5, 6]}


@pytest.fixture
def http():
    return Http()


@pytest.fixture
def reranker():
    """Of one label, whose logit is the code of the document's last character."""
    head = ClassifierConfig(labels=("relevant",), activation="sigmoid", pad_id=None)
    http = Http(FakeEngine(classifier=head, has_lm_head=False))
    http.engine.class_rule = lambda request: [request.prompt_ids[-1] - 64]
    return http


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def sent(http) -> list[str]:
    decode = http.engine.model.tokenizer.decode
    return [decode(request.prompt_ids) for request in http.engine.requests]


def test_scores_are_shares_of_the_labels_or_probabilities(http):
    reply = http.post(SCORE, LABELS | {"apply_softmax": True, "foo": 1}).json()
    shares = np.exp([-0.5, -0.6]) / np.exp([-0.5, -0.6]).sum()
    np.testing.assert_allclose(reply["scores"], [shares, shares])
    assert (reply["object"], reply["model"]) == ("scoring", "tiny")
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == 4
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    plain = http.post(SCORE, LABELS | {"apply_softmax": None}).json()["scores"]
    np.testing.assert_allclose(plain, [np.exp([-0.5, -0.6])] * 2)
    http.check_idle()


def test_labels_keep_their_order_and_may_repeat(http):
    def scores(*labels: int) -> list[float]:
        body = LABELS | {"label_token_ids": labels, "apply_softmax": True}
        return http.post(SCORE, body).json()["scores"][0]

    assert scores(5, 6) == scores(6, 5)[::-1]
    assert scores(5, 5) == [0.5, 0.5] and scores(7) == [1.0]


@pytest.mark.parametrize(
    ("more", "prompts"),
    [
        ({}, ["qx", "qy"]),
        ({"item_first": True}, ["xq", "yq"]),
        ({"items": "x"}, ["qx"]),
        ({"query": "", "items": [" x"]}, [" x"]),
        ({"query": [64], "items": [[65], []]}, ["ab", "a"]),
        ({"query": [64], "items": [65, 66], "item_first": True}, ["bca"]),
    ],
)
def test_query_and_item_are_joined(http, more, prompts):
    assert http.post(SCORE, LABELS | more).status_code == 200
    assert sent(http) == prompts


def test_scores_that_are_infinite_do_not_spoil_the_others(http):
    http.engine.label_rule = lambda request, label: -math.inf if label == 5 else 2.0
    assert http.post(SCORE, LABELS | {"apply_softmax": True}).json()["scores"][0] == [0.0, 1.0]
    http.engine.label_rule = lambda request, label: -math.inf
    assert http.post(SCORE, LABELS).json()["scores"][0] == [0.0, 0.0]
    assert http.post(SCORE, LABELS | {"apply_softmax": True}).json()["scores"][0] == [0.5, 0.5]


def test_pairs_are_scored_one_by_one_or_one_against_all(reranker):
    expected = [sigmoid(1), sigmoid(2)]
    for body in (
        {"text_1": "q", "text_2": ["b", "c"]},
        {"text_1": ["q", "r"], "text_2": ["b", "c"]},
        {"queries": ["q"], "documents": ["b", "c"]},
    ):
        reply = reranker.post(SCORE, body).json()
        assert [one["index"] for one in reply["data"]] == [0, 1]
        np.testing.assert_allclose([one["score"] for one in reply["data"]], expected, rtol=1e-6)
        assert reply["usage"]["prompt_tokens"] == 4
    (one,) = reranker.post(SCORE, {"text_1": "q", "text_2": "b"}).json()["data"]
    assert one == {"index": 0, "object": "score", "score": pytest.approx(expected[0])}
    many = reranker.post(SCORE, {"text_1": ["q", "r"], "text_2": "b"}).json()["data"]
    assert len(many) == 2 and sent(reranker)[-2:] == ["qb", "rb"]


@pytest.mark.parametrize("path", [RERANK, "/rerank"])
def test_documents_are_ranked_and_ties_keep_their_order(reranker, path):
    body = {"query": "q", "documents": ["b", {"text": "d"}, "c", "xd"], "top_n": None}
    reply = reranker.post(path, body).json()
    assert [one["index"] for one in reply["results"]] == [1, 3, 2, 0]
    scores = [one["relevance_score"] for one in reply["results"]]
    np.testing.assert_allclose(scores, [sigmoid(x) for x in (3, 3, 2, 1)], rtol=1e-6)
    assert all("document" not in one for one in reply["results"])
    shown = reranker.post(path, body | {"top_n": 2, "return_documents": True}).json()["results"]
    assert [one["document"] for one in shown] == [{"text": "d"}, {"text": "xd"}]
    assert len(reranker.post(path, body | {"top_n": 99}).json()["results"]) == 4


def test_a_classifier_tells_label_and_probabilities():
    head = ClassifierConfig(labels=("no", "yes", "maybe"), activation="softmax", pad_id=0)
    http = Http(FakeEngine(classifier=head, has_lm_head=False))
    http.engine.class_rule = lambda request: [0.0, 1.0, 1.0]
    reply = http.post(CLASSIFY, {"input": ["a", "b"]}).json()
    assert [one["label"] for one in reply["data"]] == ["yes", "yes"]  # of equals the first
    assert reply["data"][1]["index"] == 1 and reply["data"][1]["num_classes"] == 3
    np.testing.assert_allclose(sum(reply["data"][0]["probs"]), 1, rtol=1e-6)
    raw = http.post(CLASSIFY, {"input": "a", "use_activation": False}).json()["data"]
    assert raw[0]["probs"] == [0.0, 1.0, 1.0]
    assert http.error(CLASSIFY, {"input": "a", "labels": ["x"]})["param"] == "model"
    assert "LM head" in http.error(SCORE, LABELS)["message"]
    assert http.error(RERANK, {"query": "q", "documents": ["a"]})["param"] == "model"


def test_labels_are_tokens_or_texts_of_several(http):
    reply = http.post(CLASSIFY, {"input": ["a", "b"], "labels": ["c", "a"]}).json()
    assert [one["label"] for one in reply["data"]] == ["a", "a"]  # its id is lower
    by_id = http.post(CLASSIFY, {"input": "a", "label_token_ids": [66, 64]}).json()["data"][0]
    assert by_id["probs"] == reply["data"][0]["probs"] and by_id["label"] == "a"
    assert sum(by_id["probs"]) == pytest.approx(1)
    long = http.post(CLASSIFY, {"input": "abc", "labels": ["d", "ef"]}).json()["data"][0]
    # the fake's prompt logprobs are minus the position: -3, and -3 - 4
    assert long["probs"] == pytest.approx([sigmoid(4), sigmoid(-4)])
    assert sent(http)[-2:] == ["abcd", "abcef"]


WRONG = [
    (SCORE, {"query": "q"}, "items", "label_token_ids"),
    (SCORE, {"items": ["a"]}, "query", "text_1"),
    (SCORE, LABELS | {"items": []}, "items", "at least one"),
    (SCORE, LABELS | {"items": [[1], [2]]}, "items", "texts if the query is one"),
    (SCORE, LABELS | {"query": "", "items": ["a", ""]}, "items", "items[1]"),
    (SCORE, LABELS | {"query": [1], "items": [[272]]}, "items", "272"),
    (SCORE, LABELS | {"query": {"a": 1}}, "query", "{'a': 1}"),
    (SCORE, LABELS | {"items": 5}, "items", "5"),
    (SCORE, LABELS | {"items": ["a", {}]}, "items", "{}"),
    (SCORE, LABELS | {"label_token_ids": []}, "label_token_ids", "[]"),
    (SCORE, LABELS | {"label_token_ids": None}, "label_token_ids", "None"),
    (SCORE, LABELS | {"label_token_ids": [272]}, "label_token_ids", "272"),
    (SCORE, LABELS | {"label_token_ids": [5.0]}, "label_token_ids", "5.0"),
    (SCORE, LABELS | {"label_token_ids": [True]}, "label_token_ids", "True"),
    (SCORE, LABELS | {"label_token_ids": "5"}, "label_token_ids", "'5'"),
    (SCORE, LABELS | {"apply_softmax": "yes"}, "apply_softmax", "true or false"),
    (SCORE, LABELS | {"items": ["a", "a " * 1600]}, "items", "maximum context length"),
    (SCORE, LABELS | {"query": [1] * 160, "items": [[1]]}, "items", "161"),
    (SCORE, {"text_1": "a"}, "text_2", "None"),
    (SCORE, {"text_1": "a", "text_2": []}, "text_2", "at least one"),
    (SCORE, {"text_1": ["a"] * 2, "text_2": ["b"] * 3}, "text_2", "got 3"),
    (SCORE, {"text_1": "a", "text_2": ["b", 1]}, "text_2", "1"),
    (SCORE, {"text_1": "a", "text_2": "b", "items": ["c"]}, "items", "left out"),
    (SCORE, {"text_1": "a", "text_2": "b"}, "model", "Qwen3-Reranker"),
    (RERANK, {"documents": ["a"]}, "query", "None"),
    (RERANK, {"query": "q"}, "documents", "None"),
    (RERANK, {"query": "q", "documents": []}, "documents", "at least one"),
    (RERANK, {"query": "q", "documents": ["a", {}]}, "documents", "item 1"),
    (RERANK, {"query": 5, "documents": ["a"]}, "query", "a string"),
    (RERANK, {"query": "q", "documents": ["a"], "top_n": 0}, "top_n", "0"),
    (RERANK, {"query": "q", "documents": ["a"]}, "model", "Qwen3-Reranker"),
    (CLASSIFY, {"input": "a"}, "labels", "no classifier"),
    (CLASSIFY, {"labels": ["a"]}, "input", "None"),
    (CLASSIFY, {"input": "a", "labels": []}, "labels", "[]"),
    (CLASSIFY, {"input": "a", "labels": "yes"}, "labels", "'yes'"),
    (CLASSIFY, {"input": "a", "labels": ["a", ""]}, "labels", "labels[1]"),
    (CLASSIFY, {"input": "a", "labels": ["a", 5]}, "labels", "labels[1]"),
    (CLASSIFY, {"input": "a", "labels": ["a", "b" * 10**4]}, "labels", "labels[1]"),
    (CLASSIFY, {"input": "a", "label_token_ids": [-1]}, "label_token_ids", "-1"),
    (CLASSIFY, {"input": "a", "labels": ["a"], "label_token_ids": [1]}, "label_token_ids", "out"),
    (CLASSIFY, {"input": ["a", ""], "labels": ["a", "bc"]}, "input", "input[1]"),
    (CLASSIFY, {"input": [[1] * 159], "labels": ["a", "bc"]}, "input", "161"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"), WRONG, ids=lambda value: str(value)[:60]
)
def test_what_is_wrong_is_said_before_anything_runs(http, path, body, param, said):
    error = http.error(path, body)
    assert error["param"] == param and said in error["message"]
    assert not http.engine.requests


def test_a_pair_too_long_is_named(reranker):
    error = reranker.error(RERANK, {"query": "q", "documents": ["a", "a " * 1600]})
    assert error["param"] == "documents" and "documents[1]" in error["message"]
    error = reranker.error(SCORE, {"text_1": "q", "text_2": ["a", "b" * 160]})
    assert error["param"] == "text_2" and "161" in error["message"]
    body = {"query": "q", "documents": ["a"], "instruction": "be fair"}
    assert reranker.error(RERANK, body)["param"] == "instruction"
    empty = reranker.post(RERANK, {"query": "", "documents": ["b", "c"]}).json()
    assert [one["index"] for one in empty["results"]] == [1, 0]


def test_the_whole_context_is_scored(http):
    body = LABELS | {"query": [1] * 159, "items": [[2], []]}
    assert http.post(SCORE, body).json()["usage"]["prompt_tokens"] == 319


def test_what_a_few_bytes_would_blow_up_is_refused(http):
    long = "a" * 10_000
    for path, body, param in (
        (SCORE, LABELS | {"query": long, "items": ["b"] * 10_000}, "items"),
        (SCORE, LABELS | {"items": ["b"] * 70_000}, "items"),
        (SCORE, {"text_1": long, "text_2": ["b"] * 10_000}, "text_2"),
        (RERANK, {"query": long, "documents": ["b"] * 10_000}, "documents"),
        (CLASSIFY, {"input": [long] * 100, "labels": ["bc"] * 100}, "input"),
        (CLASSIFY, {"input": ["a"] * 70_000, "labels": ["b"]}, "input"),
        ("/v1/embeddings", {"input": [[1]] * 70_000}, "input"),
        ("/v1/completions", {"prompt": [[1]] * 100, "n": 1024}, "prompt"),
    ):
        error = http.error(path, body)
        assert error["param"] == param and "several requests" in error["message"]
    assert not http.engine.requests
