import pytest

from tests.fake_engine import EOS
from tests.http import Http

PATH = "/generate"
GREEDY = {"temperature": 0, "max_new_tokens": 3}
BASE = {"text": "Hello", "sampling_params": GREEDY}


@pytest.fixture
def http():
    return Http()


def test_an_answer_has_sglangs_shape(http):
    reply = http.post(PATH, BASE | {"rid": "mine", "foo": 1, "stream": None}).json()
    assert reply["meta_info"].pop("e2e_latency") > 0
    assert reply == {
        "text": "abc",
        "output_ids": [64, 65, 66],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "cached_tokens": 1,
        },
    }
    http.check_idle()


def test_a_batch_is_a_list_and_prompt_major(http):
    body = {"text": ["A", "B"], "sampling_params": [GREEDY, GREEDY | {"n": 2}]}
    reply = http.post(PATH, body).json()
    assert [one["meta_info"]["prompt_tokens"] for one in reply] == [1, 1, 1]
    assert len({one["meta_info"]["id"] for one in reply}) == 3
    assert isinstance(http.post(PATH, {"input_ids": [[1]], "sampling_params": GREEDY}).json(), list)
    alone = http.post(PATH, {"input_ids": [1, 2], "sampling_params": GREEDY | {"n": 2}}).json()
    assert len(alone) == 2
    defaults = http.post(PATH, {"text": "a"}).json()
    assert len(defaults["output_ids"]) == 128 and defaults["text"].startswith("ABC")


@pytest.mark.parametrize("start", [0, 1, 10, 19, 20])
def test_prompt_logprobs_begin_where_they_are_asked_to(http, start):
    body = {"input_ids": list(range(20)), "return_logprob": True, "sampling_params": GREEDY}
    meta = http.post(PATH, body | {"logprob_start_len": start, "top_logprobs_num": 2}).json()[
        "meta_info"
    ]
    whole = [[None if at == 0 else -float(at), at] for at in range(20)]
    assert [each[:2] for each in meta["input_token_logprobs"]] == whole[start:]
    assert len(meta["input_top_logprobs"]) == 20 - start
    if start < 20:
        assert (meta["input_top_logprobs"][0] is None) == (start == 0)
        assert meta["input_top_logprobs"][-1] == [[-0.5, 9, "*"], [-19.0, 19, "4"]]
    assert meta["output_token_logprobs"][1] == [-1.0, 65, "b"]
    assert meta["output_top_logprobs"][1] == [[-1.0, 65, "b"], [-2.0, 7, "("]]


def test_of_the_prompt_nothing_is_scored_by_default(http):
    body = BASE | {"return_logprob": True, "return_text_in_logprobs": False}
    meta = http.post(PATH, body).json()["meta_info"]
    assert meta["input_token_logprobs"] == [] and "input_top_logprobs" not in meta
    assert meta["output_token_logprobs"][0] == [-1.0, 64, None]
    assert not http.engine.requests[0].wants_prompt_logprobs


def test_given_ids_are_scored_after_the_prompt(http):
    body = BASE | {
        "return_logprob": True,
        "token_ids_logprob": [5, 7, 5],
        "sampling_params": {"max_new_tokens": 0},
    }
    reply = http.post(PATH, body).json()
    (scores,) = reply["meta_info"]["output_token_ids_logprobs"]
    assert [each[:2] for each in scores] == [[-0.5, 5], [-0.7, 7], [-0.5, 5]]
    assert (reply["text"], reply["output_ids"]) == ("", [])
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    http.engine.label_rule = lambda request, label: float("-inf")
    each = body | {"text": ["a", "b"], "token_ids_logprob": [[5], [6]]}
    second = http.post(PATH, each).json()[1]["meta_info"]
    assert second["output_token_ids_logprobs"] == [[[-9999.0, 6, "'"]]]


def test_answers_of_one_prompt_share_what_is_read_of_it(http):
    body = BASE | {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [5]}
    body["sampling_params"] = GREEDY | {"n": 2, "max_new_tokens": 1}
    one, two = (each["meta_info"] for each in http.post(PATH, body).json())
    for name in ("input_token_logprobs", "output_token_ids_logprobs"):
        assert one[name] == two[name] != []
    assert [each.label_ids for each in http.engine.requests] == [(5,), ()]


