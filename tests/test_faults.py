"""Faults of clients, of the model and of processes, against one real server after another.

After each the pages are back, the gauges are at rest, and the next answer is what it always was.
"""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.serving import overload, parse, resident_mib
from tests.folders import write_folder
from tests.test_serve import Server, engine_of, head
from tests.test_server_admin import samples_of
from tests.tiny import TinyCheckpoint

pytestmark = pytest.mark.slow

POISON = 270  # an id whose embedding is not a number, and that the tokenizer lacks: never sampled
PROBE = {"prompt": list(range(40)), "temperature": 0, "max_tokens": 4, "logprobs": 2, "echo": True}
LONG = {"prompt": [7] * 100, "max_tokens": 50, "ignore_eos": True}  # four chunks, fifty steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    checkpoint = TinyCheckpoint(is_embedding_tied=False)
    checkpoint.tensors["model.embed_tokens.weight"][POISON] = np.nan
    return write_folder(tmp_path_factory.mktemp("model"), checkpoint)


@pytest.fixture(scope="module")
def server(folder, compile_cache):
    made = Server(folder, "--max-queued-requests=8", compile_cache=compile_cache)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def expected(server) -> list:
    return server.post("/v1/completions", **PROBE)["choices"]


@pytest.fixture(autouse=True)
def all_is_as_before(server, expected):
    yield
    check(server, expected)


def check(server: Server, expected: list):
    found = until_at_rest(server)
    assert found["compilations_after_ready_total",] == 0
    choices = server.post("/v1/completions", **PROBE)["choices"]
    logprobs = [choices[0]["logprobs"].pop("token_logprobs")]
    logprobs += [expected[0]["logprobs"].get("token_logprobs")]
    assert logprobs[0][1:] == pytest.approx(logprobs[1][1:], abs=1e-4)
    assert choices[0]["text"] == expected[0]["text"]


def until_at_rest(server: Server) -> dict:
    deadline = time.monotonic() + 60
    while True:
        found = samples_of(server.http.get("/metrics").text)
        names = ("kv_pages_used", "num_running_requests", "num_waiting_requests")
        if all(found.get((name,), 1) == 0 for name in names):
            return found
        assert time.monotonic() < deadline, {name: found.get((name,)) for name in names}
        time.sleep(0.01)


