"""The command line in process, over the session's tiny engine; one test builds an engine itself."""

import io
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest

from jaxprefill import SamplingParams, __version__
from jaxprefill.cli import flags, sampling_flags, streams
from jaxprefill.cli.main import COMMANDS, load_command, main, make_parser
from jaxprefill.config import EngineConfig, engine_options
from jaxprefill.errors import CompileError
from jaxprefill.prefill.compiler import ExecutableRecord
from jaxprefill.request import Completion
from tests.tiny import TinyCheckpoint

RECORD = ExecutableRecord(
    name="prefill 8x4x160",
    lower_s=0.5,
    compile_s=1.0,
    temp_bytes=2_000_000,
    argument_bytes=0,
    output_bytes=0,
    code_bytes=0,
)
GREEDY = ["--temperature", "0", "--max-tokens", "4", "--ignore-eos"]


class SharedEngine:
    """Stands in for Engine: the session's engine, which stays open."""

    def __init__(self, engine):
        self.engine = engine
        self.options = {}

    def __call__(self, on_planned=None, on_compiled=None, **options):
        self.options = options
        if on_planned is not None:
            on_planned(self.engine.plan)
        if on_compiled is not None:
            on_compiled(RECORD, 1)
        return self

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.fixture
def shared(engine, monkeypatch) -> SharedEngine:
    made = SharedEngine(engine)
    monkeypatch.setattr("jaxprefill.cli.session.Engine", made)
    return made


@pytest.fixture
def cli(capsys):
    """Runs the command line; returns its status, stdout and stderr."""

    def run(*argv):
        status = main(list(argv))
        return status, *capsys.readouterr()

    return run


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def greedy(engine, prompt: str) -> Completion:
    return engine.generate(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]


def script(*argv, **options) -> subprocess.CompletedProcess:
    program = "import sys; from jaxprefill.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, check=False, **options
    )


# --- generate


def test_a_prompt_is_followed_by_its_completion(shared, engine, cli):
    status, out, err = cli("generate", "--prompt", "hello", *GREEDY)
    assert status == 0
    assert out == "hello" + greedy(engine, "hello").text + "\n"
    assert "[1/1] prefill 8x4x160: 1.5 s, temp 2.0 MB" in err
    assert "buckets 8,32, 4 slots, context 160; decode slots 1,4; ready in" in err
    assert "tokens: 5 prompt, 4 generated in" in err
    assert "passes: full 1, decode 3; fallbacks: none" in err


def test_quiet_leaves_stderr_empty(shared, cli):
    assert cli("generate", "--prompt", "hello", "-q", *GREEDY)[2] == ""


def test_json_holds_every_field_and_nothing_else_is_on_stdout(shared, engine, cli):
    status, out, _ = cli("generate", "--prompt", "hello", "--json", "--logprobs", "2", *GREEDY)
    (found,) = json_lines(out)
    assert status == 0
    assert set(found) == {"prompt"} | {item.name for item in fields(Completion)}
    assert found["prompt"] == "hello"
    assert found["token_ids"] == greedy(engine, "hello").token_ids
    assert len(found["logprobs"]) == 4 and len(found["top_logprobs"][0]) >= 2


def test_several_prompts_and_completions_are_told_apart(shared, engine, cli):
    argv = ("generate", "--prompt", "one", "--prompt", "two", "--n", "2", *GREEDY)
    _, out, err = cli(*argv)
    assert out.count("--- prompt ") == 4
    one, two = greedy(engine, "one").text, greedy(engine, "two").text
    assert f"--- prompt 1 of 2, completion 2 of 2 ---\none{one}\n\n--- prompt 2 of 2" in out
    assert "tokens: 6 prompt, 16 generated" in err
    found = json_lines(cli(*argv, "--json")[1])
    assert [(item["prompt"], item["index"]) for item in found] == [
        ("one", 0),
        ("one", 1),
        ("two", 0),
        ("two", 1),
    ]
    assert [item["text"] for item in found] == [one, one, two, two]


