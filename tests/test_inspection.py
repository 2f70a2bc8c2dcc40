"""What is told of executables: costs, findings, folded texts and differences of known programs."""

import io
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import AsyncMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefill.cli import inspecting
from jaxprefill.cli.main import main
from jaxprefill.cli.tables import emit_table
from jaxprefill.errors import ConfigError, InspectionError, JaxPrefillError, RequestError
from jaxprefill.inspection import sources
from jaxprefill.inspection.cost import cost_program
from jaxprefill.inspection.diff import _paired, compare
from jaxprefill.inspection.findings import find
from jaxprefill.inspection.fold import fold
from jaxprefill.inspection.hlo import parse_instruction, parse_module
from jaxprefill.inspection.model import JobSource, distant_chip, load_hlo
from jaxprefill.inspection.page import layer_graph
from jaxprefill.inspection.program import follow, kind_of, scope_of
from jaxprefill.inspection.records import Chip
from jaxprefill.inspection.select import pair_up, select, select_one
from jaxprefill.inspection.served import ServerSource
from jaxprefill.inspection.stored import StoreSource
from jaxprefill.inspection.summary import analyse, by_scope, operations, summarise
from jaxprefill.inspection.text import SUMMARY_COLUMNS, number, summary_row
from jaxprefill.inspection.thunks import read_graphs
from jaxprefill.inspection.trace import Event, summarise_trace
from jaxprefill.kernels.device import known_rates
from jaxprefill.prefill.compiler import NO_GRAPH, CompileJob
from jaxprefill.store.folder import Store
from jaxprefill.store.manifest import StoredExecutable, StoredFile
from tests.fake_engine import FakeEngine
from tests.live import live

CHIP = Chip("cpu", "a chip", 1e9, {"f32": 1e12, "bf16": 2e12}, "made up")
ROWS, WIDTH, MLP, LAYERS = 8, 64, 96, 12


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp(x, weights):
    with jax.named_scope("mlp.gate_up"):
        up = x @ weights[0]
    with jax.named_scope("mlp.down"):
        return x + jnp.tanh(up) @ weights[1]


WEIGHTS = (array(WIDTH, MLP), array(MLP, WIDTH))


def with_weight_copy(weights, x):
    flipped = jax.lax.optimization_barrier(jnp.flip(weights[0], 0) * 1.0)
    copied = jax.lax.optimization_barrier(weights[0].T.reshape(WIDTH, MLP))
    return mlp(x, (copied, weights[1])), flipped[0]


def in_float32(weights, x):
    wide = weights[0].astype(jnp.float32)
    return jnp.tanh(x.astype(jnp.float32) @ wide) @ weights[1].astype(jnp.float32)


def with_callback(weights, x):
    jax.debug.callback(lambda value: None, x[0, 0])
    return mlp(x, weights)


def with_joined_weights(weights, x):
    """No copy, by its name: XLA concatenates, reverses, multiplies, gathers."""
    joined = jax.lax.optimization_barrier(jnp.concatenate([weights[0], weights[1].T[::-1]], 1))
    return (x @ joined)[:, :WIDTH]


def with_widened_weights(weights, x):
    return x @ jax.lax.optimization_barrier(weights[0] * jnp.float32(0.5))


def with_lookup(weights, x):
    return jnp.tanh(weights[0][jnp.arange(ROWS)]) @ weights[1] + x


def of_one_row(weights, x):
    with jax.named_scope("layers"):
        return jax.lax.fori_loop(0, 5, lambda _, row: mlp(row, weights), x[:1])


def with_loop(weights, x):
    return jax.lax.fori_loop(0, 5, lambda _, rows: mlp(rows, weights), x)


def clean(weights, x):
    return mlp(x, weights)


def layer_of(x, layer, weights):
    with jax.named_scope("mlp.gate_up"):
        up = x @ weights[0]
    with jax.named_scope("mlp.down"):
        return jnp.tanh(up) @ weights[1] + layer


def unrolled(weights, x):
    step = jax.jit(layer_of)
    for layer, pair in enumerate(weights):
        x = step(x, jnp.int32(layer), pair)
    return x


def job(name, function, weights=WEIGHTS, dtype=jnp.float32):
    return CompileJob(
        name=name, function=function, arguments=(weights, array(ROWS, WIDTH, dtype=dtype))
    )


