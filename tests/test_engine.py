"""The engine against the float64 oracle: whole, chunked, batched, mixed, padded."""

import gc
import hashlib
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxprefill import SamplingParams, startup
from jaxprefill.admission import Wants
from jaxprefill.config import EngineConfig
from jaxprefill.errors import JaxPrefillError, RequestError
from jaxprefill.kernels.device import describe_device
from jaxprefill.plan import make_plan
from jaxprefill.sampling.runner import PendingScores
from jaxprefill.step import PendingStep
from jaxprefill.weights.convert import convert
from jaxprefill.weights.locate import open_checkpoint
from tests.reference import greedy, prompt_logprobs, reference_logits
from tests.tiny import TinyCheckpoint, tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed * 1000 + length).integers(0, 250, length).tolist()


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 159])
def test_prompt_logprobs_equal_the_oracle_at_every_edge(engine, checkpoint, length):
    ids = random_prompt(length)
    found = engine.logprobs([ids])[0]
    assert found[0] is None and len(found) == length
    np.testing.assert_allclose(found[1:], prompt_logprobs(checkpoint, ids), atol=1e-4)


def test_greedy_tokens_and_their_logprobs_equal_the_oracle(engine, checkpoint):
    prompts = [random_prompt(n, seed=n) for n in (3, 9, 40)]
    for ids, found in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert found.token_ids == greedy(checkpoint, ids, 6)
        expected = prompt_logprobs(checkpoint, ids + found.token_ids)[len(ids) - 1 :]
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)


def test_a_short_batch_after_a_long_one_sees_nothing_stale(engine, checkpoint):
    engine.logprobs([random_prompt(31), random_prompt(90)])
    ids = random_prompt(3)
    np.testing.assert_allclose(
        engine.logprobs([ids])[0][1:], prompt_logprobs(checkpoint, ids), atol=1e-4
    )


def test_a_prompt_scores_the_same_alone_and_in_any_company(engine):
    prompts = [random_prompt(n, seed=n) for n in (1, 5, 8, 9, 33, 64, 3, 20)]
    alone = [engine.logprobs([ids])[0] for ids in prompts]
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 5, 3, 1, 6, 4, 2, 0], [4, 4, 4, 0]):
        together = engine.logprobs([prompts[i] for i in order])
        for i, found in zip(order, together, strict=True):
            np.testing.assert_allclose(found[1:], alone[i][1:], atol=1e-4)


