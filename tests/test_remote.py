"""The engine's process, with the tiny model in it: the same numbers, and what becomes of faults."""

import asyncio
import os
import signal
import socket
import threading

import numpy as np
import pytest

from jaxprefill.admission import Admission, Wants
from jaxprefill.config import make_config
from jaxprefill.errors import ConfigError, EngineUnavailable, RequestError
from jaxprefill.remote.client import EngineProcess
from jaxprefill.remote.messages import (
    FROM_ENGINE,
    HEADER,
    TO_ENGINE,
    Ended,
    Stop,
    Submit,
    Updates,
    frame,
)
from jaxprefill.remote.worker import Outbox, _inbox
from jaxprefill.request import Request, SamplingParams
from jaxprefill.tokenizer import Tokenizer
from jaxprefill.updates import RequestUpdate, SampledToken
from tests.fake_engine import STATS
from tests.folders import write_folder
from tests.tiny import SMALL, TinyCheckpoint, byte_tokenizer

SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


def test_messages_come_through_as_they_are():
    request = Request(
        id="é",
        prompt_ids=(1, 2),
        params=SamplingParams(stop="x", logit_bias={3: 1.5}, seed=2**64 - 1),
        seed=2**64 - 1,
        stop_ids=frozenset({256}),
        label_ids=(4,),
    )
    vector = np.arange(3, dtype=np.float32)
    update = RequestUpdate(
        "é", tokens=(SampledToken(1, float("-inf"), {2: -1.0}),), hidden_sum=vector
    )
    sent = TO_ENGINE.decode(frame(Submit(7, [request]))[HEADER.size :])
    assert isinstance(sent, Submit) and sent.requests == [request]
    told = FROM_ENGINE.decode(frame(Updates([(7, update)]))[HEADER.size :])
    assert isinstance(told, Updates)
    ((number, found),) = told.items
    assert number == 7 and np.array_equal(found.hidden_sum, vector)
    assert found._replace(hidden_sum=None) == update._replace(hidden_sum=None)


def test_a_tokenizer_can_be_made_again_from_its_parts():
    tokenizer = byte_tokenizer()
    again = Tokenizer.from_parts(tokenizer.parts())
    assert again.encode("é <eos>") == tokenizer.encode("é <eos>")
    assert (again.eos_ids, again.bos_id) == (tokenizer.eos_ids, tokenizer.bos_id)
    message = [{"role": "user", "content": "Hi"}]
    assert again.apply_chat_template(message) == tokenizer.apply_chat_template(message)


@pytest.fixture(scope="module")
def options(tmp_path_factory, compile_cache):
    """Of an engine over a tiny model's folder."""
    folder = write_folder(tmp_path_factory.mktemp("model"), TinyCheckpoint())
    return SMALL | {"model": str(folder), "compile_cache": compile_cache}


async def started(process: EngineProcess) -> asyncio.Task:
    running = asyncio.create_task(process.run())
    await until(lambda: process.is_ready or running.done())
    assert process.is_ready, running.result()
    return running


async def until(condition):
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.005)


def requests_of(process: EngineProcess, name: str, prompts, params, **wants) -> list[Request]:
    model = process.model
    admission = Admission(
        tokenizer=model.tokenizer,
        vocab_size=model.config.vocab_size,
        context_length=model.context_length,
        rng=np.random.default_rng(0),
    )
    return [
        request
        for index, prompt in enumerate(prompts)
        for request in admission.requests(f"{name}-{index}", prompt, params, wants=Wants(**wants))
    ]


async def updates_of(process: EngineProcess, requests) -> dict[str, list[RequestUpdate]]:
    found = {request.id: [] for request in requests}
    async for update in process.submit(requests):
        found[update.request_id].append(update)
    return found


def tokens_of(updates: list[RequestUpdate]) -> list[int]:
    return [token.token for update in updates for token in update.tokens]