NARROW = tuple(array(*weight.shape, dtype=jnp.bfloat16) for weight in WEIGHTS)
JOBS = [
    job("clean 8x1x16", clean),
    job("clean again", clean),
    job("weight copy", with_weight_copy),
    job("float32 product", in_float32, NARROW, jnp.bfloat16),
    job("host transfer", with_callback),
    job("while", with_loop),
    job("joined: weight copy", with_joined_weights),
    job("widened: weight copy", with_widened_weights, (array(WIDTH, MLP, dtype=jnp.int8),)),
    job("lookup", with_lookup),
    job("one row", of_one_row),
    job("layers", unrolled, (WEIGHTS,) * LAYERS),
]


@pytest.fixture(scope="module")
def source():
    return JobSource(JOBS, CHIP)


@pytest.mark.parametrize(
    "name",
    [
        *("weight copy", "joined: weight copy", "widened: weight copy"),
        *("float32 product", "host transfer", "while"),
    ],
)
def test_what_should_not_be_there_is_found(source, name):
    findings = analyse(source.open(name)).findings
    assert name.rpartition(": ")[2] in {x.kind for x in findings if not x.expected}, findings


@pytest.mark.parametrize("name", ["clean 8x1x16", "lookup"])
def test_a_clean_program_has_no_findings(source, name):
    assert analyse(source.open(name)).findings == []


def test_only_the_loops_that_an_engine_means_are_excused(source):
    (found,) = [x for x in analyse(source.open("one row")).findings if x.kind == "while"]
    assert "layers are a loop" in found.expected and not found.scope


def test_what_xla_leaves_without_a_scope_takes_that_of_its_readers(source):
    """On a CPU a product of one row is rewritten, and loses the name of where it came from."""
    found = [x for x in operations(analyse(source.open("one row"))) if x.flops]
    assert {x.scope for x in found} == {"mlp.gate_up", "mlp.down"}


def test_costs_are_those_of_the_arrays(source):
    summary = summarise(analyse(source.open("clean 8x1x16")))
    assert summary.flops == 2 * 2 * ROWS * WIDTH * MLP
    assert summary.needed_bytes == 4 * (2 * WIDTH * MLP + 2 * ROWS * WIDTH)
    assert summary.num_bytes > summary.needed_bytes
    assert summary.floor_s == pytest.approx(summary.needed_bytes / 1e9)
    assert (summary.bound, summary.shape) == ("memory", (8, 1, 16))
    assert summary.kernels["GEMM library"] == 2
    assert summary.num_graphs is None and "CPU" in summary.graph_note
    assert summary.code_bytes is None, "on a CPU XLA counts no byte of code"
    assert len(summary_row(summary)) == len(SUMMARY_COLUMNS)
    assert json.loads(json.dumps(summary.as_dict()))["intensity"] == summary.intensity


def test_a_loop_counts_as_often_as_it_turns(source):
    once, often = (analyse(source.open(name)) for name in ("clean 8x1x16", "while"))
    assert often.cost.flops == 5 * once.cost.flops


def test_operations_are_grouped_by_the_models_scopes(source):
    scopes = {each.scope: each for each in by_scope(operations(analyse(source.open("layers"))))}
    assert set(scopes) >= {"mlp.gate_up", "mlp.down"}
    assert scopes["mlp.gate_up"].flops == LAYERS * 2 * ROWS * WIDTH * MLP
    assert 0 < scopes["mlp.down"].floor_share < 2


def test_xla_itself_sees_the_same_instructions(source):
    compiled = source.compiled("layers").call.runtime_executable()
    (module,) = compiled.hlo_modules()
    read = parse_module(module.to_string())
    for theirs in module.computations():
        ours = read.computations[theirs.name]
        assert set(ours.instructions) == {each.name for each in theirs.instructions()}
    assert cost_program(follow(read)).flops <= compiled.cost_analysis()["flops"]


@pytest.mark.parametrize("stage", ["jaxpr", "stablehlo", "hlo"])
def test_like_layers_are_printed_once_with_their_number(source, stage):
    text = source.open("layers").text(stage)
    folded = fold(text, stage)
    counts = [int(part.split(",")[0]) for part in folded.split("// x")[1:]]
    assert max(counts) >= LAYERS - 3, folded
    assert len(folded.splitlines()) < 100


