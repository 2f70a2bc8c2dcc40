"""A server's life from its first socket to its last, over a fake engine and real connections."""

import asyncio
import json
import os
import signal
import socket
import ssl

import httpx
import pytest
import trustme

from jaxprefill.errors import CompileError, ConfigError
from jaxprefill.server.app import create_app
from jaxprefill.server.context import Call
from jaxprefill.server.run import ServerRun
from jaxprefill.server.settings import ServerSettings
from tests.fake_engine import FakeEngine

BODY = {"prompt": "a", "temperature": 0, "max_tokens": 5}


@pytest.fixture(autouse=True)
def signals():
    """A server leaves signals ignored, as its process is about to end; this one is not."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def serve(visit, engine=None, *, verify=True, **settings) -> int:
    """The exit status of a server that is visited by `visit(client, engine)`."""
    engine = engine or FakeEngine()

    async def run():
        chosen = ServerSettings(port=0, **settings)
        server = ServerRun(create_app(engine, chosen), engine, chosen)
        running = asyncio.create_task(server.run())
        async with httpx.AsyncClient(base_url=server.url, timeout=20, verify=verify) as client:
            await visit(client, engine)
        return await asyncio.wait_for(running, 20)

    return asyncio.run(run())


def tell():
    os.kill(os.getpid(), signal.SIGTERM)


async def held_request(client, engine, **more) -> asyncio.Task:
    engine.is_held = True
    asked = asyncio.create_task(client.post("/v1/completions", json=BODY | more))
    while not engine.running:
        await asyncio.sleep(0.005)
    return asked


def test_a_signal_lets_requests_finish_and_takes_no_new_ones():
    async def visit(client, engine):
        asked = await held_request(client, engine)
        tell()
        while (await client.get("/health")).status_code == 200:
            pass
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        engine.is_held = False
        assert (await asked).json()["choices"][0]["text"] == "abcde"

    assert serve(visit) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_signals_after_the_last_answer_change_nothing(stream, monkeypatch):
    monkeypatch.setattr(Call, "close", lambda call: None)  # the second comes before a call's end

    async def visit(client, engine):
        asked = await held_request(client, engine, stream=stream)
        tell()
        await asyncio.sleep(0.05)
        engine.is_held = False
        assert (await asked).status_code == 200
        tell()

    assert serve(visit) == 0
    tell()


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_signal_ends_what_runs(stream):
    async def visit(client, engine):
        asked = await held_request(client, engine, stream=stream)
        tell()
        await asyncio.sleep(0.05)
        tell()
        reply = await asked
        assert reply.status_code == 503 and "closed" in reply.json()["error"]["message"]

    assert serve(visit) == 1


def test_the_drain_has_an_end():
    async def visit(client, engine):
        asked = await held_request(client, engine)
        tell()
        assert (await asked).status_code == 503

    assert serve(visit, drain_timeout=0.1) == 1


def test_an_engine_that_cannot_start_ends_the_server():
    async def visit(client, engine):
        pass

    engine = FakeEngine()
    engine.failure = CompileError("prefill 16 could not be compiled")
    with pytest.raises(CompileError):
        serve(visit, engine)


HEADS = {
    "a Java client's offer of HTTP/2": "POST /v1/completions HTTP/1.1\r\nUpgrade: h2c\r\n"
    "Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    "HTTP/1.0": "POST /v1/completions HTTP/1.0",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_clients_of_other_versions_are_answered_as_they_can_read(head):
    body = json.dumps(BODY | {"stream": True})
    lines = f"{head}\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"

    async def visit(client, engine):
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(lines.encode())
        await writer.drain()
        writer.write(body.encode())
        reply = await reader.readuntil(b"data: [DONE]\n\n")
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert (b"chunked" in reply) == ("HTTP/1.1" in head)
        assert len(engine.requests) == 1
        writer.close()
        tell()

    assert serve(visit) == 0


def test_an_address_in_use_is_said_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for wrong in ({"port": taken.getsockname()[1]}, {"host": "no.such.host.invalid"}):
            settings = ServerSettings(**wrong)
            with pytest.raises(ConfigError, match="another --port"):
                ServerRun(create_app(FakeEngine(), settings), FakeEngine(), settings)


def test_a_certificate_that_is_not_there_is_said_too():
    settings = ServerSettings(port=0, ssl_certfile="missing.pem")
    with pytest.raises(ConfigError, match="ssl_certfile"):
        ServerRun(create_app(FakeEngine(), settings), FakeEngine(), settings)


def test_https_is_served_with_a_certificate_that_clients_trust(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    for part in issued.cert_chain_pems:
        part.write_to_path(chain, append=True)
    issued.private_key_pem.write_to_path(key)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def visit(client, engine):
        assert client.base_url.scheme == "https"
        reply = await client.post("/v1/completions", json=BODY)
        assert reply.json()["choices"][0]["text"] == "abcde"
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as reply:
            assert (await reply.aread()).endswith(b"data: [DONE]\n\n")
        tell()

    assert serve(visit, verify=trusting, ssl_certfile=str(chain), ssl_keyfile=str(key)) == 0
