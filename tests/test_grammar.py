"""Outputs that follow a grammar, in the company of outputs that follow none."""

import json

import pytest

from jaxprefill.admission import Wants
from jaxprefill.constraints import json_grammar, make_grammars
from jaxprefill.errors import RequestError
from jaxprefill.loop import _Answer
from jaxprefill.request import SamplingParams
from tests.tiny import byte_tokenizer, tiny_config

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["é", "bc"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars():
    return make_grammars(byte_tokenizer(), tiny_config().vocab_size)


def ask(engine, grammar, grammars=None, **params):
    """The completion, by way of the engine's door for servers."""
    sampling = SamplingParams(max_tokens=60, **params)
    requests = engine._requests([[1, 2, 3]], [sampling], wants=Wants(grammar=grammar))
    answer = _Answer(requests, engine.tokenizer)
    matchers = {each.id: grammars(grammar) for each in requests} if grammars else {}
    engine.submit(requests, answer, matchers=matchers)
    return answer.done.result(60)[0]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 3}, {"seed": 4, "min_tokens": 50}])
def test_an_output_fits_its_schema(engine, grammars, params):
    before = engine.stats()["compilations_after_ready"]  # other engines' of this process count
    plain = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=0))
    found = ask(engine, json_grammar(SCHEMA), grammars, **params)
    value = json.loads(found.text)
    assert value["name"] in ("é", "bc") and value["n"] <= 99 and found.finish_reason == "stop"
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=0)) == plain
    assert engine.stats()["compilations_after_ready"] == before


def test_what_is_no_schema_is_refused(grammars):
    for schema in ("text", {"type": "nothing"}):
        with pytest.raises(RequestError, match="response_format"):
            json_grammar(schema)
    with pytest.raises(RequestError, match="grammar"):
        grammars("this is no grammar")


def test_an_engine_that_is_given_no_matcher_says_so(engine):
    with pytest.raises(RequestError, match="leave it out"):
        ask(engine, json_grammar())
