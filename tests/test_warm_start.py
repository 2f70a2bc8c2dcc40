"""A start from a store: nothing is lowered or compiled, and all is as it was."""

import json
import logging
import os
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxprefill import SamplingParams
from jaxprefill.assembly import Assembly
from jaxprefill.cli.main import main
from jaxprefill.compat import load_executable, program_settings
from jaxprefill.errors import ConfigError
from jaxprefill.prefill.compiler import CPU_OPTIONS, CompileJob, ExecutableRecord, compile_job
from jaxprefill.prefill.library import Library
from jaxprefill.prefill.program import LoadedProgram
from jaxprefill.store.folder import Store
from jaxprefill.store.machine import user_store
from tests.test_engine import random_prompt
from tests.tiny import TinyCheckpoint, tiny_engine

PROMPTS = [random_prompt(n, seed=n) for n in (3, 20, 70, 1)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=4, seed=1, repetition_penalty=1.3, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=4, seed=2, logit_bias={65: 3.0}, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=3, top_k=5, ignore_eos=True),
]


def answers(engine) -> tuple:
    engine.flush_cache()  # a prefix that is cached is not computed again: other roundings
    generated = [(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, PARAMS)]
    return generated, engine.logprobs(PROMPTS), engine.embed(PROMPTS).tolist()


@pytest.fixture
def expected(engine):
    """Of the session's engine; its executables are in the session's store then."""
    return answers(engine)


def test_a_second_start_lowers_and_compiles_nothing_and_gives_the_same_bits(expected, checkpoint):
    with tiny_engine(checkpoint) as warm:
        stats = warm.stats()
        assert (stats["lowered_at_start"], stats["compiled_at_start"]) == (0, 0)
        assert all(record["load_s"] is not None for record in stats["compiled"])
        assert all(record["compile_s"] > 0 for record in stats["compiled"])
        assert "loaded in" in warm.describe_executables() and stats["faults"] == []
        assert answers(warm) == expected
        assert warm.stats()["compilations_after_ready"] == 0


def test_what_has_run_here_is_not_tried_again(expected, checkpoint, monkeypatch):
    with tiny_engine(checkpoint):
        pass
    tried = []
    monkeypatch.setattr("jaxprefill.startup.warm_up", lambda core, plan: tried.append(core))
    with tiny_engine(checkpoint) as warm:
        assert answers(warm) == expected and not tried
        assert warm.stats()["compilations_after_ready"] == 0
    for path in user_store().glob("executables/*/set_bias-*.json"):
        path.unlink()
    with tiny_engine(checkpoint):  # one is compiled
        assert len(tried) == 1


def test_donated_operands_are_gone_after_a_loaded_call(expected, checkpoint):
    with tiny_engine(checkpoint) as warm:
        core = warm._core
        (executable, *_) = core.prefill._executables.values()
        assert isinstance(executable._compiled.call, LoadedProgram)
        pools, hidden = core.state.pools, core.state.hidden
        address = pools[0].unsafe_buffer_pointer()
        core.prefill.warm(core.state, is_brief=True)
        assert pools[0].is_deleted() and hidden.is_deleted()
        assert core.state.pools[0].unsafe_buffer_pointer() == address
        assert "HloModule" in executable._compiled.call.as_text()