def test_a_dash_reads_stdin_as_it_is(shared, cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    _, out, _ = cli("generate", "--prompt", "-", "--json", *GREEDY)
    assert json_lines(out)[0]["prompt"] == "from stdin\n"


def test_chat_goes_through_the_template(shared, engine, cli):
    argv = ("generate", "--chat", "--system", "be brief", "--prompt", "hi", *GREEDY)
    (found,) = json_lines(cli(*argv, "--json")[1])
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = greedy(engine, engine._admission.chat_ids(messages, {}))
    assert found["token_ids"] == expected.token_ids
    assert cli(*argv)[1] == f"hi\n\n{expected.text}\n"


def test_one_seed_gives_one_text(shared, cli):
    argv = ("generate", "--prompt", "a", "--seed", "7", "--temperature", "2", "-q")
    assert cli(*argv)[1] == cli(*argv)[1]


def test_stops_and_biases_reach_the_request(shared, cli):
    argv = ("generate", "--prompt", "a", "--json", "--temperature", "0", "--logit-bias", "65=100")
    (found,) = json_lines(cli(*argv, "--max-tokens", "3")[1])
    assert found["token_ids"] == [65] * 3
    (found,) = json_lines(cli(*argv, "--stop-token-ids", "65")[1])
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", 65)


def test_values_that_are_no_numbers_end_in_status_1(shared, cli, monkeypatch):
    bad = Completion(token_ids=[], text="", finish_reason="error", logprobs=[-math.inf, math.nan])
    shared.generate = lambda prompts, params: [bad]
    status, out, err = cli("generate", "--prompt", "a", "--json")
    assert status == 1
    assert json_lines(out)[0]["logprobs"] == [None, None]
    assert "jaxprefill: error: 1 of 1 completions ended early" in err


# --- logprobs


def test_logprobs_are_those_of_the_engine(shared, engine, cli):
    status, out, _ = cli("logprobs", "--prompt", "hello", "--prompt", "wörld", "--json")
    assert status == 0
    for found, prompt in zip(json_lines(out), ("hello", "wörld"), strict=True):
        ids = engine.tokenizer.encode(prompt)
        expected = engine.logprobs([ids])[0]
        assert list(found) == ["prompt", "token_ids", "tokens", "logprobs", "sum_logprob"]
        assert found["token_ids"] == ids and len(found["tokens"]) == len(ids)
        assert found["logprobs"] == pytest.approx(expected, abs=1e-5)
        assert found["sum_logprob"] == pytest.approx(sum(expected[1:]), abs=1e-4)
    assert json_lines(out)[0]["tokens"] == list("hello")


def test_the_table_of_logprobs_ends_in_totals(shared, engine, cli):
    _, out, err = cli("logprobs", "--prompt", "hey", "--prompt", "a")
    logprobs = engine.logprobs("hey")[0][1:]
    shown = [float(x) for x in re.findall(r"'[ey]' +│ +(-[\d.]+) │", out)]
    assert shown == pytest.approx(logprobs, abs=1e-3)
    totals = re.search(r"sum (-[\d.]+) over 2 tokens, mean (-[\d.]+), perplexity ([\d.]+)", out)
    mean = sum(logprobs) / 2
    expected = [sum(logprobs), mean, math.exp(-mean)]
    assert [float(x) for x in totals.groups()] == pytest.approx(expected, rel=1e-3)
    assert "--- prompt 2 of 2 ---" in out and "sum 0 over no tokens" in out
    assert "tokens: 4 prompt in" in err


# --- config


def test_config_says_where_every_option_comes_from(cli):
    argv = ["--strict-prefill", "--prefill-buckets", "8", "--page-size", "8", "--json"]
    status, out, _ = cli("config", "--prefill-config", '{"prefill_buckets": [16, 64]}', *argv)
    found = json.loads(out)
    assert status == 0 and found["prefill_config"] == {
        "prefill_buckets": [16, 64],
        "strict_prefill": True,
    }
    options = found["options"]
    assert options["prefill_buckets"] == {
        "value": [16, 64],
        "origin": "prefill_config, over the flag",
    }
    assert options["strict_prefill"] == {"value": True, "origin": "flag"}
    assert options["dtype"] == {"value": "auto", "origin": "default"}
    assert set(options) == {item.name for item, _ in engine_options()} - {"prefill_config"}


def test_config_resolved_shows_what_an_engine_would_take(cli, monkeypatch):
    opened = TinyCheckpoint()
    monkeypatch.setattr("jaxprefill.weights.locate.open_checkpoint", lambda model: opened)
    status, out, err = cli("config", "--resolved", "--prefill-max-context", "100", "--json")
    options = json.loads(out)["options"]
    assert status == 0 and not err
    assert options["dtype"]["value"] == "float32"
    assert options["dtype"]["origin"].startswith("default: the fastest")
    assert options["prefill_max_context"] == {"value": [112], "origin": "flag: whole pages of 16"}
    assert options["context_length"] == {"value": 160, "origin": "default: the model's limit"}
    status, out, _ = cli("config", "--resolved")
    assert status == 0 and "--prefill-backend" in out and "layerwise" not in out


# --- models, help, version


def test_models_are_listed(cli):
    status, out, _ = cli("models")
    assert status == 0 and "demo" in out and "Apache-2.0" in out
    (found,) = json_lines(cli("models", "--json")[1])
    assert found["name"] == "demo" and found["num_bytes"] > 0
    assert isinstance(found["is_cached"], bool)


@pytest.mark.parametrize("argv", [["models", "--json"], ["generate", "--help"], ["--version"]])
def test_jax_is_not_imported_for(argv):
    program = (
        "import sys; from jaxprefill.cli.main import main; "
        f"status = main({argv!r}); assert 'jax' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_version(cli):
    assert cli("--version") == (0, f"jaxprefill {__version__}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(cli, name):
    status, out, _ = cli(name, "--help")
    command = load_command(name)
    assert status == 0 and f"  jaxprefill {name} " in out and command.summary in out
    assert command.name == name and command.summary[:40] in cli("--help")[1]


def test_serve_waits_for_no_package_that_only_its_processes_need():
    """What it imports before it starts the engine's process is time to "ready"."""
    code = "import sys; from jaxprefill.cli import main, serve; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "rich", "tokenizers", "jinja2", "asyncio"} & set(found.stdout.split())


def test_every_engine_option_has_its_flag(cli):
    _, out, _ = cli("generate", "--help")
    for item, hint in engine_options():
        if item.name != "seed":
            assert f"{flags.flag_name(item.name)} " in out.replace("\n", " ").replace(",", " ")
            assert " ".join(item.metadata["help"].split()[:4]) in " ".join(out.split())
        if hint is bool and item.default:
            assert "--no-" + flags.flag_name(item.name)[2:] in out


def test_every_sampling_parameter_has_its_flag(cli):
    _, out, _ = cli("generate", "--help")
    for item in fields(SamplingParams):
        assert f"{flags.flag_name(item.name)} " in out.replace("\n", " ").replace(",", " ")
        assert item.default is not MISSING


def test_flags_reach_the_engine_as_its_options():
    argv = "logprobs --prompt a --context-bucket 4K,32K --prefill-buckets 16,64 --page-size 32"
    argv += " --strict-prefill --memory-fraction .5 --prefill-backend layerwise"
    config = flags.engine_config_of(make_parser().parse_args(argv.split()))
    assert config == EngineConfig(
        prefill_max_context=(4096, 32768),
        prefill_buckets=(16, 64),
        page_size=32,
        strict_prefill=True,
        memory_fraction=0.5,
        prefill_backend="layerwise",
    )


def test_no_flag_means_the_default_of_its_field():
    args = make_parser().parse_args(["generate", "--prompt", "a"])
    assert flags.engine_config_of(args) == EngineConfig()
    params = sampling_flags.sampling_params_of(args)
    assert params == SamplingParams(max_tokens=sampling_flags.DEFAULT_MAX_TOKENS)


# --- mistakes


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nope"],
        ["generate"],
        ["generate", "--prompt", "a", "--nope"],
        ["generate", "--prompt", "a", "--temp", "1"],
        ["generate", "--prompt", "a", "--temperature", "-1"],
        ["generate", "--prompt", "a", "--temperature", "nan"],
        ["generate", "--prompt", "a", "--top-k", "x"],
        ["generate", "--prompt", "a", "--logit-bias", "3"],
        ["generate", "--prompt", "a", "--logit-bias", "9999=1"],
        ["generate", "--prompt", "a", "--stop-token-ids", "-5"],
        ["generate", "--prompt", "a", "--stop", ""],
        ["generate", "--prompt", "a", "--system", "b"],
        ["generate", "--prompt", "-", "--prompt", "-"],
        ["generate", "--prompt", ""],
        ["generate", "--prompt", "a" * 500],
        ["generate", "--prompt", "\udcff"],
        ["logprobs", "--prompt", ""],
        ["logprobs", "--prompt", "a", "--seed", "1"],
        ["logprobs", "--prompt", "a", "--dtype", "float8"],
        ["logprobs", "--prompt", "a", "--prefill-buckets", "1,x"],
        ["logprobs", "--prompt", "a", "--page-size", "3"],
        ["logprobs", "--prompt", "a", "--prefill-max-context", ""],
        ["generate", "--prompt", "a", "--stop-token-ids", "272"],
        ["generate", "--prompt", "a", "--logit-bias", "272=1"],
    ],
    ids=" ".join,
)
def test_a_mistake_gives_one_message_and_status_2(shared, cli, argv):
    status, out, err = cli(*argv)
    assert (status, out) == (2, "")
    assert "error: " in err and "Traceback" not in err


def test_stdin_that_is_not_utf8_is_a_mistake(shared, cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="latin-1"))
    status, _, err = cli("generate", "--prompt", "-")
    assert status == 2 and "UTF-8" in err