def test_scores_are_right_beside_running_streams(engine, checkpoint):
    """Mixed batches: two prompts generate while others are scored."""
    ids, long = random_prompt(4), random_prompt(90)
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)] * 2
    params += [SamplingParams(temperature=0, max_tokens=1, logprobs=0)] * 2
    before = engine.stats()["passes"]
    found = engine.generate([ids, ids, long, long], params)
    assert engine.stats()["passes"]["full"] > before.get("full", 0)
    assert found[0].token_ids == found[1].token_ids == greedy(checkpoint, ids, 40)
    assert found[2].token_ids == found[3].token_ids == greedy(checkpoint, long, 1)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fewer_tokens_are_a_prefix_of_more(engine, count):
    ids = random_prompt(11)
    long = engine.generate([ids], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    short = engine.generate([ids], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    assert short[0].token_ids == long[0].token_ids[:count]


def test_the_next_step_is_dispatched_before_the_last_ones_tokens_are_read(engine, monkeypatch):
    core, events = engine._core, []
    dispatch, read = type(core)._dispatch, type(core)._read
    monkeypatch.setattr(
        type(core),
        "_dispatch",
        lambda self, *given: events.append("dispatch") or dispatch(self, *given),
    )
    monkeypatch.setattr(
        type(core), "_read", lambda self, step: events.append("read") or read(self, step)
    )
    engine.generate([random_prompt(5)], SamplingParams(max_tokens=4, ignore_eos=True))
    assert events[:5] == ["dispatch", "dispatch", "read", "dispatch", "read"]


def test_chunks_that_give_no_results_do_not_run_ahead_of_the_device(engine, monkeypatch):
    """Else a newcomer, or an abort, would come behind all chunks of a long prompt."""
    events: list[str] = []
    core, read = type(engine._core), PendingScores.read
    dispatch = core._dispatch
    monkeypatch.setattr(
        core, "_dispatch", lambda self, *given: events.append("dispatch") or dispatch(self, *given)
    )
    monkeypatch.setattr(
        PendingScores, "read", lambda scores: events.append("waited") or read(scores)
    )
    engine.flush_cache()
    engine.generate([random_prompt(120)], SamplingParams(max_tokens=1))
    chunks = 4
    assert events == ["dispatch", *["dispatch", "waited"] * (chunks - 1), "waited"]


def test_sampling_repeats_with_its_seed_alone_or_in_a_batch(engine):
    ids = random_prompt(6)
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=8, ignore_eos=True)
    alone = engine.generate([ids], params)[0].token_ids
    batch = engine.generate([random_prompt(20), ids, ids], params)
    assert batch[1].token_ids == batch[2].token_ids == alone
    other = SamplingParams(temperature=1.0, seed=12, max_tokens=8, ignore_eos=True)
    assert engine.generate([ids], other)[0].token_ids != alone


def test_n_continuations_are_prompt_major_and_repeatable(engine):
    params = SamplingParams(temperature=1.5, seed=1, n=3, max_tokens=6, ignore_eos=True)
    first = engine.generate([random_prompt(4), random_prompt(9)], params)
    assert [c.index for c in first] == [0, 1, 2, 0, 1, 2]
    assert [c.prompt_tokens for c in first] == [4] * 3 + [9] * 3
    assert len({tuple(c.token_ids) for c in first[:3]}) == 3
    again = engine.generate([random_prompt(4), random_prompt(9)], params)
    assert [c.token_ids for c in again] == [c.token_ids for c in first]


def test_logit_bias_and_stop_ids_do_what_they_say(engine):
    forced = SamplingParams(temperature=0, logit_bias={97: 100.0}, max_tokens=3)
    found = engine.generate([random_prompt(4)], forced)[0]
    assert found.token_ids == [97] * 3 and found.finish_reason == "length"
    stopping = SamplingParams(temperature=0, logit_bias={97: 100.0}, stop_token_ids=[97])
    found = engine.generate([random_prompt(4)], stopping)[0]
    assert found.token_ids == [97] and found.finish_reason == "stop" and found.stop_reason == 97
    assert found.text == ""
    late = SamplingParams(temperature=0, logit_bias={97: 100.0}, stop_token_ids=[97], min_tokens=2)
    found = engine.generate([random_prompt(4)], late)[0]
    assert len(found.token_ids) == 3 and 97 not in found.token_ids[:2]
    # The bias belonged to those requests alone.
    plain = engine.generate([random_prompt(4)], SamplingParams(temperature=0, max_tokens=2))[0]
    assert plain.token_ids != [97, 97]


def test_penalties_see_prompt_and_output(engine, checkpoint):
    ids = random_prompt(12)
    params = SamplingParams(
        temperature=0,
        max_tokens=8,
        frequency_penalty=2.0,
        presence_penalty=2.0,
        repetition_penalty=1.5,
        ignore_eos=True,
    )
    found = engine.generate([ids], params)[0].token_ids
    seen = list(ids)
    for position, token in enumerate(found):
        logits = reference_logits(checkpoint, seen)[-1][: checkpoint.tokenizer.vocab_size].copy()
        repeated = sorted(set(seen))
        values = logits[repeated]
        logits[repeated] = np.where(values > 0, values / 1.5, values * 1.5)
        counts = np.bincount(found[:position], minlength=len(logits))
        logits -= 2.0 * counts + 2.0 * (counts > 0)
        assert token == int(np.argmax(logits))
        seen.append(token)


def test_stop_strings_end_the_request_and_free_its_pages(engine):
    ids = random_prompt(7)
    full = engine.generate([ids], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
    stop = full.text[3:5]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop)
    found = engine.generate([ids], params)[0]
    assert found.text == full.text[: full.text.find(stop)] and found.finish_reason == "stop"
    assert found.stop_reason == stop and len(found.token_ids) <= len(full.token_ids)
    pages = engine.stats()["kv_pages"]
    assert pages["free"] == pages["total"]


def test_more_requests_than_slots_and_pages_all_finish(engine, checkpoint):
    prompts = [random_prompt(n % 37 + 1, seed=n) for n in range(30)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    found = engine.generate(prompts, params)
    for i in (0, 11, 29):
        assert found[i].token_ids[:20] == greedy(checkpoint, prompts[i], 20)
    assert all(len(c.token_ids) == 100 for c in found)
    pages = engine.stats()["kv_pages"]
    assert pages["free"] == pages["total"]


def test_a_bad_request_runs_nothing_and_the_engine_goes_on(engine):
    before = engine.stats()["passes"]
    for bad in (
        b"ab",
        [b"ab"],
        bytearray(b"ab"),
        np.array(3),
        {"a": 1},
        None,
        [None],
        [[1], []],
        [[1, 999]],
        "",
        [["a"]],
        [[1] * 161],
        5,
        [5.5],
    ):
        with pytest.raises(RequestError):
            engine.generate(bad)
    with pytest.raises(RequestError, match="params"):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt ids must be .* got 999$"):
        engine.logprobs([[1], [2, 999], [3]])
    with pytest.raises(RequestError, match=r"^prompt ids must be"):
        engine.logprobs([[999]])
    with pytest.raises(RequestError, match=r"^conversations\[1\]: messages\[0\] must be") as caught:
        engine.chat([[{"role": "user", "content": "a"}], ["b"]])
    assert caught.value.param == "messages"
    assert engine.stats()["passes"] == before
    assert len(engine.generate("hi", SamplingParams(max_tokens=2))) == 1


def test_nothing_to_do_is_an_empty_list(engine):
    assert engine.generate([]) == [] and engine.logprobs([]) == []


def test_a_request_larger_than_the_pool_is_refused_at_once(checkpoint):
    with tiny_engine(checkpoint, kv_cache_tokens=64) as small:
        with pytest.raises(RequestError, match="KV pool of 64 tokens"):
            small.generate([random_prompt(60)], SamplingParams(max_tokens=20))
        prompts = [random_prompt(20, seed=i) for i in range(4)]
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        found = small.generate(prompts, params)
        assert small.stats()["preemptions"] > 0
        for ids, one in zip(prompts, found, strict=True):
            assert one.token_ids == greedy(checkpoint, ids, 30)


def test_preempted_penalties_and_seeds_continue_where_they_were(checkpoint):
    prompts = [random_prompt(20, seed=i) for i in range(4)]
    params = SamplingParams(
        max_tokens=30,
        ignore_eos=True,
        seed=3,
        frequency_penalty=1.0,
        repetition_penalty=1.2,
        logit_bias={65: 1.5},
        logprobs=2,
    )
    with tiny_engine(checkpoint, kv_cache_tokens=64) as small, tiny_engine(checkpoint) as large:
        tight, roomy = small.generate(prompts, params), large.generate(prompts, params)
        assert small.stats()["preemptions"] > 0 and large.stats()["preemptions"] == 0
    assert [c.token_ids for c in tight] == [c.token_ids for c in roomy]


def test_nan_weights_end_the_request_and_not_the_engine_nor_whoever_begins_alike():
    broken = TinyCheckpoint(is_embedding_tied=False)
    broken.tensors["model.embed_tokens.weight"][200] = np.nan
    spoilt = [1] * 30 + [200] + [1] * 30
    with tiny_engine(broken) as made:
        found = made.generate([spoilt] * 2, SamplingParams(max_tokens=3))
        assert [c.finish_reason for c in found] == ["error", "error"]
        with pytest.raises(JaxPrefillError, match="not numbers"):
            made.logprobs([spoilt])
        assert made.stats()["corrupted_requests"] == 3
        assert made.stats()["kv_pages"]["free"] == made.stats()["kv_pages"]["total"]
        (alike,) = made.generate([[1] * 40], SamplingParams(max_tokens=3, ignore_eos=True))
        assert alike.finish_reason == "length" and alike.cached_tokens == 0


def test_chat_renders_the_template_once(engine):
    messages = [{"role": "user", "content": "hi"}]
    one = engine.chat(messages, SamplingParams(temperature=0, max_tokens=3))
    text = "<user>hi<a>"
    two = engine.generate([text], SamplingParams(temperature=0, max_tokens=3))
    assert one[0].token_ids == two[0].token_ids and one[0].prompt_tokens == two[0].prompt_tokens
    assert len(engine.chat([messages, messages], SamplingParams(max_tokens=1))) == 2
    with pytest.raises(RequestError, match="messages"):
        engine.chat([])
    for bad in ({"role": "user", "content": "hi"}, (m for m in messages), None, "hi" * 999):
        with pytest.raises(
            RequestError, match=r"^messages must be a list of messages, got .{4,99}$"
        ):
            engine.chat(bad)


def test_threads_take_turns(engine):
    prompts = [random_prompt(n, seed=n) for n in (5, 20, 33, 9)]
    alone = [engine.logprobs([ids]) for ids in prompts]
    with ThreadPoolExecutor(max_workers=4) as pool:
        together = list(pool.map(lambda ids: engine.logprobs([ids]), prompts))
    for [found], [expected] in zip(together, alone, strict=True):
        np.testing.assert_allclose(found[1:], expected[1:], atol=1e-4)


def test_a_chat_too_long_by_its_characters_is_not_tokenised(engine):
    with pytest.raises(RequestError, match="characters"):
        engine.chat([{"role": "user", "content": "." * 100_000}])


def test_a_step_that_cannot_be_read_fails_its_callers_and_no_others(checkpoint, monkeypatch):
    with tiny_engine(checkpoint) as made:
        expected = made.generate("ab", SamplingParams(max_tokens=4, temperature=0))[0].token_ids
        read, faults = PendingStep.read, [RuntimeError("the device is gone")]

        def fail_once(step):
            if faults:
                raise faults.pop()
            return read(step)

        monkeypatch.setattr(PendingStep, "read", fail_once)
        with pytest.raises(RuntimeError, match="the device is gone"):
            made.generate("ab", SamplingParams(max_tokens=4, temperature=0))
        found = made.generate("ab", SamplingParams(max_tokens=4, temperature=0))[0]
        stats = made.stats()
        assert found.token_ids == expected
        assert stats["kv_pages"]["free"] == stats["kv_pages"]["total"]
        faults += [RuntimeError("for good")] * 10**6
        with pytest.raises(RuntimeError, match="for good"):
            made.generate("ab", SamplingParams(max_tokens=4))


def test_an_end_token_outside_the_vocabulary_ends_nothing(checkpoint, monkeypatch):
    with tiny_engine(checkpoint) as made:
        monkeypatch.setattr(made.tokenizer, "eos_ids", frozenset({256, 99999}))
        params = SamplingParams(max_tokens=3, min_tokens=2)
        assert made.generate("ab", params)[0].finish_reason in ("stop", "length")


def test_a_closed_engine_keeps_no_executable(checkpoint):
    def live() -> int:
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    with tiny_engine(checkpoint):
        pass
    before = live()
    with tiny_engine(checkpoint) as closed:
        assert live() > before
    assert closed.stats()["memory"]["weights"] > 0  # it can still be asked
    assert live() <= before


def test_a_closed_engine_says_so(checkpoint):
    with tiny_engine(checkpoint) as made:
        pass
    with pytest.raises(JaxPrefillError, match="closed"):
        made.generate("hi")
    made.close()


def test_stats_are_ready_for_json(engine):
    engine.generate("hi", SamplingParams(max_tokens=2))
    stats = json.loads(json.dumps(engine.stats()))
    assert stats["memory"]["weights"] > 0 and stats["memory"]["kv_pool"] > 0
    assert {record["name"] for record in stats["compiled"]} >= {"greedy 1", "prefill 8x4x160"}


@pytest.fixture
def interrupts_are_raised():
    """Python leaves SIGINT ignored where its parent did, as shells do for background jobs.

    It drops what is raised in a callback of its collector, so that does not run meanwhile.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_are_raised")
def test_an_interrupt_does_not_wait_for_a_checkpoints_hashes(checkpoint, tmp_path, monkeypatch):
    convert(checkpoint, tmp_path / "tiny")
    held, is_over, waited = open_checkpoint(str(tmp_path / "tiny")), threading.Event(), []
    threads = iter([threading.main_thread().ident])

    def digest(*_):
        for one in threads:  # the first file alone
            signal.pthread_kill(one, signal.SIGINT)
        waited.append(is_over.wait(15))
        return hashlib.sha256()

    monkeypatch.setattr(hashlib, "file_digest", digest)
    monkeypatch.setattr(startup, "obtain", lambda *_, **__: {})
    plan = make_plan(EngineConfig(store=False), held.config, describe_device())
    with pytest.raises(KeyboardInterrupt):
        startup.start(held, plan, on_compiled=lambda *_: None)
    assert not waited
    is_over.set()


@pytest.mark.usefixtures("interrupts_are_raised")
def test_interrupts_at_any_moment_leave_an_engine_that_works(checkpoint):
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with tiny_engine(checkpoint) as made:
        wanted = made.generate(["abc"], params)[0].token_ids
        raised = 0
        for index in range(12):
            timer = threading.Timer(0.003 + 0.0017 * index, signal.raise_signal, [signal.SIGINT])
            try:
                timer.start()  # a slow machine is interrupted in here
                while timer.is_alive():
                    made.generate(["abc" * 5], params)
                time.sleep(0.01)
            except KeyboardInterrupt:
                raised += 1  # Python drops it where it comes in a finaliser
            timer.join()
            assert made.generate(["abc"], params)[0].token_ids == wanted
        assert raised
        assert made.stats()["kv_pages"]["free"] == made.stats()["kv_pages"]["total"]


def test_calls_of_several_threads_share_steps(checkpoint):
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with tiny_engine(checkpoint) as made:
        alone = [made.generate([text], params)[0].token_ids for text in ("ab", "cd", "ef")]
        passes = made.stats()["passes"]["decode"]
        with ThreadPoolExecutor(4) as pool:
            held = threading.Barrier(2, timeout=60)
            pool.submit(made._loop.call, lambda: [held.wait(), held.wait()])
            held.wait()  # no step begins before all three have come
            calls = [pool.submit(made.generate, [text], params) for text in ("ab", "cd", "ef")]
            while len(made._loop._inbox) < 3:
                time.sleep(0.001)
            held.wait()
            together = [call.result()[0].token_ids for call in calls]
        assert together == alone
        assert made.stats()["passes"]["decode"] - passes < passes


def test_closing_ends_running_calls_and_all_later_ones(checkpoint):
    with tiny_engine(checkpoint) as made, ThreadPoolExecutor(1) as pool:
        long = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
        call = pool.submit(lambda: [made.generate(["a"], long) for _ in range(1000)])
        while made.stats()["passes"].get("decode", 0) < 5:
            pass
        made.close()
        with pytest.raises(JaxPrefillError, match="closed"):
            call.result()
        for action in (made.flush_cache, lambda: made.generate(["a"])):
            with pytest.raises(JaxPrefillError, match="closed"):
                action()
        made.close()


@pytest.mark.parametrize("priority", ["x", None, True, 1.5])
def test_a_priority_is_an_integer(engine, priority):
    with pytest.raises(RequestError, match="priority must be an integer"):
        engine.generate("a", priority=priority)


@pytest.mark.parametrize("params", [{}, 0, "", False])
def test_only_none_means_default_params(engine, params):
    with pytest.raises(RequestError, match="params must be"):
        engine.generate("a", params)


def test_the_likeliest_tokens_of_a_prompt_come_from_the_pages_too(engine):
    ids = random_prompt(44, seed=77)
    engine.flush_cache()

    def ask(num_top: int):
        wants = Wants(prompt_logprobs=True, prompt_top=num_top)
        params = SamplingParams(max_tokens=1, temperature=0)
        return engine._loop.run(engine._requests([ids], [params], wants=wants))[0]

    before = engine.stats()["compilations_after_ready"]
    first, again, wider = ask(1), ask(1), ask(3)
    assert (first.cached_tokens, again.cached_tokens, wider.cached_tokens) == (
        0,
        39,
        0,
    )  # row 39 scores token 40
    for one, num_top in ((first, 1), (again, 1), (wider, 3)):
        assert one.prompt_logprobs == pytest.approx(first.prompt_logprobs, abs=1e-4)
        assert one.prompt_top_logprobs[0] is None
        rows = zip(
            ids,
            one.prompt_logprobs,
            one.prompt_top_logprobs,
            wider.prompt_top_logprobs,
            strict=True,
        )
        for token, logprob, top, widest in list(rows)[1:]:
            assert top[token] == logprob and num_top <= len(top) <= num_top + 1
            assert max(top.values()) == pytest.approx(max(widest.values()), abs=1e-4)
    assert engine.stats()["compilations_after_ready"] == before