def test_damage_is_compiled_anew_with_a_warning_and_mended(expected, checkpoint, caplog):
    store = Store.open(user_store())
    for path in store.folder.glob("executables/*/greedy_4-*.bin"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    for path in store.folder.glob("executables/*/set_bias-*.json"):
        path.write_text("{")
    for entry in store.entries():  # sealed as it should be, and wrong: too few operands, a stranger
        if entry.name == "set_history":
            store.write(replace(entry, read=entry.read[:-1]), store.payload(entry))
        if entry.name == "greedy 1":
            store.write(replace(entry, read=(*entry.read[:-1], 99)), store.payload(entry))
    with caplog.at_level(logging.WARNING), tiny_engine(checkpoint) as made:
        assert "greedy 4 in" in caplog.text and "SHA-256" in caplog.text
        assert made.stats()["compiled_at_start"] == 4
        assert "17 loaded, 4 compiled in" in made.describe_executables()
        assert answers(made) == expected
    with tiny_engine(checkpoint) as again:
        assert again.stats()["compiled_at_start"] == 0


def test_what_decides_a_program_decides_the_fingerprint(expected, checkpoint, monkeypatch):
    monkeypatch.setattr("jaxprefill.startup.compile_all", _count_loaded)
    for options in (dict(kv_cache_tokens=648), dict(max_running_requests=3), dict(page_size=16)):
        with pytest.raises(_Counted) as found, tiny_engine(checkpoint, **options):
            pass
        assert "prefill 8" not in " ".join(found.value.args[0]), options
        assert "zeros" not in found.value.args[0], options
    other = TinyCheckpoint(norm_eps=1e-6)
    with pytest.raises(_Counted) as found, tiny_engine(other):
        pass
    assert found.value.args[0] == []
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_x=1")
    with pytest.raises(_Counted) as found, tiny_engine(checkpoint):
        pass
    assert found.value.args[0] == []
    monkeypatch.undo()


class _Counted(Exception):
    """Instead of compiling: the names of the executables that a store has."""


def _count_loaded(jobs, *, options, keeper, **_):
    raise _Counted([job.name for job in jobs if keeper.load(job, options) is not None])


def test_what_jax_had_in_its_cache_is_not_kept(tmp_path):
    """Written down once more it would load, and fail when it runs."""
    library = Library({}, "tiny", target=Store(tmp_path))
    kept = []
    for _ in range(2):
        jax.clear_caches()
        shape = jax.ShapeDtypeStruct((5,), np.float32)
        job = CompileJob(name="cached once", function=lambda x: (x + 1,), arguments=(shape,))
        compiled = compile_job(job, CPU_OPTIONS)
        library.keep(job, CPU_OPTIONS, compiled)
        kept.append((compiled.is_own, len(list(tmp_path.rglob("*.bin")))))
    assert kept == [(True, 1), (False, 1)]


def test_a_named_folder_that_is_none_is_refused(checkpoint, tmp_path):
    with (
        pytest.raises(ConfigError, match="jaxprefill compile"),
        tiny_engine(checkpoint, executables=str(tmp_path / "none")),
    ):
        pass


def test_folders_that_cannot_be_used_are_a_warning(expected, checkpoint, tmp_path, monkeypatch):
    """One that anybody can write, and a user's cache that cannot be made."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("jaxprefill.startup.compile_all", _count_loaded)
    with (
        pytest.raises(_Counted) as found,
        tiny_engine(checkpoint, executables=str(tmp_path / "open")),
    ):
        pass
    assert found.value.args[0] == []


def test_settings_of_jax_that_change_programs_are_facts(engine):
    found = program_settings()
    assert {"jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion"} <= set(
        found
    )
    assert not {"jax_compilation_cache_dir", "jax_platforms", "jax_log_compiles"} & set(found)
    np.testing.assert_equal(jax.config.jax_enable_x64, found["jax_enable_x64"] == "True")


NO_SIZES = dict(
    lower_s=0.1, compile_s=0.1, temp_bytes=0, argument_bytes=0, output_bytes=0, code_bytes=0
)
FEW = {"prefill 8x4x160", "decode 1x1x160", "zeros", "set_bias"}


def test_compile_writes_a_folder_that_engines_load(
    expected, checkpoint, tmp_path, monkeypatch, capsys
):
    made_jobs = Assembly.jobs
    monkeypatch.setattr(
        Assembly, "jobs", lambda self: [job for job in made_jobs(self) if job.name in FEW]
    )
    monkeypatch.setattr("jaxprefill.precompile.open_checkpoint", lambda model: checkpoint)
    argv = ["--model", "tiny", "--prefill-buckets", "8,32", "--max-running-requests", "4"]
    argv += ["--kv-cache-tokens", "640", "--page-size", "8", "--dtype", "float32"]
    folder = tmp_path / "out"

    def compile_(*more: str) -> str:
        assert main(["compile", "--out", str(folder), *argv, *more]) == 0
        return capsys.readouterr().err

    assert main(["compile", "--out", str(folder), *argv, "--shapes", "9"]) == 2
    assert "got 9; they are 1x1x160, 8x4x160" in capsys.readouterr().err
    assert main(["compile", "--out", str(folder), *argv, "--shapes", ","]) == 2
    assert "--shapes must name token counts" in capsys.readouterr().err
    assert "3 executables compiled in" in compile_("--shapes", "8, 8x4x160")
    assert "1 executables compiled in" in (err := compile_()) and "3 were there" in err
    entries = {entry.name: entry for entry in Store.open(folder).entries()}
    assert entries.keys() == FEW
    body = entries["prefill 8x4x160"]
    assert "HloModule" in Store.open(folder).text(body, "hlo")
    assert "stablehlo" in Store.open(folder).text(body, "stablehlo")

    monkeypatch.undo()
    for path in folder.glob("executables/*/decode*.bin"):
        path.write_bytes(b"?")
    with tiny_engine(checkpoint, executables=str(folder)) as warm:
        assert warm.stats()["compiled_at_start"] == 0  # the user's own store has what is damaged
        assert ["SHA-256" in fault for fault in warm.stats()["faults"]] == [True]
        assert answers(warm) == expected

    assert main(["store", "list", "--dir", str(folder), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {one["name"] for one in found} == FEW and found[0]["model"] == "tiny"
    assert main(["store", "verify", "--dir", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "SHA-256" in out and "4 executables" in err and "1 damaged" in err
    assert main(["store", "prune", "--dir", str(folder)]) == 0
    assert "4 files deleted" in capsys.readouterr().err
    assert main(["store", "verify", "--dir", str(folder), "--unused", "soon"]) == 2
    assert main(["store", "list", "--dir", str(tmp_path / "none")]) == 1


def test_compile_stops_at_the_first_executable_that_cannot_be_kept(
    checkpoint, tmp_path, monkeypatch, capsys
):
    def obtain(assembly, library, jobs, *, on_compiled):
        for job in jobs:
            library.target = None
            library.report(f"executables are not kept: the disk is full at {job.name}")
            on_compiled(ExecutableRecord(name=job.name, **NO_SIZES), len(jobs))

    monkeypatch.setattr("jaxprefill.precompile.open_checkpoint", lambda model: checkpoint)
    monkeypatch.setattr("jaxprefill.precompile.obtain", obtain)
    assert main(["compile", "--out", str(tmp_path / "out"), "--model", "tiny"]) == 1
    err = capsys.readouterr().err
    assert "error: executables are not kept: the disk is full" in err and "[2/" not in err


def test_a_store_of_other_facts_says_which(expected, checkpoint, tmp_path, monkeypatch, caplog):
    store, own = Store(tmp_path), Store.open(user_store())
    entry = next(entry for entry in own.entries() if entry.name == "set_bias")
    other = entry.facts | {"versions": {"jax": "0.1"}, "source": "?"}
    store.write(replace(entry, facts=other), own.payload(entry))
    library = Library(entry.facts, "tiny", (store,), named=store)
    library.tell_missing([ExecutableRecord(**entry.record)])
    assert "1 of 1 executables are not in" in library.faults[0]
    assert "made for another source, versions" in caplog.text
    store.write(entry, own.payload(entry))  # a nearer one, whichever comes first
    library.tell_missing([ExecutableRecord(**entry.record)])
    assert "(other shapes or options, or damage)" in library.faults[1]


def test_a_loaded_executable_that_fails_when_it_first_runs_is_compiled_anew(
    expected, checkpoint, monkeypatch, caplog
):
    """In a warm call, where its donated operands are lost with it; another one in a request."""
    shutil.rmtree(user_store() / "results" / "warm_calls", ignore_errors=True)
    monkeypatch.setattr("jaxprefill.prefill.library.load_executable", _Broken.load)
    with caplog.at_level(logging.WARNING), tiny_engine(checkpoint) as made:
        assert "prefill 8x4x160 in" in caplog.text and "fails when it runs" in caplog.text
        assert made.stats()["compiled_at_start"] == len(made.stats()["faults"]) == 1
        assert "1 compiled in" in made.describe_executables()
        assert answers(made) == expected
        assert made.stats()["compilations_after_ready"] == 1
        assert ["set_bias in" in fault for fault in made.stats()["faults"]] == [False, True]
    monkeypatch.undo()
    with tiny_engine(checkpoint) as again:
        assert again.stats()["compiled_at_start"] == 0 and again.stats()["faults"] == []


def _forwarded(name):
    return property(lambda broken: getattr(broken._real, name))


class _Broken:
    """An executable that loads and does not run, as where a function that it calls is missing."""

    def __init__(self, real):
        self._real = real

    @classmethod
    def load(cls, payload, devices):
        real = load_executable(payload, devices)
        name = real.hlo_modules()[0].name
        return cls(real) if "prefill_8x4x160" in name or "set_bias" in name else real

    # By name: from Python 3.12 on protocols are looked for in the class alone.
    client, serialize, hlo_modules, get_parameter_layouts = map(
        _forwarded, ("client", "serialize", "hlo_modules", "get_parameter_layouts")
    )

    def execute_sharded(self, operands):
        if len(operands) > 20:  # a whole body: it takes what is donated, and then fails
            self._real.execute_sharded(operands)
        raise RuntimeError("a function is missing")
