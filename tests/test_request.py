"""Requests: parameters, admission, collection of results. No device."""

import numpy as np
import pytest

from jaxprefill.admission import Admission
from jaxprefill.collector import Collector
from jaxprefill.errors import RequestError
from jaxprefill.request import Request, SamplingParams
from jaxprefill.updates import RequestUpdate, SampledToken
from tests.tiny import byte_tokenizer

ADMISSION = Admission(
    tokenizer=byte_tokenizer(), vocab_size=272, context_length=32, rng=np.random.default_rng(0)
)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 1.0),
        ("temperature", -1),
        ("temperature", 10**400),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("n", 0),
        ("n", 10**9),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop", [5]),
        ("stop", 5),
        ("stop", None),
        ("stop", b"x"),
        ("stop", {"a": 1}),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 5),
        ("stop", ["a"] * 17),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {1: 1000}),
        ("logit_bias", {1: 0.0, 2: float("nan")}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {1: True}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"5": 1}),
        ("logit_bias", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("ignore_eos", 1),
    ],
)
def test_a_wrong_parameter_names_itself_and_its_value(param, value):
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**{param: value})
    assert (caught.value.param or "").startswith(param)


def test_numpy_numbers_are_numbers_and_kept_as_python_s():
    params = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.uint8(4),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int32(7): np.float16(-1.5)},
        logprobs=np.int8(2),
    )
    plain = SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        seed=2**64 - 1,
        stop_token_ids=(1, 2),
        logit_bias={7: -1.5},
        logprobs=2,
    )
    assert params == plain and repr(params) == repr(plain)


@pytest.mark.parametrize("value", [np.True_, np.float64("nan"), np.complex64(1), np.array(1)])
def test_other_numpy_values_are_no_numbers(value):
    for name in ("max_tokens", "temperature", "logprobs"):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 - 1])
