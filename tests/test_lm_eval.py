"""lm-eval's own model class: its numbers are the Python API's, which transformers' are too."""

from importlib.util import find_spec

import pytest

from jaxprefill import SamplingParams
from tests.folders import write_folder
from tests.lm_eval_runs import CHOOSING, DOCS, GENERATING, run_lm_eval, samples
from tests.tiny import SMALL, TinyCheckpoint

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


def test_its_tasks_run_offline(engine, tmp_path, compile_cache):
    long = "abc é" * 60
    docs = [doc | {"long": long[: 20 + 160 * index]} for index, doc in enumerate(DOCS)]
    folder = write_folder(tmp_path / "model", TinyCheckpoint())
    small = SMALL | {"prefill_buckets": 32, "compile_cache": compile_cache}
    options = ",".join(f"{name}={value}" for name, value in small.items())
    tasks = {"tiny_choice": CHOOSING, "tiny_text": GENERATING, "tiny_rolling": ROLLING}
    module, arguments = "jaxprefill.offline.lm_eval", f"model={folder},{options}"
    run_lm_eval(tmp_path, module, "jaxprefill", arguments, tasks, docs)
    encode = engine.tokenizer.encode
    for sample, doc in zip(samples(tmp_path, "tiny_choice"), docs, strict=True):
        for ((logprob, is_greedy),), choice in zip(sample["resps"], doc["choices"], strict=True):
            ids, size = encode(doc["question"] + choice), len(encode(choice))
            tail = engine.likeliest([ids])[0][-size:]
            assert float(logprob) == pytest.approx(sum(one.logprob for one in tail), abs=1e-4)
            assert str(is_greedy) == str(all(one.is_best for one in tail))
    greedy = SamplingParams(temperature=0, max_tokens=12, stop=["e"])
    for sample, doc in zip(samples(tmp_path, "tiny_text"), docs, strict=True):
        assert sample["resps"] == [[engine.generate(encode(doc["question"]), greedy)[0].text]]
    for sample, doc in zip(samples(tmp_path, "tiny_rolling"), docs, strict=True):
        ids, total = [257, *encode(doc["long"])], 0.0
        first, rest = ids[:160], ids[160:]
        total += sum(engine.logprobs([first])[0][1:])
        while rest:
            part, rest = rest[:159], rest[159:]
            seen = len(ids) - len(rest)
            total += sum(engine.logprobs([ids[seen - 160 : seen]])[0][-len(part) :])
        assert float(sample["resps"][0][0]) == pytest.approx(total, abs=1e-2)


def test_likeliest_tokens_are_those_that_greedy_decoding_takes(engine):
    (found,) = engine.generate(
        "hello", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    ids = engine.tokenizer.encode("hello") + found.token_ids
    tokens = engine.likeliest([ids, [*ids[:5], 200, 201]])
    assert tokens[0][0] is None and all(one.is_best for one in tokens[0][5:])
    assert not all(one.is_best for one in tokens[1][5:])
    assert [one and one.logprob for one in tokens[0]] == pytest.approx(engine.logprobs([ids])[0])
