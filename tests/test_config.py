"""Options: parsing, ranges, and what they resolve to."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefill import startup, warming
from jaxprefill.assembly import Assembly
from jaxprefill.config import EngineConfig, ModelConfig, RopeConfig, make_config
from jaxprefill.errors import ConfigError, KernelUnsupported
from jaxprefill.integers import parse_count, parse_counts
from jaxprefill.kernels.attention import select
from jaxprefill.kernels.attention.pallas_mosaic_gpu import PALLAS_MOSAIC_GPU
from jaxprefill.kernels.attention.pallas_triton import PALLAS_TRITON
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.kernels.device import DeviceInfo
from jaxprefill.models.deepseek_v4.hf import read_deepseek
from jaxprefill.models.rope import rotary_frequencies
from jaxprefill.plan import make_plan
from jaxprefill.prefill.backend import choose_prefill_backend
from jaxprefill.prefill.policy import PrefillPolicy, Use
from jaxprefill.prefill.vote import decide_batch
from jaxprefill.resolved import resolved_options
from tests.simulation import Simulation
from tests.tiny import tiny_config

CPU = DeviceInfo(platform="cpu", kind="cpu", memory_bytes=24 * 2**30, has_bf16_matmul=False)
GPU = DeviceInfo(platform="gpu", kind="H200", memory_bytes=140 * 2**30, has_bf16_matmul=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("200k", 200_000),
        ("256K", 262_144),
        ("25.6k", 25_600),
        ("1M", 2**20),
        ("1.5m", 1_500_000),
        ("2t", 2 * 10**12),
        ("2T", 2**41),
        (7, 7),
        (np.int64(7), 7),
        (" 8 ", 8),
    ],
)
def test_counts_are_read_as_people_write_them(text, value):
    assert parse_count("x", text) == value


@pytest.mark.parametrize(
    "text",
    ["", "k", "1.5", "4096.0", "25.6K", "0.0001k", "1e3", "4 k", None, True, 1.0, "9" * 5000],
)
def test_what_is_no_whole_number_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="some_option"):
        parse_count("some_option", text)


def test_lists_of_counts():
    assert parse_counts("x", "16,64,4K") == (16, 64, 4096)
    assert parse_counts("x", [1, 2]) == (1, 2) and parse_counts("x", 5) == (5,)
    assert parse_counts("x", range(64, 193, 64)) == (64, 128, 192)
    assert parse_counts("x", np.array([1, 2])) == (1, 2)
    for wrong in (",", {"a": 1}, b"16"):
        with pytest.raises(ConfigError):
            parse_counts("x", wrong)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("page_size", 3, "page_size"),
        ("page_size", 256, "page_size"),
        ("kv_cache_tokens", 0, "kv_cache_tokens"),
        ("max_running_requests", -1, "max_running"),
        ("prefill_backend", "fast", "full, layerwise, eager"),
        ("dtype", "int8", "float32"),
        ("memory_fraction", 2, "memory_fraction"),
        ("max_padding_factor", 0.5, "max_padding"),
        ("max_padding_factor", "nan", "max_padding"),
        ("max_padding_factor", "inf", "left out for no limit"),
        ("prefill_buckets", [], "at least one count"),
        ("prefill_buckets", "0,8", "prefill_buckets must be a positive integer, got 0"),
        ("prefill_backend", None, "one of auto, full, layerwise, eager, got None"),
        ("prefill_max_context", "0", "positive"),
        ("prefill_max_context", "25.6K", "25.6k"),
        ("strict_prefill", "yes", "strict_prefill"),
        ("seed", "x", "seed"),
        ("seed", -1, "seed must be at least 0"),
        ("model", 5, "model"),
        ("chunked_prefill_size", 1.5, "chunked"),
    ],
)
def test_a_wrong_option_names_itself_and_its_range(option, value, named):
    with pytest.raises(ConfigError, match=named):
        make_config(**{option: value})


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown option bucket;.*prefill_buckets"):
        make_config(bucket=5)


def test_text_is_taken_where_a_flag_would_give_it():
    config = make_config(prefill_buckets="16,64", kv_cache_tokens="4K", prefill_max_context="1k")
    assert config.prefill_buckets == (16, 64)
    assert config.kv_cache_tokens == 4096 and config.prefill_max_context == (1000,)
    assert make_config(prefill_config='{"prefill_max_context": null}') == EngineConfig()


def plan(device=CPU, model=None, **options):
    return make_plan(EngineConfig(**options), model or tiny_config(context_length=8192), device)


def test_cpu_defaults():
    found = plan()
    assert found.ladder.buckets[0] == 16 and found.chunked_prefill_size == 1024
    steps = zip(found.ladder.buckets, found.ladder.buckets[1:], strict=False)
    assert all(high <= 2 * low for low, high in steps), "padding at most doubles the time"
    assert found.dtype.name == "float32" and found.num_pages * 16 == 16384
    assert found.ladder.num_slots == found.max_running == 16
    assert found.decode_slots[-1] == 16 and found.eager_ladder.buckets[-1] >= 1024


def test_the_eager_path_holds_a_token_of_every_running_request():
    """Another rank's prompt that fits no executable sends this rank's decode step there."""
    found = plan(prefill_buckets=(8, 64), max_running_requests=100)
    key = found.eager_ladder.pick(100, found.context_length)
    assert key is not None and key.num_slots == 100 and found.hidden_rows >= key.num_tokens


def test_a_single_bfloat16_row_is_never_decoded_on_a_cpu():
    assert plan(dtype="bfloat16").decode_slots[0] >= 2
    assert plan(dtype="float32").decode_slots[0] == 1


def test_gpu_defaults_fill_the_memory_fraction():
    found = plan(GPU, kv_cache_tokens=None)
    assert found.dtype.name == "bfloat16" and len(found.ladder.buckets) == 21
    token = 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, dim, bytes
    assert 0.84 < found.num_pages * 16 * token / (140 * 2**30) < 0.86


def test_an_attention_backend_must_take_one_device_s_part_of_the_heads():
    device = replace(GPU, compute_capability="9.0", num_devices=8)
    model = tiny_config(num_q_heads=8, head_dim=128)
    options = {"attention_backend": "pallas_mosaic_gpu", "kv_cache_tokens": 4096}
    assert plan(device, model, tensor_parallel_size=4, **options).backend.name in options.values()
    with pytest.raises(KernelUnsupported, match="even number of query heads a KV head, not 1"):
        plan(device, model, tensor_parallel_size=8, **options)


def test_a_measured_row_changes_the_attention_of_its_shapes_alone(monkeypatch):
    device, options = replace(GPU, compute_capability="9.0"), {"kv_cache_tokens": 16384}
    sizes = {"num_q_heads": 8, "head_dim": 128, "context_length": 8192}
    model, made, checked = tiny_config(**sizes), [], []

    def make(tiles, spec):
        made.append(tiles)
        return PALLAS_MOSAIC_GPU.make(tiles, spec)

    mine = replace(PALLAS_MOSAIC_GPU, name="mine", make=make)
    told = "pallas_triton, pallas_mosaic_gpu from 4096 tokens"
    assert str(plan(device, model, **options).attention) == told
    monkeypatch.setattr(select, "FASTER", ())
    before = plan(device, model, **options)
    assert before.attention.backends == (PALLAS_TRITON,)
    assert str(before.attention) == before.backend.name
    monkeypatch.setattr(select, "FASTER", (select.Faster(mine, "9.0", 128, least_tokens=4096),))
    found = plan(device, model, **options)
    shapes = [(key, False) for key in (*found.ladder.keys, *found.eager_ladder.keys)]
    shapes += [(found.decode_key(slots), True) for slots in (*found.decode_slots, 4096)]
    changed = []
    for key, is_decode in shapes:
        backend = found.attention.at(key.num_tokens, is_decode=is_decode)
        layout = found.layout(key, is_decode=is_decode)
        assert backend is (mine if key.num_tokens >= 4096 and not is_decode else PALLAS_TRITON)
        assert (layout == before.layout(key, is_decode=is_decode)) == (backend is PALLAS_TRITON)
        changed += [layout.tiles] if backend is mine else []
    assert str(found.attention) == "pallas_triton, mine from 4096 tokens" in found.describe()
    assert len(changed) > 2
    Assembly.of(found, num_valid=9).jobs()
    assert set(made) == set(changed), "what is compiled has the plan's tiles and their backend"
    monkeypatch.setattr(startup, "check_attention", lambda one, **_: checked.append(one.name))
    monkeypatch.setattr(startup, "check_products", lambda *_, **__: None)
    startup.check_kernels(found)
    assert checked == ["pallas_triton", "mine"]
    # Elsewhere, and where a backend is named, the row says nothing.
    for other, named in (
        ((replace(device, compute_capability="8.0"), model), {}),
        ((device, tiny_config(**sizes | {"head_dim": 64})), {}),
        ((device, tiny_config(**sizes, attention_soft_cap=5.0)), {}),
        ((device, model), {"attention_backend": "pallas_triton"}),
    ):
        assert plan(*other, **options, **named).attention.backends == (PALLAS_TRITON,)


def test_the_ladder_ends_at_chunked_prefill_size():
    assert plan(chunked_prefill_size=100).ladder.buckets == (16, 32, 64, 100)
    assert plan(prefill_buckets=(8, 32)).chunked_prefill_size == 32
    assert plan(prefill_buckets=(8, 32), chunked_prefill_size=20).ladder.buckets == (8, 20)
    assert plan(prefill_buckets="upstream", chunked_prefill_size=2000).ladder.buckets[-2:] == (
        1792,
        2000,
    )


def test_a_short_context_does_not_compile_long_buckets():
    found = plan(model=tiny_config(context_length=160), max_running_requests=1)
    assert found.ladder.buckets == (16, 32, 64, 128, 160)


def test_max_contexts_are_rounded_up_to_a_page_and_checked_after():
    assert plan(prefill_max_context="100,1k").ladder.max_contexts == (112, 1008)
    with pytest.raises(ConfigError, match="8192"):
        plan(prefill_max_context="9000")
    with pytest.raises(ConfigError, match="704"):
        plan(model=tiny_config(context_length=700), prefill_max_context="700")
    with pytest.raises(ConfigError, match="context_length, 700, the width"):
        plan(context_length=700, prefill_max_context="700")
    assert plan(context_length=700, prefill_max_context="688").ladder.max_contexts == (688,)
    with pytest.raises(ConfigError, match=r"in whole pages of 128\); leave it out to take every"):
        plan(context_length=100, page_size=128, prefill_max_context="100")


def test_rounding_is_logged_and_what_no_executable_uses_is_warned_about(caplog):
    with caplog.at_level(logging.INFO):
        plan(prefill_max_context="112,100")
        found = plan(prefill_max_context="100", prefill_backend="eager")
    told = [record.getMessage() for record in caplog.records]
    assert any("100 is rounded up to whole pages: 112" in line for line in told)
    assert any("up to 112;" in line for line in told), "the same value is one shape"
    assert found.ladder.max_contexts == (8192,)
    assert [r.levelname for r in caplog.records if "ignored" in r.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_no_step_is_padded_so_far_that_it_falls_back_where_a_smaller_one_would_run(device):
    found = plan(device, prefill_buckets=(8, 64), max_padding_factor=1.25, kv_cache_tokens=4096)
    sim = Simulation(num_pages=found.num_pages, page_size=16, **vars(found.limits))
    policy = PrefillPolicy(ladder=found.ladder, max_padding_factor=1.25)
    for length in (47, 31, 23, 15):  # each is some eights and a seven
        sim.add(f"{length}", length, 0)
        while sim.num_unfinished:
            batch = sim.step()
            assert batch is None or isinstance(decide_batch(policy, batch), Use), length


def test_slots_that_no_step_can_fill_are_warned_about(caplog):
    found = plan(full_prefill_max_req=99, max_running_requests=8)
    assert found.ladder.num_slots == 8
    assert "99 is lowered to max_running_requests, 8" in caplog.text


def test_a_backend_that_is_not_bounded_by_a_max_context_fails_at_start_up(monkeypatch):
    poor = replace(XLA, capabilities=replace(XLA.capabilities, has_max_context=False))
    monkeypatch.setattr(select, "BACKENDS", (poor,))
    assert plan(prefill_max_context="8192").backend is poor, "the whole context is no bound"
    with pytest.raises(KernelUnsupported, match="xla is not bounded by prefill_max_context"):
        plan(prefill_max_context="100")


@pytest.mark.parametrize(
    "options",
    [
        dict(context_length=9000),
        dict(prefill_buckets="fibonacci"),
        dict(kv_cache_tokens=8),
        dict(attention_backend="cutlass"),
        dict(kv_cache_tokens=10**12),
        dict(kv_cache_tokens=1100 * 2**20),  # 24 GiB hold it, 32-bit rows do not
        dict(max_running_requests=10**8),
        dict(prefill_buckets=(10**6,)),
        dict(strict_prefill=True, prefill_backend="eager"),
    ],
)
def test_options_that_contradict_the_model_are_refused(options):
    with pytest.raises(ConfigError):
        plan(**options)


@pytest.mark.parametrize(
    "options, named",
    [
        (dict(prefill_buckets=(10**6,)), "a prefill bucket"),
        (dict(chunked_prefill_size=10**6), "chunked_prefill_size"),
    ],
)
def test_more_tokens_a_step_than_all_requests_can_have_are_refused(options, named):
    with pytest.raises(ConfigError, match=f"^{named} must be at most .* got 1000000"):
        plan(**options)


def test_a_device_without_backend_lists_the_candidates():
    tpu = DeviceInfo(platform="tpu", kind="v5", memory_bytes=2**34, has_bf16_matmul=True)
    with pytest.raises(KernelUnsupported, match="xla runs on cpu, gpu, not on tpu"):
        plan(tpu)


@pytest.mark.parametrize(
    "changes", [dict(num_kv_heads=4), dict(head_dim=15), dict(num_layers=0), dict(vocab_size=0)]
)
def test_an_impossible_model_is_refused(changes):
    with pytest.raises(ConfigError):
        tiny_config(**changes)


def test_model_config_is_frozen():
    with pytest.raises(AttributeError):
        tiny_config().head_dim = 4  # pyright: ignore
    assert isinstance(tiny_config(), ModelConfig)


def test_what_is_served_decides_the_window_and_the_longrope_factors():
    model = tiny_config(sliding_window=40)
    assert plan(model=model, context_length=41).model.windows == (40, 40)
    assert plan(model=model, context_length=40).model.windows == (None, None)
    rope = RopeConfig(
        kind="longrope",
        theta=1e4,
        original_context=100,
        short_factors=(1.0,) * 8,
        long_factors=(2.0,) * 8,
    )
    for context, factor in ((100, 1), (101, 2)):
        served = plan(model=tiny_config(rope=rope), context_length=context).model
        assert rotary_frequencies(served)[0] == 1 / factor


PREFILL = dict(prefill_buckets=[16, 64], strict_prefill=True, prefill_max_context="4K,8k")


@pytest.mark.parametrize("form", ["mapping", "text", "file"])
def test_prefill_config_wins_over_flags_and_flags_over_defaults(form, tmp_path):
    given = PREFILL if form == "mapping" else json.dumps(PREFILL)
    if form == "file":
        (tmp_path / "prefill.json").write_text(given)
        given = str(tmp_path / "prefill.json")
    found = make_config(
        prefill_config=given, prefill_buckets="8", max_padding_factor=2, page_size=8
    )
    assert found == EngineConfig(
        prefill_buckets=(16, 64),
        strict_prefill=True,
        prefill_max_context=(4096, 8000),
        max_padding_factor=2.0,
        page_size=8,
    )
    # It is merged once: what is replaced later stays replaced.
    assert replace(found, prefill_buckets=(32,)).prefill_buckets == (32,)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ('{"prefill_bucket": [16]}', "unknown key prefill_bucket"),
        ('{"page_size": 8}', "unknown key page_size"),
        ('{"strict_prefill": true', "JSON object, got"),
        ("[1]", "JSON object"),
        ('{"a":' * 5000, "recursion"),
        ('{"strict_prefill": true, "strict_prefill": false}', "strict_prefill twice"),
        ("no/such/file.json", "no/such/file.json"),
        (5, "got 5"),
    ],
)
def test_a_prefill_config_that_cannot_be_read_lists_the_keys(given, named):
    with pytest.raises(ConfigError, match=named) as caught:
        make_config(prefill_config=given)
    for key in ("prefill_backend", "prefill_max_context", "attention_backend"):
        assert key in str(caught.value)


def test_a_value_in_prefill_config_is_checked_as_a_flag_would_be():
    with pytest.raises(ConfigError, match="prefill_buckets must be a whole number"):
        make_config(prefill_config={"prefill_buckets": [1.5]})
    with pytest.raises(ConfigError, match="strict_prefill"):
        make_config(prefill_config={"strict_prefill": "yes"})


def test_prefill_differences_say_just_what_is_not_a_default():
    config = make_config(prefill_config=PREFILL, page_size=8)
    told = config.prefill_differences
    assert set(told) == set(PREFILL), "whatever it names would count as said by the user"
    assert make_config(prefill_config=json.dumps(told), page_size=8) == config
    assert EngineConfig().prefill_differences == {}


def alternating(num_layers):
    layers = tuple(index % 2 == 0 for index in range(num_layers))
    return tiny_config(num_layers=num_layers, sliding_window=8, sliding_layers=layers)


def test_rules_choose_the_prefill_backend_only_where_the_user_did_not():
    assert plan().path == "full" and plan(model=alternating(8)).path == "full"
    auto = plan(model=alternating(9))
    assert auto.path == "layerwise" and "change kind 8 times" in auto.path_why
    assert plan(GPU, model=alternating(9), kv_cache_tokens=4096).path == "full"
    for told in (dict(prefill_backend="full"), dict(prefill_config={"prefill_backend": "full"})):
        found = plan(model=alternating(9), **told)
        assert found.path == "full" and not found.path_why
    assert plan(model=alternating(9), context_length=8).path == "full", "no window is left"
    for count, path in ((8, "full"), (9, "layerwise")):  # 3 of one kind first, then in turns
        hf = {"architectures": ["DeepseekV4ForCausalLM"], "num_hash_layers": 0}
        latent = read_deepseek(hf | {"num_hidden_layers": count + 2})
        assert choose_prefill_backend("auto", latent, platform="cpu").path == path


def test_resolved_options_say_what_was_left_open():
    found = resolved_options(plan(prefill_max_context="100", page_size=16))
    assert found["prefill_max_context"] == ((112,), "whole pages of 16")
    assert found["dtype"].value == "float32" and found["attention_backend"].value == "xla"
    assert found["prefill_buckets"].why == "default of a cpu"
    assert found["quantization"].value == "none"
    assert all(why for value, why in found.values())
    found = resolved_options(plan(prefill_buckets="16,64", chunked_prefill_size=32))
    assert found["prefill_buckets"] == ((16, 32), "cut at chunked_prefill_size")
    found = resolved_options(plan(prefill_max_context="100", prefill_backend="eager"))
    assert found["prefill_max_context"] == ((8192,), "ignored, as prefill_backend is eager")


def test_graph_memory_is_told_by_executable_as_the_driver_counts_it(monkeypatch):
    free = iter([1000, 1000, 1000, 900, 900, 900, 880, 850, 850, 850, 870, 870])
    monkeypatch.setattr(warming, "driver_free_bytes", lambda: next(free, 850))

    def warm(*names):
        def run(state, *, is_brief, on_ran=None):
            for name in names if on_ran else ():
                on_ran(name)

        return SimpleNamespace(warm=run)

    core = SimpleNamespace(
        state=SimpleNamespace(hidden=jnp.zeros(1)),
        prefill=warm("prefill 8x4x160", "eager 64x4x160"),
        decode=warm("decode 4x4x160"),
        heads=warm(),
        graph_bytes={},
    )
    warming.warm_up(core, SimpleNamespace(device=GPU))
    assert core.graph_bytes == {
        "prefill 8x4x160": 0,
        "eager 64x4x160": 20,
        "decode 4x4x160": 130,
    }
