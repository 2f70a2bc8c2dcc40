"""Sampling against sort-based NumPy oracles, through the heads and the packed rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxprefill.batch import SampleSpec
from jaxprefill.request import SamplingParams
from jaxprefill.sampling.head import HeadFunctions, history_row, set_bias, set_history
from jaxprefill.sampling.pack import (
    RowToSample,
    ban,
    full_mask,
    is_plain,
    mask_words,
    needs_mask,
    pack_rows,
)
from jaxprefill.sampling.runner import PendingScores, PendingTokens
from jaxprefill.sampling.sampler import (
    PROMPT_FLAG,
    expand_mask,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise,
    unpack_rows,
)

VOCAB = 40  # not a multiple of 32
SLOTS = 8
NUM_DRAWS = 4000
GREEDY = SamplingParams(temperature=0)
top_k, top_p, min_p = jax.jit(keep_top_k), jax.jit(keep_top_p), jax.jit(keep_min_p)


def spec(params=GREEDY, *, seed=0, position=0, num_generated=0, stop_ids=()):
    return SampleSpec(
        params=params,
        seed=seed,
        position=position,
        num_generated=num_generated,
        stop_ids=frozenset(stop_ids),
    )


def sampled(*, seed=0, position=0, temperature=1.0, **params):
    return spec(SamplingParams(temperature=temperature, **params), seed=seed, position=position)


@functools.cache
def jitted(name, num_valid):
    return jax.jit(getattr(HeadFunctions(num_valid), name))


class Head:
    """The heads over one row of logits, which every sampled row reads; SLOTS lines a call."""

    def __init__(self, logits, num_valid=None):
        self.raw = np.asarray(logits, np.float32)
        self.vocab = len(self.raw)
        self.num_valid = num_valid or self.vocab
        self.head, self.hidden = jnp.asarray(self.raw[:, None]), jnp.ones((1, 1), jnp.float32)
        self.last_tokens = jnp.full((SLOTS,), -1, jnp.int32)
        self.history = jnp.zeros((SLOTS, self.vocab), jnp.int32)
        self.bias = jnp.zeros((SLOTS, self.vocab), jnp.float32)

    def general(self, specs, *, size=SLOTS, mask=None, slots=None):
        rows = self._rows(specs, slots)
        if mask is None:
            mask = full_mask(size, num_valid=self.num_valid, vocab_size=self.vocab)
        self.last_tokens, self.history, out = jitted("general", self.num_valid)(
            self.head, self.hidden, self.last_tokens, self.history, self.bias, mask,
            pack_rows(rows, size, no_slot=SLOTS),
        )  # fmt: skip
        return PendingTokens(PendingScores([out], len(rows), len(out))).read()

    def greedy(self, specs, *, size=SLOTS):
        self.last_tokens, out = jitted("greedy", self.num_valid)(
            self.head, self.hidden, self.last_tokens,
            pack_rows(self._rows(specs, None), size, no_slot=SLOTS),
        )  # fmt: skip
        return PendingTokens(PendingScores([out], len(specs), len(out))).read()

    def _rows(self, specs, slots):
        slots = slots or [index % SLOTS for index in range(len(specs))]
        return [RowToSample(0, slot, one) for slot, one in zip(slots, specs, strict=True)]


def random_logits(seed=0, vocab=VOCAB, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def log_softmax(logits):
    wide = logits.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


# Filters

WIDTH = 12
values = st.one_of(
    st.floats(-30, 30, width=32, allow_subnormal=False),
    st.sampled_from([-np.inf, 0.0, -0.0, 1.0, -1.0, 5.0, 3e38, -3e38]),
)
rows = st.lists(values, min_size=WIDTH, max_size=WIDTH).map(lambda x: np.array(x, np.float32))
probabilities = st.one_of(
    st.floats(0.0009765625, 1, width=32), st.sampled_from([1e-50, 0.5, 0.999999, 1.0])
)
check = settings(deadline=None, max_examples=150)


@check
@given(row=rows, k=st.integers(0, WIDTH + 5) | st.just(2**31 - 1))
def test_top_k_keeps_the_k_largest_and_ties_of_the_last(row, k):
    found = np.asarray(top_k(row[None], np.array([k], np.int32)))[0]
    kth = np.sort(row)[::-1][k - 1] if 0 < k <= WIDTH else -np.inf
    np.testing.assert_array_equal(found, np.where(row >= kth, row, -np.inf))


@check
@given(row=rows, p=probabilities)
def test_top_p_keeps_the_smallest_set_that_reaches_p(row, p):
    assume(row.max() > -np.inf)
    found = np.asarray(top_p(row[None], np.array([p], np.float32)))[0]
    kept = found > -np.inf
    assert kept.any()
    np.testing.assert_array_equal(found[kept], row[kept])
    if p == 1:
        np.testing.assert_array_equal(found, row)
        return
    lowest = row[kept].min()
    np.testing.assert_array_equal(kept, (row >= lowest) & (row > -np.inf))
    weights = np.exp(row.astype(np.float64) - row.max())
    weights /= weights.sum()
    assert weights[kept].sum() >= p - 1e-5
    assert weights[row > lowest].sum() < p + 1e-5


@check
@given(row=rows, p=probabilities | st.just(0.0))
def test_min_p_keeps_what_is_p_times_as_likely_as_the_best(row, p):
    assume(row.max() > -np.inf)
    found = np.asarray(min_p(row[None], np.array([p], np.float32)))[0]
    with np.errstate(divide="ignore"):
        floor = np.float64(row.max()) + np.log(np.float64(np.float32(p)))
    margin = 1e-6 * max(1.0, abs(row.max()))
    np.testing.assert_array_equal(found[row >= floor + margin], row[row >= floor + margin])
    assert (found[row < floor - margin] == -np.inf).all()
    assert found[row.argmax()] == row.max()


def test_filters_treat_each_row_alone():
    logits = np.stack([random_logits(seed, WIDTH) for seed in range(4)])
    k, p = np.array([1, 3, 0, 100], np.int32), np.array([0.2, 0.5, 0.9, 1], np.float32)
    for function, parameter in ((top_k, k), (top_p, p), (min_p, p)):
        together = np.asarray(function(logits, parameter))
        for row in range(4):
            alone = np.asarray(function(logits[row : row + 1], parameter[row : row + 1]))[0]
            np.testing.assert_array_equal(together[row], alone)


def test_equal_logits_are_all_kept_by_every_filter():
    row, one = np.zeros((1, WIDTH), np.float32), np.ones(1, np.float32)
    for found in (top_k(row, np.ones(1, np.int32)), top_p(row, one / 100), min_p(row, one)):
        np.testing.assert_array_equal(np.asarray(found), row)


# Penalties, bias, masks, packing


def test_penalties_equal_numpy():
    params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(presence_penalty=-1.5),
        SamplingParams(repetition_penalty=0.5, frequency_penalty=-0.3, presence_penalty=2.0),
        SamplingParams(),
    ]
    buffer = pack_rows([RowToSample(0, 0, spec(one)) for one in params], 5, no_slot=SLOTS)
    logits = np.stack([random_logits(seed) for seed in range(5)])
    prompt, generated = (1, 2, 2, 3), [3, 4, 4, 4]
    history = np.stack([history_row(prompt, generated, VOCAB)] * 5)
    unpacked = unpack_rows(jnp.asarray(buffer))
    found = np.asarray(penalise(jnp.asarray(logits), jnp.asarray(history), unpacked))
    count = np.bincount(generated, minlength=VOCAB)
    for row, (one, x) in enumerate(zip(params, logits, strict=True)):
        wanted = x.copy()
        for token in {*prompt, *generated}:
            by = one.repetition_penalty
            wanted[token] = x[token] / by if x[token] > 0 else x[token] * by
        wanted -= one.frequency_penalty * count + one.presence_penalty * (count > 0)
        np.testing.assert_allclose(found[row], wanted, rtol=1e-6, atol=1e-6)


def test_history_is_counted_on_the_device_and_penalises_the_next_step():
    head = Head([5.0, 4.5, 4.0, *[-9.0] * (VOCAB - 3)])
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    row = history_row((3,), [], VOCAB)
    head.history = set_history(head.history, jnp.int32(2), jnp.asarray(row))
    chosen = [head.general([spec(params), spec()], slots=[2, 0])[0].token for _ in range(4)]
    assert chosen == [0, 1, 0, 2]
    assert np.asarray(head.history)[2, :5].tolist() == [2, 1, 1, PROMPT_FLAG, 0]
    assert not np.asarray(head.history)[[0, 1, 3]].any()


def test_bias_moves_the_choice_of_its_slot_and_no_other():
    head = Head(random_logits())
    row = np.zeros(VOCAB, np.float32)
    row[7] = 100
    head.bias = set_bias(head.bias, jnp.int32(3), jnp.asarray(row))
    biased = spec(SamplingParams(temperature=0, logit_bias={7: 100}))
    found = head.general([biased, spec(), spec()], slots=[3, 3, 1])
    best = int(head.raw.argmax())
    assert [one.token for one in found] == [7, best, best]
    assert found[0].logprob == pytest.approx(log_softmax(head.raw)[7], abs=1e-5)


@given(
    vocab=st.sampled_from([1, 32, 33, 64, 100]), data=st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=15)
def test_masks_survive_pack_ban_and_expand(vocab, data):
    num_valid = data.draw(st.integers(1, vocab))
    banned = data.draw(st.sets(st.integers(0, vocab - 1), max_size=5))
    words = full_mask(2, num_valid=num_valid, vocab_size=vocab)
    assert words.shape == (2, mask_words(vocab))
    ban(words, 1, sorted(banned))
    width = mask_words(vocab) * 32  # one shape for several vocabularies: few compilations
    found = np.asarray(expand_mask(jnp.asarray(words), width))
    ids = np.arange(width)
    np.testing.assert_array_equal(found[0], ids < num_valid)
    np.testing.assert_array_equal(found[1], (ids < num_valid) & ~np.isin(ids, list(banned)))
    assert expand_mask(jnp.asarray(words), vocab).shape == (2, vocab)


def test_a_banned_id_is_not_sampled():
    head = Head(random_logits())
    mask = full_mask(SLOTS, num_valid=VOCAB, vocab_size=VOCAB)
    best = int(head.raw.argmax())
    ban(mask, 1, [best])
    found = head.general([spec(), spec()], mask=mask)
    assert found[0].token == best
    assert found[1].token == int(np.argsort(head.raw)[-2])


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63), 12345678901234567890])
def test_seeds_are_packed_as_64_bits(seed):
    packed = unpack_rows(jnp.asarray(pack_rows([RowToSample(0, 0, spec(seed=seed))], 1, no_slot=1)))
    low, high = (int(np.uint32(np.asarray(x)[0])) for x in (packed.seed_low, packed.seed_high))
    assert low + (high << 32) == seed % 2**64


def test_rows_are_packed_and_unpacked_without_loss():
    params = SamplingParams(
        temperature=0.7, top_k=2**40, top_p=0.9, min_p=0.1, presence_penalty=0.5,
        frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias={1: 2.0},
    )  # fmt: skip
    rows = [
        RowToSample(5, 2, spec(params, position=9)),
        RowToSample(6, 3, spec(SamplingParams(top_k=-1))),
    ]
    buffer = pack_rows(rows, 4, no_slot=SLOTS)
    assert not buffer.flags.writeable
    found = unpack_rows(jnp.asarray(buffer))
    assert found.row.tolist() == [5, 6, 0, 0]
    assert found.slot.tolist() == [2, 3, SLOTS, SLOTS]
    assert found.top_k.tolist() == [2**31 - 1, 0, 0, 0]
    assert found.position.tolist() == [9, 0, 0, 0]
    assert found.has_history.tolist() == found.has_bias.tolist() == [1, 0, 0, 0]
    floats = [getattr(found, name).tolist() for name in ("temperature", "top_p", "min_p")]
    assert floats == np.float32([[0.7, 1, 0, 0], [0.9, 1, 1, 1], [0.1, 0, 0, 0]]).tolist()
    assert found.repetition.tolist() == np.float32([1.2, 1, 1, 1]).tolist()
    assert found.presence.tolist() == [0.5, 0, 0, 0]
    assert found.frequency.tolist() == [-0.5, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        (dict(), True),
        (dict(top_k=5, top_p=0.5, min_p=0.1), True),
        (dict(logprobs=0), True),
        (dict(temperature=0.1), False),
        (dict(logprobs=1), False),
        (dict(presence_penalty=0.1), False),
        (dict(frequency_penalty=0.1), False),
        (dict(repetition_penalty=1.1), False),
        (dict(logit_bias={1: 1.0}), False),
        (dict(logit_bias={}), True),
        (dict(min_tokens=2), False),
    ],
)
def test_plain_rows_are_those_that_argmax_serves(changes, plain):
    params = SamplingParams(**(dict(temperature=0) | changes))
    assert is_plain(spec(params, stop_ids={3})) is plain


def test_stop_ids_are_banned_only_before_min_tokens():
    params = SamplingParams(temperature=0, min_tokens=2)
    banned = [needs_mask(spec(params, num_generated=n, stop_ids={3})) for n in range(4)]
    assert banned == [True, True, False, False]
    assert not needs_mask(spec(params))


# Choosing


@pytest.mark.parametrize("head_name", ["greedy", "general"])
def test_temperature_0_is_argmax_with_ties_to_the_lowest_id(head_name):
    logits = random_logits()
    logits[[9, 4, 30]] = 50
    found = getattr(Head(logits), head_name)([spec()] * 3)
    assert [one.token for one in found] == [4, 4, 4]


def test_greedy_and_general_heads_agree_bit_for_bit_on_greedy_rows():
    head = Head(random_logits(), num_valid=33)
    plain = head.greedy([spec()])[0]
    mixed = head.general([sampled(temperature=1.5), spec(), sampled(top_k=2)])[1]
    assert (plain.token, plain.logprob) == (mixed.token, mixed.logprob)
    assert plain.top == {} and len(mixed.top) == 20


@pytest.mark.parametrize("scale", [1.0, 1e30])
@pytest.mark.parametrize("temperature", [1e-40, 1e-8, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature, scale):
    head = Head(random_logits() * scale)
    found = head.general([sampled(temperature=temperature, seed=s, top_p=0.9) for s in range(8)])
    assert {one.token for one in found} == {int(head.raw.argmax())}


def test_a_tiny_temperature_tells_huge_logits_apart():
    head = Head([-3e38, 1.1e38, 3e38, 2.9e38, *[0] * (VOCAB - 4)])
    found = head.general([sampled(temperature=1e-5, seed=seed) for seed in range(8)])
    assert {one.token for one in found} == {2}


def test_a_tiny_top_p_is_greedy():
    head = Head(random_logits())
    found = head.general([sampled(top_p=1e-50, seed=seed) for seed in range(8)])
    assert {one.token for one in found} == {int(head.raw.argmax())}


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_draws_follow_the_distribution(varied):
    count, weights = NUM_DRAWS, np.array([0.5, 0.25, 0.15, 0.08, 0.02])
    head = Head(np.log(weights) * 2)
    specs = [sampled(temperature=2.0, **{varied: index}) for index in range(count)]
    drawn = np.bincount([one.token for one in head.general(specs, size=count)], minlength=5)
    chi_square = ((drawn - count * weights) ** 2 / (count * weights)).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in a thousand


def test_filters_bound_what_is_drawn():
    head, order = Head(random_logits(scale=0.5)), np.argsort(-random_logits(scale=0.5))
    for params, allowed in (
        (dict(top_k=3), 3),
        (dict(top_p=0.2), 1 + int((np.cumsum(np.exp(log_softmax(head.raw)[order])) < 0.2).sum())),
        (dict(min_p=0.6), int((head.raw >= head.raw.max() + np.log(0.6)).sum())),
    ):
        specs = [sampled(seed=seed, **params) for seed in range(64)]
        drawn = [one.token for at in range(0, 64, 8) for one in head.general(specs[at : at + 8])]
        assert set(drawn) <= set(order[:allowed].tolist()) and len(set(drawn)) > 1


def test_a_draw_depends_on_seed_and_position_and_on_no_other_row():
    head = Head(random_logits(scale=0.1))
    wanted = sampled(seed=77, position=5)
    alone = head.general([wanted], size=1)[0]
    for row in range(SLOTS):
        others = [sampled(seed=row * 8 + i, position=i, top_k=i) for i in range(SLOTS)]
        others[row] = wanted
        assert head.general(others)[row].token == alone.token


def test_positions_and_all_64_seed_bits_change_the_draws():
    head = Head(np.zeros(VOCAB))

    def stream(seed):
        return tuple(
            one.token
            for one in head.general([sampled(seed=seed, position=at) for at in range(SLOTS)])
        )

    seeds = [0, 1, 2**31, 2**32, 2**63, -1, -(2**63) + 1, 2**64 - 2]
    streams = [stream(seed) for seed in seeds]
    assert len(set(streams)) == len(seeds)
    assert all(len(set(tokens)) > 2 for tokens in streams)
    assert stream(-1) == stream(2**64 - 1) and stream(0) == streams[0]


def test_ids_that_no_token_has_are_never_sampled():
    logits = random_logits()
    logits[33:] = 100
    head = Head(logits, num_valid=33)
    best = int(logits[:33].argmax())
    assert head.greedy([spec()])[0].token == best
    assert head.general([spec()])[0].token == best
    found = head.general([sampled(seed=seed, temperature=50.0) for seed in range(SLOTS)])
    assert all(one.token < 33 for one in found)


def test_logprobs_are_of_the_raw_logits_whatever_shapes_the_choice():
    head = Head(random_logits())
    wanted = log_softmax(head.raw)
    specs = [
        sampled(temperature=3.0, seed=1),
        sampled(temperature=0.3, top_k=2),
        sampled(top_p=0.1, frequency_penalty=2.0),
        spec(),
    ]
    likeliest = np.argsort(-head.raw, kind="stable")[:20].tolist()
    for one in head.general(specs):
        assert one.logprob == pytest.approx(wanted[one.token], abs=1e-5)
        assert list(one.top) == likeliest
        np.testing.assert_allclose(list(one.top.values()), wanted[likeliest], atol=1e-5)
        if one.token in one.top:
            assert one.logprob == one.top[one.token]


def test_the_tokens_of_a_small_vocabulary_are_all_listed():
    found = Head([1.0, 2.0, 3.0, 0.0, -1.0]).general([spec()], size=NUM_DRAWS)[0]
    assert list(found.top) == [2, 1, 0, 3, 4]


def test_scores_are_raw_logprobs_of_their_targets():
    head = Head(random_logits())
    buffer = jnp.asarray(np.array([[0, 5], [0, 39], [0, 0]], np.int32))
    found = jitted("score", VOCAB)(head.head, head.hidden, buffer)
    np.testing.assert_allclose(found, log_softmax(head.raw)[[5, 39, 0]], atol=1e-5)


def test_sampled_tokens_are_kept_in_their_slots_and_nowhere_else():
    head = Head(random_logits())
    best = int(head.raw.argmax())
    head.general([spec(), spec()], slots=[6, 1])
    assert np.asarray(head.last_tokens).tolist() == [-1, best, -1, -1, -1, -1, best, -1]


@pytest.mark.parametrize("broken", [[5], [0, 39], list(range(VOCAB))])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_still_give_a_valid_id(broken, value):
    logits = random_logits()
    logits[broken] = value
    head = Head(logits, num_valid=33)
    specs = [spec(), sampled(), sampled(top_k=3), sampled(top_p=0.5), sampled(min_p=0.5)]
    found = head.general(specs) + head.greedy([spec()])
    assert all(0 <= one.token < 33 for one in found)
