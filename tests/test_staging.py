"""Buffers in pinned memory: executables read them, and a slot is rewritten only when read."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefill.cache.small_blocks import reserve_small_blocks
from jaxprefill.models.sharding import make_mesh, replicated
from jaxprefill.prefill.bound import BoundExecutable
from jaxprefill.prefill.compiler import CPU_OPTIONS, CompileJob, compile_job
from jaxprefill.prefill.staging import Staging, mark_job, pinned_sharding

HIDDEN = jax.ShapeDtypeStruct((4, 8), np.float32)


@pytest.fixture
def staging(engine):
    mark = compile_job(mark_job(HIDDEN), CPU_OPTIONS)
    layout = engine.plan.layout(engine.plan.ladder.keys[0])
    return Staging(layout, mark, replicated(make_mesh())), layout.num_words


def test_an_executable_reads_what_was_put_last_and_slots_come_round(staging):
    staged, num_words = staging
    pinned = pinned_sharding(replicated(make_mesh()))
    job = CompileJob(
        name="total of 8 words",
        function=lambda words, hidden: (words[:8].sum(), hidden + 1),
        arguments=(jax.ShapeDtypeStruct((num_words,), np.int32, sharding=pinned), HIDDEN),
        pinned=(0,),
    )
    assert job.module_name == "total_of_8_words"
    compiled = compile_job(job, CPU_OPTIONS).call
    hidden, operands = jnp.zeros(HIDDEN.shape), set()
    for step in range(20):
        words = np.full(num_words, step, np.int32)
        words.flags.writeable = False
        operand = staged.put(words)
        total, hidden = compiled(operand, hidden)
        staged.launched(hidden)
        operands.add(operand.unsafe_buffer_pointer())
        assert total == 8 * step
    assert len(operands) == 8


def test_a_half_is_not_written_before_its_mark_is_done(staging):
    staged, num_words = staging
    waited = []

    class Mark:
        def __init__(self, step):
            self.step = step

        def block_until_ready(self):
            waited.append(self.step)

    steps = iter(range(100))
    staged._mark = lambda hidden: Mark(next(steps))
    for _ in range(24):
        staged.put(np.zeros(num_words, np.int32))
        staged.launched(jnp.zeros(HIDDEN.shape))
    assert waited == [0, 1, 2, 3], "each half waits for its own mark of a round before"


def test_a_job_over_one_device_keeps_its_pinned_operand(engine):
    pinned = pinned_sharding(replicated(make_mesh()))
    shape = jax.ShapeDtypeStruct((4,), np.int32, sharding=pinned)
    job = CompileJob(name="x", function=lambda x: x * 2, arguments=(shape,), pinned=(0,))
    moved = replace(job).over(make_mesh())
    assert moved.pinned == (0,) and moved.arguments[0].sharding == pinned


def test_a_bound_executable_gives_what_the_compiled_call_gives_and_takes_donations():
    weights = (jnp.arange(4.0), jnp.zeros((2, 2)), jnp.ones(4))  # the second is not read
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    job = CompileJob(
        name="bound",
        function=lambda weights, pools, hidden: (
            (pools[0] + weights[0],),
            hidden * weights[2].sum(),
        ),
        arguments=((shape, jax.ShapeDtypeStruct((2, 2), np.float32), shape), (shape,), shape),
        donated=(1, 2),
    )
    compiled = compile_job(job, CPU_OPTIONS)
    assert compiled.read == (0, 2, 3, 4)
    expected = jax.tree.leaves(compiled.call(weights, (jnp.ones(4),), jnp.full(4, 3.0)))
    operands = jnp.ones(4), jnp.full(4, 3.0)
    found = BoundExecutable(compiled, weights)(*operands)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(one.is_deleted() for one in operands)
    assert not any(one.is_deleted() for one in weights)
    again = compiled.call(weights, (found[0],), found[1])  # both ways take each other's results
    np.testing.assert_array_equal(again[1], 48.0)


def test_small_blocks_keep_one_array_behind_each_free_block():
    kept = reserve_small_blocks(replicated(make_mesh()))
    assert len(kept) == 7 * 96 + 6 * 4
    assert all(block.nbytes == 1 and not block.is_deleted() for block in kept)
