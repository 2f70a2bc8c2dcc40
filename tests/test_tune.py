"""Lengths from files, the search with a fake device, the record, and the command end to end."""

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import pytest

from jaxprefill import engine as engine_module
from jaxprefill import precompile as precompile_module
from jaxprefill.cli import tuning as tuning_cli
from jaxprefill.cli.main import main
from jaxprefill.config import EngineConfig
from jaxprefill.engine import Engine
from jaxprefill.errors import ConfigError
from jaxprefill.inspection import model as inspected_module
from jaxprefill.kernels.device import describe_device
from jaxprefill.plan import make_plan
from jaxprefill.prefill.buckets import ShapeKey
from jaxprefill.store.folder import Store
from jaxprefill.store.machine import user_store
from jaxprefill.tuning import chosen
from jaxprefill.tuning.chosen import TunedLadder, choose_plan, keep, user_results
from jaxprefill.tuning.costs import BucketCost
from jaxprefill.tuning.ladder import Goal
from jaxprefill.tuning.lengths import DISTRIBUTIONS, named, read_lengths, read_prompts, within
from jaxprefill.tuning.measure import full_batch, without_drift
from jaxprefill.tuning.search import fine_grid, quantiles, search
from tests.tiny import byte_tokenizer, tiny_config

OPTIONS = dict(dtype="float32", max_running_requests=4, page_size=8, chunked_prefill_size=160)
TUNED = TunedLadder(buckets=(8, 24, 160), distribution="chat", waste=0.04, budget=0.05)
TINY_FLAGS = ["--kv-cache-tokens=640"]
TINY_FLAGS += [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]


class FakeDevice:
    """Time grows with the tokens above a floor; remembers what it was asked."""

    asked: ClassVar[list[int]] = []

    def __init__(self, *args, **kwargs):
        FakeDevice.asked = []

    def measure(self, buckets):
        FakeDevice.asked += buckets
        return [
            BucketCost(
                num_tokens=n,
                time_ns=max(20_000, 1000 * n),
                compile_s=0.5,
                code_bytes=1000,
                temp_bytes=n,
            )
            for n in buckets
        ]

    def pair_ns(self):
        return Fraction(0)

    def seconds(self, cost):
        return 1.0

    def close(self):
        FakeDevice.asked.append(-1)


# --- lengths


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("5\n7\n\n5\n", {5: 2, 7: 1}),
        ("\ufeff5, 7 5\r\n1k", {5: 2, 7: 1, 1000: 1}),
        ("arrival_s,prompt_tokens,output_tokens\n0.1,30,2\n0.2,4,9\n", {4: 1, 30: 1}),
        ('"id", "prompt_tokens"\r\n"two\nlines, one cell","5"\r\n\r\n', {5: 1}),
    ],
)
def test_lengths_are_counted(tmp_path, text, lengths):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path).lengths == lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("prompt_tokens\n", "only a header"),
        ("3\n0\n", "line 2: a length must be at least 1"),
        ("3\nx", "line 2: length must be a whole number"),
        ("a,prompt_tokens\n1", "line 2: length must be a whole number"),
        ("id,tokens\n1,5", "line 1: length must .*'id'; of a CSV the column prompt_tokens is read"),
    ],
)
def test_what_is_no_length_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_lengths(path)
    with pytest.raises(ConfigError, match="can be read"):
        read_lengths(tmp_path / "none")


def test_prompts_are_tokenised_as_the_engine_does(tmp_path):
    path, tokenizer = tmp_path / "prompts.jsonl", byte_tokenizer()
    chat = [{"role": "user", "content": "hi"}]
    lines = ["abc", {"prompt": "abcd"}, {"text": "abcd"}, {"prompt": [1, 2, 3]}, [7, 8]]
    lines += [{"messages": chat}, {"custom_id": "a", "body": {"messages": chat}}]
    lines += [["ab", [1, 2]], {"body": {"input": "a\u2028b"}}]  # a line for JSONL, not for Unicode
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    rendered = len(tokenizer.encode("<user>hi<a>", add_special_tokens=False))
    assert read_prompts(path, tokenizer).lengths == {2: 3, 3: 2, 4: 2, 5: 1, rendered: 2}


