import asyncio

import pytest

from tests.fake_engine import EOS, FakeEngine, too_long_for_the_pool
from tests.http import Exchange, Http

PATH = "/v1/completions"
BASE = {"prompt": "Hello", "temperature": 0, "max_tokens": 3}


@pytest.fixture
def http():
    return Http()


def test_a_completion_has_openais_shape(http):
    reply = http.post(PATH, BASE).json()
    assert reply.pop("id").startswith("cmpl-") and reply.pop("created") > 0
    assert reply == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "abc",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    http.check_idle()


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [64, 65, 66], [[64, 65, 66]]])
def test_echo_and_logprobs_are_the_same_for_every_form_of_a_prompt(http, prompt):
    reply = http.post(PATH, BASE | {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1})
    choice = reply.json()["choices"][0]
    assert choice["text"] == "abc" + "a"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "a"]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -1.0]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1]["b"] == -1.0


def test_the_generated_token_is_counted_though_it_ends_the_text(http):
    http.engine.rule = lambda request, position: EOS
    body = BASE | {"prompt": [1, 2, 3], "echo": True, "logprobs": 1, "max_tokens": 1}
    choice = http.post(PATH, body).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["logprobs"]["token_logprobs"][-1] == -1.0
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    usage = http.post(PATH, BASE).json()["usage"]
    assert usage["completion_tokens"] == 1  # the end-of-text token counts


def test_max_tokens_0_scores_a_prompt(http):
    body = BASE | {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
    reply = http.post(PATH, body).json()
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert choice["logprobs"]["top_logprobs"][2] == {"c": -2.0}
    assert reply["usage"]["completion_tokens"] == 0
    assert http.error(PATH, body | {"echo": False})["param"] == "max_tokens"


def test_choices_are_prompt_major(http):
    body = BASE | {"prompt": ["A1", "B2", "C3"], "n": 2, "echo": True, "max_tokens": 1}
    choices = http.post(PATH, body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["text"] for choice in choices] == ["A1a", "A1a", "B2a", "B2a", "C3a", "C3a"]
    usage = http.post(PATH, body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 6)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_choices_of_one_prompt_share_its_logprobs(http, max_tokens):
    """They are found once, and the other choices of a stream wait for them."""
    more = {"prompt": ["abcd", "e"], "n": 3, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    whole = http.post(PATH, BASE | more).json()["choices"]
    assert [each.wants_prompt_logprobs for each in http.engine.requests] == [True, False, False] * 2
    assert all(choice["logprobs"] == whole[0]["logprobs"] for choice in whole[:3])
    http.engine.num_scoring_steps = 5
    texts, logprobs = [""] * 6, [[] for _ in range(6)]
    for event in http.events(PATH, BASE | more):
        (part,) = event["choices"]
        texts[part["index"]] += part["text"]
        logprobs[part["index"]] += part["logprobs"]["token_logprobs"]
    assert texts == [choice["text"] for choice in whole]
    assert logprobs == [choice["logprobs"]["token_logprobs"] for choice in whole]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"echo": True, "logprobs": 2},
        {"stop": "de", "max_tokens": 9, "logprobs": 0},
        {"prompt": ["a", "bc"], "n": 2, "logprobs": 1, "return_token_ids": True},
        {"prompt": "é🙂", "echo": True, "max_tokens": 0, "logprobs": 1},
        {"prompt": [1], "echo": True, "return_tokens_as_token_ids": True, "logprobs": 1},
    ],
)
def test_a_stream_adds_up_to_the_whole(http, more):
    body = BASE | more
    whole = http.post(PATH, body).json()["choices"]
    streamed = [dict(choice, text="", finish_reason=None, stop_reason=None) for choice in whole]
    joined = {}
    for event in http.events(PATH, body):
        (part,) = event["choices"]
        choice = streamed[part["index"]]
        assert choice["finish_reason"] is None, "nothing comes after the end"
        choice["text"] += part["text"]
        choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
        for name, values in (part["logprobs"] or {}).items():
            joined.setdefault((part["index"], name), []).extend(values)
        joined.setdefault((part["index"], "ids"), []).extend(part.get("token_ids", []))
    assert streamed == whole
    for choice in whole:
        for name, values in (choice["logprobs"] or {}).items():
            assert joined[choice["index"], name] == values
        assert joined[choice["index"], "ids"] == choice.get("token_ids", [])
    http.check_idle()