def test_every_64_bit_seed_is_taken(seed):
    [request] = ADMISSION.requests("a", [1, 2], SamplingParams(seed=seed))
    assert 0 <= request.seed < 2**64


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "at least one token"),
        ([], "at least one token"),
        ([1, 2, 272], "272"),
        ([-1], "-1"),
        ([2**63], str(2**63)),
        ([1.5], "1.5"),
        ([True], "True"),
        (["1"], "'1'"),
        ([[1]], r"\[1\]"),
        ("a" * 32, "maximum context length is 32"),
        ("a" * 10_000, "maximum context length"),
        (list(range(33)), "33 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_with_rule_and_value(prompt, said):
    with pytest.raises(RequestError, match=said) as caught:
        ADMISSION.requests("a", prompt, SamplingParams(max_tokens=1))
    assert caught.value.param == "prompt"


def test_a_prompt_of_context_minus_one_may_generate_one_and_a_full_one_none():
    assert ADMISSION.requests("a", [1] * 31, SamplingParams(max_tokens=1))
    assert ADMISSION.requests("a", [1] * 32, SamplingParams(max_tokens=0))
    with pytest.raises(RequestError, match="shorten the prompt to 31"):
        ADMISSION.requests("a", [1] * 32, SamplingParams(max_tokens=1))


def test_the_last_row_of_the_vocabulary_is_a_valid_id():
    assert ADMISSION.requests("a", [271, np.int64(3)], SamplingParams())[0].prompt_ids == (271, 3)


@pytest.mark.parametrize("params", [dict(stop_token_ids=[272]), dict(logit_bias={272: 1.0})])
def test_ids_in_parameters_are_checked_too(params):
    with pytest.raises(RequestError, match="272"):
        ADMISSION.requests("a", [1], SamplingParams(**params))


def test_n_continuations_have_streams_of_their_own():
    requests = ADMISSION.requests("a", [1], SamplingParams(n=4, seed=7))
    assert len({request.seed for request in requests}) == 4
    assert [request.index for request in requests] == [0, 1, 2, 3]
    assert requests[0].seed == 7
    again = ADMISSION.requests("b", [1], SamplingParams(n=4, seed=7))
    assert [r.seed for r in again] == [r.seed for r in requests]


def test_without_a_seed_requests_differ():
    first, second = (ADMISSION.requests("a", [1], SamplingParams())[0] for _ in range(2))
    assert first.seed != second.seed


def test_eos_stops_unless_it_is_ignored():
    params = SamplingParams(stop_token_ids=[5])
    assert ADMISSION.requests("a", [1], params)[0].stop_ids == {256, 5}
    ignoring = SamplingParams(stop_token_ids=[5], ignore_eos=True)
    assert ADMISSION.requests("a", [1], ignoring)[0].stop_ids == {5}


def collect(text: str, **params):
    tokenizer = byte_tokenizer()
    request = Request(
        id="a",
        prompt_ids=(1,),
        params=SamplingParams(max_tokens=99, **params),
        seed=0,
        stop_ids=frozenset({256}),
    )
    collector = Collector(request, tokenizer)
    for token in [*tokenizer.encode(text), 256]:
        top = {token: -1.0, 7: -2.0} if params.get("logprobs") else {}
        collector.add(RequestUpdate("a", tokens=(SampledToken(token, -1.0, top),)))
    collector.add(RequestUpdate("a", finish_reason="stop"))
    return collector.completion()


def test_text_ends_before_the_earliest_stop_string():
    found = collect("one two three", stop=["three", "two"])
    assert (found.text, found.finish_reason, found.stop_reason) == ("one ", "stop", "two")


def test_a_stop_string_across_tokens_is_found():
    assert collect("aXbXYc", stop="XY").text == "aXb"


def test_stop_strings_are_not_sought_in_the_first_min_tokens():
    assert collect("a!b!c", stop="!", min_tokens=2).text == "a!b"


def test_eos_is_not_text_and_is_no_stop_reason():
    found = collect("é日本🙂")
    assert found.text == "é日本🙂" and found.stop_reason is None and found.token_ids[-1] == 256


def test_a_character_cut_in_half_shows_once():
    tokenizer = byte_tokenizer()
    request = Request(id="a", prompt_ids=(1,), params=SamplingParams(), seed=0)
    collector = Collector(request, tokenizer)
    for token in tokenizer.encode("a🙂")[:-1]:
        collector.add(RequestUpdate("a", tokens=(SampledToken(token, -1.0, {}),)))
    collector.add(RequestUpdate("a", finish_reason="length"))
    assert collector.completion().text == "a\N{REPLACEMENT CHARACTER}"


def test_logprobs_are_given_when_asked_for_and_hold_the_chosen_token():
    assert collect("ab").logprobs is None and collect("ab").top_logprobs is None
    found = collect("ab", logprobs=1)
    assert found.logprobs == [-1.0] * 3
    for token, top in zip(found.token_ids, found.top_logprobs, strict=True):
        assert top[token] == -1.0


def test_zero_logprobs_gives_the_tokens_own_alone():
    found = collect("ab", logprobs=0)
    assert found.logprobs == [-1.0] * 3 and found.top_logprobs is None


def taken(text: str, **params) -> list[str]:
    """What a stream would show after each token, and at the end."""
    tokenizer, pieces = byte_tokenizer(), []
    sampling = SamplingParams(max_tokens=99, **params)
    collector = Collector(Request(id="a", prompt_ids=(1,), params=sampling, seed=0), tokenizer)
    for token in tokenizer.encode(text):
        collector.add(RequestUpdate("a", tokens=(SampledToken(token, -1.0, {}),)))
        pieces.append(collector.take_text())
    collector.add(RequestUpdate("a", finish_reason="length"))
    return [*pieces, collector.take_text()]


def test_text_is_held_back_only_while_a_stop_string_may_have_begun():
    assert taken("abXacXYz", stop="XY") == ["a", "b", "", "Xa", "c", "", "", "", ""]
    assert taken("aXX", stop="XY") == ["a", "", "X", "X"]


def test_half_a_character_is_never_shown():
    assert taken("é🙂") == ["", "é", "", "", "", "🙂", ""]


def test_offsets_count_the_characters_before_each_token():
    collector = Collector(
        Request(id="a", prompt_ids=(1,), params=SamplingParams(), seed=0), byte_tokenizer()
    )
    for token in byte_tokenizer().encode("aéb"):
        collector.add(RequestUpdate("a", tokens=(SampledToken(token, -1.0, {}),)))
    assert collector.offsets == [0, 1, 1, 2]
