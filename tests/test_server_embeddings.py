import base64

import numpy as np
import pytest

from jaxprefill.config import PoolingConfig
from tests.fake_engine import FakeEngine
from tests.http import Http

PATH = "/v1/embeddings"


@pytest.fixture
def http():
    return Http()


def test_an_embedding_has_openais_shape(http):
    reply = http.post(PATH, {"input": "abc", "user": "me", "encoding_format": None}).json()
    vector = reply["data"][0].pop("embedding")
    np.testing.assert_allclose(vector, np.full(48, 48**-0.5), rtol=1e-6)
    assert reply == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}],
        "model": "tiny",
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    assert [request.params.max_tokens for request in http.engine.requests] == [0]
    http.check_idle()


def test_base64_is_the_same_float32_numbers(http):
    body = {"input": ["a", "bcd"], "normalize": False}
    plain = http.post(PATH, body).json()["data"]
    packed = http.post(PATH, body | {"encoding_format": "base64"}).json()["data"]
    for one, other, length in zip(plain, packed, (1, 3), strict=True):
        vector = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert vector.tolist() == one["embedding"] == [float(length)] * 48
        assert one["index"] == other["index"]


@pytest.mark.parametrize(
    ("given", "count"),
    [("ab", 1), (["ab"], 1), ([64, 65], 1), ([[64, 65]], 1), (["a", "b"], 2), ([[1], [271]], 2)],
)
def test_all_forms_of_input_are_taken(http, given, count):
    reply = http.post(PATH, {"input": given}).json()
    assert [one["index"] for one in reply["data"]] == list(range(count))


def test_dimensions_cut_before_the_length_is_made_1():
    http = Http(FakeEngine(pooling=PoolingConfig(kind="mean", is_normalized=False)))
    plain = http.post(PATH, {"input": "ab", "dimensions": 4}).json()["data"][0]["embedding"]
    assert plain == [1.0] * 4  # the fake's sum, 2, over two tokens
    assert http.engine.requests[0].pooling == "mean"
    body = {"input": "ab", "dimensions": 4, "normalize": True}
    assert http.post(PATH, body).json()["data"][0]["embedding"] == [0.5] * 4


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "None"),
        ({"input": ""}, "input", "at least one token"),
        ({"input": []}, "input", "[]"),
        ({"input": [""]}, "input", "at least one token"),
        ({"input": ["a", ""]}, "input", "input[1]"),
        ({"input": [[1], []]}, "input", "input[1]"),
        ({"input": [272]}, "input", "272"),
        ({"input": [1.5]}, "input", "1.5"),
        ({"input": ["a", [1]]}, "input", "list"),
        ({"input": {"text": "a"}}, "input", "{'text': 'a'}"),
        ({"input": [1] * 161}, "input", "maximum context length"),
        ({"input": "a " * 1600}, "input", "maximum context length"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1 to the model's 48"),
        ({"input": "a", "dimensions": 49}, "dimensions", "49"),
        ({"input": "a", "dimensions": "4"}, "dimensions", "an integer"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float or base64"),
        ({"input": "a", "normalize": 1}, "normalize", "true or false"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_before_anything_runs(http, body, param, said):
    error = http.error(PATH, body)
    assert error["param"] == param and said in error["message"]
    assert not http.engine.requests


def test_the_whole_context_is_embedded(http):
    assert http.post(PATH, {"input": [1] * 160}).json()["usage"]["prompt_tokens"] == 160