def test_a_stop_string_ends_the_request_at_once_and_is_not_shown(http):
    choice = http.post(PATH, BASE | {"stop": ["x", "cd"], "max_tokens": 99}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
    assert len(http.engine.aborted) == 1
    text = "".join(event["choices"][0]["text"] for event in http.events(PATH, BASE | {"stop": "c"}))
    assert text == "ab"


def test_usage_comes_last_and_only_when_asked_for(http):
    assert all("usage" not in event for event in http.events(PATH, BASE))
    *chunks, last = http.events(PATH, BASE | {"stream_options": {"include_usage": True}})
    assert all(chunk["choices"] for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert http.error(PATH, BASE | {"stream_options": {}})["param"] == "stream_options"


def test_two_ids_of_one_text_both_keep_their_logprob(http):
    http.engine.rule = lambda request, position: 260  # no token has it: its text is ""
    body = BASE | {"max_tokens": 1, "logprobs": 2}
    top = http.post(PATH, body).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert len(top) == 2 and max(top.values()) == -1.0


WRONG = [
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": None}, "prompt", "None"),
    ({"prompt": []}, "prompt", "[]"),
    ({"prompt": [""]}, "prompt", "at least one token"),
    ({"prompt": [[]]}, "prompt", "at least one token"),
    ({"prompt": ["a", ""]}, "prompt", "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt", "prompt[1]"),
    ({"prompt": 5}, "prompt", "5"),
    ({"prompt": {"a": 1}}, "prompt", "{'a': 1}"),
    ({"prompt": ["a", 1]}, "prompt", "list"),
    ({"prompt": [1, 2, 272]}, "prompt", "272"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [2**63]}, "prompt", str(2**63)),
    ({"prompt": [1.0]}, "prompt", "1.0"),
    ({"prompt": [True]}, "prompt", "True"),
    ({"prompt": ["1", ["1"]]}, "prompt", "list"),
    ({"prompt": [[[1]]]}, "prompt", "[1]"),
    ({"prompt": [1] * 160}, "prompt", "maximum context length"),
    ({"prompt": [1] * 200}, "prompt", "shorten the prompt to 159"),
    ({"prompt": "a " * 10**6}, "prompt", "maximum context length"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": "5"}, "max_tokens", "an integer, got '5'"),
    ({"max_tokens": 2**63}, "max_tokens", str(2**63)),
    ({"top_k": 10**30}, "top_k", str(10**30)),
    ({"min_tokens": 2**64}, "min_tokens", str(2**64)),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "999"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias[5]"),
    ({"logit_bias": {"5": None}}, "logit_bias", "an object of numbers"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"top_k": 1.5}, "top_k", "1.5"),
    ({"min_p": -0.1}, "min_p", "-0.1"),
    ({"n": 0}, "n", "0"),
    ({"n": 10**9}, "n", "1000000000"),
    ({"best_of": 2}, "best_of", "2"),
    ({"suffix": "x"}, "suffix", "suffix"),
    ({"logprobs": -2}, "logprobs", "-2"),
    ({"logprobs": 21}, "logprobs", "21"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"seed": 2**64}, "seed", str(2**64)),
    ({"stop": [""]}, "stop", "''"),
    ({"stop": [1]}, "stop", "stop[0] must be a string"),
    ({"stop": {"a": 1}}, "stop", "stop must be a string or a list"),
    ({"temperature": {}}, "temperature", "temperature must be a number"),
    ({"stop": ["x"] * 17}, "stop", "17"),
    ({"stop_token_ids": [272]}, "stop_token_ids", "272"),
    ({"logit_bias": {"272": 1}}, "logit_bias", "272"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "number"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"rid": "a b"}, "rid", "'a b'"),
    ({"model": 3}, "model", "a string"),
]


