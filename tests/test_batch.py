"""Batch files over the fake engine: envelopes, order, faults, and runs that are killed."""

import asyncio
import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from backports import zstd

from jaxprefill import SamplingParams
from jaxprefill.cli.flags import flag_name
from jaxprefill.cli.main import main
from jaxprefill.errors import ConfigError, EngineUnavailable, JaxPrefillError
from jaxprefill.offline import batch as batch_module
from jaxprefill.offline.batch import BatchJob
from jaxprefill.offline.lines import LineReader, Source
from jaxprefill.offline.output import LineOutput
from jaxprefill.offline.seen import SeenNames
from jaxprefill.offline.session import OfflineSession
from jaxprefill.offline.window import Window
from jaxprefill.weights.convert import convert
from tests.fake_engine import FakeEngine
from tests.http import Http
from tests.tiny import SMALL, TinyCheckpoint

COMPLETION = {"prompt": "Hi", "temperature": 0, "max_tokens": 3}
BODIES = [
    ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    ("/v1/embeddings", {"input": ["a", "bc"], "encoding_format": "base64"}),
    ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [3, 4]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"], "model": "tiny"}),
    ("/v1/classify", {"input": "a", "labels": ["x", "y"]}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    ("/v1/completions", {"prompt": "a" * 200}),
    ("/v1/completions", {"prompt": [1, 9999]}),
    ("/v1/completions", COMPLETION | {"model": "other"}),
    ("/v1/completions", []),
    ("/v1/embeddings", {"input": 5}),
]


def request(custom_id, url="/v1/completions", body=COMPLETION, **more) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more


def jsonl(requests) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


def answers(path) -> list[dict]:
    data = path.read_bytes()
    data = {".gz": gzip.decompress, ".zst": zstd.decompress}.get(path.suffix, bytes)(data)
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def run(source, output, *, engine=None, mode="new", window=8, **more) -> BatchJob:
    """Answers one file with another, with nothing left running."""
    engine = engine or FakeEngine()
    resumes = mode == "resume"

    async def work(job):
        async with OfflineSession(engine, **more) as session:
            await job.run(session, resumes=resumes)

    with Source(str(source)) as opened, LineOutput(str(output), mode) as written:
        job = BatchJob(opened, written, window=window)
        try:
            asyncio.run(asyncio.wait_for(work(job), 60))
        finally:
            assert not engine.running
    return job


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_every_url_answers_as_the_server_does(files):
    source, output = files
    source.write_bytes(jsonl(request(f"é{i}", *each) for i, each in enumerate(BODIES)))
    job = run(source, output)
    http = Http()
    found = answers(output)
    assert [one["custom_id"] for one in found] == [f"é{i}" for i in range(len(BODIES))]
    assert len({one["id"] for one in found}) == len(BODIES)
    for one, (url, body) in zip(found, BODIES, strict=True):
        assert set(one) == {"id", "custom_id", "response", "error"}
        reply = http.post(url, body)
        told = one["response"]
        assert told["status_code"] == reply.status_code
        assert settled(told["body"]) == settled(reply.json()), url
        if reply.status_code == 200:
            assert one["error"] is None
        else:
            assert one["error"]["message"] == reply.json()["error"]["message"]
    assert (job.progress.num_lines, job.progress.num_failed) == (len(BODIES), 6)


def settled(body):
    """Without what names the request or the moment, and sampled text."""
    if isinstance(body, list):
        return [settled(item) for item in body]
    if not isinstance(body, dict):
        return body
    moving = ("id", "created", "e2e_latency")
    return {key: settled(value) for key, value in body.items() if key not in moving}


WRONG = [
    (b"{nonsense", 400, None, "JSON object"),
    (b"[1]", 400, None, "object"),
    (b'{"custom_id": "\xff"}', 400, None, "UTF-8"),
    (b'{"custom_id": "nan", "body": {"temperature": NaN}}', 400, "nan", "JSON object"),
    (b'{"custom_id": "half", "body": {"prompt": "\\ud83d"}}', 400, "half", "JSON object"),
    (b'{"custom_id": "\\ud83d", "body": {}}', 400, None, "JSON object"),
    (b'{"custom_id": 5, "body": NaN}', 400, None, "JSON object"),
    (b"{" + b'"a": [' * 9**5, 400, None, "JSON object"),
    (json.dumps(request(None)).encode(), 400, None, "custom_id must be a text"),
    (json.dumps(request("")).encode(), 400, None, "custom_id must be a text"),
    (json.dumps(request(5)).encode(), 400, None, "custom_id must be a text"),
    (json.dumps(request("good")).encode(), 400, "good", "stand on one line alone"),
    (json.dumps(request("url", "/v1/nope")).encode(), 404, "url", "/v1/classify"),
    (json.dumps(request("no url", None)).encode(), 404, "no url", "url must be"),
    (json.dumps(request("get", method="GET")).encode(), 405, "get", "must be POST"),
    (json.dumps(request("body", body=None)).encode(), 400, "body", "JSON object"),
    (json.dumps(request("s", body=COMPLETION | {"stream": True})).encode(), 400, "s", "stream"),
    (b'"' + b"x" * (2**20) + b'"', 413, None, "too long"),
]


def test_lines_that_are_no_requests_are_answered_in_their_places(files, monkeypatch):
    read = batch_module.LineReader
    monkeypatch.setattr(
        batch_module, "LineReader", lambda source, **_: read(source, max_bytes=2**19)
    )
    source, output = files
    good = json.dumps(request("good")).encode()
    last = json.dumps(request("last", body=COMPLETION | {"rid": "same"})).encode()
    lines = [b"\xef\xbb\xbf" + good, b"", b"  \r", *(line for line, *_ in WRONG), last]
    source.write_bytes(b"\r\n".join(lines))
    engine = FakeEngine()
    job = run(source, output, engine=engine)
    first, *wrong, end = answers(output)
    assert first["response"]["body"]["choices"][0]["text"] == "abc"
    assert (first["id"], end["custom_id"]) == ("batch_req_1", "last")
    assert end["response"]["status_code"] == 200
    for found, (line, status, custom_id, words) in zip(wrong, WRONG, strict=True):
        assert found["custom_id"] == custom_id, line
        assert found["response"]["status_code"] == status, line
        assert words in found["error"]["message"] and found["error"]["code"]
        assert found["response"]["body"]["error"]["message"] == found["error"]["message"]
    assert job.progress.num_failed == len(WRONG)
    assert len(engine.requests) == 2


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_files_are_packed_and_unpacked_in_many_blocks(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("jaxprefill.offline.output._BLOCK_BYTES", 1000)
    requests = jsonl(request(str(i)) for i in range(40))
    pack = {".gz": gzip.compress, ".zst": zstd.compress, "": bytes}[suffix]
    source, output = tmp_path / "in", tmp_path / f"out.jsonl{suffix}"
    source.write_bytes(pack(requests[:900]) + pack(requests[900:]))  # known by its content
    run(source, output)
    assert [one["custom_id"] for one in answers(output)] == [str(i) for i in range(40)]


@pytest.mark.parametrize(
    ("suffix", "unpack"), [("", bytes), (".gz", gzip.decompress), (".zst", zstd.decompress)]
)
def test_an_empty_file_gives_an_empty_file(tmp_path, suffix, unpack):
    source, output = tmp_path / "in", tmp_path / f"out{suffix}"
    source.write_bytes(b"\n\n")
    for mode in ("new", "resume"):
        assert run(source, output, mode=mode).progress.num_lines == 0
        assert unpack(output.read_bytes()) == b""


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd.compress)]
)
@pytest.mark.parametrize("mode", ["new", "resume"])
def test_a_large_file_is_not_held(tmp_path, suffix, pack, mode):
    """Of 24 MB, less than a third at any time, packed or not, answered before or not."""
    source, output = tmp_path / "in", tmp_path / f"out{suffix}"
    lines = [request(str(i), method="GET", padding="a" * 2**16) for i in range(384)]
    source.write_bytes(pack(jsonl(lines)))
    if mode == "resume":
        run(source, output)
    tracemalloc.start()
    try:
        assert run(source, output, mode=mode).progress.num_failed == 384
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_answers_keep_their_order_and_the_window_its_bounds(files):
    """Later lines end sooner; no more are begun than the window allows."""
    source, output = files
    source.write_bytes(
        jsonl(request(str(i), body=COMPLETION | {"max_tokens": 40 - i}) for i in range(40))
    )
    engine = FakeEngine()
    run(source, output, engine=engine, window=5)
    assert [one["custom_id"] for one in answers(output)] == [str(i) for i in range(40)]
    assert engine.most_running == 5