def test_only_lines_of_an_operation_are_shown(source):
    shown = fold(
        source.open("layers").text("stablehlo"), "stablehlo", op="dot_general"
    ).splitlines()
    assert len(shown) == 2 and all("dot_general" in line for line in shown)


def test_stretches_that_read_other_values_are_not_alike():
    block = "  %a{0} = f32[2] add(%x{1}, %y)\n  %x{0} = f32[2] negate(%a{2})"
    same = [block.format(n, n - 1, n) for n in range(1, 37)]
    other = [block.format(n, n - 1, n * 7 // 10 + 1) for n in range(1, 37)]
    assert "// x36, 2 lines" in fold("\n".join(same), "stablehlo")
    assert "// x36" not in fold("\n".join(other), "stablehlo")


def test_a_stage_that_cannot_be_had_says_why(source):
    one = source.open("clean 8x1x16")
    for stage in ("ptx", "thunks"):
        with pytest.raises(InspectionError, match=f"no {stage} text.*CPU"):
            one.text(stage)


def test_equal_programs_do_not_differ(source):
    before, after = (analyse(source.open(name)) for name in ("clean 8x1x16", "clean again"))
    assert compare(before, after).is_empty


def test_of_what_programs_were_made_for_only_what_differs_is_told(source):
    one = source.open("clean 8x1x16")
    sides = [
        analyse(replace(one, facts={"jax": "1", "versions": {"xla": xla, "numpy": "2"}, **more}))
        for xla, more in (("7", {}), ("8", {"xla_flags": ["--x"]}))
    ]
    difference = compare(*sides)
    assert difference.facts == {"versions.xla": ("7", "8"), "xla_flags": (None, ["--x"])}
    assert difference.is_empty


def test_what_is_added_and_gone_is_named(source):
    before, after = (analyse(source.open(name)) for name in ("clean 8x1x16", "weight copy"))
    there, back = compare(before, after), compare(after, before)
    assert any(each.status == "added" for each in there.changes)
    assert any(each.status == "gone" for each in back.changes)
    assert there.numbers["output_bytes"] == back.numbers["output_bytes"][::-1]
    assert not there.is_empty


def test_operations_that_changed_are_told_beside_those_most_alike():
    def each(operation: str, size: int, inside: str):
        return ("fusion", "mlp", f"{operation} -> f32[{size}]", f"((f32[{size}])) {inside} 1")

    gone = [each("add", 8, "exp"), each("add", 8, "tanh"), each("exponential", 8, "exp")]
    added = [each("exponential", 9, "log"), each("add", 9, "tanh"), each("maximum", 9, "exp")]
    assert dict(_paired(gone, added)) == {
        gone[1]: added[1],  # all but its shape
        gone[2]: added[0],  # what it makes
        gone[0]: added[2],  # where it is
    }


def test_a_key_is_a_name_a_shape_or_a_part():
    names = ["prefill 16x4x99", "prefill 32x4x99", "decode 4x4x99", "greedy 4", "greedy 16"]
    assert select(names, "prefill") == names[:2]
    assert select_one(names, "32x4x99") == select_one(names, "prefill 32") == names[1]
    assert select_one(names, "greedy 4") == "greedy 4"
    with pytest.raises(RequestError, match="must mean one"):
        select_one(names, "prefill")
    with pytest.raises(RequestError, match="no executable is called 'nothing'"):
        select(names, "nothing")


# A GPU's program as XLA prints it, cut to one instruction of each kind.
GPU = """\
HloModule jit_prefill, is_scheduled=true, input_output_alias={ {1}: (2, {}, may-alias) }

%gemm_fusion (p0: bf16[32,64], p1: bf16[96,64]) -> bf16[32,96] {
  %p0 = bf16[32,64]{1,0} parameter(0)
  %p1 = bf16[96,64]{1,0} parameter(1)
  ROOT %d = bf16[32,96]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%norm (p: f32[32,64]) -> f32[32] {
  %p = f32[32,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %m = f32[32,64]{1,0} multiply(%p, %p)
  %r = f32[32]{0} reduce(%m, %zero), dimensions={1}, to_apply=%sum
  ROOT %s = f32[32]{0} rsqrt(%r)
}

ENTRY %main (w: bf16[96,64], x: bf16[32,64], pool: bf16[2,8,4096,16,128], ints: s32[99]) -> (f32[32], bf16[2,8,4096,16,128]) {
  %w = bf16[96,64]{1,0} parameter(0), metadata={op_name="arguments[0][0]"}
  %x = bf16[32,64]{1,0} parameter(1), metadata={op_name="arguments[1]"}
  %pool = bf16[2,8,4096,16,128]{4,3,2,1,0} parameter(2), metadata={op_name="arguments[2]"}
  %ints = s32[99]{0:S(5)} parameter(3), metadata={op_name="arguments[3]"}
  %copy-start = (s32[99]{0}, s32[99]{0:S(5)}, u32[]) copy-start(%ints)
  %copy-done = s32[99]{0} copy-done(%copy-start)
  %blas = (bf16[32,96]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %tri = bf16[32,96]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm_fusion, metadata={op_name="jit(prefill)/jit(layer)/mlp.gate_up/dot_general"}, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %pal = (bf16[32,96]{1,0}, f32[32,4]{1,0}) custom-call(%x, %w), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(prefill)/attention.qkv/pallas_call"}, backend_config={grid_x = 4 : i32, name = "plain_product"}
  %att = (bf16[32,64]{1,0}, bf16[2,8,4096,16,128]{4,3,2,1,0}) custom-call(%x, %pool), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{1}: (1, {})}, backend_config={name = "ragged_paged_attention"}
  %f = f32[32,64]{1,0} convert(%x)
  %n = f32[32]{0} fusion(%f), kind=kInput, calls=%norm, metadata={op_name="jit(prefill)/final_norm/rsqrt"}
  %cp = bf16[96,64]{1,0} copy(%w)
  %ar = f32[32]{0} all-reduce(%n), replica_groups={{0,1}}, to_apply=%sum
  %g = bf16[2,8,4096,16,128]{4,3,2,1,0} get-tuple-element(%att), index=1
  ROOT %t = (f32[32]{0}, bf16[2,8,4096,16,128]{4,3,2,1,0}) tuple(%ar, %g)
}
"""  # noqa: E501


def test_kernels_of_a_gpu_are_told_apart_and_costed():
    program = follow(parse_module(GPU))
    cost = cost_program(program)
    by_kind = dict(zip([each.kind for each in program.kernels], cost.by_kernel, strict=True))
    product = {"bf16": 2.0 * 32 * 96 * 64}
    for kind in ("GEMM library", "GEMM Triton", "Pallas plain_product"):
        assert by_kind[kind].products == product, kind
    attention = by_kind["Pallas ragged_paged_attention"]
    assert attention.products is None and cost.num_untold == 1
    assert attention.num_bytes == 2 * 2 * 32 * 64, "the pool is updated in place"
    assert by_kind["collective"].products == {}
    assert cost.needed_bytes < 1e5
    kinds = {each.kind: each for each in find(program, cost, platform="gpu")}
    assert set(kinds) == {"host transfer", "weight copy"}
    assert kinds["host transfer"].expected and not kinds["weight copy"].expected
    assert {each.scope for each in program.kernels} >= {"mlp.gate_up", "final_norm"}


def test_a_norm_in_four_kernels_is_found():
    parts = "multiply(%p, %p)", "reduce(%m, %z), dimensions={1}, to_apply=%s", "rsqrt(%r)"
    shapes, names = ("f32[32,64]{1,0}", "f32[32]{0}", "f32[32]{0}"), ("m", "r", "q")
    lines = [f"  %{n} = {s} {part}" for n, s, part in zip(names, shapes, parts, strict=True)]
    module = "\n".join(
        [
            "HloModule jit_norm",
            "",
            "ENTRY %main (p: f32[32,64]) -> f32[32,64] {",
            "  %p = f32[32,64]{1,0} parameter(0)",
            "  %z = f32[] constant(0)",
            *lines,
            "  ROOT %out = f32[32,64]{1,0} multiply(%p, %q)",
            "}",
        ]
    )
    program = follow(parse_module(module))
    (found,) = find(program, cost_program(program), platform="gpu")
    assert (found.kind, found.what) == ("unfused norm", "4 kernels")


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("  %x = f32[2] add(%a, %b", "must read"),
        ("  x equals 3", "must read"),
        ("  %x = nonsense[2] add(%a)", "must read"),
    ],
)
def test_what_is_not_understood_is_an_error(line, rule):
    with pytest.raises(InspectionError, match=rule):
        parse_instruction(line)


