"""The Python API: prompts in, completions and logprobs out, in input order."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from jaxprefill.admission import Admission, Prompt, naming_item
from jaxprefill.collector import Collector
from jaxprefill.config import make_config
from jaxprefill.errors import JaxPrefillError, RequestError
from jaxprefill.kernels.device import describe_device, free_memory_bytes
from jaxprefill.plan import EnginePlan, make_plan
from jaxprefill.prefill.compiler import ExecutableRecord
from jaxprefill.request import Completion, Request, SamplingParams
from jaxprefill.startup import start
from jaxprefill.weights.locate import open_checkpoint

logger = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, Any]]


class Engine:
    """A model behind a ladder of compiled prefill executables.

    Use it as a context manager, or call `close`. Calls from several threads run one after
    another; give many prompts to one call instead. After construction nothing compiles any more.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        on_planned: Callable[[EnginePlan], None] | None = None,
        on_compiled: Callable[[ExecutableRecord, int], None] | None = None,
        **options: Any,
    ) -> None:
        """Loads and compiles; `options` are the fields of `EngineConfig`.

        Args:
            model: see `EngineConfig.model`.
            on_planned: called before anything is loaded or compiled; what it raises stops start-up.
            on_compiled: called after each executable with its record and the number of all.
            options: fields of `EngineConfig`.

        Raises:
            ConfigError: an option is unknown, out of range, or does not fit model or device.
            CheckpointError: the model cannot be had.
            CompileError: an executable could not be compiled.
        """
        config = make_config(model=model, **options)
        checkpoint = open_checkpoint(config.model)
        self.plan = make_plan(config, checkpoint.config, describe_device())
        if on_planned is not None:
            on_planned(self.plan)
        self._started = start(checkpoint, self.plan, on_compiled=on_compiled or _log_compiled)
        self.tokenizer = checkpoint.tokenizer
        self._core = self._started.core
        self._admission = Admission(
            tokenizer=self.tokenizer,
            vocab_size=self.plan.model.vocab_size,
            context_length=self.plan.context_length,
            rng=np.random.default_rng(config.seed),
        )
        self._num_prompts = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continues each prompt; `n` continuations of a prompt stand together.

        Args:
            prompts: texts or lists of token ids; a single one is taken as a list of one.
            params: for all prompts, or one for each.

        Raises:
            RequestError: a prompt or parameter is invalid; nothing was run.
        """
        many = _as_prompts(prompts)
        each = _as_params(params, len(many))
        return self._run(self._requests(many, each))

    def logprobs(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float | None]]:
        """The raw logprob of every prompt token given those before it; the first is None.

        Raises:
            RequestError: a prompt is invalid; nothing was run.
        """
        many = _as_prompts(prompts)
        each = [SamplingParams(max_tokens=0)] * len(many)
        requests = self._requests(many, each, wants_prompt_logprobs=True)
        return [_checked_logprobs(completion) for completion in self._run(requests)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> list[Completion]:
        """Answers one conversation, or several, through the model's chat template.

        Args:
            messages: {"role", "content"} mappings, or a list of such lists.
            params: for all conversations.
            template_options: `add_generation_prompt`, and variables for the template, which
                ignores those it does not know.

        Raises:
            RequestError: messages are malformed, or the template refuses them.
        """
        if not _is_list(messages):
            raise RequestError(
                f"messages must be a list of messages, got {messages!r}", param="messages"
            )
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            with naming_item("conversations", index, len(conversations)):
                prompts.append(self._admission.chat_ids(conversation, template_options))
        return self.generate(prompts, params)

    def stats(self) -> dict[str, Any]:
        """Counters and the memory table, ready for JSON.

        Keys: passes (by path), executables (passes by executable), fallbacks (by reason),
        real_tokens, padding_tokens, preemptions, corrupted_requests,
        compilations_after_ready, kv_pages, memory (bytes on each device), mesh (devices by axis,
        processes), startup_s, compiled (records).
        """
        core, counters = self._core, self._core.counters
        records = self._started.records
        memory = core.state.nbytes() | {
            "executable_temp_max": max(record.temp_bytes for record in records),
            "executable_code": sum(record.code_bytes for record in records),
            "free": free_memory_bytes(),
        }
        return {
            "passes": dict(counters.passes),
            "executables": dict(counters.executables),
            "fallbacks": {str(reason): n for reason, n in counters.fallbacks.items()},
            "real_tokens": counters.real_tokens,
            "padding_tokens": counters.padding_tokens,
            "preemptions": counters.preemptions,
            "corrupted_requests": counters.corrupted_requests,
            "compilations_after_ready": core.compilations.count,
            "kv_pages": {"total": core.pages.num_pages, "free": core.pages.num_free},
            "memory": memory,
            "mesh": {
                "model": self.plan.config.tensor_parallel_size,
                "processes": self.plan.device.num_processes,
            },
            "startup_s": self._started.seconds,
            "compiled": [record.as_dict() for record in records],
        }

    def close(self) -> None:
        """Frees the device's arrays; the engine cannot be used afterwards."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._core.state.delete()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        wants_prompt_logprobs: bool = False,
    ) -> list[Request]:
        """All requests of the prompts, in order; an error says which prompt is at fault."""
        requests: list[Request] = []
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            with naming_item("prompts", index, len(prompts)):
                requests += self._admission.requests(
                    self._next_id(), prompt, one, wants_prompt_logprobs=wants_prompt_logprobs
                )
        return requests

    def _next_id(self) -> str:
        self._num_prompts += 1
        return f"prompt-{self._num_prompts}"

    def _run(self, requests: list[Request]) -> list[Completion]:
        """Runs requests to their end; whatever happens, none is left behind."""
        with self._lock:
            if self._is_closed:
                raise JaxPrefillError("the engine is closed; make a new one")
            return self._run_alone(requests)

    def _run_alone(self, requests: list[Request]) -> list[Completion]:
        collectors = {request.id: Collector(request, self.tokenizer) for request in requests}
        try:
            for request in requests:
                self._core.add(request)
            while not all(collector.is_finished for collector in collectors.values()):
                self._step(collectors)
        finally:
            for request in requests:
                self._core.abort(request.id)
            while self._core.has_work:
                self._core.step()
        return [collectors[request.id].completion() for request in requests]

    def _step(self, collectors: dict[str, Collector]) -> None:
        for update in self._core.step():
            collector = collectors.get(update.request.id)
            if collector is None or collector.is_finished:
                continue
            collector.add_prompt_logprobs(update.prompt_logprobs)
            for token in update.tokens:
                collector.add_token(*token)
            if update.finish_reason is not None:
                collector.finish(update.finish_reason)
            elif collector.is_finished:  # a stop string, which only the text shows
                self._core.abort(update.request.id)


