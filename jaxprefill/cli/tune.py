"""`jaxprefill tune`: the smallest ladder of buckets that wastes little on this machine."""

import argparse
from pathlib import Path

from jaxprefill.cli.command import Command, add_output_flags, at_least
from jaxprefill.cli.flags import add_engine_flags, engine_config_of
from jaxprefill.errors import ConfigError
from jaxprefill.integers import parse_count
from jaxprefill.tuning.ladder import Goal
from jaxprefill.tuning.lengths import DISTRIBUTIONS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Distribution, goal, output and engine."""
    group = parser.add_argument_group("tuning options")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="prompt lengths in tokens: one or more a line, or a CSV with a column prompt_tokens",
    )
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="prompts: texts, or objects with prompt, text, input or messages, also under body",
    )
    source.add_argument(
        "--distribution",
        choices=DISTRIBUTIONS,
        help=f"lengths by name, if there is no file (default: {DISTRIBUTIONS[0]})",
    )
    group.add_argument(
        "--budget", default="5%", metavar="SHARE", help="most waste, 5%% or 0.05 (default: 5%%)"
    )
    group.add_argument("--max-buckets", metavar="N", help="most buckets (default: any number)")
    group.add_argument(
        "--time-limit",
        type=at_least(1),
        default=180,
        metavar="SECONDS",
        help="measure no further buckets after so long; costs of the others are interpolated "
        "(default: 180)",
    )
    group.add_argument(
        "--write",
        action="store_true",
        help="keep the ladder for this model and chip: engines whose prefill_buckets is auto "
        "take it, and say so",
    )
    group.add_argument(
        "--force",
        action="store_true",
        help="with --write: keep the ladder though other work slows this machine",
    )
    add_output_flags(parser, "one JSON object")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, proposes and prints; 1 if no ladder keeps to the budget.

    Raises:
        JaxPrefillError: an option, a file or the model is at fault, or the ladder cannot be kept.
    """
    most = args.max_buckets
    goal = Goal(
        budget=parse_share("budget", args.budget),
        max_buckets=None if most is None else parse_count("max_buckets", most),
    )
    config = engine_config_of(args)
    # Importing jax takes a second, which --help and mistakes in flags need not wait for.
    from jaxprefill.cli.tuning import tune

    return tune(config, goal, args)


def parse_share(name: str, text: str) -> float:
    """`5%` or `0.05` as 0.05.

    Raises:
        ConfigError: it is neither, or above 1 without a percent sign.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
        if rest or (share > 1 and not percent):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{name} must be a share such as 5% or 0.05, and above 1 in percent, got {text!r}"
        ) from None
    return share


COMMAND = Command(
    name="tune",
    summary="Measure buckets on this machine, and choose the few that suit your prompts.",
    usage="[--lengths FILE | --prompts FILE.jsonl] [--budget 5%%] [--write] [options]",
    epilog="""\
Waste is the time that prompts of these lengths take, one at a time, in the ladder's buckets over
the time at their exact lengths, minus one, as measured and interpolated. Fewest buckets win, as
each takes time to compile and memory to keep; the last is chunked_prefill_size. Buckets given by
--prefill-buckets are the only ones measured and proposed. The exit status is 1 if no ladder keeps
to the budget: the least wasteful is shown, and kept with --write.

examples:
  jaxprefill tune --write
  jaxprefill tune --model Qwen/Qwen3-0.6B --prompts prompts.jsonl --budget 2%
  jaxprefill tune --lengths lengths.txt --max-buckets 6 --json | jq .buckets
""",
    add_flags=add_flags,
    run=run,
)