def test_a_process_gives_the_same_numbers_step_by_step_and_survives_faults(options, engine):
    prompts = [[1, 2, 3, 4], list(range(40)), [7]]
    expected = engine.generate(prompts, SCORED)
    logprobs = engine.logprobs(prompts)

    async def ask():
        process = EngineProcess(make_config(**options | {"kv_cache_tokens": 80}))
        with pytest.raises(EngineUnavailable):
            process.submit([])
        running = await started(process)
        requests = requests_of(process, "a", prompts, SCORED, prompt_logprobs=True, prompt_top=2)
        found = await updates_of(process, requests)
        with pytest.raises(RequestError, match="KV pool"):
            await updates_of(process, requests_of(process, "b", [[1] * 81], SCORED))
        await check_aborts(process)
        stats = await process.stats()
        await process.flush_cache()
        await process.stop()
        await running
        assert not process.is_ready
        return list(found.values()), stats

    found, stats = asyncio.run(ask())
    for updates, one, scores in zip(found, expected, logprobs, strict=True):
        assert tokens_of(updates) == one.token_ids
        assert sum(bool(update.tokens) for update in updates) == 8, "one token a step"
        assert updates[-1].finish_reason == "length"
        (times,) = [update.times for update in updates if update.times is not None]
        assert all(seconds >= 0 for seconds in times)
        scored = [value for update in updates for value in update.prompt_logprobs]
        assert scored == pytest.approx(scores[1:], abs=1e-4)
        tops = [top for update in updates for top in update.prompt_top]
        assert all(value in top.values() for value, top in zip(scored, tops, strict=True))
    assert stats.keys() == STATS.keys(), "the fake engine's are the same"
    assert stats["compilations_after_ready"] == 0 and stats["num_running"] == 0
    assert stats["kv_pages"]["free"] == stats["kv_pages"]["total"]


async def check_aborts(process: EngineProcess):
    """One request of two is ended, then the whole submission: both at once, and nothing is left."""
    long = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = requests_of(process, "c", [[1], [2]], long)
    submission = process.submit(requests)
    seen = []
    async for update in submission:
        seen.append(update.request_id)
        if len(seen) == 4:
            submission.abort("c-0-0")
        assert len(seen) < 5 or update.request_id == "c-1-0"
        if len(seen) == 8:
            break
    submission.close()
    async with asyncio.timeout(60):
        while (await process.stats())["num_running"]:
            await asyncio.sleep(0.001)


def test_a_start_can_be_broken_off(options):
    async def start():
        process = EngineProcess(make_config(**options))
        running = asyncio.create_task(process.run())
        await until(lambda: process.process_id is not None)
        await process.stop()
        await asyncio.wait_for(running, 60)

    asyncio.run(start())


def test_a_process_ends_with_its_parent_whatever_that_had_not_read(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"unread")
        ours.close()  # so that reading gives an error and not an end
        outbox = Outbox(theirs)
        outbox.put(Ended(1, "RequestError", "nobody hears this"))
        outbox.close()
        _inbox(theirs)
        assert ended.wait(60)


def test_a_process_ends_with_a_parent_that_died_while_it_was_sending(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(frame(Stop())[:-1])
        ours.close()
        inbox = _inbox(theirs)
        assert ended.wait(60) and inbox.empty()


def test_an_engine_that_cannot_start_says_why(options):
    process = EngineProcess(make_config(**options | {"context_length": 10**6}))
    with pytest.raises(ConfigError, match="context_length must be at most"):
        asyncio.run(process.run())


@pytest.mark.slow
def test_a_process_that_dies_is_started_again(options):
    async def die():
        process = EngineProcess(make_config(**options))
        running = await started(process)
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        submission = process.submit(requests_of(process, "a", [[1]], long))
        with pytest.raises(EngineUnavailable):
            async for _ in submission:
                os.kill(process.process_id, signal.SIGKILL)
        assert not process.is_ready
        await until(lambda: process.is_ready)
        assert process.num_restarts == 1
        found = await updates_of(process, requests_of(process, "a", [[1]], SCORED))
        assert len(tokens_of(found["a-0-0"])) == 8
        await process.stop()
        await running

    asyncio.run(die())
