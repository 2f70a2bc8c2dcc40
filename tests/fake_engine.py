"""An engine of integers behind the server: no jax, no model, every step under the test's hand.

The token after a text is chosen by a rule that a test can replace; its logprob is -1, an
alternative's -2, a prompt token's minus its position. Scores of labels and classes follow rules
too. Steps follow each other by themselves unless `is_held`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxprefill.client import ServedModel
from jaxprefill.errors import EngineUnavailable, RequestError
from jaxprefill.request import Request
from jaxprefill.updates import RequestUpdate, SampledToken
from tests.tiny import byte_tokenizer, tiny_config

EOS = 256


STATS = {  # a part of `Engine.stats()`; the running engine's test compares the keys
    "passes": {"full": 5, "eager": 1, "decode": 7},
    "executables": {
        "full 32x4x160": 3,
        "full 8x4x160": 2,
        "eager 64x4x160": 1,
        "decode 4x4x160": 7,
    },
    "padding": {"full 32x4x160": 12, "full 8x4x160": 1, "eager 64x4x160": 20, "decode 4x4x160": 3},
    "fallbacks": {"too_many_requests": 1},
    "real_tokens": 100,
    "padding_tokens": 36,
    "cached_tokens": 10,
    "preemptions": 2,
    "corrupted_requests": 0,
    "compilations_after_ready": 0,
    "num_running": 0,
    "num_waiting": 3,
    "kv_pages": {"total": 40, "free": 30, "cached": 8},
    "recent_pages": {"total": 9, "free": 7, "cached": 3},
    "memory": {"weights": 1000, "executable_temp_max": 4096, "executable_code": 100, "free": None},
    "mesh": {"model": 1, "processes": 1},
    "device": {"platform": "cpu", "kind": "cpu"},
    "ladder": {
        "path": "full",
        "buckets": [8, 32],
        "slots": 4,
        "max_contexts": [160],
        "decode_slots": [1, 2, 4],
        "eager_buckets": [64],
    },
    "startup_s": {"compile": 3.5, "warm_up": 0.5, "total": 4.0},
    "lowered_at_start": 3,
    "compiled_at_start": 3,
    "faults": [],
    "compiled": [{"name": "full 32x4x160", "temp_bytes": 4096}],
}


def letters(request: Request, position: int) -> int:
    """a, b, c and so on; capitals where the temperature is not 0."""
    first = "a" if request.params.temperature == 0 else "A"
    return ord(first) - ord("!") + position % 26  # the tokenizer's ids begin with "!"


class FakeEngine:
    """`EngineClient`, with what it was asked and a switch for every fault."""

    def __init__(self, rule: Callable[[Request, int], int] = letters, **config):
        tokenizer = byte_tokenizer()
        self.rule = rule
        self.label_rule = lambda request, label: -label / 10
        self.class_rule = lambda request: range(len(self.model.config.classifier.labels))
        self.is_ready = True
        self.is_held = False
        self.num_scoring_steps = 0  # that the logprobs of a prompt take, before its first token
        self.refusal: Exception | None = None
        self.failure: Exception | None = None
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.most_running = 0
        self.num_flushes = 0
        self.num_compiled = (9, 9)
        self.num_restarts = 0
        self.profiles: list[str | None] = []
        self._model = ServedModel(
            root="tiny",
            config=tiny_config(**config),
            tokenizer=tokenizer,
            context_length=160,
            max_running=4,
            kv_tokens=640,
            started_at=1700000000,
        )

    @property
    def model(self) -> ServedModel:
        if not self.is_ready:
            raise EngineUnavailable("the engine is starting")
        return self._model

    def submit(self, requests):
        self.requests += requests
        found = FakeSubmission(self, requests)
        self.most_running = max(self.most_running, len(self.running))
        return found

    async def flush_cache(self):
        self.num_flushes += 1

    async def stats(self):
        if not self.is_ready:
            raise EngineUnavailable("the engine is starting")
        return STATS | {"num_running": len(self.running)}

    async def program_text(self, name: str):
        return f"HloModule {name}"

    async def start_profile(self, folder: str):
        self.profiles.append(folder)

    async def stop_profile(self):
        self.profiles.append(None)

    async def run(self):
        """Lives until it is stopped, or fails at once."""
        self._stopped = asyncio.Event()
        if self.failure is not None:
            raise self.failure
        await self._stopped.wait()

    async def stop(self):
        """Ends every request, as a process that ends does."""
        self.is_ready, self.is_held = False, False
        self.failure = EngineUnavailable("the engine was closed while the call was running")
        self._stopped.set()

    async def restart(self):
        """As after a crash: another model object, the same model."""
        self._model = replace(self._model, started_at=self._model.started_at + 1)


class FakeSubmission:
    def __init__(self, engine: FakeEngine, requests):
        self.engine = engine
        self.live = {request.id: request for request in requests}
        self.is_cancelled = False
        engine.running |= self.live.keys()

    async def __aiter__(self):
        if self.engine.refusal is not None:
            raise self.engine.refusal
        for position in range(10**6):
            await asyncio.sleep(0)
            while self.engine.is_held and not self.is_cancelled:
                await asyncio.sleep(0.001)
            if self.engine.failure is not None:
                raise self.engine.failure
            for request in list(self.live.values()):
                if self.is_cancelled:
                    self.abort(request.id)
                    yield RequestUpdate(request.id, finish_reason="abort")
                if request.id in self.live:
                    yield self.step(request, position)
            if not self.live:
                return

    def step(self, request: Request, position: int) -> RequestUpdate:
        if request.wants_prompt_logprobs:
            position -= self.engine.num_scoring_steps
            if position < 0:
                return RequestUpdate(request.id)
        prompt = request.prompt_ids
        room = self.engine.model.context_length - len(prompt)
        last = min(request.params.max_tokens, room)
        tokens, reason = (), None
        if last:
            token = self.engine.rule(request, position)
            top = {token: -1.0, 7: -2.0} if request.params.logprobs else {}
            tokens = (SampledToken(token, -1.0, top),)
            if request.is_ended_by(token, position + 1):
                reason = "stop"
        if position + 1 >= last and reason is None:
            reason = "length"
        if reason is not None:
            self.drop(request.id)
        scored = prompt[1:] if position == 0 and request.wants_prompt_logprobs else ()
        logprobs = tuple(-float(at + 1) for at in range(len(scored)))
        size = self.engine.model.config.hidden_size
        return RequestUpdate(
            request.id,
            tokens=tokens,
            prompt_logprobs=logprobs,
            prompt_top=tuple(
                {token: logprob, 9: -0.5} for token, logprob in zip(scored, logprobs, strict=True)
            )
            if request.num_prompt_top
            else (),
            label_scores=tuple(
                self.engine.label_rule(request, label) for label in request.label_ids
            ),
            hidden_sum=np.full(size, len(prompt), np.float32) if request.pooling else None,
            class_logits=self.class_logits(request),
            cached_tokens=1,
            finish_reason=reason,
            times=(0.25, 0.5) if position == 0 else None,
        )

    def class_logits(self, request: Request):
        classifier = self.engine.model.config.classifier
        if not request.wants_class_logits or classifier is None:
            return None
        return np.array(self.engine.class_rule(request), np.float32)

    def drop(self, name: str):
        self.live.pop(name, None)
        self.engine.running.discard(name)

    def abort(self, name: str):
        if name in self.live:
            self.engine.aborted.append(name)
        self.drop(name)

    def cancel(self):
        self.is_cancelled = True

    def close(self):
        for name in list(self.live):
            self.abort(name)


def too_long_for_the_pool() -> RequestError:
    return RequestError("prompt and output must fit the KV pool", param="prompt")
