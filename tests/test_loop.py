"""The engine's loop over a core of counters: whoever fails, nobody else waits or loses a token."""

from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace

import pytest

from jaxprefill.errors import EngineUnavailable, RequestError
from jaxprefill.loop import EngineLoop
from jaxprefill.remote.messages import Abort, Ended, Stop, Submit
from jaxprefill.remote.worker import Service
from jaxprefill.request import Request, SamplingParams
from jaxprefill.updates import RequestUpdate, SampledToken
from tests.tiny import byte_tokenizer


class CountingCore:
    """Gives every request one token a step, until it has `max_tokens`."""

    is_in_group = False

    def __init__(self):
        self.running: dict[str, Request] = {}
        self.given: dict[str, int] = {}
        self.faults: list[BaseException] = []
        self.is_closed = False

    def add(self, request, matcher=None):
        if request.grammar is not None and matcher is None:
            raise ZeroDivisionError(request.grammar)
        self.running[request.id] = request

    def abort(self, name):
        self.running.pop(name, None)

    def is_known(self, name):
        return name in self.running

    def leave_group(self):
        pass

    @property
    def has_work(self):
        return bool(self.running)

    def step(self):
        if self.faults:
            raise self.faults.pop()
        updates = []
        for name, request in list(self.running.items()):
            count = self.given[name] = self.given.get(name, 0) + 1
            reason = "length" if count == request.params.max_tokens else None
            updates.append(RequestUpdate(name, (SampledToken(65, -1.0, {}),), finish_reason=reason))
            if reason:
                self.abort(name)
        return updates

    def close(self):
        self.is_closed = True


@dataclass  # no hash, and equal to others: the loop must go by identity
class Hears:
    fails_at: int = 0
    fails_at_end: bool = False
    updates: list = field(default_factory=list)
    ends: list = field(default_factory=list)
    ended: Event = field(default_factory=Event, compare=False)

    def on_update(self, update):
        self.updates.append(update)
        if len(self.updates) == self.fails_at:
            raise KeyError("a listener's own fault")
        return True

    def on_end(self, error):
        self.ends.append(error)
        self.ended.set()
        if self.fails_at_end:
            raise KeyError("at the end")


def request(name, max_tokens=5, grammar=None):
    params = SamplingParams(max_tokens=max_tokens)
    return Request(id=name, prompt_ids=(1,), params=params, seed=0, grammar=grammar)


@pytest.fixture
def core():
    return CountingCore()


@pytest.fixture
def loop(core):
    made = EngineLoop(core, byte_tokenizer())
    yield made
    made.close()
    assert core.is_closed and not core.running


def run(loop, *requests, listener=None):
    listener = listener or Hears()
    loop.submit(requests, listener)
    assert listener.ended.wait(60)
    return listener


def test_a_fault_in_starting_a_call_ends_that_call_alone(loop):
    broken = run(loop, request("a"), request("b", grammar="x"))
    assert isinstance(broken.ends[0], ZeroDivisionError)
    assert len(run(loop, request("c")).updates) == 5


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_listener_that_fails_ends_with_its_error_and_takes_no_token_from_others(loop, order):
    failing, other = pair = [Hears(fails_at=3), Hears()]
    loop.call(lambda: [loop.submit([request(f"{at}", 12)], pair[at]) for at in order])
    assert failing.ended.wait(60) and other.ended.wait(60)
    assert isinstance(failing.ends[0], KeyError) and len(failing.updates) == 3
    assert len(other.updates) == 12 and other.ends == [None]


def test_a_listener_that_fails_at_its_end_harms_nobody(loop, caplog):
    run(loop, request("a"), listener=Hears(fails_at_end=True))
    assert len(run(loop, request("b")).updates) == 5
    assert "a listener failed at its end" in caplog.text


def test_a_listener_of_two_calls_hears_all_and_one_end(loop):
    hears = Hears()
    loop.call(lambda: [loop.submit([request(n, c)], hears) for n, c in (("a", 9), ("b", 2))])
    assert hears.ended.wait(60)
    assert len(hears.updates) == 11 and hears.ends == [None]


def test_an_engine_whose_last_step_in_a_group_fails_is_closed(core, loop, monkeypatch):
    def leave_group():
        raise ZeroDivisionError

    monkeypatch.setattr(core, "leave_group", leave_group)
    with pytest.raises(ZeroDivisionError):
        loop.close()
    assert core.is_closed


def test_a_step_that_fails_and_takes_no_request_ends_every_call(core, loop):
    class Panic(BaseException):  # as a Rust library raises
        pass

    core.faults = [Panic("at once")]
    assert isinstance(run(loop, request("a", 10**9)).ends[0], Panic)
    assert len(run(loop, request("b")).updates) == 5


def test_closing_ends_what_runs_whatever_its_last_step_does(core, loop):
    hears = Hears()
    loop.submit([request("a", 10**9)], hears)
    loop.close()
    assert hears.ended.wait(60) and isinstance(hears.ends[0], EngineUnavailable)


def test_grammars_that_take_long_to_compile_hold_up_no_step_and_no_message(loop):
    may_end, inbox, told = Event(), SimpleQueue(), SimpleQueue()

    def grammars(text):
        assert may_end.wait(60)
        if text == "bad":
            raise RequestError("no grammar", param="response_format")
        return text

    def grammatical(*names, text="good"):
        return [request(name, grammar=text) for name in names]

    def finished() -> tuple[int, str]:
        while True:
            match told.get(timeout=60):
                case (number, update) if update.finish_reason is not None:
                    return number, update.request_id
                case Ended() as ended:
                    return ended.number, ended.param

    engine = SimpleNamespace(submit=loop.submit, abort=loop.abort)
    service = Thread(target=Service(engine, told, inbox, lambda: grammars).run)
    service.start()
    for message in (
        Submit(1, grammatical("a")),
        Submit(2, grammatical("unwanted")),
        Submit(3, grammatical("half", "b")),
        Submit(4, grammatical("c", text="bad")),
        Submit(5, [request("plain")]),
        Abort(2),
        Abort(3, "half"),
    ):
        inbox.put(message)
    assert finished() == (5, "plain")
    inbox.put(Submit(6, [request("after the aborts")]))
    assert finished() == (6, "after the aborts")
    may_end.set()
    assert {finished() for _ in range(3)} == {(1, "a"), (3, "b"), (4, "response_format")}
    inbox.put(Stop())
    service.join(10)
    assert told.empty()
