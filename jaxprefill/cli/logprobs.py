"""`jaxprefill logprobs`: how likely the model finds each token of a prompt."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxprefill.cli.command import Command, add_output_flags, add_prompt_flag, read_prompts
from jaxprefill.cli.flags import add_engine_flags, engine_config_of
from jaxprefill.cli.streams import emit, emit_json, note
from jaxprefill.cli.tables import emit_table


@dataclass(frozen=True, kw_only=True)
class ScoredPrompt:
    """A prompt's tokens and their logprobs, of which the first is None."""

    prompt: str
    token_ids: list[int]
    tokens: list[str]
    logprobs: list[float | None]

    @property
    def scored(self) -> list[float]:
        """Logprobs of all tokens but the first."""
        return [logprob for logprob in self.logprobs if logprob is not None]

    @property
    def sum_logprob(self) -> float:
        """Logprob of the prompt given its first token."""
        return math.fsum(self.scored)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Prompts, output and engine; nothing is sampled."""
    add_prompt_flag(parser)
    add_output_flags(parser, "one JSON object on a line for each prompt")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Scores and prints.

    Raises:
        JaxPrefillError: an option, a prompt or the model is at fault.
    """
    config = engine_config_of(args)
    prompts = read_prompts(args.prompt)
    # Importing jax takes a second, which --help and mistakes in flags need not wait for.
    from jaxprefill.cli.session import Stopwatch, open_engine, token_text

    with open_engine(config, args) as engine:
        watch = Stopwatch(engine)
        ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
        scored = [
            ScoredPrompt(
                prompt=prompt,
                token_ids=tokens,
                tokens=[token_text(engine.tokenizer, token) for token in tokens],
                logprobs=logprobs,
            )
            for prompt, tokens, logprobs in zip(prompts, ids, engine.logprobs(ids), strict=True)
        ]
        summary = watch.summary(num_prompt_tokens=sum(map(len, ids)), num_generated_tokens=0)
    _print(scored, is_json=args.json)
    if not args.quiet:
        note(summary)
    return 0


def _print(scored: Sequence[ScoredPrompt], *, is_json: bool) -> None:
    for number, one in enumerate(scored, 1):
        if is_json:
            emit_json(_as_json(one))
            continue
        if len(scored) > 1:
            before = "\n" if number > 1 else ""
            emit(f"{before}--- prompt {number} of {len(scored)} ---\n")
        emit_table(
            (">#", ">id", "token", ">logprob"),
            [_row(one, at) for at in range(len(one.token_ids))],
        )
        emit(_totals(one) + "\n")


def _as_json(one: ScoredPrompt) -> dict[str, Any]:
    return asdict(one) | {"sum_logprob": one.sum_logprob}


def _row(one: ScoredPrompt, at: int) -> tuple[str, str, str, str]:
    logprob = one.logprobs[at]
    shown = "" if logprob is None else f"{logprob:.4f}"
    return str(at), str(one.token_ids[at]), repr(one.tokens[at]), shown


def _totals(one: ScoredPrompt) -> str:
    count = len(one.scored)
    if not count:
        return "sum 0 over no tokens: the first has nothing before it to be predicted from"
    mean = one.sum_logprob / count
    perplexity = math.exp(-mean) if mean > -700 else math.inf  # exp raises where floats end
    noun = "token" if count == 1 else "tokens"
    return (
        f"sum {one.sum_logprob:.4f} over {count} {noun}, mean {mean:.4f}, "
        f"perplexity {perplexity:.4g}"
    )


COMMAND = Command(
    name="logprobs",
    summary="Show the logprob of each prompt token given those before it.",
    usage="--prompt TEXT [--prompt TEXT ...] [--json] [options]",
    epilog="""\
The first token has no logprob. With --json each line is
{"prompt", "token_ids", "tokens", "logprobs", "sum_logprob"}.

examples:
  jaxprefill logprobs --prompt "The capital of France is Paris."
  jaxprefill logprobs --prompt - --json < text.txt | jq .sum_logprob
""",
    add_flags=add_flags,
    run=run,
)
