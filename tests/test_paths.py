"""Full, layerwise and eager give one answer; every fallback is counted; nothing compiles late."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefill import SamplingParams
from jaxprefill.assembly import Assembly
from jaxprefill.batch import Batch, BatchRow
from jaxprefill.errors import CapacityError, CompileError, FallbackError, RequestError
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.prefill.buckets import BucketLadder
from jaxprefill.prefill.compiler import CPU_OPTIONS, CompileJob, compile_all
from jaxprefill.prefill.padding import NO_ROW, pad
from tests.reference import greedy, prompt_logprobs
from tests.tiny import TinyCheckpoint, tiny_engine


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed * 1000 + length).integers(0, 250, length).tolist()


PROMPTS = [random_prompt(n, seed=n) for n in (3, 20, 70, 1, 8)]


def change(before: dict, after: dict) -> dict:
    return {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}


@pytest.mark.parametrize("backend", ["full", "layerwise", "eager"])
def test_every_backend_equals_the_oracle_and_is_the_one_that_ran(engine, checkpoint, backend):
    if backend == "full":
        check_backend(engine, checkpoint, "full")
        return
    with tiny_engine(checkpoint, prefill_backend=backend) as made:
        check_backend(made, checkpoint, backend)


def check_backend(made, checkpoint, path):
    before = made.stats()
    for ids, found in zip(PROMPTS, made.logprobs(PROMPTS), strict=True):
        np.testing.assert_allclose(found[1:], prompt_logprobs(checkpoint, ids), atol=1e-4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for ids, found in zip(PROMPTS, made.generate(PROMPTS, params), strict=True):
        assert found.token_ids == greedy(checkpoint, ids, 4)
    after = made.stats()
    ran = change(before["passes"], after["passes"])
    assert set(ran) == {path, "decode"}
    assert change(before["fallbacks"], after["fallbacks"]) == (
        {"disabled": ran["eager"]} if path == "eager" else {}
    )
    # Other engines of this process may have compiled before, so the count is compared.
    assert after["compilations_after_ready"] == before["compilations_after_ready"]


def test_the_max_context_changes_no_answer(engine):
    """One chunk behind a cached prefix, through three max contexts and the eager path."""
    plan, core = engine.plan, engine._core
    mesh = make_mesh(1)
    tree = model_tree(plan.model, plan.dtype, mesh)
    assembly = Assembly(plan, tree, mesh, num_valid=plan.model.vocab_size)
    ladder = BucketLadder((8,), plan.ladder.num_slots, (256, 1024, 2048))
    compiled = compile_all(
        assembly.prefill_jobs(ladder), options=CPU_OPTIONS, num_threads=2, on_done=lambda _: None
    )
    executables = {
        **assembly.prefill_executables(ladder, core.state, compiled),
        **core.prefill._fallback,
    }
    pages = [7, 3, 11, 1, 60]
    for cached in (row(0, 32, pages), replace(row(1, 1, pages), kv_len=33)):
        core.prefill.run(core.state, Batch(rows=(cached,), is_decode=False))
    chunk = Batch(rows=(replace(row(2, 6, pages), kv_len=39),), is_decode=False)
    found = {}
    for key, executable in executables.items():
        executable.run(core.state, chunk)
        found[str(key)] = np.asarray(core.state.hidden)[:6].copy()
    assert {"8x4x256", "8x4x1024", "8x4x2048", "32x4x160"} <= set(found)
    for key, hidden in found.items():
        np.testing.assert_allclose(hidden, found["8x4x256"], atol=1e-4, err_msg=key)


def test_one_context_more_than_the_maximum_falls_back_and_says_so(checkpoint, caplog):
    with tiny_engine(checkpoint, prefill_max_context=(16, 64)) as made:
        ids = random_prompt(64)
        fits = made.logprobs([ids])[0]
        assert made.stats()["fallbacks"] == {}
        assert "full 8x4x16" not in made.stats()["executables"]
        longer = [*ids, 5]
        with caplog.at_level(logging.WARNING):
            found = made.logprobs([longer, longer])
        stats = made.stats()
        assert stats["fallbacks"] == {"context_above_max": stats["passes"]["eager"]}
        said = [r for r in caplog.records if "context_above_max" in r.getMessage()]
        assert len(said) == 1, "logged once, counted always"
        np.testing.assert_allclose(fits[1:], prompt_logprobs(checkpoint, ids), atol=1e-4)
        for one in found:
            np.testing.assert_allclose(one[1:], prompt_logprobs(checkpoint, longer), atol=1e-4)
        assert stats["compilations_after_ready"] == 0
        made.logprobs([random_prompt(5)])
        assert made.stats()["executables"]["full 8x4x16"] == 1


def test_strict_makes_a_fallback_an_error_and_the_engine_goes_on(checkpoint):
    with tiny_engine(checkpoint, prefill_max_context=32, strict_prefill=True) as made:
        with pytest.raises(FallbackError, match="context_above_max"):
            made.logprobs([random_prompt(33)])
        ids = random_prompt(32)
        np.testing.assert_allclose(
            made.logprobs([ids])[0][1:], prompt_logprobs(checkpoint, ids), atol=1e-4
        )
        assert made.stats()["kv_pages"]["free"] == made.stats()["kv_pages"]["total"]


def row(index: int, tokens: int, pages: list[int]) -> BatchRow:
    ids = tuple(random_prompt(tokens, seed=index))
    return BatchRow(request_id=str(index), slot=index, token_ids=ids, kv_len=tokens, pages=pages)


def test_too_many_requests_and_padding_have_reasons_of_their_own(checkpoint):
    limits = dict(full_prefill_max_req=2, max_padding_factor=2.0, chunked_prefill_size=20)
    with tiny_engine(checkpoint, **limits) as made:
        core = made._core
        three = Batch(rows=tuple(row(i, 3, [i]) for i in range(3)), is_decode=False)
        core.prefill.run(core.state, three)
        sparse = Batch(rows=(row(0, 3, [0]),), is_decode=False)
        core.prefill.run(core.state, sparse)
        core.prefill.run(core.state, Batch(rows=(row(0, 21, [0, 1, 2]),), is_decode=False))
        assert made.stats()["fallbacks"] == {
            "too_many_requests": 1,
            "padding_factor": 1,
            "too_many_tokens": 1,
        }
        with pytest.raises(CapacityError, match="eager fallback holds"):
            beyond = row(0, 33, [0, 1, 2, 3, 4])
            core.prefill.run(core.state, Batch(rows=(beyond,), is_decode=False))
        # The scheduler itself never forms the first: it splits instead.
        found = made.logprobs([random_prompt(4, seed=i) for i in range(5)])
        assert made.stats()["fallbacks"]["too_many_requests"] == 1
        for i, one in enumerate(found):
            expected = prompt_logprobs(checkpoint, random_prompt(4, seed=i))
            np.testing.assert_allclose(one[1:], expected, atol=1e-4)


def test_the_second_guard_refuses_what_the_policy_would_not_have_let_through(engine):
    core = engine._core
    executable = core.prefill._executables[engine.plan.ladder.keys[-1]]
    with pytest.raises(CapacityError, match="holds 8 tokens, the batch has 9"):
        executable.run(core.state, Batch(rows=(row(0, 9, [0, 1]),), is_decode=False))


def test_all_buckets_write_one_hidden_buffer_and_one_pool_in_place(engine):
    core = engine._core
    where = (core.state.hidden.unsafe_buffer_pointer(), core.state.pools[0].unsafe_buffer_pointer())
    engine.generate([random_prompt(5), random_prompt(60)], SamplingParams(max_tokens=4))
    assert where == (
        core.state.hidden.unsafe_buffer_pointer(),
        core.state.pools[0].unsafe_buffer_pointer(),
    )


def poisoned(engine, batch, *, key, padding_id=271):
    """The hidden rows of `batch` when everything that is not its own is NaN.

    `padding_id` is an id whose embedding is NaN.
    """
    core, plan = engine._core, engine.plan
    num_pages, page_size = plan.num_pages, plan.config.page_size
    layout = plan.layout(key)
    buffer = pad(batch, layout).copy()
    fields, real = layout.fields(buffer), batch.num_tokens
    fields["ids"][real:] = padding_id
    own = {page for one in batch.rows for page in one.pages}
    stale = next(page for page in range(num_pages) if page not in own)
    for index in range(key.num_slots):
        used = -(-batch.rows[index].kv_len // page_size) if index < len(batch.rows) else 0
        fields["page_table"][index, used:] = stale
    assert (fields["kv_rows"][real:] == NO_ROW).all()
    core.state.pools = (jnp.full_like(core.state.pools[0], jnp.nan),)
    core.state.hidden = jnp.full_like(core.state.hidden, jnp.nan)
    core.prefill._executables[key].execute(core.state, buffer)
    return np.asarray(core.state.hidden)[:real], np.asarray(core.state.pools[0])


def test_nothing_in_padding_reaches_a_real_row_not_even_nan():
    checkpoint = TinyCheckpoint()
    checkpoint.tensors["model.embed_tokens.weight"][271] = np.nan
    checkpoint.config = TinyCheckpoint(is_embedding_tied=False).config
    checkpoint.tensors["lm_head.weight"] = np.nan_to_num(
        checkpoint.tensors["model.embed_tokens.weight"]
    )
    with tiny_engine(checkpoint) as made:
        key = made.plan.ladder.keys[0]
        batch = Batch(rows=(row(0, 5, [7]), row(1, 11, [3, 40])), is_decode=False)
        hidden, pool = poisoned(made, batch, key=key)
        made._core.state.pools = (jnp.zeros_like(made._core.state.pools[0]),)
        made._core.prefill._executables[key].run(made._core.state, batch)
        np.testing.assert_array_equal(hidden, np.asarray(made._core.state.hidden)[:16])
        assert np.isfinite(hidden).all()
        # Padding wrote no page: what is not the rows' own is NaN still.
        by_layer = pool.reshape(2, 2, 2, made.plan.num_pages, 8, 16)
        written = np.isfinite(by_layer).all(axis=(0, 1, 2, 5))
        assert written.sum() == 16
        assert written[7, :5].all() and written[3].all() and written[40, :3].all()


def test_the_whole_menu_compiles_nothing_after_ready(checkpoint):
    """A first time for everything, on an engine that has run nothing yet."""
    with tiny_engine(checkpoint) as made:
        run_menu(made)
        assert made.stats()["compilations_after_ready"] == 0
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))  # the counter does count
        assert made.stats()["compilations_after_ready"] > 0


def run_menu(engine):
    ids = random_prompt(9)
    engine.logprobs([ids])
    menu = [
        dict(temperature=0),
        dict(temperature=1.3, seed=5),
        dict(top_k=3),
        dict(top_p=0.5),
        dict(min_p=0.2),
        dict(logprobs=0),
        dict(logprobs=20),
        dict(n=3),
        dict(stop="x"),
        dict(presence_penalty=1.0),
        dict(frequency_penalty=-1.0),
        dict(repetition_penalty=1.3),
        dict(logit_bias={5: 100.0}),
        dict(logit_bias={i: 1.0 for i in range(272)}),
        dict(min_tokens=4, max_tokens=5),
        dict(stop_token_ids=[3]),
        dict(ignore_eos=True),
        dict(max_tokens=0),
        dict(max_tokens=1),
    ]
    for params in menu:
        engine.generate([ids], SamplingParams(**params))
    engine.generate([ids] * 4, [SamplingParams(**params) for params in menu[:4]])
    engine.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError):
        engine.generate([[9999]])


def test_a_shape_that_does_not_compile_stops_start_up_with_its_name():
    def broken(x):
        raise ValueError("kernel wants tiles of 64")

    jobs = [CompileJob(name="prefill 3x1x8", function=broken, arguments=(np.int32(1),))]
    with pytest.raises(CompileError, match=r"prefill 3x1x8 .*kernel wants tiles of 64"):
        compile_all(jobs, options={}, num_threads=2, on_done=lambda record: None)


def test_executables_are_compiled_largest_first_each_with_a_record(checkpoint):
    seen = []
    with tiny_engine(checkpoint, on_compiled=lambda record, total: seen.append((record, total))):
        pass
    names = [record.name for record, _ in seen]
    assert len(names) == len(set(names)) == seen[0][1]
    assert all(record.compile_s > 0 for record, _ in seen)
    assert {record.name for record, _ in seen if not record.argument_bytes} == {"zeros"}
    jobs = [
        CompileJob(name=str(cost), function=lambda x: x, arguments=(np.int32(1),), cost=cost)
        for cost in (4, 64, 16)
    ]
    order = []
    compile_all(jobs, options={}, num_threads=1, on_done=lambda record: order.append(record.name))
    assert order == ["64", "16", "4"]
