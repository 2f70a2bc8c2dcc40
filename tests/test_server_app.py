import asyncio

import pytest

from jaxprefill.errors import ConfigError
from jaxprefill.server.settings import ServerSettings
from tests.http import Exchange, Http

PATH = "/v1/completions"
BODY = {"prompt": "Hello", "temperature": 0, "max_tokens": 5}


def test_the_model_is_listed_under_the_names_it_is_served_by():
    http = Http(served_model_name=("org/one", "two"))
    data = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in data] == ["org/one", "two"]
    assert data[0]["root"] == "tiny" and data[0]["max_model_len"] == 160
    assert http.get("/v1/models/org/one").json() == data[0]
    assert http.get("/v1/models/three").json()["error"]["code"] == "model_not_found"
    assert http.error(PATH, BODY | {"model": "tiny"}, status=404)["code"] == "model_not_found"
    assert http.post(PATH, BODY | {"model": "two"}).json()["model"] == "two"


def test_health_tells_the_state_and_asks_nobody():
    http = Http()
    assert http.get("/health").status_code == 200
    http.engine.is_ready = False
    for path in ("/health", "/ready", "/ping", "/v1/models"):
        reply = http.get(path)
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0, path
    assert http.error(PATH, BODY, status=503)["type"] == "service_unavailable_error"
    http.engine.is_ready, http.context.is_draining = True, True
    assert http.get("/health").json() == {"status": "draining"}
    assert http.post(PATH, BODY).headers["retry-after"]


def test_health_generate_runs_one_token():
    http = Http()
    for method in ("GET", "HEAD"):
        assert http.request(method, "/health_generate").status_code == 200
    assert [request.params.max_tokens for request in http.engine.requests] == [1, 1]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", PATH, 405),
        ("PUT", PATH, 405),
        ("POST", "/v1/models", 405),
    ],
)
def test_a_wrong_address_has_an_error_in_the_same_form(method, path, status):
    reply = Http().request(method, path)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] in ("not_found_error", "invalid_request_error")
    assert Http().request("HEAD", PATH).status_code == 405


def test_an_error_shows_no_more_of_a_value_than_a_reader_can_use():
    long, http = "x" * 10**4, Http()
    for path, body in (
        (PATH, {"prompt": [[long]]}),
        (PATH, {"prompt": "a", "stop": {"a": long}}),
        (PATH, {"model": long}),
        ("/generate", {"text": "a", "return_logprob": True, "token_ids_logprob": [long]}),
        ("/generate", {"text": "a", "sampling_params": long}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [long]}]}),
        ("/v1/chat/completions", {"messages": [long]}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": long}),
        ("/v1/score", {"query": [long], "items": [[1]], "label_token_ids": [1]}),
        ("/v1/rerank", {"query": "a", "documents": [[long]]}),
        ("/v1/classify", {"input": "a", "labels": [[long]]}),
        ("/v1/embeddings", {"input": [long, 1]}),
        ("/tokenize", {"prompt": [[long]]}),
        ("/detokenize", {"tokens": [[long]]}),
        ("/abort_request", {"rid": long}),
    ):
        reply = http.post(path, body)
        assert reply.status_code in (400, 404) and len(reply.content) < 600, path


def test_only_json_is_taken():
    http = Http()
    reply = http.post(PATH, b"prompt=a", headers={"content-type": "text/plain"})
    assert reply.status_code == 415
    packed = http.post(PATH, BODY, headers={"content-encoding": "gzip"})
    assert packed.status_code == 415 and "Content-Encoding" in packed.json()["error"]["message"]
    assert http.post(PATH, BODY, headers={"content-type": "application/json; charset=utf-8"}).json()


def test_a_body_over_the_limit_is_refused_before_it_is_read():
    http = Http(max_body_bytes=100)
    assert http.error(PATH, {"prompt": "a" * 100}, status=413)["code"] == "body_too_large"

    async def without_a_length():
        exchange = Exchange(http.app, PATH)
        for _ in range(3):
            exchange.body(b" " * 50, more=True)
        await exchange.task
        assert exchange.sent[0]["status"] == 413

    asyncio.run(without_a_length())


