import pytest

from tests.http import Http


@pytest.fixture
def http():
    return Http()


@pytest.mark.parametrize("at", ["", "/v1"])
def test_text_goes_to_ids_and_back(http, at):
    for text in ("Hello", " A", "Answer: ", "é e\u0301 ﬁ 👩‍👩‍👧 𠜎 \u2028\u0085\r\n\0", ""):
        reply = http.post(f"{at}/tokenize", {"prompt": text}).json()
        assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == 160
        assert reply["tokens"] == http.engine.model.tokenizer.encode(text)
        back = http.post(f"{at}/detokenize", {"tokens": reply["tokens"]}).json()
        assert back == {"text": text, "prompt": text}


def test_lists_get_lists(http):
    reply = http.post("/tokenize", {"prompt": ["a", "bc"], "return_token_strs": True}).json()
    assert reply["tokens"] == [[64], [65, 66]] and reply["count"] == [1, 2]
    assert reply["token_strs"] == [["a"], ["b", "c"]]
    back = http.post("/detokenize", {"tokens": reply["tokens"]}).json()
    assert back["text"] == back["prompt"] == ["a", "bc"]


def test_special_tokens_can_be_kept_or_dropped(http):
    ids = {"tokens": [257, 64, 256, 270]}
    assert http.post("/detokenize", ids).json()["text"] == "a"
    kept = http.post("/detokenize", ids | {"skip_special_tokens": False}).json()
    assert kept["text"] == "<bos>a<eos>"
    assert http.post("/detokenize", {"tokens": []}).json()["text"] == ""


def test_messages_go_through_the_chat_template(http):
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    reply = http.post("/tokenize", body).json()
    assert reply["tokens"] == http.engine.model.tokenizer.encode("<user>Hi<a>")
    assert http.error("/tokenize", {"messages": []})["param"] == "messages"


def test_texts_far_longer_than_the_context_are_taken_but_not_without_limit(http):
    assert http.post("/tokenize", {"prompt": "a " * 1600}).json()["count"] == 3200
    assert "at most 5120" in http.error("/tokenize", {"prompt": "." * 10**6})["message"]
    assert not http.engine.requests


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/tokenize", {}, "prompt", "neither"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "both"),
        ("/tokenize", {"prompt": 5}, "prompt", "5"),
        ("/tokenize", {"prompt": ["a", 5]}, "prompt", "list of texts"),
        ("/tokenize", {"prompt": ["a"] * 65537}, "prompt", "at most 65536 sequences"),
        ("/detokenize", {"tokens": [[]] * 65537}, "tokens", "at most 65536 sequences"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens", "true"),
        ("/detokenize", {}, "tokens", "None"),
        ("/detokenize", {"tokens": "a"}, "tokens", "'a'"),
        ("/detokenize", {"tokens": [272]}, "tokens", "272"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "-1"),
        ("/detokenize", {"tokens": [1.0]}, "tokens", "1.0"),
        ("/detokenize", {"tokens": [True]}, "tokens", "True"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens", "2"),
        ("/detokenize", {"tokens": [2**63]}, "tokens", str(2**63)),
        (
            "/detokenize",
            {"tokens": [[5] * 5000, [5] * 121]},
            "tokens",
            "at most 5120 ids, got 5121",
        ),
    ],
)
def test_what_is_wrong_is_named(http, path, body, param, said):
    error = http.error(path, body)
    assert error["param"] == param and said in error["message"]


def test_clients_can_read_what_the_tokenizer_is(http):
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<bos>", "<eos>")
    assert "messages" in info["chat_template"]
    http.engine.is_ready = False
    assert http.get("/tokenizer_info").status_code == 503
