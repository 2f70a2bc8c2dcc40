import pytest

from tests.http import Http

PATH = "/v1/chat/completions"
BASE = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 3}


@pytest.fixture
def http():
    return Http()


def test_a_chat_has_openais_shape(http):
    reply = http.post(PATH, BASE).json()
    assert reply["id"].startswith("chatcmpl-") and reply["object"] == "chat.completion"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abc", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    (request,) = http.engine.requests
    text = http.engine.model.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert text == "<user>Hi<a>"  # what the template wrote, and no BOS before it
    assert reply["usage"]["prompt_tokens"] == len(request.prompt_ids)


@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": True, "top_logprobs": 2}, {"logprobs": True}, {"n": 2, "stop": "cd"}],
)
def test_a_stream_adds_up_to_the_whole(http, more):
    body = BASE | more | {"max_tokens": 8, "return_token_ids": True}
    reply, events = http.post(PATH, body).json(), http.events(PATH, body)
    whole, streamed = reply["choices"], {}
    told = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    assert told == [reply["prompt_token_ids"]]
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        (part,) = event["choices"]
        if part["index"] not in streamed:
            assert part["delta"] == {"role": "assistant", "content": ""}
            message = {"role": "assistant", "content": "", "refusal": None}
            streamed[part["index"]] = part | {"message": message, "token_ids": []}
            streamed[part["index"]].pop("delta")
            continue
        choice = streamed[part["index"]]
        choice["message"]["content"] += part["delta"]["content"]
        choice["token_ids"] += part["token_ids"]
        choice |= {name: part[name] for name in ("finish_reason", "stop_reason")}
        if part["logprobs"]:
            known = choice["logprobs"] or {"content": [], "refusal": None}
            known["content"] += part["logprobs"]["content"]
            choice["logprobs"] = known
        streamed[part["index"]] = choice
    assert list(streamed.values()) == whole


def test_each_token_has_its_own_logprobs(http):
    reply = http.post(PATH, BASE | {"logprobs": True, "top_logprobs": 2}).json()
    first, second, _ = reply["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -1.0, [97])
    assert first["top_logprobs"][0]["token"] == "a" and len(first["top_logprobs"]) == 2
    assert second["top_logprobs"][0]["token"] == "b"


def test_text_parts_are_joined_and_content_may_be_empty(http):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content in (parts, ""):
        messages = [{"role": "user", "content": content}]
        assert http.post(PATH, BASE | {"messages": messages}).status_code == 200
    text = http.engine.model.tokenizer.decode(http.engine.requests[0].prompt_ids)
    assert text == "<user>ab<a>"


def test_the_final_message_can_be_continued(http):
    for words in ("So ", "", "<", "\n"):
        messages = [*BASE["messages"], {"role": "assistant", "content": words}]
        http.post(PATH, BASE | {"messages": messages, "continue_final_message": True})
        prompt = http.engine.model.tokenizer.decode(http.engine.requests[-1].prompt_ids)
        assert prompt == f"<user>Hi<assistant>{words}"


def test_an_answer_may_fill_the_context_unless_told_otherwise(http):
    reply = http.post(PATH, {"messages": BASE["messages"], "temperature": 0}).json()
    assert reply["usage"]["total_tokens"] == 160
    more = {"max_tokens": 9, "max_completion_tokens": 2}
    assert http.post(PATH, BASE | more).json()["usage"]["completion_tokens"] == 2


def test_what_clients_send_beside_is_ignored(http):
    message = {"role": "user", "content": "Hi", "id": "1", "reasoning_content": "x"}
    more = {"messages": [message], "service_tier": "auto", "parallel_tool_calls": True}
    more |= {"enable_thinking": False, "tool_choice": "none", "chat_template_kwargs": None}
    assert http.post(PATH, BASE | more).status_code == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 10**6}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 200}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 2**63}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_before_anything_runs(http, more, param):
    for stream in (False, True):
        assert http.error(PATH, BASE | more | {"stream": stream})["param"] == param
    assert not http.engine.requests


def test_a_model_without_a_template_says_what_to_do(http):
    http.engine.model.tokenizer.chat_templates = {}
    assert "plain prompt" in http.error(PATH, BASE)["message"]


def test_a_response_format_becomes_a_grammar_of_the_request(http):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for given in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ):
        assert http.post(PATH, BASE | {"response_format": given}).status_code == 200
    anything, narrow = (request.grammar for request in http.engine.requests)
    assert anything and narrow and anything != narrow
    assert http.post(PATH, BASE | {"response_format": {"type": "text"}}).status_code == 200
    assert http.engine.requests[-1].grammar is None


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "given",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": "no"}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
        {"type": "json_schema", "json_schema": {"schema": False}},
        {"type": "json_schema", "json_schema": {"schema": nested(300)}},
        {},
    ],
)
def test_a_response_format_that_cannot_be_followed_is_refused(http, given):
    assert http.error(PATH, BASE | {"response_format": given})["param"] == "response_format"
