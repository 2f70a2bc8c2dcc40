"""Runs the tiny model on several devices, and prints as JSON what came out (test_devices.py).

XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.on_devices 1 2 4
python -m tests.on_devices 2 4 --families deepseek_v4          (see `family_differences`)
python -m tests.on_devices 2 --deep                            (see `deep_error`)
python -m tests.on_devices 2 4 --fixture gemma2_soft_caps bfloat16
python -m tests.on_devices 2 --process 0 --port 12345 --cache folder    (and --process 1)
"""

import tests.conftest  # noqa: F401, I001  array annotations are checked here too

import argparse
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxprefill import SamplingParams
from jaxprefill.batch import Batch
from jaxprefill.errors import ConfigError
from jaxprefill.models.deepseek_v4.hf import read_deepseek
from jaxprefill.models.registry import read_config
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.prefill.compiler import CPU_OPTIONS
from jaxprefill.weights.convert import convert
from jaxprefill.weights.load import load_leaves
from jaxprefill.weights.locate import open_checkpoint
from tests.bodies import hidden_rows, random_checkpoint
from tests.oracle.cases import CASES
from tests.reference import greedy, prompt_logprobs, reference_embedding
from tests.test_deepseek_v4 import fixture_config
from tests.test_oracle import fixture, open_fixture
from tests.test_paths import poisoned, random_prompt, row
from tests.tiny import TinyCheckpoint, tiny_engine

FAMILIES = ("qwen3_moe", "gpt_oss_sinks", "gemma2_soft_caps", "gemma3_two_ropes")
POISON = 270  # an id whose embedding is NaN
OPTIONS = dict(
    prefill_buckets=(16,),
    prefill_max_context=(32,),  # longer prompts take the eager path
    max_running_requests=2,
    kv_cache_tokens=320,
    store=True,
)
PROMPTS = [random_prompt(n, seed=n) for n in (3, 20, 70, 1, 8)]
SAMPLED = [
    SamplingParams(max_tokens=3, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=3, seed=8, top_k=9, top_p=0.9, min_p=0.01, logprobs=4),
    SamplingParams(max_tokens=3, seed=9, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(max_tokens=3, seed=10, logit_bias={249: 6.0, 5: -90.0}, logprobs=0),
    SamplingParams(max_tokens=3, seed=11, min_tokens=3, stop_token_ids=[1, 2], logprobs=20),
]


def make_checkpoint() -> TinyCheckpoint:
    """Sizes that do not come out even: 2 KV heads for 4 devices, 271 ids; and every bias."""
    biases = dict(has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True)
    sizes = dict(num_q_heads=8, num_kv_heads=2, vocab_size=271, is_embedding_tied=False)
    checkpoint = TinyCheckpoint(**sizes, **biases)
    checkpoint.tensors["model.embed_tokens.weight"][POISON] = np.nan
    return checkpoint


def measure(checkpoint: TinyCheckpoint, num_devices: int, **options) -> dict:
    """What an engine over so many devices gives."""
    with tiny_engine(checkpoint, tensor_parallel_size=num_devices, **(OPTIONS | options)) as made:
        scored = made.logprobs(PROMPTS)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        greedily = made.generate(PROMPTS, params)
        sampled = made.generate(PROMPTS, SAMPLED)
        found = {
            "logprob_error": max(
                np.abs(np.array(one[1:]) - prompt_logprobs(checkpoint, ids)).max(initial=0)
                for ids, one in zip(PROMPTS, scored, strict=True)
            ),
            "embedding_error": max(
                np.abs(one - reference_embedding(checkpoint, ids)).max()
                for ids, one in zip(PROMPTS, made.embed(PROMPTS), strict=True)
            ),
            "greedy": [one.token_ids for one in greedily],
            "sampled": [one.token_ids for one in sampled],
            "logprobs": [one.logprobs for one in sampled],
            "top": [one.top_logprobs for one in sampled],
        }
        stats = made.stats()
        kept = ("passes", "compilations_after_ready", "memory", "mesh")
        kept += ("lowered_at_start", "compiled_at_start")
        found |= {name: stats[name] for name in kept}
        if jax.process_count() == 1:
            found |= {
                "collectives": collectives(made),
                "is_poison_ignored": is_poison_ignored(made),
            }
        return found


def collectives(made) -> dict[str, dict[str, int]]:
    """How often the devices wait for each other, by executable."""
    key = made.plan.ladder.keys[0]
    calls = {
        "body": made._core.prefill._executables[key]._compiled.call,
        "greedy": made._core.heads.lm._call["greedy 2"],
        "score": made._core.heads.lm._call["score 16"],
    }
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    return {
        name: {
            kind: len(re.findall(rf"= \S+ {kind}(?:-start)?\(", call.as_text())) for kind in kinds
        }
        for name, call in calls.items()
    }


def is_poison_ignored(made) -> bool:
    """Whether NaN in padding, stale pages and the hidden buffer changes nothing."""
    key, core = made.plan.ladder.keys[0], made._core
    batch = Batch(rows=(row(0, 5, [7]), row(1, 9, [3, 30])), is_decode=False)
    hidden, _ = poisoned(made, batch, key=key, padding_id=POISON)
    core.state.pools = (jnp.zeros_like(core.state.pools[0]),)
    core.prefill._executables[key].run(core.state, batch)
    clean = np.asarray(core.state.hidden)[: batch.num_tokens]
    return bool(np.isfinite(clean).all() and (hidden == clean).all())


def measure_fixture(name: str, num_devices: int, dtype: str) -> dict:
    """How far a model of tests/data/oracle is from transformers' float32; its greedy ids."""
    case, held = next(case for case in CASES if case.name == name), fixture(name)
    prompts = [ids.tolist() for ids in np.split(held["ids"], np.cumsum(case.lengths)[:-1])]
    wanted = np.split(held["logprobs"], np.cumsum(np.array(case.lengths) - 1)[:-1])
    options = dict(prefill_buckets=(32,), max_running_requests=2, dtype=dtype)
    with tiny_engine(open_fixture(name), tensor_parallel_size=num_devices, **options) as made:
        pairs = zip(made.logprobs(prompts), wanted, strict=True)
        errors = np.abs(np.concatenate([np.array(one[1:]) - two for one, two in pairs]))
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        greedily = made.generate(prompts[: case.num_greedy], params)
        return {
            "worst": errors.max(),
            "mean": errors.mean(),
            "is_greedy": [one.token_ids for one in greedily] == held["greedy_ids"].tolist(),
            "compilations_after_ready": made.stats()["compilations_after_ready"],
        }


def restores_alike(checkpoint: TinyCheckpoint, num_devices: int) -> bool:
    """Whether a converted checkpoint's leaves lie on the devices as those of its source."""
    with tempfile.TemporaryDirectory() as folder:
        pairs: list[tuple[jax.Array, jax.Array]] = []
        for kind in (None, "int8"):
            convert(checkpoint, Path(folder) / f"{kind}", dtype=kind or "auto")
            config = replace(checkpoint.config, quantization=kind)
            tree = model_tree(config, jnp.dtype("float32"), make_mesh(num_devices))
            held = open_checkpoint(f"{folder}/{kind}")
            pairs += zip(load_leaves(held, tree), load_leaves(checkpoint, tree), strict=True)
        return all(
            one.sharding == other.sharding and np.allclose(one, other, rtol=1e-6, equal_nan=True)
            for one, other in pairs
        )


def family_differences(devices: list[int], names: list[str]) -> dict[str, float]:
    """How far rows of these families (none: all) are from one device's, at most."""
    hybrid = [
        f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed")
    ]
    latent = dict(
        num_hidden_layers=3,
        layer_types=hybrid,
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"heavily_compressed_attention": 16},
        num_attention_heads=8,
        o_groups=4,
        sliding_window=9,
        index_topk=3,
    )
    configs = {case.name: read_config(case.hf) for case in CASES if case.name in FAMILIES}
    configs["deepseek_v4"] = read_deepseek(fixture_config() | latent)
    configs = {name: configs[name] for name in names or configs}
    worst = dict.fromkeys(configs, 0.0)
    for name, config in configs.items():
        checkpoint = random_checkpoint(config)
        one = hidden_rows(checkpoint, 1)
        assert np.isfinite(one).all() and np.abs(one).max() > 0.1
        for num_devices in devices:
            off = np.abs(hidden_rows(checkpoint, num_devices) - one).max()
            worst[name] = max(worst[name], float(off))
    return worst