def test_a_text_that_is_no_program_is_an_error():
    for text, rule in (("module @jit_f {", "HloModule"), ("HloModule f\n", "ENTRY")):
        with pytest.raises(InspectionError, match=rule):
            parse_module(text)
    with pytest.raises(InspectionError, match="cut off"):
        parse_module(GPU[:-3])


def test_paths_are_read_for_their_scopes():
    assert scope_of("jit(f)/while/body/closed_call/mlp.down/cond/branch_1_fun/dot") == "mlp.down"
    assert scope_of("jit(f)/jit(layer)/attention.core/jit(floor_divide)/eq") == "attention.core"
    assert scope_of("jit(f)/dot_general") == ""
    merged = "jit(f)/broadcast_in_dim;jit(f)/attention.core/mul;jit(f)/attention.core/exp"
    assert scope_of(merged) == "attention.core"
    callback = '  %c = () custom-call(), custom_call_target="xla_ffi_python_gpu_callback"'
    assert kind_of(parse_instruction(callback)) == "host"


def test_graphs_are_counted_in_a_dump_of_thunks():
    text = "000: kCommandBuffer\n  000: kKernel\n  001: kGemm\n001: kCopy\n"
    graphs = read_graphs(text)
    assert (graphs.num_graphs, graphs.num_nodes, graphs.outside) == (1, 2, {"kCopy": 1})


