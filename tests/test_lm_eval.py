"""lm-eval's own model class: its numbers are the Python API's, which transformers' are too."""

import json
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from jaxprefill import SamplingParams
from jaxprefill.errors import ConfigError
from tests.folders import write_folder, write_json
from tests.lm_eval_runs import CHOOSING, DOCS, GENERATING, run_lm_eval, samples
from tests.test_serve import Server
from tests.tiny import SMALL, TEMPLATE, TinyCheckpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("lm_eval"), reason="needs pip install -e '.[lm-eval]'"),
]

ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity, higher_is_better: false}]
"""


LONG = "abc é" * 60
ALL = [
    *DOCS,
    {"question": LONG, "choices": [" far", " too long"], "label": 0},  # beyond the model's context
    {"question": "", "choices": ["A", " B"], "label": 1},
]
ALL = [doc | {"long": LONG[: 20 + 80 * index]} for index, doc in enumerate(ALL)]
TASKS = {
    "tiny_choice": CHOOSING,
    "tiny_text": GENERATING.replace("{{question}}", "Q: {{question[:40]}}"),
    "tiny_rolling": ROLLING,
}
NUM_KNOWN = 258  # tokens of the byte tokenizer
CONTEXT = 159  # of what is scored: the server wants a place for a generated token too


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write_folder(tmp_path_factory.mktemp("model"), TinyCheckpoint())
    path = made / "tokenizer_config.json"  # as transformers 5 wants it
    names = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(path, json.loads(path.read_text()) | names)
    # Ids that the tokenizer does not know: an engine samples none, transformers must be told.
    unknown = list(range(NUM_KNOWN, TinyCheckpoint().config.vocab_size))
    write_json(made / "generation_config.json", {"suppress_tokens": unknown})
    return made


@pytest.fixture(scope="module")
def ran(folder, tmp_path_factory, compile_cache):
    """Where the class's results are."""
    small = SMALL | {"prefill_buckets": 32, "compile_cache": compile_cache}
    options = ",".join(f"{name}={value}" for name, value in small.items())
    place = tmp_path_factory.mktemp("jaxprefill")
    arguments = f"model={folder},max_length={CONTEXT},{options}"
    run_lm_eval(place, "jaxprefill.offline.lm_eval", "jaxprefill", arguments, TASKS, ALL)
    return place


def test_its_tasks_run_offline(engine, ran):
    encode = engine.tokenizer.encode
    for sample, doc in zip(samples(ran, "tiny_choice"), ALL, strict=True):
        for ((logprob, is_greedy),), choice in zip(sample["resps"], doc["choices"], strict=True):
            ids, size = [257, *encode(doc["question"] + choice)], len(encode(choice))
            tail = engine.likeliest([ids[-CONTEXT:]])[0][-size:]
            assert float(logprob) == pytest.approx(sum(one.logprob for one in tail), abs=1e-4)
            assert str(is_greedy) == str(all(one.is_best for one in tail))
    greedy = SamplingParams(temperature=0, max_tokens=12, stop=["e"])
    for sample, doc in zip(samples(ran, "tiny_text"), ALL, strict=True):
        ids = [257, *encode(f"Q: {doc['question'][:40]}")]
        assert sample["resps"] == [[engine.generate(ids, greedy)[0].text]]
    for sample, doc in zip(samples(ran, "tiny_rolling"), ALL, strict=True):
        ids, total = [257, 257, *encode(doc["long"])], 0.0
        first, rest = ids[:CONTEXT], ids[CONTEXT:]
        total += sum(engine.logprobs([first])[0][1:])
        while rest:
            part, rest = rest[: CONTEXT - 1], rest[CONTEXT - 1 :]
            seen = len(ids) - len(rest)
            total += sum(engine.logprobs([ids[seen - CONTEXT : seen]])[0][-len(part) :])
        assert float(sample["resps"][0][0]) == pytest.approx(total, abs=1e-2)