def deep_error(num_devices: int) -> float:
    """How far logprobs are, layer by layer, where a step is more launches than a device takes."""
    checkpoint = TinyCheckpoint(num_layers=40, scale=1.0)
    options = OPTIONS | dict(prefill_backend="layerwise", store=False)
    with tiny_engine(checkpoint, tensor_parallel_size=num_devices, **options) as made:
        prompts = [ids for ids in PROMPTS for _ in range(4)]
        return max(
            np.abs(np.array(one[1:]) - prompt_logprobs(checkpoint, ids)).max(initial=0)
            for ids, one in zip(prompts, made.logprobs(prompts), strict=True)
        )


def disagree(checkpoint: TinyCheckpoint, process: int) -> str:
    """What a process is told whose options differ from the others'."""
    try:
        with tiny_engine(checkpoint, tensor_parallel_size=jax.device_count(), seed=process):
            return "started"
    except ConfigError as error:
        return str(error)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", nargs="+", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--port")
    parser.add_argument("--cache")
    parser.add_argument("--families", nargs="*", metavar="NAME")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--fixture", nargs=2, metavar=("NAME", "DTYPE"))
    args = parser.parse_args()
    CPU_OPTIONS["xla_backend_optimization_level"] = "0"  # as in the tests' own process
    if args.fixture:
        name, dtype = args.fixture
        found = {n: measure_fixture(name, n, dtype) for n in args.devices}
        print("\nFOUND " + json.dumps(found, default=float))
        return
    checkpoint = make_checkpoint()
    if args.deep:
        found = {n: deep_error(n) for n in args.devices}
    elif args.families is not None:
        found = family_differences(args.devices, args.families)
    elif args.process is None:
        found = {n: measure(checkpoint, n) for n in args.devices}
        found["restored"] = [restores_alike(checkpoint, n) for n in args.devices]
        found["expected"] = [greedy(checkpoint, ids, 4) for ids in PROMPTS]
    else:
        jax.distributed.initialize(f"localhost:{args.port}", 2, args.process)
        cold, warm = (measure(checkpoint, args.devices[0], compile_cache=args.cache) for _ in "12")
        found = {"cold": cold, "warm": warm, "disagree": disagree(checkpoint, args.process)}
    print("\nFOUND " + json.dumps(found, default=float))


if __name__ == "__main__":
    main()
