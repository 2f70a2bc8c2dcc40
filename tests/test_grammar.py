"""Outputs that follow a grammar, in the company of outputs that follow none."""

import json

import pytest

from jaxprefill.admission import Wants
from jaxprefill.constraints import json_grammar, make_grammars
from jaxprefill.errors import RequestError
from jaxprefill.request import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["é", "bc"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture
def grammars(engine):
    engine.use_grammars(make_grammars(engine.tokenizer, engine.plan.model.vocab_size))
    yield
    engine.use_grammars(None)


def ask(engine, grammar, **params):
    sampling = SamplingParams(max_tokens=60, **params)
    requests = engine._requests([[1, 2, 3]], [sampling], wants=Wants(grammar=grammar))
    return engine._loop.run(requests)[0]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 3}, {"seed": 4, "min_tokens": 50}])
def test_an_output_fits_its_schema(engine, grammars, params):
    before = engine.stats()["compilations_after_ready"]  # other engines' of this process count
    plain = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=0))
    found = ask(engine, json_grammar(SCHEMA), **params)
    value = json.loads(found.text)
    assert value["name"] in ("é", "bc") and value["n"] <= 99 and found.finish_reason == "stop"
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=0)) == plain
    assert engine.stats()["compilations_after_ready"] == before


def test_what_is_no_schema_is_refused(engine, grammars):
    for schema in ("text", {"type": "nothing"}):
        with pytest.raises(RequestError, match="response_format"):
            json_grammar(schema)
    with pytest.raises(RequestError, match="grammar"):
        ask(engine, "this is no grammar")


def test_an_engine_without_grammars_says_so(engine):
    with pytest.raises(RequestError, match="leave it out"):
        ask(engine, json_grammar())
