"""The table of kernels: rows are checked numbers, failures are rows, and the budget holds."""

import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import kernel_runs
from benchmarks.kernel_families import FAMILIES, family_of
from benchmarks.kernels import POISONED, Session, fastest, line

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
ROWS = {
    "attention": [("d3+40", "pallas_triton", "block_k=32"), ("d3+40", "pallas_mosaic_gpu", "")],
    "latent_attention": [("sparse/d2+300", "pallas_triton", "block=16")],
    "top_k": [("d2+200", "pallas_triton", "queries=1,block=64")],
    "experts": [("tiny/40", "pallas_triton", "down.block_n=16"), ("tiny/40", "xla", "")],
    "products": [
        ("down/float8_e4m3fn/3", "pallas_triton", ""),
        ("down/float8_e4m3fn/3", "pallas_triton", "num_splits=2,block_k=32"),
        ("down/float8_e4m3fn/3", "xla", ""),
    ],
}
LACKS = {"pallas_mosaic_gpu": "runs on gpu, not on", "experts": "no products of planned blocks"}
MARKS = {name: pytest.mark.long for name in ("latent_attention", "top_k", "experts")}


def rows_of(family, variants):
    rows, variants = [], [kernel_runs.Variant(*one) for one in variants]
    until = time.monotonic() + 600
    assert kernel_runs.run_family(family, variants, rows.append, interpret=True, until=until)
    assert [(row["case"], row["backend"]) for row in rows] == [one[:2] for one in variants]
    return rows


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in FAMILIES],
)
def test_a_family_s_rows_hold_its_kernel_and_plain_jax_to_one_reference(name):
    for asked, row in zip(ROWS[name], rows_of(family_of(name), ROWS[name]), strict=True):
        lack = LACKS.get(asked[1]) or (LACKS.get(name) if asked[1] == "xla" else None)
        if lack is not None:
            assert lack in row["failure"] and "us" not in row
            continue
        assert row.get("failure") is None
        assert 0 <= row["error"] <= kernel_runs.LIMIT and np.isfinite(row["max_error"])
        assert row["us_min"] <= row["us"] <= row["us_max"] and row["gb_per_s"] > 0
        assert {"calls", "sets", "tflops_per_s", "compile_s", "took_s"} < set(row)
        assert bool(row["tiles"]) == (row["backend"] != "xla")
        wanted = kernel_runs.parse_tiles(asked[2])
        assert row["is_default"] == (not wanted)
        for field, value in wanted.items():
            assert f"{field.split('.')[-1]}={value}" in row["tiles"], "the overrides are what ran"


def test_a_wrong_kernel_and_one_that_cannot_be_made_are_rows_that_say_so():
    family = family_of("products")

    def broken(inputs, backend, overrides, interpret):
        work = family.make(inputs, backend, overrides, interpret)
        return replace(work, sample=lambda carry: work.sample(carry) * 1.1)

    case = ROWS["products"][0][0]
    [wrong] = rows_of(replace(family, make=broken), [(case, "xla", "")])
    assert wrong["failure"].startswith("wrong: error 0.1") and wrong["us"] > 0
    both = rows_of(family, [(case, "pallas_triton", text) for text in ("block_k=48", "sides=3")])
    assert "tiles must divide" in both[0]["failure"] and "got sides" in both[1]["failure"]
    named = [{"family": "products"} | row for row in (wrong, *both)]
    assert not fastest(named), "what is wrong is not fast"
    assert all(row.get("failure", "") in line(row) for row in named)


WORKER = """
import json, sys, time
first = int(sys.argv[1])
print(json.dumps({"meta": {"card": "none"}, "variants": ["a", "b", "c", "d", "e"]}), flush=True)
for at, name in enumerate("abcde"):
    if at < first:
        continue
    if name == "b":
        sys.exit(9)
    if name == "d":
        time.sleep(60)
    row = {"case": name} | ({"failure": "illegal address"} if name == "c" else {"us": 1.0})
    print(json.dumps(row), flush=True)
    if name == "c":
        sys.exit(POISONED)
"""


def test_a_process_that_ends_or_hangs_costs_its_own_row_and_no_other():
    def command(first, until):
        assert until > time.monotonic()
        return [sys.executable, "-c", WORKER.replace("POISONED", str(POISONED)), str(first)]

    rows, session = [], Session(command, limit_s=5.0)
    assert session.run(rows.append, time.monotonic() + 60) == []
    assert [row["case"] for row in rows] == list("abcde")
    assert "status 9" in rows[1]["failure"] and rows[2]["failure"] == "illegal address"
    assert "did not answer" in rows[3]["failure"] and rows[4]["us"] == 1.0
    assert session.meta == {"card": "none"}
    late = Session(command, limit_s=5.0)
    assert late.run(rows.append, time.monotonic()) == [] and len(rows) == 5
    with pytest.raises(RuntimeError, match="ended with status 4"):
        Session(lambda *_: [sys.executable, "-c", "exit(4)"], limit_s=5.0).run(print, 1e12)


def test_the_budget_ends_a_family_before_its_next_row():
    rows, family = [], family_of("products")
    variants = family.variants("", [], ["default"], is_tiny=True)
    kernel_runs.run_family(family, variants, rows.append, interpret=True, until=time.monotonic())
    assert not rows


def row(backend, us, tiles="", *, spread=0.0, is_default=True):
    times = {"us": us, "us_min": us - spread, "us_max": us + spread}
    names = {"family": "attention", "case": "8192x1", "backend": backend, "tiles": tiles}
    return names | times | {"is_default": is_default}


def test_the_fastest_is_named_with_what_others_take():
    rows = [row("one", 10.0, "a=1"), row("two", 12.0, spread=0.5), row("two", 15.0)]
    rows += [row("one", 8.0, "a=2", is_default=False), row("one", 1.0) | {"failure": "wrong"}]
    [best] = fastest(rows)
    assert (best["backend"], best["tiles"], best["us"]) == ("one", "a=2", 8.0)
    assert best["default"] == 1.25 and best["others"] == {"two": 1.5} and not best["is_close"]
    assert fastest([row("one", 10.0), row("two", 10.4, spread=0.5)])[0]["is_close"]
    json.dumps(best)


@pytest.mark.parametrize("name", FAMILIES)
def test_cases_come_by_weight_and_other_tilings_last(name):
    family = family_of(name)
    every = family.variants("", [], None, is_tiny=False)
    own = [one for one in every if not one.tiles]
    assert every[: len(own)] == own and own[0][:2] == (family.cases[0], family.backends[0])
    assert len(every) == len(family.cases) * (len(family.backends) + len(family.tiles))
    assert len(set(every)) == len(every)
    plain = family.variants("*", ["xla"], None, is_tiny=False)
    assert {one.backend for one in plain} == {"xla"} and len(plain) == len(family.cases)
    assert all(kernel_runs.parse_tiles(text) for text in family.tiles)