@pytest.mark.parametrize(
    "flags", [["--stop-token-ids", "271", "--stop-token-ids", "272"], ["--logit-bias", "272=1"]]
)
def test_ids_that_the_model_lacks_are_refused_before_anything_compiles(cli, monkeypatch, flags):
    monkeypatch.setattr("jaxprefill.engine.open_checkpoint", lambda model: TinyCheckpoint())
    monkeypatch.setattr("jaxprefill.engine.start", lambda *_, **__: pytest.fail("it started"))
    status, out, err = cli("generate", "--prompt", "a", "--quiet", *flags)
    assert (status, out) == (2, "")
    assert "ids must be 0 to 271, got 272" in err


@pytest.mark.parametrize("model", ["nope", "/no/such/file.gguf", os.path.dirname(__file__)])
def test_a_model_that_is_not_there_gives_status_1(cli, model):
    status, out, err = cli("generate", "--prompt", "a", "--model", model)
    assert (status, out) == (1, "")
    assert err.startswith("jaxprefill: error: ") and model in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CompileError("no memory"), 1),
        (KeyboardInterrupt(), 130),
        (KeyboardInterrupt(signal.SIGTERM), 143),
        (BrokenPipeError(), 141),
    ],
)
def test_status_of_other_ends(shared, cli, error, status):
    def fail(prompts, params):
        raise error

    shared.generate = fail
    found, _, err = cli("generate", "--prompt", "a")
    assert found == status and "Traceback" not in err