def test_results_that_wait_for_an_earlier_one_count_against_memory():
    begun = []

    async def check():
        held = asyncio.Event()

        async def work(item):
            begun.append(item)
            if item == 0:
                await held.wait()
            return item

        async def batches():
            yield list(range(100))

        window = Window(work, lambda _: 1, lambda _: 10, max_items=50, max_bytes=95)
        found = window.results(batches())
        first = asyncio.ensure_future(anext(found))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(begun) == 50  # the first fifty were begun together, and weigh 491 when done
        held.set()
        results = [*(await first), *[item async for part in found for item in part]]
        assert results == list(range(100))

    asyncio.run(check())


def test_what_fails_while_lines_are_read_is_what_is_told(files, monkeypatch):
    source, output = files
    source.write_bytes(jsonl(request(str(i)) for i in range(2000)))

    def fail(held, data):
        raise JaxPrefillError("the output is full")

    monkeypatch.setattr(LineOutput, "write", fail)
    with pytest.raises(JaxPrefillError, match="the output is full"):
        run(source, output, window=4000)


# --- resuming

LIVES = """
import io, os, random, signal, sys
from jaxprefill.offline import output
from tests.test_batch import run
source, *targets = sys.argv[1:]
output._BLOCK_BYTES = 2000

class Mortal(io.FileIO):
    def write(self, data):
        global left
        left -= 1
        if left < 0:
            super().write(data[: rng.randrange(len(data) + 1)])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(data)

output.io.FileIO = Mortal
for seed, target in enumerate(targets):
    rng, kills, kept = random.Random(seed), 0, set()
    while True:
        left = rng.randrange(30 if target.endswith("jsonl") else 6)
        child = os.fork()
        if child == 0:
            run(source, target, mode="resume", window=3)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            assert status == 0, status
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
        kept.add(os.path.getsize(target))
    print(kills, len(kept), flush=True)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_loses_and_repeats_nothing(tmp_path):
    """Each life ends inside one of its first writes, any part of which may be on the disk."""
    source, whole = tmp_path / "in.jsonl", tmp_path / "whole.jsonl"
    lines = [request(str(i), body=COMPLETION | {"max_tokens": i % 30 + 1}) for i in range(200)]
    lines[50:50] = [request("1"), request(None)]  # errors, to be kept as well
    source.write_bytes(jsonl(lines))
    run(source, whole)
    outputs = [tmp_path / f"out.jsonl{suffix}" for suffix in ("", ".gz", ".zst")]
    ran = subprocess.run(
        [sys.executable, "-c", LIVES, str(source), *map(str, outputs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for output, counts in zip(outputs, ran.stdout.splitlines(), strict=True):
        kills, kept = map(int, counts.split())
        assert kills >= kept >= 5, "lives left something behind"
        assert settled(answers(output)) == settled(answers(whole))


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd.compress)]
)
def test_wherever_an_output_was_cut_off_it_is_completed(tmp_path, suffix, pack):
    source, output = tmp_path / "in.jsonl", tmp_path / f"out{suffix}"
    source.write_bytes(jsonl(request(str(i)) for i in range(4)))
    run(source, output)
    lines = [json.dumps(one).encode() + b"\n" for one in answers(output)]
    whole = b"".join(pack(line) for line in lines)
    for length in range(0, len(whole) + 1, 37):
        output.write_bytes(whole[:length])
        job = run(source, output, mode="resume")
        assert [one["custom_id"] for one in answers(output)] == ["0", "1", "2", "3"]
        kept = sum(len(b"".join(map(pack, lines[: i + 1]))) <= length for i in range(4))
        assert job.progress.num_resumed == kept


def test_an_output_of_another_input_is_refused(files):
    source, output = files
    source.write_bytes(jsonl([request("a"), request("b")]))
    run(source, output)
    before = output.read_bytes()
    for lines in ([request("a"), request("c")], [request("a")], [request("b")] * 3):
        source.write_bytes(jsonl(lines))
        with pytest.raises(ConfigError, match="another input's"):
            run(source, output, mode="resume")
        assert output.read_bytes() == before
    source.write_bytes(jsonl(map(request, "abc")))
    output.write_bytes(before + b"my diary\n")
    with pytest.raises(ConfigError, match=r"line 3 of .* is no answer"):
        run(source, output, mode="resume")


@pytest.mark.parametrize(
    "text", [b"my diary\n", b'{"id":1}', b"a\nb", gzip.compress(b"my diary\n")]
)
def test_what_no_run_wrote_is_not_cut_off(files, text):
    source, output = files
    source.write_bytes(jsonl([request("a")]))
    for name, data in ((output, text), (output.with_suffix(".gz"), gzip.compress(text)[:-4])):
        name.write_bytes(data)
        with pytest.raises(ConfigError, match=r"earlier run, but .* is none"):
            run(source, name, mode="resume")
        assert name.read_bytes() == data


def test_what_an_output_holds_is_not_thrown_away_unasked(files):
    source, output = files
    source.write_bytes(jsonl([request("a")]))
    output.write_bytes(b"precious\n")
    with pytest.raises(ConfigError, match="--resume goes on"):
        run(source, output)
    held = LineOutput(str(output), "resume")
    with pytest.raises(ConfigError, match="written by another run"):
        run(source, output, mode="overwrite")
    held.close()
    assert output.read_bytes() == b"precious\n"
    run(source, output, mode="overwrite")
    assert [one["custom_id"] for one in answers(output)] == ["a"]


# --- engines that fail


def test_what_an_engine_lost_is_asked_again(files):
    """As after a crash: those in flight fail, the next engine answers."""
    source, output = files
    source.write_bytes(jsonl(request(str(i)) for i in range(20)))
    engine = FakeEngine()
    submit, calls = engine.submit, 0

    def failing(requests):
        nonlocal calls
        calls += 1
        if calls in (3, 11):
            engine.failure = EngineUnavailable("lost")
            engine.num_restarts += 1
            asyncio.get_running_loop().call_later(0.01, lambda: setattr(engine, "failure", None))
        return submit(requests)

    engine.submit = failing
    job = run(source, output, engine=engine)
    assert job.progress.num_failed == 0 and calls > 20
    assert [one["custom_id"] for one in answers(output)] == [str(i) for i in range(20)]


def test_an_engine_that_is_lost_for_good_ends_the_run_and_leaves_it_to_be_resumed(files):
    source, output = files
    source.write_bytes(jsonl(request(str(i)) for i in range(5)))

    class Doomed(FakeEngine):
        def submit(self, requests):
            if self.requests:
                self.is_ready = False
                self.num_restarts += 3
                raise EngineUnavailable("lost")
            return super().submit(requests)

    with pytest.raises(JaxPrefillError, match="lost 3 times"):
        run(source, output, engine=Doomed(), window=1)
    assert [one["custom_id"] for one in answers(output)] == ["0"]
    assert run(source, output, mode="resume").progress.num_resumed == 1


def test_values_that_are_no_numbers_fail_their_own_line(files):
    source, output = files
    source.write_bytes(jsonl([request("bad", body=COMPLETION | {"prompt": "\0"}), request("a")]))

    class Sick(FakeEngine):
        def submit(self, requests):
            found = super().submit(requests)
            if requests[0].prompt_length == 1:
                step = found.step
                found.step = lambda *at: step(*at)._replace(finish_reason="error")
            return found

    run(source, output, engine=Sick())
    assert [one["response"]["status_code"] for one in answers(output)] == [500, 200]


# --- parts


def test_lines_end_at_newlines_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxprefill.offline.lines._CHUNK", 3)
    path = tmp_path / "in"
    path.write_text("a\u2028b\x0bc\n\n \r\nlonger than the rest\r\n12345678\nend", encoding="utf-8")
    with Source(str(path)) as source:
        reader, found = LineReader(source, max_bytes=12), []
        while (lines := reader.read()) is not None:
            found += [(line.number, line.text) for line in lines]
    expected = [(1, "a\u2028b\x0bc".encode()), (4, None), (5, b"12345678"), (6, b"end")]
    assert found == expected


def test_what_other_programs_packed_is_told_or_read(files):
    source, output = files
    skipped = b"\x50\x2a\x4d\x18\x03\0\0\0abc"
    source.write_bytes(skipped + zstd.compress(jsonl([request("a")])))
    assert run(source, output).progress.num_failed == 0
    for pack in (bz2.compress, lzma.compress, lambda data: data.decode().encode("utf-16")):
        source.write_bytes(pack(jsonl([request("a")])))
        with pytest.raises(ConfigError, match="plain or packed by gzip or zstd, but is"):
            Source(str(source))


def test_a_file_that_ends_too_early_says_so(files):
    source, output = files
    packed = gzip.compress(jsonl(request(str(i)) for i in range(9)))
    source.write_bytes(packed[:-12])
    with pytest.raises(JaxPrefillError, match=r"in.jsonl cannot be read to its end"):
        run(source, output)


def test_names_are_seen_once():
    seen = SeenNames()
    assert all(seen.add(f"name {i}") for i in range(20_000))
    assert not any(seen.add(f"name {i}") for i in range(20_000))


# --- the command


@pytest.fixture
def command(monkeypatch, capsys):
    """`jaxprefill batch` over a fake engine: its status and what it wrote."""

    def call(*argv, engine=None):
        monkeypatch.setattr(
            "jaxprefill.cli.offline.EngineProcess", lambda config, **_: engine or FakeEngine()
        )
        status = main(["batch", *map(str, argv)])
        return status, capsys.readouterr()

    return call


def test_the_exit_status_tells_whether_a_line_failed(files, command):
    source, output = files
    source.write_bytes(jsonl([request("a")]))
    status, said = command("-i", source, "-o", output)
    assert status == 0 and "1 lines in" in said.err and "; padding 26%" in said.err
    assert "tokens: 2 prompt, 3 generated" in said.err
    source.write_bytes(jsonl([request("a"), request("a")]))
    assert command("-i", source, "-o", output)[0] == 2
    status, said = command("-i", source, "-o", output, "--resume", "-q")
    assert (status, said.err) == (3, "")
    assert command("-i", source, "-o", output, "--overwrite")[0] == 3
    status, said = command("-i", source, "-o", output, "--resume")
    assert status == 3 and "2 of the lines were there before" in said.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("-i", "nowhere", "-o", "out"), "cannot read nowhere"),
        (("-i", "in", "-o", "no/folder/out"), "cannot write"),
        (("-i", "in", "-o", "in", "--resume"), "another file than --input"),
        (("-i", "in", "-o", "./in", "--overwrite"), "another file than --input"),
        (("-i", "in", "-o", "-", "--resume"), "--resume needs an output that is a file"),
        (("-i", "in", "-o", "out", "--window", "0"), "--window must be at least 1"),
        (("-i", "in", "-o", "out", "--resume", "--overwrite"), "not allowed with"),
    ],
)
def test_mistakes_are_told_before_an_engine_starts(argv, words, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_bytes(jsonl([request("a")]))
    engine = FakeEngine()
    engine.run = lambda: pytest.fail("it started")
    status, said = command(*argv, engine=engine)
    assert status == 2 and words in said.err
    assert (tmp_path / "in").read_bytes() == jsonl([request("a")])


def test_an_engine_that_cannot_start_gives_status_1_and_leaves_nothing_in_the_way(files, command):
    source, output = files
    source.write_bytes(jsonl([request("a")]))
    for _ in range(2):
        engine = FakeEngine()
        engine.is_ready, engine.failure = False, JaxPrefillError("no such model")
        status, said = command("-i", source, "-o", f"{output}.gz", engine=engine)
        assert status == 1 and "no such model" in said.err


@pytest.mark.slow
def test_a_dash_is_a_standard_stream(tmp_path):
    program = (
        "from tests.fake_engine import FakeEngine; import jaxprefill.cli.offline as wiring, sys;"
        "wiring.EngineProcess = lambda config, **_: FakeEngine();"
        "from jaxprefill.cli.main import main; sys.exit(main(['batch', '-i', '-', '-o', '-']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        input=jsonl([request("a"), request("b")]),
        capture_output=True,
        check=False,
        env=os.environ,
    )
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line)["custom_id"] for line in io.BytesIO(ran.stdout)] == ["a", "b"]


@pytest.mark.slow
def test_the_command_answers_with_a_real_engine_over_a_converted_checkpoint(
    files, tmp_path, engine, capsys
):
    source, output = files
    convert(TinyCheckpoint(), tmp_path / "tiny")
    greedy = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logprobs": 1}
    prompts = [[5, 200, 31, 7], list(range(40, 90)), [257, 1, 2]]
    requests = [request(f"c{i}", body={"prompt": ids} | greedy) for i, ids in enumerate(prompts)]
    requests += [request("long", body={"prompt": [1] * 500})]
    requests += [request("e", "/v1/embeddings", {"input": prompts[0]})]
    source.write_bytes(jsonl(requests))
    options = SMALL | {"prefill_buckets": "8,32", "prefill_backend": "eager"}
    del options["seed"]
    flags = [text for name, value in options.items() for text in (flag_name(name), str(value))]
    model = ["--model", str(tmp_path / "tiny"), "--served-model-name", "tiny"]
    assert main(["batch", "-i", str(source), "-o", str(output), *model, *flags]) == 3
    found = answers(output)
    assert [one["custom_id"] for one in found] == ["c0", "c1", "c2", "long", "e"]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    for one, wanted in zip(found, engine.generate(prompts, params), strict=False):
        (choice,) = one["response"]["body"]["choices"]
        assert choice["text"] == wanted.text
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], wanted.logprobs, atol=1e-4)
    assert found[3]["response"]["status_code"] == 400 and found[3]["error"]
    (data,) = found[4]["response"]["body"]["data"]
    np.testing.assert_allclose(data["embedding"], engine.embed([prompts[0]])[0], atol=1e-4)
    told = capsys.readouterr().err
    assert "5 lines, 1 failed" in told and "padding" in told
