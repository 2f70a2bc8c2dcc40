"""The device's copy of the int buffer: one address, the newest words, the host's left alone."""

import numpy as np

from jaxprefill.models.sharding import make_mesh, replicated
from jaxprefill.prefill.compiler import CPU_OPTIONS, compile_job
from jaxprefill.prefill.staging import Staging


def test_each_put_replaces_every_word_at_one_address(engine):
    everywhere = replicated(make_mesh())
    layout = engine.plan.layout(engine.plan.ladder.keys[0])
    job = Staging.job(layout, everywhere)
    assert not job.is_graph and job.donated == (0,)
    staging = Staging(layout, {job.name: compile_job(job, CPU_OPTIONS)}, everywhere)
    addresses = set()
    for seed in range(3):
        words = np.random.default_rng(seed).integers(0, 1000, layout.num_words, np.int32)
        kept = words.copy()
        words.flags.writeable = False
        found = staging.put(words)
        np.testing.assert_array_equal(np.asarray(found), kept)
        np.testing.assert_array_equal(words, kept)
        addresses.add(found.unsafe_buffer_pointer())
    assert len(addresses) == 1


def test_shapes_of_one_length_share_an_upload(engine):
    first, *rest = (engine.plan.layout(key) for key in engine.plan.ladder.keys)
    assert Staging.job_name(first) == f"upload {first.num_words}"
    assert {Staging.job_name(one) for one in rest} != {Staging.job_name(first)}