@pytest.mark.parametrize(
    "line",
    ['{"a": 1}', "7", '{"prompt": 7}', '{"prompt": ""}', "{", "[[[1]]]", "[true]", '{"body": []}'],
)
def test_a_line_without_a_prompt_is_refused_by_number(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"abc"\n{line}\n')
    with pytest.raises(ConfigError, match="line 2: a"):
        read_prompts(path, byte_tokenizer())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_named_distributions_are_the_same_each_time_and_fit_the_context(name):
    found = named(name, 2048)
    assert found == named(name, 2048) and sum(found.lengths.values()) == 1000
    assert min(found.lengths) >= 1 and max(found.lengths) <= 2048
    assert within(found, 2048).num_left_out == 0
    with pytest.raises(ConfigError, match="one of chat"):
        named("nope", 2048)


def test_prompts_beyond_the_context_are_left_out_and_counted(tmp_path):
    path = tmp_path / "lengths"
    path.write_text("10 20 20 30")
    kept = within(read_lengths(path), 20)
    assert (kept.lengths, kept.num_left_out) == ({10: 1, 20: 2}, 1)
    with pytest.raises(ConfigError, match="the shortest has 10"):
        within(read_lengths(path), 9)


# --- search


def test_every_bucket_of_the_proposal_was_measured_and_none_twice():
    lengths = named("uniform", 200).lengths
    found = search(FakeDevice(), lengths, Goal(), top=256, default=(16, 256))
    assert len(FakeDevice.asked) == len(set(FakeDevice.asked))
    assert set(found.proposal.chosen.buckets) <= set(FakeDevice.asked)
    assert found.proposal.is_within_budget and found.proposal.chosen.waste <= 0.05
    assert found.proposal.chosen.buckets[-1] == 256 and found.proposal.chosen.is_measured
    again = search(FakeDevice(), lengths, Goal(), top=256, default=(16, 256))
    assert again.proposal == found.proposal


def test_one_length_gets_a_bucket_of_its_own():
    found = search(FakeDevice(), {300: 9}, Goal(budget=0.02), top=1024, default=(512, 1024))
    assert found.proposal.chosen.buckets == (304, 1024) and 304 in FakeDevice.asked


def test_when_time_is_up_other_costs_are_interpolated():
    uniform = named("uniform", 200).lengths
    found = search(FakeDevice(), uniform, Goal(), top=256, default=(16, 256), limit_s=8)
    assert FakeDevice.asked == [8, 16, 32, 64, 128, 256, 12, 24]
    assert found.proposal.is_within_budget and not found.proposal.chosen.is_measured
    found = search(FakeDevice(), {20: 1}, Goal(), top=256, default=(16, 256), limit_s=0)
    assert FakeDevice.asked == [8, 16, 32, 64, 128, 256]  # enough to draw a line
    wide = search(FakeDevice(), {20: 1}, Goal(budget=9), top=256, default=(16, 256), limit_s=0)
    assert wide.proposal.chosen.is_measured and wide.proposal.is_within_budget


def test_given_shapes_are_the_only_ones():
    found = search(
        FakeDevice(), {100: 1}, Goal(), top=256, default=(16, 256), shapes=(64, 128, 999)
    )
    assert FakeDevice.asked == [64, 128, 256] and found.proposal.chosen.buckets == (128, 256)


def test_many_lengths_ask_for_few_buckets():
    lengths = dict.fromkeys(range(1, 1001), 1)
    assert len(quantiles(lengths)) == 32 and max(quantiles(lengths)) == 1000
    assert fine_grid((8,), {3: 1}) == (8,)
    assert set(fine_grid((8, 1024), {300: 1, 5: 1})) >= {8, 304, 1024}


# --- the record


@pytest.fixture
def results(tmp_path) -> Store:
    return Store(tmp_path / "store")


def plans(results, model=None, **options):
    config = EngineConfig(**({"chunked_prefill_size": 160} | options))
    return choose_plan(config, model or tiny_config(), describe_device(), results)


def write(results, tuned=TUNED, model=None, **options):
    held = model or tiny_config()
    config = EngineConfig(**({"chunked_prefill_size": 160} | options))
    plan = make_plan(config, held, describe_device())
    keep(tuned, held, plan, results)


def test_a_written_ladder_is_taken_where_the_user_set_none(results):
    assert plans(results).ladder.buckets == (16, 32, 64, 128, 160)
    write(results)
    found = plans(results)
    assert found.ladder.buckets == (8, 24, 160) == found.config.prefill_buckets
    assert "buckets 8,24,160 (tuned for chat on 20" in found.describe()
    assert found.ladder_table()["origin"] == found.ladder_origin


def test_a_model_that_is_no_longer_as_it_was_when_it_was_tuned_is_told(results, caplog):
    """Also where a new version of jaxprefill knows more of it."""
    other = tiny_config(num_layers=3)
    write(results)
    found = plans(results, other)
    assert found.ladder.buckets[0] == 16 and not found.ladder_origin
    assert "demo is not as it was" in caplog.text and "tune --write" in caplog.text
    caplog.clear()
    renamed = EngineConfig(model="another", chunked_prefill_size=160)
    choose_plan(renamed, other, describe_device(), results)
    plans(results, other, prefill_buckets="default")
    write(results, model=other)
    plans(results, other)
    assert not caplog.text


@pytest.mark.parametrize("buckets", ["default", "upstream", "16,64"])
def test_what_the_user_set_is_never_overridden(results, buckets):
    write(results)
    given = plans(results, prefill_buckets=buckets)
    assert given == plans(None, prefill_buckets=buckets) and not given.ladder_origin


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(dtype="bfloat16"), "measured with dtype float32, and it is bfloat16"),
        (dict(chunked_prefill_size=64), "measured with chunked_prefill_size 160, and it is 64"),
        (dict(prefill_backend="layerwise"), "measured with prefill_backend full"),
    ],
)
def test_a_stale_ladder_is_left_out_with_the_reason(results, caplog, options, reason):
    write(results, dtype="float32")
    found = plans(results, **({"dtype": "float32"} | options))
    assert found.ladder == plans(None, **({"dtype": "float32"} | options)).ladder
    assert reason in found.describe() and reason in caplog.text


