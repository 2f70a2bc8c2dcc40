"""A real server that chunks prompts, under everything at once and under more clients."""

import base64
import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import openai
import pytest

from jaxprefill import SamplingParams
from tests.folders import write_folder
from tests.lm_eval_runs import CHOOSING, DOCS, GENERATING, run_lm_eval, samples
from tests.reference import prompt_logprobs
from tests.test_serve import Server
from tests.tiny import TinyCheckpoint

pytestmark = pytest.mark.slow

TEXTS = ["The sky is", "Two and two make", "é🙂 naïve", "a" * 70]


@pytest.fixture(scope="module")
def server(tmp_path_factory, compile_cache):
    folder = write_folder(tmp_path_factory.mktemp("model"), TinyCheckpoint())
    made = Server(folder, compile_cache=compile_cache, chunked_prefill_size=24)
    yield made
    made.stop()


def metric(server: Server, name: str) -> float:
    found = re.search(rf"^jaxprefill_{name} (\S+)$", server.http.get("/metrics").text, re.M)
    assert found, f"{name} is among the metrics"
    return float(found[1])


SHARED = list(range(40))
PROMPTS = [[*SHARED[:n], 100 + n] for n in (1, 7, 8, 22, 23, 24, 31, 32, 40)] + [[9] * 100]
SCORED = {"temperature": 0, "max_tokens": 1, "logprobs": 2, "echo": True}
PROBES = [
    *(("/v1/completions", SCORED | {"prompt": prompt}) for prompt in PROMPTS),
    ("/v1/completions", SCORED | {"prompt": PROMPTS}),
    ("/v1/completions", SCORED | {"prompt": SHARED, "max_tokens": 12, "ignore_eos": True, "n": 2}),
    *(("/v1/embeddings", {"input": prompt}) for prompt in (PROMPTS[0], PROMPTS[5], PROMPTS)),
    *(
        (
            "/v1/score",
            {
                "query": SHARED[:30],
                "items": PROMPTS[:count],
                "label_token_ids": [7, 9, 7],
                "apply_softmax": is_softmax,
            },
        )
        for count in (1, 6)
        for is_softmax in (False, True)
    ),
    ("/v1/classify", {"input": TEXTS, "labels": ["x", " yz"]}),
    (
        "/generate",
        {
            "input_ids": PROMPTS[4:8],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 3,
            "top_logprobs_num": 3,
        },
    ),
]


def numbers(path: str, reply: dict | list) -> np.ndarray:
    """All that a probe found, in order."""
    if path == "/v1/completions":
        found = [choice["logprobs"]["token_logprobs"][1:] for choice in reply["choices"]]
    elif path == "/v1/embeddings":
        found = [one["embedding"] for one in reply["data"]]
    elif path == "/v1/score":
        found = reply["scores"]
    elif path == "/v1/classify":
        found = [one["probs"] for one in reply["data"]]
    else:
        tops = [one["meta_info"]["input_top_logprobs"] for one in reply]
        found = [[value for value, _, _ in place] for each in tops for place in each]
    return np.concatenate([np.asarray(row, np.float64) for row in found])


def others(server: Server) -> list:
    """What runs beside the probes: features, faults and clients that go away."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}
    answers = [
        ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 20}, 200),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_object"}}, 200),
        ("/v1/completions", {"prompt": "a", "n": 3, "seed": 1, "stop": "q"}, 200),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 4}, "min_p": 0.1}, 200),
        ("/v1/completions", {"prompt": [5] * 90, "presence_penalty": 1, "top_k": 3}, 200),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 1.2, "top_p": 0.5}, 200),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 9, "n": 2}}, 200),
        ("/tokenize", {"prompt": "a " * 1000}, 200),
        ("/v1/completions", {"prompt": "a" * 1000}, 400),
        ("/v1/completions", {"prompt": [1, 272]}, 400),
        ("/v1/embeddings", {"input": ["a", [1]]}, 400),
        ("/v1/score", {"query": "a", "items": [], "label_token_ids": [1]}, 400),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, 400),
    ]

    def send(path: str, body: dict, status: int):
        reply = server.http.post(path, json=body)
        assert reply.status_code == status, reply.text

    def leave(num_lines: int):
        body = chat | {"stream": True, "max_tokens": 90, "ignore_eos": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()
            for _ in range(num_lines):
                next(lines)

    return [lambda each=each: send(*each) for each in answers] + [
        lambda count=count: leave(count) for count in (1, 5, 30)
    ]


def test_numbers_depend_on_nothing_that_runs_before_or_beside_and_nothing_compiles(server):
    def probe(index: int) -> np.ndarray:
        path, body = PROBES[index]
        reply = server.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return numbers(path, reply.json())

    alone = []
    for index in range(len(PROBES)):
        server.http.post("/flush_cache").raise_for_status()
        alone.append(probe(index))
    np.testing.assert_allclose(
        np.concatenate(alone[: len(PROMPTS)]), alone[len(PROMPTS)], atol=1e-4
    )

    def check(index: int):
        np.testing.assert_allclose(probe(index), alone[index], atol=1e-4, err_msg=PROBES[index][0])

    tasks = [lambda index=index: check(index) for index in range(len(PROBES))] * 3
    tasks += others(server) * 3
    rng = random.Random(1)
    for num_workers in (1, 16):
        rng.shuffle(tasks)
        with ThreadPoolExecutor(num_workers) as pool:
            for done in [pool.submit(task) for task in tasks]:
                done.result()
    for task in others(server):
        task()
        check(rng.randrange(len(PROBES)))
    assert metric(server, "compilations_after_ready_total") == 0


def test_every_length_scores_as_the_reference_does(server):
    """Two prompts a body, so that each bucket is full, nearly full and just passed."""
    checkpoint, rng = TinyCheckpoint(), np.random.default_rng(3)
    for length in range(1, 60):
        prompts = [rng.integers(0, 256, size).tolist() for size in (60 - length, length)]
        reply = server.post("/v1/completions", **SCORED, prompt=prompts)
        for prompt, choice in zip(prompts, reply["choices"], strict=True):
            first, *found, _ = choice["logprobs"]["token_logprobs"]
            assert first is None
            np.testing.assert_allclose(found, prompt_logprobs(checkpoint, prompt), atol=1e-4)


def test_openais_client_embeds(server, engine):
    """In base64, which it asks for by itself; the tiny model's engine is the same."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="tiny", input=PROMPTS[:3], dimensions=20)
    vectors = np.array([one.embedding for one in found.data])
    np.testing.assert_allclose(vectors, engine.embed(PROMPTS[:3], dimensions=20), atol=1e-5)
    raw = server.post("/v1/embeddings", input=PROMPTS[0], encoding_format="base64")
    packed = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(packed, engine.embed([PROMPTS[0]])[0], atol=1e-5)
    assert found.usage.prompt_tokens == sum(map(len, PROMPTS[:3]))


