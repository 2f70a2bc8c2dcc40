"""The simulation benchmark: everything is answered, nothing needs a device."""

import json
import subprocess
import sys

from benchmarks import scheduler_sim as sim


def test_a_length_file_is_replayed_to_its_end(tmp_path):
    path = tmp_path / "lengths.csv"
    lines = [f"{i * 0.01},{20 + i % 7 * 90},{i % 3},{i % 2 * 64}" for i in range(60)]
    head = "arrival_s,prompt_tokens,output_tokens,shared_tokens"
    path.write_text("\n".join([head, *lines]))
    jobs = sim.read_jobs(path)
    ladder = sim.ladder_of("64,256", slots=8, context=4096)
    device = sim.Device(floor_s=0.005, token_s=2e-5)
    found = {
        shares: sim.replay(jobs, ladder, device, max_running=8, num_pages=400, shares=shares)
        for shares in (True, False)
    }
    prompts = sum(job.prompt_tokens for job in jobs)
    outputs = sum(max(job.output_tokens - 1, 0) for job in jobs)
    assert found[False].real_tokens == prompts + outputs
    assert found[True].real_tokens == prompts + outputs - found[True].cached_tokens
    assert found[True].cached_tokens >= 64 * 20
    for result in found.values():
        assert len(result.queue_s) == 60 and min(result.queue_s) >= 0
        assert len(result.ttft_s) == sum(job.output_tokens > 0 for job in jobs)
        assert set(result.passes) <= {"decode", "full 64", "full 256"}
        assert result.padded_tokens >= result.real_tokens


def test_a_tuned_ladder_is_replayed_at_its_measured_costs(tmp_path):
    costs = [
        dict(num_tokens=n, time_ns=n * 10**6, compile_s=1.0, code_bytes=0, temp_bytes=0)
        for n in (16, 64)
    ]
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"buckets": [16, 64], "measured": costs}))
    ladder = sim.ladder_of(str(path), slots=8, context=4096)
    device = sim.Device(floor_s=9.0, token_s=9.0, curve=sim.read_costs(path))
    jobs = [sim.Job(0.0, 14, 0)]
    result = sim.replay(jobs, ladder, device, max_running=8, num_pages=40, shares=False)
    assert ladder.buckets == (16, 64) and result.passes == {"full 16": 1}
    assert result.duration_s == 0.016


def test_it_needs_no_jax():
    code = "import sys, benchmarks.scheduler_sim; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