def test_a_body_of_a_million_values_is_refused_before_it_is_decoded():
    """To decode them would hold up everybody else."""
    error = Http().error(PATH, b'{"prompt": [' + b"5," * 2**20 + b"5]}", status=413)
    assert "at most 1048576 values" in error["message"]


def test_keys_guard_all_but_what_tells_the_state():
    http = Http(api_key=("first", "zwölf"))
    assert http.post(PATH, BODY).status_code == 401
    assert http.post(PATH, BODY, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert http.post(PATH, BODY, headers={"authorization": "Basic first"}).status_code == 401
    reply = http.get("/v1/models", headers={"authorization": "Bearer "})
    assert reply.json()["error"]["code"] == "invalid_api_key"
    for key in (b"Bearer first", "bearer zwölf".encode()):
        assert http.post(PATH, BODY, headers={b"authorization": key}).status_code == 200
    assert http.get("/health").status_code == 200
    assert Http().get("/v1/models", headers={"authorization": "Bearer "}).status_code == 200


def test_browsers_of_the_allowed_origins_may_call():
    http = Http(api_key=("key",), allowed_origins=("https://a.example",))
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    reply = http.request("OPTIONS", PATH, headers=ask)
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    refused = http.request("OPTIONS", PATH, headers=ask | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers


def test_a_full_queue_refuses_and_says_when_to_come_again():
    http = Http(max_queued_requests=1)  # beside the four that run

    async def fill():
        http.engine.is_held = True
        running = [Exchange(http.app, PATH) for _ in range(5)]
        for exchange in running:
            exchange.body(BODY)
        await running[0].until(lambda: len(http.engine.running) == 5, "five run")
        late = Exchange(http.app, PATH)
        late.body(BODY)
        await late.task
        assert late.sent[0]["status"] == 429
        assert any(name == b"retry-after" for name, _ in late.sent[0]["headers"])
        http.engine.is_held = False
        await asyncio.gather(*(exchange.task for exchange in running))
        assert [exchange.sent[0]["status"] for exchange in running] == [200] * 5

    asyncio.run(fill())


def test_a_request_that_takes_too_long_is_given_up():
    http = Http(request_timeout=0.05)
    http.engine.is_held = True
    assert http.error(PATH, BODY, status=408)["code"] == "timeout"
    assert len(http.engine.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["body", "waiting", "running"])
def test_a_client_that_goes_away_ends_its_request(stream, stage):
    http = Http()

    async def go_away():
        exchange = Exchange(http.app, PATH)
        http.engine.is_held = stage == "waiting"
        body = BODY | {"stream": stream, "max_tokens": 150, "n": 3}
        if stage == "body":
            exchange.body(b"{", more=True)
            await asyncio.sleep(0.005)
        else:
            exchange.body(body)
            await exchange.until(lambda: http.engine.running, "it runs")
        if stage == "running" and stream:
            await exchange.until(lambda: len(exchange.sent) > 5, "tokens are sent")
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, 60)

    asyncio.run(go_away())
    http.check_idle()
    http.engine.is_held = False
    if stage != "body":
        assert len(http.engine.aborted) == 3
    assert http.post(PATH, BODY).status_code == 200


def test_the_model_can_come_back_as_another_process():
    http = Http()
    http.post(PATH, BODY | {"logprobs": 1})
    asyncio.run(http.engine.restart())
    assert http.post(PATH, BODY | {"logprobs": 1}).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"max_queued_requests": -1},
        {"max_body_bytes": 0},
        {"drain_timeout": float("nan")},
        {"api_key": ("",)},
        {"ssl_keyfile": "key.pem"},
    ],
)
def test_settings_name_what_is_wrong(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerSettings(**wrong)
