"""`jaxprefill compile`: writes the executables of a model into a folder, for later starts."""

import argparse
import re
from pathlib import Path

from jaxprefill.cli.command import Command, named
from jaxprefill.cli.flags import add_engine_flags, engine_config_of
from jaxprefill.cli.streams import note
from jaxprefill.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where to, what, and the engine."""
    parser.add_argument(
        "--out", type=named, required=True, metavar="DIR", help="folder to write, or add to"
    )
    parser.add_argument(
        "--shapes",
        metavar="SHAPE,...",
        help="of the prefill and decode executables just these: token counts (256) or whole shapes "
        "(256x16x8192); default: all that an engine with these options has",
    )
    parser.add_argument(
        "--no-texts", action="store_true", help="leave out StableHLO and HLO, which inspect reads"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the log of this and other libraries"
    )
    add_engine_flags(parser, leave_out=("executables", "store"))  # it loads from neither


def run(args: argparse.Namespace) -> int:
    """Compiles what is not there yet.

    Raises:
        JaxPrefillError: an option or the model is at fault, or the folder cannot be written.
    """
    config = engine_config_of(args)
    shapes = () if args.shapes is None else tuple(re.findall(r"[^,\s]+", args.shapes))
    if args.shapes is not None and not shapes:
        raise ConfigError(f"--shapes must name token counts or shapes, got {args.shapes!r}")
    # Importing jax takes a second, which --help and mistakes in flags need not wait for.
    from jaxprefill.cli.progress import compile_progress, no_progress
    from jaxprefill.precompile import precompile

    progress = (
        no_progress() if args.quiet else compile_progress(has_bar=not args.verbose, is_early=False)
    )
    with progress as on_compiled:
        done = precompile(
            config,
            Path(args.out),
            shapes=shapes,
            has_texts=not args.no_texts,
            on_compiled=on_compiled,
        )
    if not args.quiet:
        note(f"{args.out}: {done.describe()}")
    return 0


COMMAND = Command(
    name="compile",
    summary="Write a model's executables into a folder, from which later starts load them.",
    usage="--out DIR [--model MODEL] [--shapes SHAPE,...] [options]",
    epilog="""\
Weights are not read. Executables hold for one kind of device, one version of jax and the same
options; give the options that the engine will have. What the folder has already stays.

examples:
  jaxprefill compile --out executables/
  jaxprefill serve --executables executables/
  jaxprefill compile --out executables/ --model Qwen/Qwen3-0.6B --prefill-buckets 64,512
""",
    add_flags=add_flags,
    run=run,
)
