"""One model over several devices, of one process or of two, gives what one device gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxprefill.config import EngineConfig
from jaxprefill.errors import ConfigError
from jaxprefill.kernels.device import DeviceInfo
from jaxprefill.models.deepseek_v4.hf import read_deepseek
from jaxprefill.models.sharding import share_of
from jaxprefill.plan import make_plan
from tests.test_deepseek_v4 import fixture_config
from tests.tiny import tiny_config

ROOT = Path(__file__).parent.parent
LIMIT_S = 450  # far more than needed: a deadlock must end before the suite does


def start(*arguments: object, num_devices: int) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.on_devices", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(*processes: subprocess.Popen) -> list[dict]:
    """What each process printed; none outlives this call."""
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(printed.split("FOUND ")[-1]) for printed, _ in outputs]


@pytest.fixture(scope="module")
def found() -> dict:
    """The same prompts on 1, 2 and 4 devices."""
    return results(start(1, 2, 4, num_devices=4))[0]


def assert_alike(one: dict, other: dict) -> None:
    assert one["sampled"] == other["sampled"]
    for name in ("logprobs", "top"):
        assert_near(one[name], other[name])


def assert_near(one, other) -> None:
    """Numbers within 1e-4, everything else equal."""
    if isinstance(one, float):
        np.testing.assert_allclose(one, other, atol=1e-4)
    elif isinstance(one, (dict, list)):
        assert len(one) == len(other)
        keys = one if isinstance(one, dict) else range(len(one))
        for key in keys:
            assert_near(one[key], other[key])
    else:
        assert one == other


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "families"),
    [
        ((2,), ("deepseek_v4",)),  # the shortest
        ((4,), ("deepseek_v4",)),
        ((2, 4), ("qwen3_moe", "gpt_oss_sinks", "gemma2_soft_caps", "gemma3_two_ropes")),
    ],
    ids=("deepseek_v4-2", "deepseek_v4-4", "others"),
)
def test_experts_and_latent_attention_are_shared_out_too(devices, families):
    (worst,) = results(start(*devices, "--families", *families, num_devices=max(devices)))
    assert set(worst) == set(families)
    assert max(worst.values()) <= 1e-4


@pytest.mark.slow
def test_converted_checkpoints_lie_on_devices_as_their_sources_do(found):
    assert found["restored"] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_any_number_of_devices_equals_the_oracle_on_every_path(found, num_devices):
    one = found[str(num_devices)]
    assert one["logprob_error"] <= 1e-4 and one["embedding_error"] <= 1e-4
    assert one["greedy"] == found["expected"]
    assert set(one["passes"]) == {"full", "eager", "decode"}
    assert one["is_poison_ignored"]
    assert one["compilations_after_ready"] == 0
    assert one["mesh"] == {"model": num_devices, "processes": 1}
    assert_alike(one, found["1"])


@pytest.mark.slow
def test_devices_wait_for_each_other_twice_a_layer_and_once_at_each_end(found):
    nothing = {"all-reduce": 0, "all-gather": 0, "all-to-all": 0, "collective-permute": 0}
    assert found["1"]["collectives"] == dict.fromkeys(("body", "greedy", "score"), nothing)
    for num_devices in ("2", "4"):
        assert found[num_devices]["collectives"] == {
            "body": nothing | {"all-reduce": 1 + 2},  # layers are a loop here
            "greedy": nothing | {"all-gather": 1},
            "score": nothing | {"all-gather": 1},
        }


@pytest.mark.slow
def test_weights_and_pages_are_shared_out(found):
    memory = {n: found[str(n)]["memory"] for n in (1, 2, 4)}
    assert memory[2]["weights"] < 0.52 * memory[1]["weights"]
    assert memory[4]["weights"] < 0.29 * memory[1]["weights"]  # both KV heads are there twice
    assert memory[2]["kv_pool"] == memory[4]["kv_pool"] == memory[1]["kv_pool"] / 2


@pytest.mark.slow
def test_a_new_process_loads_everything_and_gives_the_same_bits(found):
    """On one device and on two; the first process has put its executables into the store."""
    (again,) = results(start(2, 1, num_devices=4))
    for num_devices in ("1", "2"):
        first, second = found[num_devices], again[num_devices]
        assert first["compiled_at_start"] >= 20
        assert (second["lowered_at_start"], second["compiled_at_start"]) == (0, 0)
        for name in ("greedy", "sampled", "logprobs", "top", "logprob_error", "embedding_error"):
            assert second[name] == first[name], name


@pytest.mark.parametrize(
    ("name", "dtype", "devices"),
    [
        pytest.param("gemma2_soft_caps", "bfloat16", (4,), marks=pytest.mark.slow),
        pytest.param("gpt_oss_sinks", "float32", (2, 4), marks=pytest.mark.long),
        pytest.param("gemma3_two_ropes", "bfloat16", (1, 4), marks=pytest.mark.long),
        pytest.param("gpt_oss_sinks", "bfloat16", (1, 2, 4), marks=pytest.mark.long),
        pytest.param("qwen3_moe", "bfloat16", (1, 4), marks=pytest.mark.long),
    ],
)
def test_soft_caps_sinks_and_experts_are_shared_out(name, dtype, devices):
    """In bfloat16 a token near a border may take another expert: few are far off."""
    (each,) = results(start(*devices, "--fixture", name, dtype, num_devices=4))
    for one in each.values():
        assert one["compilations_after_ready"] == 0
        if dtype == "float32":
            assert one["worst"] <= 1e-4 and one["is_greedy"]
        else:
            assert one["mean"] <= 0.1 and one["worst"] <= 1.5


@pytest.mark.slow
def test_a_deep_model_s_launches_do_not_keep_its_devices_from_each_other():
    """A device of a CPU takes 32 at once; the next waits on the thread that the others need."""
    (found,) = results(start(2, "--deep", num_devices=2))
    assert found["2"] <= 1e-4


@pytest.mark.slow
def test_two_processes_run_one_engine_and_share_a_compilation_cache(found, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    each = results(
        *(
            start(2, "--process", i, "--port", port, "--cache", tmp_path, num_devices=1)
            for i in range(2)
        )
    )
    for process, seen in enumerate(each):
        for one in (seen["cold"], seen["warm"]):
            assert one["logprob_error"] <= 1e-4
            assert one["greedy"] == found["expected"]
            assert one["compilations_after_ready"] == 0
            assert one["mesh"] == {"model": 2, "processes": 2}
            assert_alike(one, found["1"])
        assert "processes [1] differ from process 0" in seen["disagree"], process
    assert any(tmp_path.iterdir())


def plan(num_devices: int, device: dict | None = None, **options):
    sizes = dict(platform="cpu", kind="cpu", memory_bytes=2**34, has_bf16_matmul=False)
    info = DeviceInfo(**sizes, **({"num_devices": 8} | (device or {})))
    model = tiny_config(num_q_heads=24, num_kv_heads=6, mlp_size=96)
    return make_plan(EngineConfig(tensor_parallel_size=num_devices, **options), model, info)


def test_a_model_that_cannot_be_shared_out_names_what_does_not_come_out_even():
    assert plan(2).config.tensor_parallel_size == 2
    with pytest.raises(ConfigError, match="at most the 8 devices that jax sees, got 16; lower it"):
        plan(16)
    with pytest.raises(ConfigError, match="24 query heads evenly, got 5"):
        plan(5)
    with pytest.raises(ConfigError, match="6 KV heads evenly, got 4"):
        plan(4)
    with pytest.raises(ConfigError, match="100 MLP columns evenly, got 3"):
        share_of(tiny_config(mlp_size=100), 3)
    with pytest.raises(ConfigError, match="2 groups of heads evenly, got 4; choose a divisor of 2"):
        share_of(read_deepseek(fixture_config()), 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at least 1, got 0"):
        plan(0)


def test_several_processes_use_all_their_devices_and_one_seed():
    two = {"num_devices": 2, "num_processes": 2}
    assert plan(2, two, seed=0).device.num_processes == 2
    with pytest.raises(ConfigError, match="must be 2, all devices of the 2 processes"):
        plan(1, two, seed=0)
    with pytest.raises(ConfigError, match="seed must be given"):
        plan(2, two)


def test_a_share_has_whole_heads_and_a_padded_vocabulary():
    whole = tiny_config(num_q_heads=8, num_kv_heads=2, vocab_size=271)
    share = share_of(whole, 4)
    assert (share.num_q_heads, share.num_kv_heads, share.mlp_size, share.vocab_size) == (
        2,
        1,
        20,
        68,
    )
    assert share_of(whole, 1) is whole


def test_each_device_is_given_its_part_of_the_memory():
    gpu = {"num_devices": 2, "platform": "gpu", "memory_bytes": 2**30, "has_bf16_matmul": True}
    sizes = dict(kind="gpu")
    model = tiny_config(num_kv_heads=2)
    one, two = (
        make_plan(EngineConfig(tensor_parallel_size=n), model, DeviceInfo(**sizes, **gpu))
        for n in (1, 2)
    )
    assert 1.9 < two.num_pages / one.num_pages < 2.1
