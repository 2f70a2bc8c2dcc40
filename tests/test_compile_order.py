"""The order in which executables are compiled."""

import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxprefill.errors import CompileError, KernelError
from jaxprefill.prefill import compiler
from jaxprefill.prefill.compiler import CPU_OPTIONS, CompileJob, compile_all, compile_job

JOBS = [
    CompileJob(name=f"{kind} {rows}", function=len, arguments=(), cost=cost, products=rows)
    for kind, rows, cost in (
        *(("prefill", rows, int(rows)) for rows in ("16", "64", "256")),
        *(("decode", rows, 1) for rows in ("16", "64")),
        *(("score", rows, 0) for rows in ("16", None, "256")),
    )
]


@pytest.fixture(scope="module")
def made():
    one = jax.ShapeDtypeStruct((1,), np.float32)
    return compile_job(CompileJob(name="one", function=abs, arguments=(one,)), CPU_OPTIONS)


def compiled_names(monkeypatch, obtain):
    monkeypatch.setattr(compiler, "_obtain", obtain)
    told: list[str] = []
    done = compile_all(JOBS, options={}, num_threads=8, on_done=lambda one: told.append(one.name))
    assert list(done) == told
    return told


def test_jobs_with_products_in_common_never_compile_at_once_and_others_do(monkeypatch, made):
    lock, active, most = threading.Lock(), list[object](), [0]

    def obtain(job, options, keeper):
        with lock:
            assert job.products is None or job.products not in active
            active.append(job.products)
            most[0] = max(most[0], len(active))
        time.sleep(0.02)
        with lock:
            active.remove(job.products)
        return replace(made, record=replace(made.record, name=job.name))

    assert sorted(compiled_names(monkeypatch, obtain)) == sorted(job.name for job in JOBS)
    assert most[0] > 1


def test_a_failure_ends_all(monkeypatch, made):
    def obtain(job, options, keeper):
        if job.name == "decode 64":
            raise CompileError("decode 64 could not be compiled")
        return replace(made, record=replace(made.record, name=job.name))

    with pytest.raises(CompileError, match="decode 64"):
        compiled_names(monkeypatch, obtain)


def test_the_largest_comes_first_and_then_the_longest_chain(monkeypatch, made):
    def obtain(job, options, keeper):
        return replace(made, record=replace(made.record, name=job.name))

    monkeypatch.setattr(compiler, "_obtain", obtain)
    told: list[str] = []
    compile_all(JOBS, options={}, num_threads=1, on_done=lambda one: told.append(one.name))
    assert told[0] == "prefill 256"
    assert told[2:5] == ["prefill 16", "decode 16", "score 16"]


def test_a_kernel_that_fails_its_check_is_named_and_ends_all(monkeypatch, made):
    """The check runs beside the compilations: those here wait for it."""
    is_checked = threading.Event()

    def obtain(job, options, keeper):
        is_checked.wait()
        return replace(made, record=replace(made.record, name=job.name))

    def check():
        is_checked.set()
        raise KernelError("the kernel gated product must compute what plain JAX does")

    monkeypatch.setattr(compiler, "_obtain", obtain)
    with pytest.raises(KernelError, match="gated product"):
        compile_all(JOBS, options={}, num_threads=2, on_done=lambda one: None, check=check)