def _as_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts from one text, one list of ids, or several of either."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts must be texts or lists of token ids, got {prompts!r}", param="prompt"
        )
    items: list[Any] = list(prompts)
    if items and all(np.isscalar(item) and not isinstance(item, str) for item in items):
        return [items]
    for item in items:
        if not isinstance(item, str) and not _is_list(item):
            raise RequestError(
                f"a prompt must be a text or a list of token ids, got {item!r}", param="prompt"
            )
    return items


def _is_list(value: Any) -> bool:
    """Whether the value is a sequence of items; bytes are no token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    is_raw = isinstance(value, (bytes, bytearray, memoryview))
    return isinstance(value, Sequence) and not is_raw


def _as_params(params: Any, count: int) -> list[SamplingParams]:
    many: list[Any] = (
        list(params) if isinstance(params, (list, tuple)) else [params or SamplingParams()] * count
    )
    if len(many) != count or not all(isinstance(one, SamplingParams) for one in many):
        raise RequestError(
            f"params must be a SamplingParams or {count} of them, got {params!r}", param="params"
        )
    return many


def _checked_logprobs(completion: Completion) -> list[float | None]:
    if completion.finish_reason == "error":
        raise JaxPrefillError(
            "the model gave logprobs that are not numbers; its weights or dtype are at fault"
        )
    return completion.prompt_logprobs or []


def _log_compiled(record: ExecutableRecord, total: int) -> None:
    logger.info(
        "compiled %s in %.1f s (temp %d bytes), one of %d",
        record.name,
        record.compile_s,
        record.temp_bytes,
        total,
    )
