"""The check at start-up says which kernel is wrong, and passes those that are right."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import pytest

from jaxprefill import startup
from jaxprefill.config import EngineConfig
from jaxprefill.errors import KernelError
from jaxprefill.kernels import self_check
from jaxprefill.kernels.attention.capabilities import AttentionSpec
from jaxprefill.kernels.attention.xla import XLA
from jaxprefill.kernels.decoder_layer import gemm
from jaxprefill.kernels.device import DeviceInfo
from jaxprefill.kernels.experts import pallas_triton
from jaxprefill.kernels.latent_attention import pallas_triton as latent
from jaxprefill.kernels.splits import merge_splits
from jaxprefill.kernels.top_k import pallas_triton as top_k
from jaxprefill.plan import make_plan
from tests.test_choose_entries import flash_config
from tests.tiny import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
FLOAT32 = jnp.dtype("float32")


def test_a_wrong_attention_kernel_is_named():
    spec = AttentionSpec(window=600, soft_cap=2.0, has_sinks=True)
    check = dict(heads=(4, 2, 32), page_size=16, dtype=FLOAT32, spec=spec)
    self_check.check_attention(XLA, **check)

    def make(tiles, spec):
        attend = XLA.make(tiles, spec)

        def slightly_wrong(*operands):
            out, pool = attend(*operands)
            return out.at[1].multiply(1.02), pool

        return slightly_wrong

    wrong = replace(XLA, name="mine", make=make)
    with pytest.raises(KernelError, match=r"mine attention \(prefill\).*float32.*within 0.0001"):
        self_check.check_attention(wrong, **check)


# The residual product is the last of three: the others pass before it.
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        pytest.param("rotated", None, marks=pytest.mark.slow),
        pytest.param("gated", "float8_e4m3fn", marks=pytest.mark.slow),
        ("residual", "int8"),
    ],
)
def test_a_wrong_product_is_named(monkeypatch, kind, quantization):
    finish = gemm._finish

    def wrong(operands, results, sums, rows, block, of):
        if of.kind == kind:
            sums = tuple(total * 1.01 for total in sums)
        finish(operands, results, sums, rows, block, of)

    monkeypatch.setattr(gemm, "_finish", wrong)
    with pytest.raises(KernelError, match=f"pallas_triton {kind} product"):
        self_check.check_products(FLOAT32, quantization=quantization, interpret=True)


def test_wrong_experts_are_named(monkeypatch):
    apart = pallas_triton._apart
    monkeypatch.setattr(pallas_triton, "_apart", lambda total: apart(total * 1.01))
    with pytest.raises(KernelError, match="pallas_triton experts"):
        self_check.check_experts(FLOAT32, interpret=True)


@pytest.mark.slow
def test_wrong_latent_attention_is_named(monkeypatch):
    check = partial(self_check.check_latent_attention, num_heads=2, dim=16, interpret=True)
    check(jnp.dtype("bfloat16"))
    for name, wrong in {
        "merge_splits": lambda *parts: merge_splits(*parts) * 1.01,  # none but decode's
        "LOG2_E": 1.45,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(latent, name, wrong)
            with pytest.raises(KernelError, match=r"latent attention.*float32.*within"):
                check(FLOAT32)


@pytest.mark.slow
def test_a_wrong_choice_of_entries_is_named(monkeypatch):
    monkeypatch.setattr(top_k, "_kth_largest", lambda numbers, k: numbers.max())
    with pytest.raises(KernelError, match="pallas_triton choice of entries"):
        self_check.check_choice(FLOAT32, interpret=True)


def test_no_number_at_all_is_an_error():
    nan = jnp.full(3, jnp.nan)
    with pytest.raises(KernelError, match="got nan"):
        self_check._compare("x", nan, jnp.ones(3), FLOAT32)


FUSIBLE = tiny_config(
    hidden_size=64, mlp_size=128, num_q_heads=4, num_kv_heads=2, head_dim=32, has_qk_norm=True
)
LATENT = replace(flash_config(4096), mlp_size=512)
CHEAP_INDEX = replace(LATENT, latent=replace(LATENT.latent, index_heads=4))


@pytest.mark.parametrize(
    ("model", "num_devices", "checked", "sizes"),
    [
        (FUSIBLE, 1, {"attention", "products"}, {"heads": (4, 2, 32)}),
        (FUSIBLE, 2, {"attention"}, {"heads": (2, 1, 32)}),
        (LATENT, 2, {"experts", "choice", "latent_attention"}, {"num_heads": 32, "dim": 512}),
        (CHEAP_INDEX, 2, {"experts"}, {}),  # the core of its layers is no kernel
    ],
    ids=["fused", "shared_out", "latent", "latent_in_plain_jax"],
)
def test_what_one_device_runs_is_checked_at_its_sizes(
    monkeypatch, model, num_devices, checked, sizes
):
    found, told = set(), {}
    for name in ("attention", "products", "experts", "choice", "latent_attention"):

        def check(*_, name=name, **given):
            found.add(name)
            told.update(given)

        monkeypatch.setattr(startup, f"check_{name}", check)
    device = DeviceInfo(
        platform="gpu", kind="NVIDIA H200", memory_bytes=2**40, has_bf16_matmul=True,
        num_devices=num_devices, compute_capability="9.0",
    )  # fmt: skip
    options = EngineConfig(tensor_parallel_size=num_devices, kv_cache_tokens=4096)
    startup.check_kernels(make_plan(options, model, device))
    assert found == checked and sizes.items() <= told.items()