def status_of(server: Server, pieces: Sequence[bytes], *, pause_s: float = 0) -> int:
    """The answer's status to what is sent piece by piece; it may come before all is sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
        except ConnectionError:
            pass  # the server has said what it thinks of it
        return int(connection.makefile("rb").readline().split()[1])


def go_away_after(server: Server, data: bytes, *, linger_s: float = 0):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(data)
        time.sleep(linger_s)


def test_two_hundred_clients_go_away_at_every_stage(server):
    body = json.dumps(LONG | {"stream": True}).encode()
    data = head(len(body)) + body

    def go_away(stage: int):
        if stage < 100:  # inside the head, or inside the body
            go_away_after(server, data[: len(data) * stage // 100])
        else:
            go_away_after(server, data, linger_s=(stage - 100) * 0.001)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(go_away, range(200)))


def test_requests_are_aborted_in_the_middle_of_their_prompts(server):
    def ask(index: int) -> httpx.Response:
        return server.http.post("/v1/completions", json=LONG | {"rid": f"r{index}"})

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, index) for index in range(6)]
        num_aborted = 0
        while not all(future.done() for future in asked):
            num_aborted += server.post("/abort_request", abort_all=True)["num_aborted"]
        replies = [future.result() for future in asked]
    assert num_aborted
    for reply in replies:
        if reply.status_code == 200:
            assert reply.json()["choices"][0]["finish_reason"] in ("abort", "length")
        else:
            assert reply.status_code == 400 and reply.json()["error"]["code"] == "aborted"


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"\xff\xfe{\x00}\x00", b'{"prompt": "\xff"}', b'{"prompt": [1, 2', b""]
)
def test_malformed_bodies_are_the_clients_fault(server, body):
    assert status_of(server, [head(len(body)) + body]) == 400


def test_a_truncated_body_and_one_of_100_mb_cost_nothing(server):
    go_away_after(server, head(10**4) + b'{"prompt": "')
    chunked = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    piece = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    before = resident_mib(server.process.pid)
    assert status_of(server, [chunked] + [piece] * 100) == 413
    assert status_of(server, [head(10**8), *[b" " * 2**20] * 95]) == 413
    assert resident_mib(server.process.pid) < before + 64


def test_a_slow_sender_holds_nobody_up(server):
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    data = head(len(body)) + body
    with ThreadPoolExecutor(1) as pool:
        pieces = [data[:-10], *(data[at:][:1] for at in range(-10, 0))]
        slow = pool.submit(status_of, server, pieces, pause_s=0.02)
        while not slow.done():
            server.post("/v1/completions", prompt="b", max_tokens=1)
    assert slow.result() == 200


def test_values_that_are_no_numbers_end_their_request_alone(server, expected):
    before = samples_of(server.http.get("/metrics").text)["corrupted_requests_total",]
    poisoned = {"prompt": [1] * 30 + [POISON] + [1] * 30, "max_tokens": 5}
    with ThreadPoolExecutor(3) as pool:
        replies = list(
            pool.map(
                lambda body: server.http.post("/v1/completions", json=body),
                [poisoned, PROBE, poisoned],
            )
        )
    assert [reply.status_code for reply in replies] == [500, 200, 500]
    assert "not numbers" in replies[0].json()["error"]["message"]
    logprobs = [reply["logprobs"]["token_logprobs"] for reply in replies[1].json()["choices"]]
    assert logprobs[0][1:] == pytest.approx(expected[0]["logprobs"]["token_logprobs"][1:], abs=1e-4)
    found = samples_of(server.http.get("/metrics").text)
    assert found["corrupted_requests_total",] == before + 2
    for _ in range(3):  # over every page that was poisoned
        many = {"prompt": [[n] * 100 for n in range(8)], "max_tokens": 2}
        reply = server.http.post("/v1/completions", json=many)
        assert reply.status_code == 200, reply.text


def test_twice_what_can_be_served_is_refused_in_part_and_leaks_nothing(server):
    found = asyncio.run(overload(parse(load_flags(server, seconds=2))))
    check_overload(found)


@pytest.mark.long
def test_two_minutes_of_twice_what_can_be_served(server):
    found = asyncio.run(overload(parse(load_flags(server, seconds=120))))
    print(json.dumps(found, indent=2))
    check_overload(found)
    assert found["after"]["resident_mib"] < found["before"]["resident_mib"] + 64
    assert found["health_ms"]["max"] < 200


def load_flags(server: Server, *, seconds: float) -> list[str]:
    flags = ["overload", f"--url={server.url}", f"--duration={seconds}", "--vocab=200"]
    flags += ["--concurrency=12", "--prompt-tokens=60", f"--pid={server.process.pid}"]
    return flags


def check_overload(found: dict):
    assert set(found["statuses"]) <= {"200", "429"} and found["statuses"]["200"] > 0
    assert found["rejected_without_retry_after"] == 0
    for state in (found["before"], found["after"]):
        assert state["kv_pages_used"] == 0 == state["compilations_after_ready_total"]
    assert found["health_ms"]["max"] < float("inf"), "health never failed"


def test_an_engine_that_is_killed_is_replaced(server, expected):
    before = samples_of(server.http.get("/metrics").text)["engine_restarts_total",]
    engine = engine_of(server)
    body = {"prompt": [7], "max_tokens": 150, "ignore_eos": True, "n": 20, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGKILL)
        last = [line for line in lines if line][-2:]
    assert '"error"' in last[0] and last[1] == "data: [DONE]"
    reply = server.http.post("/v1/completions", json=PROBE)
    assert reply.status_code == 503 and reply.headers["retry-after"]
    deadline = time.monotonic() + 120
    while server.http.get("/health").status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    check(server, expected)
    assert samples_of(server.http.get("/metrics").text)["engine_restarts_total",] == before + 1


def test_a_server_that_is_killed_leaves_nothing_and_starts_again(server, folder, compile_cache):
    engine, port = engine_of(server), server.port
    server.process.kill()
    assert server.stop() == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while Path(f"/proc/{engine}").exists():
        assert time.monotonic() < deadline, "the engine outlives its server"
        time.sleep(0.01)
    again = Server(folder, "--max-queued-requests=8", compile_cache=compile_cache, port=port)
    server.__dict__.update(again.__dict__)