def test_a_ladder_of_another_jax_is_left_out(results, monkeypatch):
    write(results)
    monkeypatch.setattr(chosen, "conditions_of", lambda plan: {"jax": "9.9.9"})
    assert "and it is 9.9.9" in plans(results).ladder_origin


@pytest.mark.parametrize("buckets", [None, [], [0, 160], ["8", 160], [8, 64], [True, 160]])
def test_a_damaged_ladder_is_left_out(results, caplog, buckets):
    write(results)
    path = next(results.folder.rglob("*.json"))
    facts = chosen.facts_of(tiny_config(), 1)
    value = results.read_result(chosen.KIND, facts)
    results.write_result(chosen.KIND, facts, value | {"buckets": buckets})
    found = plans(results)
    assert found.ladder.buckets[0] == 16 and "damaged" in found.ladder_origin
    path.write_text(path.read_text().replace("160", "161"))
    assert plans(results).ladder.buckets[0] == 16
    results.write_result(chosen.KIND, facts, "a text")
    assert "damaged" in plans(results).ladder_origin and "left out" in caplog.text


def test_a_full_step_fills_its_bucket_within_context_and_slots():
    plan = make_plan(
        EngineConfig(max_running_requests=4, kv_cache_tokens=160, page_size=8, dtype="float32"),
        tiny_config(context_length=64),
        describe_device(),
    )
    for num_tokens in (1, 64, 100, 256):
        batch = full_batch(plan, num_tokens)
        assert batch.num_tokens == num_tokens and batch.max_context <= 64
        for row in batch.rows:
            assert len(row.pages) * 8 >= row.kv_len and max(row.pages) < plan.num_pages
            assert min(row.token_ids) >= 0 and max(row.token_ids) < plan.model.vocab_size


def test_a_machine_that_slowed_down_is_allowed_for():
    anchor, fresh = ShapeKey(64, 4, 160), ShapeKey(80, 4, 160)
    assert without_drift({anchor: 300, fresh: 390}, anchor, 100) == {fresh: 130}


# --- the command


class Planned(Exception):
    """Start-up has got as far as the plan."""


def planned(**options) -> str:
    """What an engine says of its plan; it is not built."""
    described = []

    def stop(plan):
        described.append(plan.describe())
        raise Planned

    with pytest.raises(Planned):
        Engine("tiny", on_planned=stop, **options)
    return described[0]


def test_all_who_compile_take_the_tuned_ladder(tmp_path, monkeypatch, checkpoint):
    """It lies in the user's own store, and what is compiled ahead is what an engine will run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (engine_module, precompile_module, inspected_module):
        monkeypatch.setattr(module, "open_checkpoint", lambda model: checkpoint)
    assert user_results().folder == user_store()
    config = EngineConfig(chunked_prefill_size=160)
    held = checkpoint.config
    keep(TUNED, held, make_plan(config, held, describe_device()), user_results())
    found = []

    def stop(checkpoint, plan):
        found.append(plan.ladder.buckets)
        raise Planned

    monkeypatch.setattr(precompile_module, "prepare", stop)
    with pytest.raises(Planned):
        precompile_module.precompile(config, tmp_path / "out", on_compiled=lambda *_: None)
    assert found == [TUNED.buckets] == [inspected_module.ModelSource(config).plan.ladder.buckets]
    assert "buckets 8,24,160 (tuned" in planned(chunked_prefill_size=160)


@pytest.fixture
def command(tmp_path, monkeypatch, checkpoint, capsys):
    """Runs `jaxprefill tune` over the tiny model, with a user's cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.getloadavg", lambda: (0.0,) * 3)
    for module in (tuning_cli, engine_module):
        monkeypatch.setattr(module, "open_checkpoint", lambda model: checkpoint)
    path = tmp_path / "lengths.txt"
    path.write_text("20 20 20 24 90 200")

    def run(*argv, file: Path | str = path):
        status = main(["tune", "--model", "tiny", "--lengths", str(file), *TINY_FLAGS, *argv])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(tuning_cli, "ShapeMeasurer", FakeDevice)