@pytest.mark.skipif(not find_spec("lm_eval"), reason="needs pip install -e '.[lm-eval]'")
def test_lm_eval_works_without_a_tokenizer_of_its_own(server, engine, tmp_path):
    """It asks /tokenizer_info, /tokenize and /detokenize, and its numbers are the Python API's."""
    arguments = f"model=tiny,base_url={server.url}/v1/completions,max_length=160,num_concurrent=1"
    arguments += ",tokenizer_backend=remote"
    tasks = {"tiny_choice": CHOOSING, "tiny_text": GENERATING}
    run_lm_eval(tmp_path, "lm_eval", "local-completions", arguments, tasks, DOCS)
    encode = engine.tokenizer.encode
    for sample, doc in zip(samples(tmp_path, "tiny_choice"), DOCS, strict=True):
        for (answer,), choice in zip(sample["resps"], doc["choices"], strict=True):
            ids = encode(doc["question"] + choice, add_special_tokens=False)
            size = len(encode(choice, add_special_tokens=False))
            expected = sum(engine.logprobs([ids])[0][-size:])
            assert float(answer[0]) == pytest.approx(expected, abs=1e-4)
    greedy = SamplingParams(temperature=0, max_tokens=12, stop=["e"])
    for sample, doc in zip(samples(tmp_path, "tiny_text"), DOCS, strict=True):
        ids = encode(doc["question"], add_special_tokens=False)
        assert sample["resps"] == [[engine.generate(ids, greedy)[0].text]]


LITELLM = """
import json, sys
import litellm
base = dict(model="hosted_vllm/tiny", api_base=sys.argv[1] + "/v1", api_key="none", num_retries=0)
chat = dict(messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=6)
whole = litellm.completion(**base, **chat)
parts = litellm.completion(**base, **chat, stream=True)
text = litellm.text_completion(**base, prompt="a", temperature=0, max_tokens=4)
vectors = litellm.embedding(**base, input=["a", "bc"])
try:
    litellm.completion(**base, **chat | {"temperature": -1})
    refused = None
except litellm.BadRequestError as error:
    refused = str(error)
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "streamed": "".join(part.choices[0].delta.content or "" for part in parts),
    "text": text.choices[0].text,
    "vectors": [one["embedding"] for one in vectors.data],
    "refused": refused,
}))
"""


@pytest.mark.skipif(not find_spec("litellm"), reason="needs pip install -e '.[litellm]'")
def test_litellm_chats_completes_and_embeds(server, engine):
    ran = subprocess.run(
        [sys.executable, "-c", LITELLM, server.url],
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 6}
    expected = server.post("/v1/chat/completions", **chat)["choices"][0]["message"]["content"]
    assert found["whole"] == found["streamed"] == expected
    text = server.post("/v1/completions", prompt="a", temperature=0, max_tokens=4)
    assert found["text"] == text["choices"][0]["text"]
    ids = [engine.tokenizer.encode(text) for text in ("a", "bc")]
    with_bos = [[257, *each] for each in ids]  # the folder's tokenizer adds it
    np.testing.assert_allclose(found["vectors"], engine.embed(with_bos), atol=1e-5)
    assert "temperature" in found["refused"]