def test_rates_are_known_by_the_drivers_name():
    assert known_rates("NVIDIA H200").bytes_per_s == 4.44e12
    assert known_rates("NVIDIA A100-SXM4-80GB").bytes_per_s == 2.039e12
    assert known_rates("NVIDIA H100 80GB HBM3").flops_per_s["bf16"] == 989e12
    strangers = ("a new chip", "NVIDIA GH200 480GB", "NVIDIA L40", "NVIDIA H200 MIG 1g.18gb")
    assert [known_rates(kind) for kind in strangers] == [None] * 4
    slow = Chip("gpu", "", 1e9, {"bf16": 4e9, "f32": 1e9})
    assert slow.seconds({"bf16": 4e9, "f8e4m3fn": 1e9}, 1e9) == 2.0
    assert Chip("gpu", "").seconds({}, np.inf) is None


def test_a_trace_tells_busy_time_gaps_and_kernels():
    events = [Event("a", 0, 100), Event("b", 50, 150), Event("a", 250, 300), Event("c", 260, 280)]
    trace = summarise_trace(events, num_calls=2)
    assert (trace.span_s, trace.busy_s, trace.gap_s) == pytest.approx((3e-7, 2e-7, 1e-7))
    assert (trace.num_gaps, trace.longest_gap_s) == (1, 1e-7)
    assert [(each.name, each.count) for each in trace.kernels] == [("a", 2), ("b", 1), ("c", 1)]


@pytest.fixture
def cli(source, monkeypatch, capsys):
    monkeypatch.setattr(inspecting, "open_source", lambda args: source)

    def call(*argv):
        status = main(["inspect", *argv])
        return status, *capsys.readouterr()

    return call


def test_the_command_lists_and_measures(cli):
    status, out, err = cli("list", "clean", "--measure", "2", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [each["name"] for each in lines] == ["clean 8x1x16", "clean again"]
    assert all(each["measured_s"] > 0 and each["ratio_to_floor"] > 0 for each in lines)
    status, out, err = cli("list", "clean")
    assert status == 0 and "clean again" in out and "a CPU has no graphs (2 executables)" in err


def test_the_command_shows_operations_and_findings(cli):
    status, out, _ = cli("ops", "weight copy", "--json")
    assert status == 0 and {"weight copy"} <= {x["kind"] for x in json.loads(out)["findings"]}
    assert "nothing that should not be there" in cli("ops", "clean 8")[1]
    status, out, _ = cli("show", "layers", "--stage", "stablehlo", "--op", "call")
    assert status == 0 and f"x{LAYERS}" in out
    assert out[0] != "\n" and "module" not in out
    status, _, err = cli("show", "layers", "--stage", "ptx")
    assert status == 1 and "LLVM" in err
    for flags in ([], ["--no-fold"], ["--json"], ["--stage", "stablehlo"]):
        status, out, err = cli("show", "layers", "--op", "sort", *flags)
        assert status == 1 and not out and "runs 'sort'" in err
    status, out, _ = cli("show", "clean 8", "--op", "dot")
    assert status == 0 and "HloModule" not in out and " dot(" in out
    assert not [line for line in out.splitlines() if line.endswith("{") and "(" in line]


@pytest.mark.parametrize(
    ("pair", "expected"), [(("clean 8", "clean again"), 0), (("clean 8", "layers"), 1)]
)
def test_the_status_of_a_diff_is_for_scripts(cli, pair, expected):
    status, out, _ = cli("diff", *pair)
    assert (status, bool(out)) == (expected, bool(expected))
    assert cli("diff", "clean", "layers")[0] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["list", "--measure", "-1"], "--measure: must be a whole number of at least 0"),
        (["trace", "clean 8", "--calls", "0"], "--calls: must be a whole number of at least 1"),
        (["ops", "clean 8", "--top", "x"], "jaxprefill inspect ops: error: argument --top: must"),
        (["diff", "./nowhere", "clean 8"], "./nowhere must be a store's folder"),
        (["list", "--store", ""], "argument --store: must not be empty, got ''"),
        (["show", "clean 8", "--op", " "], "argument --op: must not be empty"),
        (["list", "--store", "x", "--page-size", "8"], "must be left out, got --page-size"),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(cli, argv, message):
    status, out, err = cli(*argv)
    assert status == 2 and not out and message in err