@pytest.mark.skipif(
    not (find_spec("torch") and find_spec("accelerate")),
    reason="needs pip install -e '.[oracle]'",
)
def test_the_class_the_server_and_transformers_say_the_same(folder, ran, tmp_path, compile_cache):
    """Loglikelihoods within 2e-3, rolling sums too, all else equal."""
    server = Server(folder, compile_cache=compile_cache)
    try:
        arguments = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={folder}"
        arguments += f",max_length={CONTEXT + 1},num_concurrent=1,add_bos_token=True"
        run_lm_eval(tmp_path / "http", "lm_eval", "local-completions", arguments, TASKS, ALL)
    finally:
        server.stop()
    # In batches its rolling sums of some texts are off by more than one token's logprob (0.4.13).
    arguments = f"pretrained={folder},dtype=float32,max_length={CONTEXT - 1}"
    run_lm_eval(tmp_path / "hf", "lm_eval", "hf", arguments, TASKS, ALL, batch_size=1)
    for other in ("http", "hf"):
        for task in TASKS:
            pairs = zip(samples(ran, task), samples(tmp_path / other, task), strict=True)
            for found, wanted in pairs:
                check_same(task, found, wanted)


def check_same(task: str, found: dict, wanted: dict):
    assert found["doc"] == wanted["doc"] and found["arguments"] == wanted["arguments"]
    if task == "tiny_text":
        assert found["resps"] == wanted["resps"]
        return
    for (one,), (other,) in zip(found["resps"], wanted["resps"], strict=True):
        one, other = ([each] if isinstance(each, str) else each for each in (one, other))
        assert float(one[0]) == pytest.approx(float(other[0]), abs=2e-3)
        assert one[1:] == other[1:]  # whether it is what greedy decoding takes
    if task == "tiny_choice":
        assert found["acc"] == wanted["acc"]


@pytest.fixture(scope="module")
def model(folder):
    with warnings.catch_warnings():  # lm-eval's own
        warnings.simplefilter("ignore")
        made = import_module("jaxprefill.offline.lm_eval").JaxPrefillLM
    small = SMALL | {"prefill_buckets": 32}
    found = made(str(folder), batch_size="auto", max_batch_size=4, device="cpu", **small)
    yield found
    found.engine.close()


def asked(*args) -> list:
    return [SimpleNamespace(args=each) for each in args]


def test_what_prompts_share_is_computed_once(model):
    before = model.engine.stats()
    shots = "Question and answer. " * 5
    found = model.loglikelihood(asked(*((shots, f"{n} is it") for n in range(9))))
    after = model.engine.stats()
    size = len(model.tok_encode(shots)) // SMALL["page_size"] * SMALL["page_size"]
    assert len(found) == 9 and size > 90
    assert after["cached_tokens"] - before["cached_tokens"] >= 5 * size  # four run at once


def test_odd_requests_are_answered(model):
    (empty, alone) = model.loglikelihood(asked(("a", ""), ("", "b")))
    assert empty == (0.0, True) and alone[0] < 0
    assert model.loglikelihood_rolling(asked(("",)))[0] <= 0
    ends = [f"<{n}>" for n in range(20)]
    greedy = {"until": ends, "max_gen_toks": 9}
    (text,) = model.generate_until(asked(("ab", greedy)))
    for until in (None, "", [], [""]):
        assert model.generate_until(asked(("ab", {"until": until, "max_gen_toks": 9}))) == [text]
    assert model.generate_until(asked(("ab", greedy | {"until": [*ends, text[2]]}))) == [
        text[: text.index(text[2])]
    ]
    assert isinstance(model.generate_until(asked(("", greedy)))[0], str)


def test_options_that_make_no_sense_are_refused(model, folder, caplog):
    with pytest.raises(ConfigError, match="less than the context of 160 tokens, got 256; lower"):
        model.generate_until(asked(("ab", {"until": None})))
    with pytest.raises(ConfigError, match="one of the model's: default, got 'tool'"):
        model.chat_template("tool")
    assert model.chat_template(True) == TEMPLATE and model.chat_template(False) == ""
    with pytest.raises(ConfigError, match="unknown option pretrained; the options are model, "):
        type(model)(str(folder), pretrained="x")
    caplog.clear()
    for _ in range(2):
        model.generate_until(asked(("long " * 60, {"max_gen_toks": 9})))
    assert [record.message for record in caplog.records] == [
        "prompts of more than 151 tokens, 301 here, are cut"
    ]


def test_likeliest_tokens_are_those_that_greedy_decoding_takes(engine):
    (found,) = engine.generate(
        "hello", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    ids = engine.tokenizer.encode("hello") + found.token_ids
    tokens = engine.likeliest([ids, [*ids[:5], 200, 201]])
    assert tokens[0][0] is None and all(one.is_best for one in tokens[0][5:])
    assert not all(one.is_best for one in tokens[1][5:])
    assert [one and one.logprob for one in tokens[0]] == pytest.approx(engine.logprobs([ids])[0])