def test_the_table_shows_the_ladder_beside_the_others(command, fake):
    status, out, err = command()
    assert status == 0 and FakeDevice.asked[-1] == -1
    assert "5 prompts of 20 to 90 tokens; budget 5.0%" in out
    lines = [line for line in out.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in lines[:3]] == ["tuned", "default", "upstream"]
    # 90 runs as 24, 24, 24, 18
    assert "--prefill-buckets 20,24,160\n" in out and "20,24,160" in lines[-1]
    assert "1 prompts are longer than the context" in err and "kept" not in err
    assert "for about 180 s at most (--time-limit)" in err and "interpolated" not in err
    assert "tuned" not in planned(**OPTIONS)


def test_a_machine_that_is_busy_is_told(command, fake, monkeypatch):
    for load, is_told in ((1e3, True), (0.0, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load,) * 3)
        assert ("load 1000.0 on" in command("-q")[2]) == is_told


def test_what_a_busy_machine_measured_is_kept_only_by_force(command, fake, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (1e3,) * 3)
    status, out, err = command("--write")
    assert status == 2 and not out and "insist with --force" in err
    assert "tuned" not in planned(**OPTIONS)
    status, _, err = command("--write", "--force")
    assert status == 0 and "load 1000.0 on" in err and "kept for this model" in err
    assert "tuned" in planned(**OPTIONS)


def test_json_holds_everything_and_the_next_engine_takes_what_was_written(command, fake):
    status, out, err = command("--json", "--write", "--budget", "30%")
    found = json.loads(out)
    assert status == 0 and found["budget"] == 0.3 and "kept for this model" in err
    assert found["buckets"] == found["ladders"]["tuned"]["buckets"] == [24, 160]
    assert set(found["ladders"]) == {"tuned", "default", "upstream"}
    assert {cost["num_tokens"] for cost in found["measured"]} >= set(found["buckets"])
    assert "buckets 24,160 (tuned for " in planned(**OPTIONS)
    assert "buckets 8,32," in planned(**OPTIONS | {"prefill_buckets": (8, 32)})


@pytest.mark.parametrize("budget", ["5", "1.5", "5%%", "x", "-1%"])
def test_a_budget_is_a_share(command, budget):
    status, _, err = command(f"--budget={budget}")
    assert status == 2 and "must be a share" in err


def test_a_budget_that_cannot_be_met_is_told_by_the_status(command, fake):
    status, out, err = command("--budget", "0", "--max-buckets", "1")
    assert status == 1 and "--prefill-buckets 160" in out and "no ladder" in err
    _, out, err = command("--time-limit", "1")
    assert "│ tuned    │       4 │ ~" in out and "costs of 20,24,92 are interpolated" in err
    status, out, _ = command("--budget", "1e8%", "-q")
    assert status == 0 and "--prefill-buckets 160" in out


@pytest.mark.parametrize(
    "argv",
    [
        ["--budget", "x"],
        ["--budget", "-1%"],
        ["--budget", "5%%"],
        ["--max-buckets", "0"],
        ["--time-limit", "0"],
        ["--distribution", "chat"],
        ["--prefill-backend", "eager"],
    ],
)
def test_mistakes_are_told_before_anything_is_measured(command, argv):
    status, out, err = command(*argv)
    assert status == 2 and not out and "error: " in err


def test_a_store_that_cannot_be_written_is_told_after_the_table(command, fake, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    status, out, err = command("--write")
    assert status == 1 and "--prefill-buckets" in out and "cannot be written" in err
    assert "kept" not in err and "buckets 16," in planned(**OPTIONS)


def test_an_empty_file_is_a_mistake(command, tmp_path):
    (tmp_path / "empty").write_text("")
    status, _, err = command(file=tmp_path / "empty")
    assert status == 2 and "is empty" in err


def test_the_tiny_model_is_measured_and_its_ladder_taken(command):
    """With real executables, those of the session's engine, from its compilation cache."""
    status, out, err = command(
        *("--prefill-buckets=8,32", "--chunked-prefill-size=32"),
        *("--budget=1e9%", "--write", "--json"),
    )
    found = json.loads(out)
    assert status == 0 and found["buckets"] == [32] and "measured 8 tokens: " in err
    assert sorted(cost["num_tokens"] for cost in found["measured"]) == [8, 32]
    assert all(cost["time_ns"] > 0 and cost["compile_s"] > 0 for cost in found["measured"])
    assert "buckets 32 (tuned for " in planned(**OPTIONS | {"chunked_prefill_size": 32})


def test_the_costs_of_a_record_can_be_read_back(command, fake):
    _, out, _ = command("--json", "-q")
    names = {field.name for field in dataclasses.fields(BucketCost)}
    assert set(json.loads(out)["measured"][0]) == names
