"""Ranks of a group: one decision for all, whatever they have and however they talk."""

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprefill import SamplingParams
from jaxprefill.assembly import Assembly
from jaxprefill.batch import Batch, BatchRow
from jaxprefill.errors import ConfigError, EngineUnavailable
from jaxprefill.loop import EngineLoop
from jaxprefill.models.sharding import make_mesh
from jaxprefill.models.tree import model_tree
from jaxprefill.prefill import transport as transport_module
from jaxprefill.prefill.buckets import BucketLadder
from jaxprefill.prefill.policy import Fallback, FallbackReason, PrefillPolicy, Use, decide
from jaxprefill.prefill.transport import KeyValueTransport, LocalGroup
from jaxprefill.prefill.vote import (
    IDLE,
    Ballot,
    GroupVote,
    ballot_of,
    decide_batch,
    decide_in_group,
    tally,
)
from tests.reference import greedy
from tests.tiny import SMALL

POLICY = PrefillPolicy(ladder=BucketLadder((4, 16, 64), 4, (100, 700)), max_padding_factor=3.0)


def batch_of(*lengths: tuple[int, int]) -> Batch | None:
    """A batch by (new tokens, cached prefix) of each row; none: idle."""
    rows = tuple(
        BatchRow(
            request_id=str(index),
            slot=index,
            token_ids=(0,) * new,
            kv_len=new + prefix,
            pages=(),
        )
        for index, (new, prefix) in enumerate(lengths)
    )
    is_decode = bool(rows) and all(row.q_len == 1 for row in rows)
    return Batch(rows=rows, is_decode=is_decode) if rows else None


def run_ranks(group: LocalGroup, functions):
    """Each function of a transport, in a thread of its own."""
    with ThreadPoolExecutor(len(functions)) as pool:
        members = [group.member(rank) for rank in range(len(functions))]
        return list(pool.map(lambda pair: pair[0](pair[1]), zip(functions, members, strict=True)))


ROWS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 720)), max_size=6)


@given(st.lists(ROWS, min_size=1, max_size=5), st.sampled_from([None, 1.5, 3.0]))
@settings(deadline=None)
def test_no_rank_can_disagree(ranks, factor):
    policy = PrefillPolicy(ladder=POLICY.ladder, max_padding_factor=factor)
    batches = [batch_of(*rows) for rows in ranks]
    ballots = [ballot_of(policy, batch) for batch in batches]
    group = tally(ballots)
    assert group == tally(ballots[::-1]) == tally([*ballots, IDLE]), "order and idle ranks: no say"
    assert group.is_busy == any(batch is not None for batch in batches)
    if not group.is_busy:
        return
    ran = [batch or Batch(rows=(), is_decode=False) for batch in batches]
    found = [decide_in_group(policy, batch, group) for batch in ran]
    assert len({each.key if isinstance(each, Use) else "eager" for each in found}) == 1
    lenient = PrefillPolicy(ladder=policy.ladder)
    alone = [decide_batch(lenient, batch) for batch in ran]
    if all(isinstance(each, Use) for each in alone):
        assert len(set(found)) == 1, "an executable, or too much padding, for all of them"
        for batch in ran if isinstance(found[0], Use) else ():
            needs = (batch.num_tokens, len(batch.rows), batch.max_context)
            assert all(need <= limit for need, limit in zip(needs, found[0].key, strict=True))
        assert isinstance(found[0], Use) or factor is not None
    else:
        for one, own in zip(found, alone, strict=True):
            vote = Fallback(FallbackReason.GROUP_VOTE)
            assert one == (own if isinstance(own, Fallback) else vote)


def test_the_longest_batch_and_the_longest_context_give_the_shape():
    batches = [batch_of((3, 0)), batch_of((2, 300)), batch_of((1, 20), (1, 8)), None]
    group = tally([ballot_of(POLICY, batch) for batch in batches])
    assert group == Ballot(1, 1, 1, num_tokens=3, num_requests=2, max_context=302)
    shared = decide(POLICY, num_tokens=3, num_requests=2, max_context=302)
    assert all(decide_in_group(POLICY, batch, group) == shared for batch in batches if batch)


