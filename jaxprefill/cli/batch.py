"""`jaxprefill batch`: OpenAI's batch files, answered offline."""

import argparse

from jaxprefill.cli.command import Command
from jaxprefill.cli.flags import add_engine_flags, engine_config_of
from jaxprefill.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Files, how to go on, and the engine."""
    parser.add_argument(
        "-i",
        "--input",
        required=True,
        metavar="FILE",
        help="requests, one JSON object a line; gzip and zstd are recognised; - is stdin",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="answers, one a line, in the same order; packed if it ends in .gz or .zst; - is "
        "stdout",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on with an output that was not completed: append what is missing",
    )
    group.add_argument(
        "--overwrite", action="store_true", help="throw away what the output holds already"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=1024,
        metavar="N",
        help="lines worked on at once (default: 1024); more pack better and take more memory",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what bodies call the model (default: MODEL); repeatable",
    )
    add_offline_flags(parser)
    add_engine_flags(parser)


def add_offline_flags(parser: argparse.ArgumentParser) -> None:
    """What is said on stderr."""
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing of the progress")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the log of this and other libraries"
    )


def run(args: argparse.Namespace) -> int:
    """Answers a file; 0 if every line has its answer, 3 if some are errors.

    Raises:
        JaxPrefillError: an option or a file is at fault, or the engine cannot work.
    """
    config = engine_config_of(args)
    if args.window < 1:
        raise ConfigError(f"--window must be at least 1, got {args.window}")
    from jaxprefill.cli.offline import run_batch

    return run_batch(config, args)


COMMAND = Command(
    name="batch",
    summary="Answer a file of requests in OpenAI's batch format.",
    usage="-i FILE -o FILE [--resume | --overwrite] [--model MODEL] [options]",
    epilog="""\
An input line:
  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
urls: /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/score, /v1/rerank, /rerank,
/v1/classify, /generate. What is wrong with a line is said in its answer, and the rest goes on.

exit status: 0, all lines are answered; 3, some with errors; 1, the run could not be completed
(--resume goes on with it); 2, a mistake in the command.

examples:
  jaxprefill batch -i in.jsonl -o out.jsonl
  jaxprefill batch -i in.jsonl.zst -o out.jsonl.zst --resume --model Qwen/Qwen3-0.6B
  jaxprefill batch -i - -o - < in.jsonl | jq .response.body.usage
""",
    add_flags=add_flags,
    run=run,
)