def test_what_ended_an_answer_is_told(http):
    stopped = http.post(PATH, BASE | {"sampling_params": GREEDY | {"stop": "b"}}).json()
    assert stopped["text"] == "a"
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}
    http.engine.rule = lambda request, position: EOS
    ended = http.post(PATH, BASE).json()
    assert ended["text"] == "" and ended["output_ids"] == [EOS]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"return_logprob": True, "logprob_start_len": 0},
        {"sampling_params": GREEDY | {"stop": "bcx", "n": 2}},
        {"text": ["a", "b"], "return_logprob": [True, False]},
        {"sampling_params": {"max_new_tokens": 0}},
    ],
)
def test_a_stream_tells_all_so_far_and_ends_as_the_whole(http, more):
    body = BASE | more
    whole = http.post(PATH, body).json()
    wholes = whole if isinstance(whole, list) else [whole]
    last: dict[int, dict] = {}
    for event in http.events(PATH, body):
        index = event.pop("index") if isinstance(whole, list) else 0
        before = last.get(index, {"text": "", "output_ids": [], "meta_info": {}})
        assert event["text"].startswith(before["text"])
        assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"].get("finish_reason") is None
        last[index] = event
    for index, expected in enumerate(wholes):
        found = last[index]
        for each in (expected, found):
            each["meta_info"].pop("e2e_latency")
            each["meta_info"].pop("id")
        assert found == expected
    http.check_idle()


WRONG = [
    ({"text": None}, "text", "neither"),
    ({"input_ids": [1]}, "text", "both"),
    ({"text": ""}, "text", "at least one token"),
    ({"text": []}, "text", "[]"),
    ({"text": ["a", ""]}, "text", "text[1]"),
    ({"text": [1]}, "text", "list of texts"),
    ({"text": None, "input_ids": "a"}, "input_ids", "'a'"),
    ({"text": None, "input_ids": [[1], [272]]}, "input_ids", "input_ids[1]"),
    ({"text": None, "input_ids": [1.5]}, "input_ids", "1.5"),
    ({"text": "a " * 1600}, "text", "maximum context length"),
    ({"text": None, "input_ids": [1] * 160}, "input_ids", "160"),
    ({"sampling_params": 5}, "sampling_params", "5"),
    ({"sampling_params": [{}, {}]}, "sampling_params", "list of 1"),
    ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens", "-1"),
    ({"sampling_params": {"max_new_tokens": "5"}}, "max_new_tokens", "an integer"),
    ({"sampling_params": {"max_new_tokens": 1, "min_new_tokens": 2}}, "min_new_tokens", "max_new"),
    ({"sampling_params": {"temperature": -1}}, "temperature", "-1"),
    ({"sampling_params": {"stop": [""]}}, "stop", "''"),
    ({"sampling_params": {"stop_token_ids": [272]}}, "stop_token_ids", "272"),
    ({"sampling_params": {"logit_bias": {"272": 1}}}, "logit_bias", "272"),
    ({"sampling_params": {"sampling_seed": 2**64}}, "sampling_seed", str(2**64)),
    ({"sampling_params": {"regex": "a+"}}, "regex", "json_schema"),
    ({"sampling_params": {"json_schema": "{"}}, "json_schema", "JSON schema"),
    ({"sampling_params": {"json_schema": 5}}, "json_schema", "5"),
    ({"return_logprob": "yes"}, "return_logprob", "'yes'"),
    ({"return_logprob": [True, True]}, "return_logprob", "list of 1"),
    ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len", "-2"),
    ({"return_logprob": True, "logprob_start_len": 6}, "logprob_start_len", "which is 5"),
    ({"return_logprob": True, "logprob_start_len": True}, "logprob_start_len", "True"),
    ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num", "21"),
    ({"return_logprob": True, "token_ids_logprob": [5]}, "token_ids_logprob", "0 or 1"),
    ({"return_logprob": True, "token_ids_logprob": [272]}, "token_ids_logprob", "272"),
    ({"return_logprob": True, "token_ids_logprob": 5}, "token_ids_logprob", "5"),
    ({"image_data": "x"}, "image_data", "left out"),
    ({"rid": ["a"]}, "rid", "a string"),
]


@pytest.mark.parametrize(("more", "param", "said"), WRONG, ids=lambda value: str(value)[:50])
def test_what_is_wrong_is_said_before_anything_runs(http, more, param, said):
    for stream in (False, True):
        error = http.error(PATH, BASE | more | {"stream": stream})
        assert error["param"] == param and said in error["message"]
    assert not http.engine.requests


def test_a_schema_becomes_a_grammar(http):
    for schema in ({"type": "object"}, '{"type": "object"}'):
        http.post(PATH, BASE | {"sampling_params": GREEDY | {"json_schema": schema}})
    first, second = http.engine.requests
    assert first.grammar is not None and first.grammar == second.grammar


def test_other_inputs_may_be_there_if_they_are_empty(http):
    """As sglang.bench_serving sends them."""
    body = BASE | {"image_data": [], "lora_path": "", "logprob_start_len": -1}
    assert http.post(PATH, body | {"return_logprob": False}).status_code == 200
    assert http.error(PATH, body | {"lora_path": "x"})["param"] == "lora_path"