def test_numbers_of_calls_and_urls_are_checked_in_python_too(source):
    calls = source.calls("clean 8x1x16")
    for use in (calls.median_s, calls.trace):
        with pytest.raises(ConfigError, match="repeats must be at least 1, got 0"):
            use(0)
    with pytest.raises(ConfigError, match="url must be one such as http"):
        ServerSource("localhost:8000", find_chip=lambda *_: CHIP)


def served(executables: bytes) -> bytes:
    device = b'{"platform": "cpu", "kind": "cpu"}'
    return b'HTTP/1.1 200 OK\r\n\r\n{"device": %s, "executables": %s}' % (device, executables)


@pytest.mark.parametrize(
    ("url", "reply"),
    [
        ("http://[::1", b""),
        ("http://127.0.0.1:port", b""),
        ("http://a b", b""),
        ("", b"SSH-2.0-OpenSSH\r\n"),
        ("", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"),
        ("", b"HTTP/1.1 200 OK\r\n\r\n[]"),
        ("", b'HTTP/1.1 200 OK\r\n\r\n{"executables": [3], "device": {}}'),
        ("", b'HTTP/1.1 200 OK\r\n\r\n{"executables": [], "device": {"platform": 1, "kind": 2}}'),
        ("", served(b'[{"name": "x", "temp_bytes": "many"}]')),
        ("", served(b'[{"name": "x", "measured_s": "long"}]')),
        ("", served(b'[{"name": "x", "compile_s": NaN}]')),
        ("", served(b'[{"name": "\\ud800"}]')),
        ("", served(b"[" * 100_000)),
    ],
)
def test_strangers_at_a_url_are_told(url, reply):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer():
            if not url:
                with server.accept()[0] as connection:
                    connection.recv(4096)
                    connection.sendall(reply)

        done = pool.submit(answer)
        own = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InspectionError, match=r"answer|has no executables"):
            ServerSource(url or own, find_chip=lambda *_: CHIP)
        done.result()


def test_the_command_traces_only_what_it_compiled(cli, source, monkeypatch):
    status, out, _ = cli("trace", "clean 8", "--calls", "2", "--json")
    trace = json.loads(out)
    assert status == 0 and trace["num_calls"] == 2 and 0 < trace["busy_s"] <= trace["span_s"]
    assert any("fusion" in each["name"] or "dot" in each["name"] for each in trace["kernels"])
    monkeypatch.setattr(sources, "JobSource", StoreSource)
    status, _, err = cli("trace", "clean 8")
    assert status == 1 and "compiled just now" in err


def test_the_page_holds_everything_and_asks_for_nothing(cli, tmp_path):
    page = tmp_path / "out.html"
    assert cli("html", str(page), "clean", "layers")[0] == 0
    text = page.read_text()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert len(data["executables"]) == len(data["rows"]) == 3
    assert [each["key"] in data["executables"][0] for each in data["columns"]].count(False) == 0
    graph = layer_graph(analyse(JobSource([JOBS[-1]], CHIP).open("layers")))
    assert ["mlp.gate_up", "mlp.down", LAYERS] in graph["links"]
    for place in (tmp_path / "none" / "out.html", tmp_path):
        status, _, err = cli("html", str(place), "clean")
        assert status == 2 and "must name a file" in err and "..." not in err


