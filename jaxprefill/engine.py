"""The Python API: prompts in, completions and logprobs out, in input order."""

import itertools
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np

from jaxprefill.admission import (
    NOTHING_GENERATED,
    NOTHING_MORE,
    Admission,
    Prompt,
    Wants,
    naming_item,
)
from jaxprefill.arguments import as_params, as_prompts, is_list
from jaxprefill.config import make_config
from jaxprefill.embeddings import Matrix
from jaxprefill.errors import JaxPrefillError, RequestError
from jaxprefill.grammar import NO_MATCHERS, Matchers
from jaxprefill.kernels.device import describe_device, free_memory_bytes
from jaxprefill.loop import EngineLoop, Listener
from jaxprefill.plan import EnginePlan
from jaxprefill.prefill.compiler import ExecutableRecord
from jaxprefill.prefill.transport import Transport
from jaxprefill.readings import Reading, Readings, ScoredToken
from jaxprefill.request import Completion, Request, SamplingParams
from jaxprefill.startup import start
from jaxprefill.tuning.chosen import choose_plan, user_results
from jaxprefill.weights.locate import open_checkpoint

logger = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class Engine:
    """A model behind a ladder of compiled prefill executables.

    Use it as a context manager, or call `close`. Calls from several threads
    run together and share batches. After construction nothing compiles any more.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        on_planned: Callable[[EnginePlan], None] | None = None,
        on_compiled: Callable[[ExecutableRecord, int], None] | None = None,
        group: Transport | None = None,
        **options: Any,
    ) -> None:
        """Loads and compiles; `options` are the fields of `EngineConfig`.

        Args:
            model: see `EngineConfig.model`.
            on_planned: called before anything is loaded or compiled; what it raises stops start-up.
            on_compiled: called after each executable with its record and the number of all.
            group: this engine's end (see `prefill.transport`) of a group of engines over devices of
                their own that run one shape in every step, as data-parallel attention needs: no
                model has it yet. Starting and `close` wait for all of it, in a thread each.
            options: fields of `EngineConfig`.

        Raises:
            ConfigError: an option is unknown, out of range, or does not fit model or device.
            CheckpointError: the model cannot be had.
            CompileError: an executable could not be compiled.
        """
        config = make_config(model=model, **options)
        checkpoint = open_checkpoint(config.model)
        device = describe_device(is_alone=group is not None)
        self.plan = choose_plan(config, checkpoint.config, device, user_results())
        if on_planned is not None:
            on_planned(self.plan)
        told = on_compiled or _log_compiled
        self._started = start(checkpoint, self.plan, on_compiled=told, group=group)
        self.tokenizer = checkpoint.tokenizer
        self._core = self._started.core
        self._admission = Admission(
            tokenizer=self.tokenizer,
            vocab_size=self.plan.model.vocab_size,
            context_length=self.plan.context_length,
            rng=np.random.default_rng(config.seed),
            has_lm_head=self.plan.model.has_lm_head,
        )
        self._readings = Readings(self.plan.model, self._admission)
        self._numbers = itertools.count(1)
        self._loop = EngineLoop(self._core, self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[Completion]:
        """Continues each prompt; `n` continuations of a prompt stand together.

        Args:
            prompts: texts or lists of token ids; a single one is taken as a list of one.
            params: for all prompts, or one for each.
            priority: of all prompts, against other calls' requests; a higher one goes first.

        Raises:
            RequestError: a prompt or parameter is invalid; nothing was run.
        """
        many = as_prompts(prompts)
        each = as_params(params, len(many))
        return self._loop.run(self._requests(many, each, wants=Wants(priority=priority)))

    def logprobs(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float | None]]:
        """The raw logprob of every prompt token given those before it; the first is None.

        Raises:
            RequestError: a prompt is invalid; nothing was run.
        """
        return self._read(self._readings.logprobs(prompts))

    def likeliest(self, prompts: Prompt | Sequence[Prompt]) -> list[list[ScoredToken | None]]:
        """As `logprobs`, and of each token whether greedy decoding would have chosen it.

        Raises:
            RequestError: a prompt is invalid; nothing was run.
        """
        return self._read(self._readings.likeliest(prompts))

    def score(
        self,
        query: Prompt,
        items: Prompt | Sequence[Prompt],
        label_token_ids: Sequence[int],
        apply_softmax: bool = True,
        *,
        item_first: bool = False,
    ) -> list[list[float]]:
        """How likely each label is as the token after query + item, one list an item.

        A query of text is joined with its items as text, one of ids with items of ids. What the
        prompts have in common is computed once.

        Args:
            query: what every prompt begins with; may be empty.
            items: what follows it; a single one is taken as a list of one.
            label_token_ids: the ids to score, in the order of the results.
            apply_softmax: scores are normalised over the labels; else they are the labels'
                probabilities among all tokens.
            item_first: the prompts are item + query instead.

        Raises:
            RequestError: a prompt or label is invalid; nothing was run.
        """
        reading = self._readings.score(
            query, items, label_token_ids, apply_softmax=apply_softmax, item_first=item_first
        )
        return self._read(reading)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> Matrix:
        """Embeddings [n, hidden_size], float32: the final hidden state, pooled as the model says.

        Texts are embedded as they are. Models that want an instruction before queries need it in
        the text; `jaxprefill.embedding_query` writes Qwen3-Embedding's.

        Args:
            texts: texts or lists of token ids; a single one is taken as a list of one.
            dimensions: keep so many of the first numbers, of models trained for that.
            normalize: scale to length 1, after that; None: as the model's own files say, and
                scaled where they say nothing.

        Raises:
            RequestError: a text or argument is invalid; nothing was run.
        """
        reading = self._readings.embed(texts, dimensions=dimensions, normalize=normalize)
        return self._read(reading)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the columns of `classify`; none where the model has no classifier."""
        classifier = self.plan.model.classifier
        return classifier.labels if classifier is not None else ()

    def classify(
        self, texts: Prompt | Sequence[Prompt], *, apply_activation: bool = True
    ) -> Matrix:
        """Scores [n, labels], float32, of a `*ForSequenceClassification` model.

        Args:
            texts: texts or lists of token ids; a single one is taken as a list of one.
            apply_activation: softmax over the labels, or sigmoid where there is one label or
                several may hold, or nothing for a regression; else always raw logits.

        Raises:
            RequestError: a text is invalid, or the model has no classifier; nothing was run.
        """
        return self._read(self._readings.classify(texts, apply_activation=apply_activation))

    def rerank(
        self, query: str, documents: str | Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """How well each document answers the query, 0 to 1, in the order of the documents.

        A language model, trained for it or not, is asked as Qwen3-Reranker is, and the score is
        the share of "yes" against "no"; the prompts' common beginning is computed once. A
        classifier of one label gives its score: Qwen3's of the same prompt, others' of the pair as
        the tokenizer joins it.

        Args:
            query: what is asked.
            documents: texts to be ranked.
            instruction: what counts as an answer; None: that of a web search.

        Raises:
            RequestError: an argument is invalid, or the model cannot be asked: a classifier of
                several labels, or no token for "yes" or "no"; nothing was run.
        """
        return self._read(self._readings.rerank(query, documents, instruction))

    def submit(
        self, requests: Sequence[Request], listener: Listener, *, matchers: Matchers = NO_MATCHERS
    ) -> None:
        """Runs validated requests for a listener, which hears of every step; does not wait.

        The listener is called on the engine's own thread, between two steps. Requests of a grammar
        need their `matchers`.
        """
        self._loop.submit(requests, listener, matchers=matchers)

    def abort(self, listener: Listener, request_ids: Sequence[str] | None = None) -> None:
        """Ends requests of a listener before the next step; None: all of them."""
        self._loop.abort(listener, request_ids)

    def flush_cache(self) -> None:
        """Forgets all prefixes that no running request uses."""
        self._loop.flush_cache()

    def program_text(self, executable: str) -> str:
        """The optimised HLO of an executable, by its name in `stats()["compiled"]`.

        Raises:
            RequestError: there is none of that name.
        """
        programs = self._started.programs
        if executable not in programs:
            raise RequestError(
                f"executable must be a name such as {next(iter(programs), 'none')!r}, "
                f"got {executable!r:.120}",
                param="executable",
            )
        return programs[executable].hlo

    def describe_executables(self) -> str:
        """One line: how many were loaded, how many compiled, and what was wrong with stores."""
        return self._started.describe_executables()

    def start_profile(self, folder: str) -> None:
        """Records what runs, for xprof or TensorBoard, until `stop_profile`."""
        jax.profiler.start_trace(folder)

    def stop_profile(self) -> None:
        """Writes the recording into its folder."""
        jax.profiler.stop_trace()

    def _read(self, reading: Reading[T]) -> T:
        """Runs prompts for what their rows tell; nothing is generated."""
        params = [NOTHING_GENERATED] * len(reading.prompts)
        requests = self._requests(reading.prompts, params, name=reading.name, wants=reading.wants)
        completions = self._loop.run(requests)
        if any(completion.finish_reason == "error" for completion in completions):
            raise JaxPrefillError(
                "the model gave values that are not numbers; its weights or dtype are at fault"
            )
        return reading.result(completions)

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
        if isinstance(messages, str) or not is_list(messages):
            raise RequestError(
                f"messages must be a list of messages, got {reprlib.repr(messages)}",
                param="messages",
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
        padding (tokens by executable), real_tokens, padding_tokens, cached_tokens, preemptions,
        corrupted_requests, compilations_after_ready, lowered_at_start and compiled_at_start (of the
        whole process, other engines' included), num_running and num_waiting (requests), kv_pages
        and recent_pages (free ones may be cached; the latter of models with a window's pages
        apart, else null), memory (bytes on each device), mesh (devices by axis, processes),
        device, ladder, startup_s, compiled (records, on GPUs with graphs), faults (of stores).
        """
        core, counters = self._core, self._core.counters
        records = self._started.records
        memory = core.state.nbytes() | {
            "executable_temp_max": max(record.temp_bytes for record in records),
            "executable_code": sum(record.code_bytes for record in records),
            "graphs": sum(core.graph_bytes.values()) if core.graph_bytes else None,
            "free": free_memory_bytes(),
        }
        return {
            "passes": dict(counters.passes),
            "executables": dict(counters.executables),
            "padding": dict(counters.padding),
            "fallbacks": {str(reason): n for reason, n in dict(counters.fallbacks).items()},
            "real_tokens": counters.real_tokens,
            "padding_tokens": counters.padding_tokens,
            "preemptions": counters.preemptions,
            "corrupted_requests": counters.corrupted_requests,
            "compilations_after_ready": core.compilations.count,
            "cached_tokens": counters.cached_tokens,
            "num_running": core.scheduler.num_running,
            "num_waiting": core.scheduler.num_waiting,
            **core.cache.counts(),
            "memory": memory,
            "device": {"platform": self.plan.device.platform, "kind": self.plan.device.kind},
            "mesh": {
                "model": self.plan.config.tensor_parallel_size,
                "processes": self.plan.device.num_processes,
            },
            "ladder": self.plan.ladder_table(),
            **self._started.stats(),
        }

    def close(self) -> None:
        """Frees the device's arrays and the executables; the engine cannot be used afterwards."""
        self._loop.close()
        self._started.programs.clear()

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
        name: str = "prompts",
        wants: Wants = NOTHING_MORE,
    ) -> list[Request]:
        """All requests of the prompts, in order; an error says which of `name` is at fault."""
        requests: list[Request] = []
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            with naming_item(name, index, len(prompts)):
                requests += self._admission.requests(
                    f"prompt-{next(self._numbers)}", prompt, one, wants=wants
                )
        return requests


def _log_compiled(record: ExecutableRecord, total: int) -> None:
    logger.info(
        "%s %s in %.1f s (temp %d bytes), one of %d",
        "compiled" if record.load_s is None else "loaded",
        record.name,
        record.seconds,
        record.temp_bytes,
        total,
    )