@pytest.mark.parametrize(("more", "param", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said_before_anything_runs(http, more, param, said):
    error = http.error(PATH, BASE | more)
    assert error["param"] == param and said in error["message"]
    assert not http.engine.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": ',
        b"[]",
        b"null",
        b'"text"',
        b'{"p":"\xff"}',
        '{"prompt":"a"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"prompt":"a"}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt":"a","seed":' + b"1" * 5000 + b"}",
    ],
    ids=lambda body: str(body[:24]),
)
def test_a_body_that_is_no_json_object_is_the_clients_fault(http, body):
    assert http.error(PATH, body)["type"] == "invalid_request_error"


def test_unknown_fields_are_ignored_and_nulls_mean_absent(http):
    nulls = ("max_tokens", "stop", "logit_bias", "stream_options", "n", "seed", "logprobs", "user")
    more = {name: None for name in nulls} | {"foo": {"bar": 1}, "metadata": {}, "store": False}
    reply = http.post(PATH, {"prompt": "a", "temperature": 0} | more)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 16  # the default


def test_a_nul_character_and_line_separators_come_through(http):
    text = "a\0b\u2028c\u0085d\r\n"
    whole = http.post(PATH, BASE | {"prompt": text, "echo": True}).json()["choices"][0]["text"]
    assert whole == text + "abc"
    reply = http.post(PATH, BASE | {"prompt": text, "echo": True, "stream": True})
    lines = reply.text.splitlines()  # as many clients do
    assert all(line.startswith("data: ") for line in lines if line)
    assert (
        http.events(PATH, BASE | {"prompt": text, "echo": True})[0]["choices"][0]["text"][:-1]
        == text
    )


def test_the_whole_context_can_be_used_but_no_more(http):
    reply = http.post(PATH, BASE | {"prompt": [1] * 159, "max_tokens": 9}).json()
    assert reply["usage"]["total_tokens"] == 160
    scoring = {"prompt": [1] * 160, "max_tokens": 0, "echo": True, "logprobs": 1}
    assert http.post(PATH, scoring).status_code == 200
    message = http.error(PATH, BASE | {"prompt": [1] * 161})["message"]
    assert "161" in message and "160" in message


def test_what_the_engine_refuses_is_a_400_even_for_a_stream(http):
    http.engine.refusal = too_long_for_the_pool()
    for stream in (False, True):
        assert "KV pool" in http.error(PATH, BASE | {"stream": stream})["message"]


def test_a_fault_inside_a_stream_is_its_last_event(http):
    http.engine.rule = lambda request, position: fail_at(http.engine, position)
    *_, last = http.events(PATH, BASE | {"max_tokens": 9})
    assert last["error"]["type"] == "server_error"
    http.check_idle()
    assert http.error(PATH, BASE, status=500)


def fail_at(engine: FakeEngine, position: int) -> int:
    if position == 2:
        engine.failure = ValueError("broken")
    return 65


def test_the_same_id_cannot_run_twice(http):
    async def twice():
        first = Exchange(http.app, PATH)
        http.engine.is_held = True
        first.body(BASE | {"rid": "one"})
        await first.until(lambda: http.engine.running, "the first runs")
        second = Exchange(http.app, PATH, headers=[(b"x-request-id", b"one")])
        second.body(BASE)
        await second.task
        assert second.sent[0]["status"] == 409
        http.engine.is_held = False
        await first.task
        assert first.sent[0]["status"] == 200
        assert (b"x-request-id", b"one") in first.sent[0]["headers"]

    asyncio.run(twice())
