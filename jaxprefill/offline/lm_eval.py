"""lm-eval's model `jaxprefill`: loglikelihoods, rolling ones and generations, in this process.

    python -m jaxprefill.offline.lm_eval --model jaxprefill --model_args model=demo --tasks NAME

takes all that `lm-eval` does. Plain `lm-eval` cannot find it: it knows its own models alone and
has no plugins (0.4.13). So this module must be imported first, as in `import
jaxprefill.offline.lm_eval` before `lm_eval.simple_evaluate(model="jaxprefill", model_args={"model":
"demo"}, …)`. What is asked in one call is run together: prompts are packed, and what they have in
common, few-shot examples for instance, is computed once.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from jaxprefill.engine import Engine
from jaxprefill.errors import ConfigError
from jaxprefill.request import MAX_STOP_STRINGS, SamplingParams

_TEMPLATE_LM: Any = import_module("lm_eval.api.model").TemplateLM  # of the extra lm-eval
_REGISTRY: Any = import_module("lm_eval.api.registry")
_WINDOWS: Any = import_module("lm_eval.utils")

_log = logging.getLogger(__name__)

_CHUNK = 4096  # prompts that are handed over at once
_IGNORED = ("batch_size", "max_batch_size", "device")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_GREEDY: dict[str, Any] = {"temperature": 0.0}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")


@_REGISTRY.register_model("jaxprefill")
class JaxPrefillLM(_TEMPLATE_LM):
    """An engine as lm-eval sees it; options of `EngineConfig` are model arguments.

    Texts begin as the tokenizer has them begin, as with lm-eval's models `hf` and `vllm`;
    `local-completions` has to be told so (`add_bos_token=True`). Prompts too long for the context
    lose their beginning.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        add_bos_token: bool = True,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        """Starts an engine.

        Args:
            model: see `EngineConfig.model`.
            add_bos_token: False: texts get no special tokens.
            max_gen_toks: most tokens to generate where a task does not say.
            max_length: lm-eval's name of the option `context_length`.
            options: fields of `EngineConfig`; sizes of batches and the device, which lm-eval may
                name too, the engine decides itself.

        Raises:
            JaxPrefillError: as `Engine`.
        """
        super().__init__()
        given = {name: value for name, value in options.items() if name not in _IGNORED}
        if max_length is not None:
            given["context_length"] = max_length
        self.engine = Engine(model, **given)
        self.max_length: int = self.engine.plan.context_length
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._has_cut = False

    @property
    def eot_token_id(self) -> int:
        """The token that ends texts; 0 where there is none."""
        return min(self.engine.tokenizer.eos_ids, default=0)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text of its own: the token that begins texts, or ends them."""
        bos_id = self.engine.tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's caches."""
        return self.engine.plan.config.model.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The model's template, for lm-eval's records; raises ConfigError if it has no such one."""
        if not chat_template:
            return ""
        name = chat_template if isinstance(chat_template, str) else "default"
        templates = self.engine.tokenizer.chat_templates
        if name not in templates:
            found = ", ".join(sorted(templates)) or "none"
            raise ConfigError(
                f"the chat template must be one of the model's: {found}, got {name!r}"
            )
        return templates[name]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation."""
        return self.engine.tokenizer.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of a text."""
        is_whole = self._add_bos_token if add_special_tokens is None else add_special_tokens
        ids = self.engine.tokenizer.encode(string, add_special_tokens=is_whole)
        bos_id = self.engine.tokenizer.bos_id
        has_two = is_whole and bos_id is not None and ids[:2] == [bos_id, bos_id]
        return ids[1:] if has_two else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation after its context: its logprob, and whether it is the likeliest."""
        found: list[tuple[float, bool]] = []
        for part in _chunks(requests):
            prompts = [self._fitting(context + target, 0) for _, context, target in part]
            scored = self.engine.likeliest(prompts)
            for (key, _, target), prompt, tokens in zip(part, prompts, scored, strict=True):
                size = min(len(target), len(prompt) - 1)
                last = [each for each in tokens[len(tokens) - size :] if each is not None]
                answer = sum(each.logprob for each in last), all(each.is_best for each in last)
                found.append(answer)
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answer)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The logprob of each text, cut into windows that fill the context where it is longer."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts: list[int] = []
        for request in requests:
            pairs = _WINDOWS.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = [(None, *_WINDOWS.make_disjoint_window(pair)) for pair in pairs]
            windows += pairs
            counts.append(len(pairs))
        parts = iter(self._loglikelihood_tokens(windows))
        found: list[float] = []
        for request, count in zip(requests, counts, strict=True):
            found.append(sum(next(parts)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to one of its `until` texts.

        Raises:
            ConfigError: `max_gen_toks` leaves no room for a context.
        """
        found: list[str] = []
        for part in _chunks(requests):
            params = [self._params(request.args[1]) for request in part]
            prompts = [
                self._fitting(
                    self.tok_encode(request.args[0]) or [self.prefix_token_id], one.max_tokens
                )
                for request, one in zip(part, params, strict=True)
            ]
            completions = self.engine.generate(prompts, params)
            for request, completion in zip(part, completions, strict=True):
                text = completion.text
                for end in _ends(request.args[1]):
                    text = text.split(end)[0]
                found.append(text)
                self.cache_hook.add_partial("generate_until", request.args, text)
        return found

    def _fitting(self, ids: list[int], num_new: int) -> list[int]:
        """The end of a prompt that leaves room for new tokens; raises ConfigError if none does."""
        room = self.max_length - num_new
        if room < 1:
            raise ConfigError(
                f"max_gen_toks must be less than the context of {self.max_length} tokens, got "
                f"{num_new}; lower it with --gen_kwargs max_gen_toks=N"
            )
        if len(ids) > room and not self._has_cut:
            self._has_cut = True
            _log.warning("prompts of more than %d tokens, %d here, are cut", room, len(ids))
        return ids[-room:]

    def _params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Greedy unless a temperature is asked for."""
        lengths = [given[name] for name in _LENGTHS if given.get(name) is not None]
        sampling: dict[str, Any] = {
            name: given[name] for name in _SAMPLING if given.get(name) is not None
        }
        is_sampled = given.get("do_sample", "temperature" in sampling)
        sampling.setdefault("temperature", 1.0)
        return SamplingParams(
            max_tokens=int(lengths[0]) if lengths else self.max_gen_toks,
            stop=tuple(_ends(given)[:MAX_STOP_STRINGS]),
            **(sampling if is_sampled else _GREEDY),
        )


def _ends(given: Mapping[str, Any]) -> list[str]:
    until: Any = given.get("until") or []
    return [end for end in ([until] if isinstance(until, str) else until) if end]


def _chunks(requests: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(requests), _CHUNK):
        yield requests[start : start + _CHUNK]


if __name__ == "__main__":
    import_module("lm_eval.__main__").cli_evaluate()
    sys.exit(0)