def end_with_a_finaliser(finaliser, *, then="pass"):
    """A process of the entry point, whose command drops an object, runs `then` and succeeds."""
    code = f"""
import signal, time
from jaxprefill.cli import main

class Dropped:
    def __del__(self):
        {finaliser}

def work(command):
    Dropped()
    {then}
    return 0

main._run = work
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
main.run()
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_an_interrupt_inside_a_callback_is_not_lost(name, status):
    """Python drops what a finaliser or a callback of its collector raises."""
    done = end_with_a_finaliser(f"signal.raise_signal(signal.{name})", then="time.sleep(60)")
    assert (done.returncode, done.stderr) == (status, "jaxprefill: interrupted\n")


def test_another_error_inside_a_callback_is_shown_as_ever():
    done = end_with_a_finaliser('raise ZeroDivisionError("in here")')
    assert done.returncode == 0 and "ZeroDivisionError: in here" in done.stderr


def test_an_unexpected_error_is_not_hidden(shared, cli):
    def fail(prompts, params):
        raise ZeroDivisionError

    shared.generate = fail
    with pytest.raises(ZeroDivisionError):
        cli("generate", "--prompt", "a")


# --- streams


def test_a_full_disk_is_reported(shared, cli, monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    status, _, err = cli("models", "--json")
    assert status == 1 and "cannot write to stdout: No space left on device" in err


def test_output_is_utf8_in_any_locale(tmp_path):
    environ = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = script("models", env=environ)
    assert done.returncode == 0 and "│ demo" in done.stdout.decode()


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_closed_and_broken_stdout_are_quiet():
    code = "import sys; from jaxprefill.cli.main import main; sys.exit(main())"
    program = f"{sys.executable} -c '{code}'"
    for tail, expected in ((">&-", "0"), ("| true", "141"), (">/dev/full", "1")):
        line = f"( sleep 0.2; {program} models --json; echo $? >&2 ) {tail}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        assert done.stderr.splitlines()[-1] == expected, tail
        assert "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_other_libraries_logs_are_shown_only_when_asked_for(capsys):
    for is_verbose in (False, True):
        with streams.logging_to_stderr(is_verbose=is_verbose):
            logging.getLogger("some.library").warning("seen if verbose")
            logging.getLogger("jaxprefill.some").info("seen if verbose")
    seen = "WARNING some.library: seen if verbose\nINFO jaxprefill.some: seen if verbose\n"
    assert capsys.readouterr().err == seen


def test_what_becomes_of_an_option_is_always_said(capsys):
    with streams.logging_to_stderr(is_verbose=False):
        logging.getLogger("jaxprefill.plan").warning("lowered")
    assert capsys.readouterr().err == "WARNING jaxprefill.plan: lowered\n"


def test_a_terminal_gets_a_bar(shared, cli, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    _, out, err = cli("generate", "--prompt", "a", *GREEDY)
    assert "\x1b[" in err and "[1/1]" not in err and "1/1" in err
    assert "\x1b[" not in out


# --- the real thing


def test_an_engine_is_built_from_flags(cli, monkeypatch, engine):
    held = TinyCheckpoint()
    monkeypatch.setattr("jaxprefill.engine.open_checkpoint", lambda model: held)
    argv = "--prefill-buckets 8,32 --max-running-requests 4 --kv-cache-tokens 640 --page-size 8"
    argv += " --compile-cache off --dtype float32"
    status, out, err = cli("generate", "--prompt", "hello", *GREEDY, *argv.split())
    assert (status, out) == (0, "hello" + greedy(engine, "hello").text + "\n")
    assert "] prefill 32x4x160: " in err and "ready in" in err
