"""`jaxprefill score-file`: a table with new columns that a model makes of one of its own."""

import argparse
import csv
import os

from jaxprefill.cli.batch import add_offline_flags
from jaxprefill.cli.command import Command
from jaxprefill.cli.flags import add_engine_flags, engine_config_of
from jaxprefill.errors import ConfigError

_FORMATS = ("csv", "tsv", "jsonl", "parquet")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Files, the measure and the engine."""
    parser.add_argument(
        "-i", "--input", required=True, metavar="FILE", help="the table; - is stdin"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="the new table; - is stdout"
    )
    parser.add_argument("--text-column", required=True, metavar="NAME", help="the texts to score")
    measure = parser.add_mutually_exclusive_group(required=True)
    measure.add_argument(
        "--labels",
        metavar="A,B",
        help="how likely each label is to follow the text: columns label and prob_A, prob_B; a "
        "space before a label is part of it",
    )
    measure.add_argument(
        "--classify", action="store_true", help="the same by the model's own classifier"
    )
    measure.add_argument(
        "--perplexity", action="store_true", help="columns perplexity, num_tokens, sum_logprob"
    )
    measure.add_argument("--embed", action="store_true", help="column embedding")
    parser.add_argument(
        "--template",
        default="{text}",
        metavar="TEXT",
        help=r"the prompt, with {text} for the row's text and \n for a new line (default: {text})",
    )
    parser.add_argument(
        "--prefix", default="", metavar="TEXT", help="begins the names of the new columns"
    )
    parser.add_argument(
        "--format", choices=_FORMATS, help="of both tables (default: by their names)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an output that is there already"
    )
    add_offline_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Scores a table; 0 if every row with a text could be scored, 3 if not.

    Raises:
        JaxPrefillError: an option or a file is at fault, or the engine cannot work.
    """
    config = engine_config_of(args)
    for name in ("labels", "template", "prefix"):
        given: str = getattr(args, name) or ""
        if given != given.encode(errors="replace").decode():  # bytes that were none
            raise ConfigError(f"--{name} must be UTF-8, got {given!r:.80}")
    labels = labels_of(args.labels) if args.labels is not None else []
    if os.path.isdir(args.output):
        raise ConfigError(f"--output must be a file, got the folder {args.output}")
    if os.path.isfile(args.output) and not args.overwrite:
        raise ConfigError(f"{args.output} is there already; --overwrite replaces it")
    from jaxprefill.cli.offline import run_score_file

    return run_score_file(config, args, labels)


def labels_of(text: str) -> list[str]:
    """The labels of a list with commas; quotes keep a comma inside one.

    Raises:
        ConfigError: one is empty, or some begin with a space and others do not.
    """
    labels = next(csv.reader([text]), [])
    if not labels or not all(label.strip() for label in labels):
        raise ConfigError(f"--labels must be texts with commas between, got {text!r}")
    if len({label[0].isspace() for label in labels}) > 1:
        raise ConfigError(
            f"--labels must all begin with a space or none, as it is part of them, got {text!r}"
        )
    return labels


COMMAND = Command(
    name="score-file",
    summary="Score the texts of a CSV, JSONL or Parquet file into new columns.",
    usage="-i FILE -o FILE --text-column NAME (--labels A,B | --classify | --perplexity | --embed)",
    epilog="""\
The output has the input's rows, columns and format. Rows whose text is empty or null get nulls. So
do those that are malformed, or refused, of more tokens than the context for instance: they are
named on stderr, and keep what JSON, or the header's columns, can hold of them. NaN and Infinity in
JSON lines become null.

exit status: 0, all rows are scored; 3, some were malformed or refused; 1, the run could not be
completed; 2, a mistake in the command.

examples:
  jaxprefill score-file -i in.csv -o out.csv --text-column review --labels " positive, negative" \\
    --template "Review: {text}\\nSentiment:"
  jaxprefill score-file -i in.parquet -o out.parquet --text-column text --perplexity
  jaxprefill score-file -i in.jsonl.gz -o out.jsonl.gz --text-column body --embed
""",
    add_flags=add_flags,
    run=run,
)