def test_ranks_that_were_given_other_options_are_all_told():
    def join(size):
        policy = PrefillPolicy(ladder=BucketLadder((size,), 4, (100,)))

        def run(transport):
            with pytest.raises(ConfigError, match=r"ranks \[1\] differ from rank 0"):
                GroupVote(transport, policy)
            return True

        return run

    assert run_ranks(LocalGroup(2), [join(8), join(16)]) == [True, True]


def test_a_rank_that_never_comes_is_told_to_those_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(transport_module, "_PATIENCE_S", 0.001)
    with pytest.raises(EngineUnavailable, match="rank 0 waited for one in vain"):
        GroupVote(LocalGroup(2).member(0), POLICY)


class Store:
    """A key-value store as `jax.distributed` has it."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000)
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            del self.values[key]


def test_a_key_value_store_carries_many_rounds_and_keeps_two_at_most():
    store = Store()

    def talk(rank):
        transport = KeyValueTransport(store, rank=rank, size=3, name="group")
        return [transport.gather((rank, number)) for number in range(50)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(talk, range(3)))
    assert found[0] == found[1] == found[2]
    assert found[0] == [[(rank, number) for rank in range(3)] for number in range(50)]
    assert len([key for key in store.values if key.count("/") == 2]) == 3


def test_a_rank_or_a_name_of_a_group_is_taken_once():
    store = Store()
    KeyValueTransport(store, rank=0, size=2, name="group")
    with pytest.raises(ConfigError, match="rank 0 of 'group' is in use or was"):
        KeyValueTransport(store, rank=0, size=2, name="group")
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match="0 to 1 in a group of 2"):
            KeyValueTransport(store, rank=rank, size=2, name="group")
        with pytest.raises(ConfigError, match="0 to 1 in a group of 2"):
            LocalGroup(2).member(rank)


def test_ranks_of_another_model_are_told(engine):
    other = replace(engine.plan, model=replace(engine.plan.model, norm_eps=1e-3))
    plans = (engine.plan, replace(engine.plan, num_pages=2), other)

    def join(plan):
        def run(transport):
            with pytest.raises(ConfigError, match=r"ranks \[2\] differ from rank 0"):
                Assembly.of(plan, num_valid=1).group_vote(transport)

        return run

    run_ranks(LocalGroup(3), [join(plan) for plan in plans])


def members(engine, group):
    """Engine cores of a group over one engine's weights and executables; nothing is compiled."""
    plan, started = engine.plan, engine._started
    mesh = make_mesh(1)
    tree = model_tree(plan.model, plan.dtype, mesh)
    assembly = Assembly(plan, tree, mesh, num_valid=plan.model.vocab_size)
    compiled, leaves = started.programs, started.core.state.leaves

    def make(transport):
        core = assembly.assemble(assembly.allocate(leaves, compiled), compiled)
        core.group = assembly.group_vote(transport)
        core.close = lambda: None  # its weights are the engine's
        return core

    return run_ranks(group, [make] * group.size)


def test_cores_of_a_group_run_the_same_executable_in_every_step(engine, checkpoint):
    """One rank has long prompts, the other one short prompt and then nothing."""
    rng = np.random.default_rng(0)
    prompts = [[rng.integers(0, 250, n).tolist() for n in lengths] for lengths in ((70, 9), (3,))]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    cores = members(engine, LocalGroup(2))
    requests = [engine._requests(own, [params] * len(own)) for own in prompts]

    def serve(rank):
        core, tokens = cores[rank], {request.id: [] for request in requests[rank]}
        for request in requests[rank]:
            core.add(request)
        for _ in range(20):  # together, whether there is work or not
            for update in core.step():
                tokens[update.request_id] += [one.token for one in update.tokens]
        return list(tokens.values()), core.counters.executables

    with ThreadPoolExecutor(2) as pool:
        (first, ran), (second, also_ran) = pool.map(serve, range(2))
    for ids, found in zip([*prompts[0], *prompts[1]], [*first, *second], strict=True):
        assert found == greedy(checkpoint, ids, 4)
    assert ran == also_ran and sum(ran.values()) < 20, "nothing runs when nobody has work"
    assert any(name.startswith("full 32") for name in ran)
    assert any(name.startswith("decode") for name in ran)


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
GROUP_OPTIONS = SMALL | dict(
    prefill_max_context=(48,), prefill_buckets=(32,), max_running_requests=1, kv_cache_tokens=160
)


