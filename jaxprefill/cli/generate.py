"""`jaxprefill generate`: prompts continued, or answered through the chat template."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from jaxprefill.cli.command import Command, add_output_flags, add_prompt_flag, read_prompts
from jaxprefill.cli.flags import add_engine_flags, engine_config_of
from jaxprefill.cli.sampling_flags import add_sampling_flags, sampling_params_of
from jaxprefill.cli.streams import emit, emit_json, note
from jaxprefill.errors import RequestError
from jaxprefill.request import Completion


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Prompts, output, sampling and engine."""
    add_prompt_flag(parser)
    parser.add_argument(
        "--chat", action="store_true", help="take each prompt as a user's message to answer"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message, with --chat")
    add_output_flags(parser, "one JSON object on a line for each completion")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Generates and prints; 1 if the model gave values that are not numbers.

    Raises:
        JaxPrefillError: an option, a prompt or the model is at fault.
    """
    if args.system is not None and not args.chat:
        raise RequestError("--system needs --chat; put it into the prompt, or add --chat")
    params = sampling_params_of(args)
    config = engine_config_of(args)
    prompts = read_prompts(args.prompt)
    # Importing jax takes a second, which --help and mistakes in flags need not wait for.
    from jaxprefill.cli.session import Stopwatch, open_engine

    with open_engine(config, args, params) as engine:
        watch = Stopwatch(engine)
        if args.chat:
            completions = engine.chat([_messages(text, args.system) for text in prompts], params)
        else:
            completions = engine.generate(prompts, params)
        summary = watch.summary(
            num_prompt_tokens=sum(one.prompt_tokens for one in completions if one.index == 0),
            num_generated_tokens=sum(len(one.token_ids) for one in completions),
        )
    _print(prompts, completions, args)
    if not args.quiet:
        note(summary)
    return _status(completions)


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def _print(
    prompts: Sequence[str], completions: Sequence[Completion], args: argparse.Namespace
) -> None:
    num_each = len(completions) // len(prompts)
    for at, completion in enumerate(completions):
        number, prompt = at // num_each + 1, prompts[at // num_each]
        if args.json:
            emit_json({"prompt": prompt} | asdict(completion))
            continue
        if len(completions) > 1:
            nth = f", completion {completion.index + 1} of {num_each}" if num_each > 1 else ""
            before = "\n" if at else ""
            emit(f"{before}--- prompt {number} of {len(prompts)}{nth} ---\n")
        # An answer is a text of its own, while a continuation goes on in mid-sentence.
        emit(f"{prompt}{chr(10) * 2 if args.chat else ''}{completion.text}\n")


def _status(completions: Sequence[Completion]) -> int:
    num_bad = sum(completion.finish_reason == "error" for completion in completions)
    if num_bad:
        note(
            f"jaxprefill: error: {num_bad} of {len(completions)} completions ended early, as the "
            "model gave values that are not numbers; its weights or dtype are at fault"
        )
    return 1 if num_bad else 0


COMMAND = Command(
    name="generate",
    summary="Continue prompts, or answer them with --chat.",
    usage="--prompt TEXT [--prompt TEXT ...] [--chat] [--json] [options]",
    epilog="""\
The prompt and its completion go to stdout, everything else to stderr.

examples:
  jaxprefill generate --prompt "The capital of France is" --temperature 0 --max-tokens 16
  jaxprefill generate --chat --system "Be brief." --prompt "What is a prefill?" --seed 1
  jaxprefill generate --prompt - --json --logprobs 3 < prompt.txt | jq .text
""",
    add_flags=add_flags,
    run=run,
)
