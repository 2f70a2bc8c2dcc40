"""`jaxprefill serve` as people run it: a process of its own, real sockets, real clients."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from jaxprefill import SamplingParams
from tests.folders import write_folder, write_json
from tests.tiny import SMALL, TinyCheckpoint

CHAT = [{"role": "user", "content": "Hi"}]
LONG = {"prompt": "a", "stream": True, "max_tokens": 140, "ignore_eos": True}


class Server:
    """A running server over the tiny model."""

    def __init__(self, folder: Path, *flags: str, **options):
        shown = {key: value for key, value in (SMALL | options).items() if key != "seed"}
        shown["prefill_buckets"] = "8,32"
        given = [f"--{key.replace('_', '-')}={value}" for key, value in shown.items()]
        command = [sys.executable, "-m", "jaxprefill", "serve", "--model", str(folder)]
        self.process = subprocess.Popen(
            [*command, "--served-model-name", "tiny", "--port=0", *given, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.match(r"jaxprefill ready at (http\S+) after", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.log))
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str, **body) -> dict:
        return self.http.post(path, json=body).raise_for_status().json()

    def stop(self) -> int:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.stderr.close()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = write_folder(tmp_path_factory.mktemp("model"), TinyCheckpoint())
    path = made / "tokenizer_config.json"  # as transformers 5 wants it
    names = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(path, json.loads(path.read_text()) | names)
    return made


@pytest.fixture(scope="module")
def server(folder, compile_cache):
    made = Server(folder, compile_cache=compile_cache)
    yield made
    try:
        check_drain(made)
    finally:
        made.stop()


def engine_of(server: Server) -> int:
    """The process of its engine."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    (child,) = [int(pid) for task in tasks for pid in task.read_text().split()]
    return child


def check_drain(server: Server):
    """After the first signal nothing new is taken, what runs is finished, and the port is free."""
    with server.http.stream("POST", "/v1/completions", json=LONG | {"n": 20}) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(engine := engine_of(server), signal.SIGSTOP)  # nothing ends before all is seen
        server.process.send_signal(signal.SIGTERM)
        while (health := httpx.get(f"{server.url}/health")).status_code == 200:
            pass
        assert health.json() == {"status": "draining"}
        refused = httpx.post(f"{server.url}/v1/completions", json=LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        os.kill(engine, signal.SIGCONT)
        seen = [line for line in lines if line]
    assert seen[-1] == "data: [DONE]"
    assert sum('"finish_reason":"length"' in line for line in seen) == 20
    assert server.process.wait(30) == 0  # a second signal might come before the last call has ended
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", server.port))


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openais_client_completes(server, client, engine):
    prompt = [1, 2, 3, 4]
    one = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=4, temperature=0, logprobs=2, echo=True
    )
    choice = one.choices[0]
    assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == 8
    scores = engine.logprobs([prompt])[0]
    assert choice.logprobs.token_logprobs[1:4] == pytest.approx(scores[1:], abs=1e-4)
    for score, top in zip(
        choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True
    ):
        assert score in top.values() and len(top) in (2, 3)
    streamed = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=4, temperature=0, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_openais_client_chats(client):
    asked = dict(model="tiny", messages=CHAT, temperature=0, max_tokens=6)
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options=options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.choices == [] and last.usage.total_tokens == whole.usage.total_tokens


def test_openais_client_sees_the_models_and_the_errors(client):
    assert client.models.list().data[0].id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.completions.create(model="tiny", prompt=[1] * 160)
    assert caught.value.param == "prompt"