def test_engines_of_a_group_fall_back_together_and_leave_together(engine, checkpoint):
    cores = members(engine, LocalGroup(2))
    refusing = replace(cores[0].prefill._policy, is_enabled=False)
    cores[0].prefill._policy = cores[0].group._policy = refusing
    loops = [EngineLoop(core, engine.tokenizer) for core in cores]
    prompts = [[1] * 60, [2] * 5]

    def serve(rank):
        (found,) = loops[rank].run(engine._requests([prompts[rank]], [GREEDY]))
        loops[rank].close()
        return found.token_ids

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(serve, range(2))) == [greedy(checkpoint, ids, 4) for ids in prompts]
    refused, voted = (dict(core.counters.fallbacks) for core in cores)
    assert (set(refused), set(voted)) == ({FallbackReason.DISABLED}, {FallbackReason.GROUP_VOTE})
    # Where the first rank happened to be idle, its ballot was in nobody's way.
    apart = refused[FallbackReason.DISABLED] - voted[FallbackReason.GROUP_VOTE]
    assert apart in (0, 1) and voted[FallbackReason.GROUP_VOTE] >= 2


def test_a_step_that_fails_while_an_engine_leaves_ends_its_voting(engine, monkeypatch):
    (core,) = members(engine, LocalGroup(1))

    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(core, "step", fail)
    with pytest.raises(ZeroDivisionError):
        core.leave_group()
    assert not core.is_in_group


def test_an_engine_whose_group_is_gone_says_so(engine, monkeypatch):
    group = LocalGroup(1)
    (core,) = members(engine, group)
    loop = EngineLoop(core, engine.tokenizer)
    assert loop.run(engine._requests([[1, 2]], [GREEDY]))

    def gone(rank, numbers):
        raise threading.BrokenBarrierError

    monkeypatch.setattr(group, "exchange", gone)
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="group"):
            loop.run(engine._requests([[1, 2]], [GREEDY]))
    loop.close()


PROCESS = """
import json, random, sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from jaxprefill import Engine, SamplingParams
from jaxprefill import engine as engine_module
from jaxprefill.compat import key_value_client
from jaxprefill.prefill.transport import KeyValueTransport
from jaxprefill.prefill.vote import GroupVote
from tests.test_vote import GREEDY, GROUP_OPTIONS, POLICY, batch_of
from tests.tiny import TinyCheckpoint
rank = int(sys.argv[2])
transport = KeyValueTransport(key_value_client(), rank=rank, size=2, name="vote")
vote, own = GroupVote(transport, POLICY), random.Random(rank)
batches = [batch_of((own.randint(1, 40), 0)) if own.random() < 0.8 else None for _ in range(30)]
votes = [vote.agree(batch) for batch in batches]
engine_module.open_checkpoint = lambda model: TinyCheckpoint()
transport = KeyValueTransport(key_value_client(), rank=rank, size=2, name="engines")
with Engine("tiny", group=transport, **GROUP_OPTIONS) as engine:
    (made,) = engine.generate([[1 + rank] * (5 if rank else 60)], GREEDY)
    fallbacks = engine.stats()["fallbacks"]
print("FOUND", json.dumps([votes, made.token_ids, fallbacks]), flush=True)
"""


@pytest.mark.slow
def test_two_processes_agree_through_jax_distributed(checkpoint):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(port), str(rank)],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs
    votes, tokens, fallbacks = zip(
        *(json.loads(printed.split("FOUND ")[-1]) for printed, _ in outputs), strict=True
    )
    assert votes[0] == votes[1] and len(votes[0]) == 30
    assert any(each is not None and each[3] > 4 for each in votes[0])
    assert list(tokens) == [greedy(checkpoint, ids, 4) for ids in ([1] * 60, [2] * 5)]
    own, other = fallbacks
    assert set(own) == {"context_above_max"} and other == {"group_vote": sum(own.values())}