H200 = {"platform": "gpu", "device_kind": "NVIDIA H200"}


def store_of(source, folder, *names, without=(), facts=H200, **job):
    """A store of an engine, by default a GPU's; `job` are facts of its jobs."""
    store = Store(folder, is_trusted=True)
    for name in names:
        record = source.compiled(name).record.as_dict()
        del record["load_s"]  # not known before it is loaded
        entry = StoredExecutable(
            name=name,
            facts=dict(facts),
            job=job,
            read=(),
            outputs=[],
            record=record,
            payload=StoredFile(name="none", sha256="", num_bytes=0),
        )
        texts = {} if name in without else {"hlo": source.open(name).text("hlo")}
        executable = source.compiled(name).call.runtime_executable()
        store.write(entry, executable.serialize(), texts)


def test_a_store_is_read_without_its_payloads(source, tmp_path):
    store_of(source, tmp_path / "store", "clean 8x1x16", "while", without=("while",))
    found = StoreSource(tmp_path / "store", find_chip=distant_chip, is_trusted=True)
    summary = summarise(analyse(found.open("clean 8x1x16")))
    assert summary.flops == 2 * 2 * ROWS * WIDTH * MLP and summary.floor_s > 0
    assert len(summary.fingerprint) == 64 and "without it" in summary.graph_note
    with pytest.raises(InspectionError, match="without it"):
        found.open("while").text("hlo")
    assert compare(analyse(source.open("clean 8x1x16")), analyse(found.open("clean 8x1x16"))).facts
    store_of(source, tmp_path / "apart", "clean 8x1x16", options=NO_GRAPH)
    apart = StoreSource(tmp_path / "apart", find_chip=distant_chip, is_trusted=True)
    assert summarise(analyse(apart.open("clean 8x1x16"))).num_graphs == 0


def test_a_store_without_texts_is_read_by_loading_what_it_holds(source, tmp_path, capsys):
    store_of(source, tmp_path / "bare", "clean 8x1x16", without=("clean 8x1x16",))
    found = StoreSource(
        tmp_path / "bare", find_chip=distant_chip, load=load_hlo, is_trusted=True
    ).open("clean 8x1x16")
    assert summarise(analyse(found)).flops == 2 * 2 * ROWS * WIDTH * MLP
    store_of(source, tmp_path / "whole", "clean 8x1x16")
    sides = [str(tmp_path / name) for name in ("bare", "whole")]
    assert main(["inspect", "diff", *sides, "--trust-executables", "-q"]) == 0
    for path in tmp_path.glob("bare/executables/*/*.bin"):
        path.write_bytes(b"?")
    with pytest.raises(InspectionError, match="SHA-256"):
        found.text("hlo")
    with pytest.raises(InspectionError, match="inspect it where it was compiled"):
        load_hlo(b"native code of another machine")


def test_a_server_is_read_over_http(source):
    engine = FakeEngine()
    engine.program_text = AsyncMock(return_value=source.open("clean 8x1x16").text("hlo"))
    with live(engine, api_key=("secret",)) as url:
        served = ServerSource(url, find_chip=distant_chip, api_key="secret")
        summary = summarise(analyse(served.open("full 32x4x160")))
        assert summary.flops == 2 * 2 * ROWS * WIDTH * MLP and summary.temp_bytes == 4096
        assert summary.floor_s is None and "measured on the machine" in summary.notes[0]
        for stage, why in (("jaxpr", "tells only the hlo"), ("ptx", "a CPU runs")):
            with pytest.raises(InspectionError, match=why):
                served.open("full 32x4x160").text(stage)
        with pytest.raises(InspectionError, match="answers 401"):
            ServerSource(url, find_chip=distant_chip)
    with pytest.raises(InspectionError, match="does not answer"):
        ServerSource(url, find_chip=distant_chip)


def test_an_engine_tells_its_programs(engine):
    name = engine.stats()["compiled"][0]["name"]
    assert parse_module(engine.program_text(name)).name.startswith("jit_")
    with pytest.raises(RequestError, match="executable must be"):
        engine.program_text("none")