def test_numbers_do_not_depend_on_what_runs_beside(server):
    prompts = [[7] * 3 + list(range(n)) for n in (1, 8, 30, 32, 33, 60)]
    scoring = dict(max_tokens=1, temperature=0, logprobs=1, echo=True)

    def scores(prompt) -> list[list[float]]:
        choices = server.post("/v1/completions", prompt=prompt, **scoring)["choices"]
        return [choice["logprobs"]["token_logprobs"][1:] for choice in choices]

    alone = [scores(prompt)[0] for prompt in prompts]
    again = [scores(prompt)[0] for prompt in reversed(prompts)][::-1]
    together = scores(prompts)
    for one, two, three in zip(alone, again, together, strict=True):
        assert one == pytest.approx(two, abs=1e-4) and one == pytest.approx(three, abs=1e-4)


def raw(server: Server, data: bytes, *, wait: bool = True) -> bytes:
    """What a socket gets back for these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        if not wait:
            return b""
        connection.settimeout(60)
        found = b""
        while chunk := connection.recv(65536):
            found += chunk
        return found


def head(length: int, *more: str) -> bytes:
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: test",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_broken_and_interrupted_input_leaves_nothing_behind(server):
    body = json.dumps({"prompt": "a", "temperature": 0, "max_tokens": 2}).encode()
    expected = server.post("/v1/completions", prompt="a", temperature=0, max_tokens=2)
    assert b" 200 " in raw(server, head(len(body)) + body).split(b"\r\n")[0]
    assert b" 400 " in raw(server, b"\x16\x03\x01 not http\r\n\r\n").split(b"\r\n")[0]
    assert b" 413 " in raw(server, head(10**8)).split(b"\r\n")[0]
    long = json.dumps({"prompt": "a", "stream": True, "max_tokens": 150, "ignore_eos": True})
    for stage in range(40):
        data = head(len(long)) + long.encode()
        raw(server, data[: 20 * (stage + 1)] if stage < 20 else data, wait=False)
    deadline = time.monotonic() + 30
    while True:
        after = server.post("/v1/completions", prompt="a", temperature=0, max_tokens=2)
        assert after["choices"] == expected["choices"]
        if server.http.get("/health").status_code == 200:
            break
        assert time.monotonic() < deadline


TASKS = {
    "scored.yaml": """
task: scored
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "generated.yaml": """
task: generated
output_type: generate_until
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " red"], "gold": 0, "answer": "x"},
    {"question": "é日本", "choices": [" a", "b"], "gold": 1, "answer": "x"},
]


@pytest.mark.slow
def test_lm_eval_scores_and_generates_as_the_python_api_does(server, folder, engine, tmp_path):
    pytest.importorskip("lm_eval", reason="needs pip install -e '.[lm-eval]'")
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    common = "test_split: test\ndoc_to_text: '{{question}}'\ndataset_path: json\n"
    common += f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
    for name, text in TASKS.items():
        (tmp_path / name).write_text(text + common)
    given = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={folder},max_length=150"
    given += ",tokenizer_backend=huggingface"  # else the server's, but with this one's BOS
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", given, "--batch_size", "2", "--log_samples"]
    command += [
        "--tasks",
        "scored,generated",
        "--include_path",
        tmp_path,
        "--output_path",
        tmp_path,
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    subprocess.run(command, check=True, env=os.environ | offline)
    samples = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name in ("scored", "generated")
        for path in tmp_path.rglob(f"samples_{name}_*.jsonl")
    }
    for sample in samples["scored"]:
        for (logprob, _), choice in zip(
            sample["filtered_resps"], sample["doc"]["choices"], strict=True
        ):
            before, ids = (
                engine.tokenizer.encode(text, add_special_tokens=False)
                for text in (sample["doc"]["question"], sample["doc"]["question"] + choice)
            )
            expected = sum(engine.logprobs([ids])[0][len(before) :])
            assert float(logprob) == pytest.approx(expected, abs=1e-3)
    params = SamplingParams(temperature=0, max_tokens=6, stop="\n")
    for sample in samples["generated"]:
        ids = engine.tokenizer.encode(sample["doc"]["question"], add_special_tokens=False)
        assert sample["resps"][0][0] == engine.generate([ids], params)[0].text
