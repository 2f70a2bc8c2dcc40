import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxprefill.server.observer import FinishedRequest
from tests.http import Exchange, Http

PATH = "/v1/completions"
BODY = {"prompt": "Hello", "temperature": 0, "max_tokens": 5}
NAMES = [
    "time_to_first_token_seconds",
    "queue_time_seconds",
    "prefill_time_seconds",
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "prompt_tokens_total",
    "cached_tokens_total",
    "generation_tokens_total",
    "num_running_requests",
    "num_waiting_requests",
    "kv_pages_used",
    "kv_pages_total",
    "requests_finished_total",
    "rejected_total",
    "prefill_passes_total",
    "prefill_fallbacks_total",
    "padding_tokens_total",
    "compilations_after_ready_total",
    "executables",
    "executable_temp_bytes",
    "startup_seconds",
    "corrupted_requests_total",
]
ADMIN = [
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/executables"),
    ("GET", "/executables/full 32x4x160"),
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
]


def samples(http: Http) -> dict[tuple, float]:
    """Values by name and labels, without the prefix that all have."""
    reply = http.get("/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    return samples_of(reply.text)


def samples_of(text: str) -> dict[tuple, float]:
    return {
        (sample.name.removeprefix("jaxprefill_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("jaxprefill_")
    }


def test_every_metric_has_its_name_and_its_number():
    http = Http()
    assert http.post(PATH, BODY | {"n": 2, "temperature": 1}).status_code == 200
    assert http.post(PATH, {"prompt": 5}).status_code == 400
    found = samples(http)
    told = {name for name, *_ in found} | {name.removesuffix("_count") for name, *_ in found}
    assert set(NAMES) <= told
    for name, count, total in (("queue_time", 2, 0.5), ("prefill_time", 2, 1.0)):
        assert found[f"{name}_seconds_count",] == count and found[f"{name}_seconds_sum",] == total
    assert found["queue_time_seconds_bucket", "0.1"] == 0
    assert found["queue_time_seconds_bucket", "0.25"] == 2 == found["prefill_time_seconds_count",]
    assert found["inter_token_latency_seconds_count",] == 8
    assert found["time_to_first_token_seconds_bucket", "+Inf"] == 2
    assert (found["prompt_tokens_total",], found["cached_tokens_total",]) == (10, 2)
    assert found["generation_tokens_total",] == 10
    assert (
        found["requests_finished_total", "length"] == 2 and found["rejected_total", "invalid"] == 1
    )
    assert found["num_running_requests",] == 0 and found["num_waiting_requests",] == 3
    for pool, counts in (("kv", (10, 8, 40)), ("recent", (2, 3, 9))):
        names = (f"{pool}_pages_{kind}" for kind in ("used", "cached", "total"))
        assert tuple(found[name,] for name in names) == counts
    text = http.get("/metrics").text
    for tokens, path, count in ((32, "full", 3), (8, "full", 2), (64, "eager", 1)):
        labels = f'max_context="160",num_tokens="{tokens}",path="{path}"'
        assert f"jaxprefill_prefill_passes_total{{{labels}}} {count}.0\n" in text
    assert 'path="decode"' not in text
    assert found["prefill_fallbacks_total", "too_many_requests"] == 1
    assert found["compilations_after_ready_total",] == 0 == found["corrupted_requests_total",]
    assert found["executables", "compiled"] == 9 and found["executables", "pending"] == 0
    assert found["executable_temp_bytes",] == 4096 and found["startup_seconds", "total"] == 4


def test_metrics_of_two_applications_have_nothing_in_common():
    first, second = Http(), Http()
    first.post(PATH, BODY)
    assert samples(first)["requests_finished_total", "length"] == 1
    assert samples(second)["requests_finished_total", "length"] == 0


def test_metrics_are_there_while_the_engine_starts_and_while_it_says_nothing(monkeypatch):
    http = Http()
    http.engine.is_ready, http.engine.num_compiled = False, (2, 9)
    found = samples(http)
    assert found["executables", "pending"] == 7 and ("kv_pages_total",) not in found
    http.engine.is_ready = True
    assert samples(http)["kv_pages_total",] == 40

    async def never():
        raise TimeoutError

    monkeypatch.setattr(http.engine, "stats", never)
    assert samples(http)["kv_pages_total",] == 40


def test_a_request_without_tokens_is_in_no_histogram_of_tokens():
    http = Http()
    nothing = FinishedRequest(
        reason="abort",
        prompt_tokens=3,
        cached_tokens=0,
        generated_tokens=0,
        queue_s=None,
        prefill_s=None,
        first_token_s=None,
        total_s=1.0,
    )
    http.context.observer.finished(nothing)
    found = samples(http)
    assert found["e2e_request_latency_seconds_count",] == 1
    assert found["time_to_first_token_seconds_count",] == 0
    assert found["requests_finished_total", "abort"] == 1


def test_server_info_says_what_is_served_and_from_what():
    info = Http().get("/server_info").json()
    assert info["model"] == "tiny" and info["context_length"] == 160 and info["version"]
    assert (info["buckets"], info["slots"], info["max_contexts"]) == ([8, 32], 4, [160])
    assert info["executables"][0]["temp_bytes"] == info["memory"]["executable_temp_max"]
    assert info["counters"]["padding_tokens"] == 36
    http = Http()
    http.engine.is_ready = False
    assert http.get("/get_server_info").status_code == 503


def test_executables_are_told_with_their_programs():
    http = Http()
    told = http.get("/executables").json()
    assert told["device"]["platform"] == "cpu"
    assert told["executables"][0]["name"] == "full 32x4x160"
    program = http.get("/executables/full%2032x4x160").json()
    assert program["text"] == "HloModule full 32x4x160"
    assert http.get("/executables/none").status_code == 404


def test_the_cache_is_flushed_by_get_and_post():
    http = Http()
    assert http.get("/flush_cache").json()["success"] and http.post("/flush_cache", b"")
    assert http.engine.num_flushes == 2


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_operators_need_a_key_where_there_is_one(method, path):
    http = Http(api_key=("key",), profile_dir="profiles")
    assert http.request(method, path).status_code == 401
    more = {"content": b"{}"} if path == "/abort_request" else {}
    headers = {"authorization": "Bearer key", "content-type": "application/json"}
    reply = http.request(method, path, headers=headers, **more)
    assert reply.status_code == (400 if more else 200)
    assert http.get("/metrics").status_code == 200


def test_profiles_go_where_the_operator_said():
    assert Http().post("/start_profile", b"{}").json()["error"]["code"] == "no_profile_dir"
    http = Http(profile_dir="here")
    assert http.post("/start_profile", {"output_dir": "/elsewhere"}).json()["folder"] == "here"
    assert http.post("/stop_profile", b"").status_code == 200
    assert http.engine.profiles == ["here", None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"rid": "one"}, {"abort_all": True}])
def test_an_aborted_request_tells_its_client(stream, body):
    http = Http()

    async def abort():
        exchange = Exchange(http.app, PATH)
        exchange.body(BODY | {"rid": "one", "stream": stream, "max_tokens": 150})
        await exchange.until(lambda: http.engine.running, "it runs")
        await exchange.until(lambda: not stream or len(exchange.sent) > 3, "tokens are sent")
        order = Exchange(http.app, "/abort_request")
        order.body(body)
        await asyncio.wait_for(asyncio.gather(order.task, exchange.task), 60)
        assert json.loads(order.sent[1]["body"])["num_aborted"] == 1
        return exchange.sent

    sent = asyncio.run(abort())
    text = b"".join(message.get("body", b"") for message in sent).decode()
    assert sent[0]["status"] == 200 and '"finish_reason":"abort"' in text
    http.check_idle()
    assert len(http.engine.aborted) == 1
    assert samples(http)["requests_finished_total", "abort"] == 1


def test_an_abort_before_the_first_token_is_an_error_and_an_unknown_id_is_none():
    http = Http()

    async def abort():
        http.engine.is_held = True
        exchange = Exchange(http.app, PATH)
        exchange.body(BODY | {"rid": "one"})
        await exchange.until(lambda: http.engine.running, "it waits")
        order = Exchange(http.app, "/abort_request")
        order.body({"rid": "one"})
        await asyncio.wait_for(asyncio.gather(order.task, exchange.task), 60)
        assert exchange.sent[0]["status"] == 400
        assert json.loads(exchange.sent[1]["body"])["error"]["code"] == "aborted"

    asyncio.run(abort())
    http.check_idle()
    assert http.post("/abort_request", {"rid": "two"}).json()["num_aborted"] == 0