def test_a_notebook_reads_stores_and_servers_alike(source, tmp_path):
    store_of(source, tmp_path / "store", "clean 8x1x16")
    opened = sources.open_store(tmp_path / "store", is_trusted=True)
    (name,) = opened.names
    assert summarise(sources.analysed(opened, "clean")).name == name
    with pytest.raises(InspectionError, match="compiled just now"):
        sources.analysed(opened, name, repeats=1)
    with pytest.raises(InspectionError, match="does not answer"):
        sources.open_server("http://127.0.0.1:1")
    timed = sources.analysed(source, "clean 8", repeats=1)
    assert summarise(timed).as_dict()["measured_s"] > 0
    with pytest.raises(ConfigError, match="page_size"):
        sources.open_model(page_size=-1)


def test_folders_are_compared_name_by_name(source, tmp_path, capsys):
    for folder, name in (("one", "clean 8x1x16"), ("same", "clean 8x1x16"), ("other", "while")):
        store_of(source, tmp_path / folder, name)
    paths = {name: str(tmp_path / name) for name in ("one", "same", "other")}
    flags = ("--trust-executables", "-q")
    assert main(["inspect", "diff", paths["one"], paths["same"], *flags]) == 0
    assert main(["inspect", "diff", f"{paths['one']}#clean", paths["other"], *flags]) == 1
    assert "while" in capsys.readouterr().out
    assert main(["inspect", "diff", paths["one"], str(tmp_path), *flags]) == 2
    (text,) = (tmp_path / "same").glob("executables/*/*.gz")
    text.write_bytes(b"?")
    assert main(["inspect", "diff", paths["one"], paths["same"], *flags]) == 2


def test_what_is_damaged_hides_nothing_else(source, tmp_path, capsys):
    store_of(source, tmp_path, "clean 8x1x16", "while")
    next(tmp_path.glob("executables/*/while*.gz")).write_bytes(b"?")
    flags = ("--store", str(tmp_path), "--trust-executables", "-q", "--json")
    assert main(["inspect", "list", *flags]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["name"] == "clean 8x1x16" and "SHA-256" in captured.err
    assert main(["inspect", "html", str(tmp_path / "x.html"), "while", *flags]) == 1
    assert not (tmp_path / "x.html").exists()


def test_executables_of_two_sources_are_paired_by_what_they_are():
    one = {"a": None, "b @01": "01", "b @02": "02", "c": "03", "d @04": "04"}
    other = {"d": "09", "b": "02", "a": "05", "e": "06"}
    assert pair_up(one, other) == {"a": "a", "b @02": "b", "d @04": "d"}


def test_each_executable_of_a_store_is_of_its_own_chip(source, tmp_path):
    store_of(source, tmp_path, "clean 8x1x16")
    store_of(source, tmp_path, "while", facts={"platform": "cpu", "device_kind": "cpu"})
    found = StoreSource(tmp_path, find_chip=distant_chip, is_trusted=True)
    assert summarise(analyse(found.open("while"))).floor_s is None
    for stage in ("ptx", "thunks"):  # nor has a model
        with pytest.raises(InspectionError, match=f"no {stage} text.*CPU"):
            found.open("while").text(stage)
    assert summarise(analyse(found.open("clean 8x1x16"))).floor_s > 0


class Screen(io.StringIO):
    """A terminal, or a pipe."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


def test_tables_are_legible_at_any_width(monkeypatch):
    columns = ("name", *(f">n{index}" for index in range(9)), "text")
    row = ["one name", *(f"{index}23 MB" for index in range(9)), "some words"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = {}
    for width, is_terminal in ((40, True), (300, True), (40, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.stdout", Screen(is_terminal))
        emit_table(columns, [row, row])
        shown[width, is_terminal] = sys.stdout.getvalue()
    narrow, wide, piped = shown.values()
    assert narrow.startswith("one name\n  n0 023 MB, n1 123 MB")
    assert "n8 823 MB, text some words" in " ".join(narrow.split())
    assert max(map(len, narrow.splitlines())) <= 40 and narrow.count("one name\n") == 2
    for table in (wide, piped):
        assert "023 MB" in table and "some words │" in table


def test_a_full_disk_under_a_table_is_an_error(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(JaxPrefillError, match="cannot write to stdout"):
            emit_table(("a",), [("b",)])


def test_numbers_have_three_digits():
    assert [number(x) for x in (999.4, 999.6, 12, 0)] == ["999", "1 k", "12", "0"]
