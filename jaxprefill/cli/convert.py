"""`jaxprefill convert`: a model as a checkpoint of Orbax: arrays as the model takes them."""

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.filesize import decimal

from jaxprefill.cli.command import Command, add_output_flags
from jaxprefill.cli.streams import emit_json, note


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Source, target, type, output."""
    parser.add_argument(
        "source", metavar="SRC", help="demo, a Hugging Face folder, a GGUF file, or a hub id"
    )
    parser.add_argument("target", metavar="DIR", help="what to make, such as checkpoints/NAME")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "int8", "float8_e4m3fn"),
        default="auto",
        help="auto: as they are read, so that nothing is lost (quantised GGUF: float32); int8 and "
        "float8_e4m3fn: the layers' matrices, each row with a scale (with float8 some are int8)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a checkpoint made by this command"
    )
    add_output_flags(parser, "what was written, as a JSON object")


def run(args: argparse.Namespace) -> int:
    """Converts, on the host alone.

    Raises:
        CheckpointError: the model cannot be read, or the checkpoint not written.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # an accelerator would be taken for nothing

    from jaxprefill.weights.convert import convert
    from jaxprefill.weights.locate import open_checkpoint

    found = convert(
        open_checkpoint(args.source),
        Path(args.target),
        dtype=args.dtype,
        overwrite=args.overwrite,
    )
    if args.json:
        emit_json(asdict(found))
    elif not args.quiet:
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.dtypes.items())
        note(
            f"{found.folder}: {found.source}, arrays: {kinds}; {decimal(found.num_bytes)} in "
            f"{found.num_files} files"
        )
    return 0


COMMAND = Command(
    name="convert",
    summary="Write a model as a checkpoint that is read straight onto the devices.",
    usage="SRC DIR [--dtype DTYPE] [--overwrite]",
    epilog="""\
The checkpoint (Orbax; no pickles) holds weights, config and tokenizer, and a manifest with sizes
and SHA-256 of all files: one that was truncated or edited is refused. Name it wherever a model is
named: --model checkpoints/NAME.

examples:
  jaxprefill convert demo checkpoints/demo
  jaxprefill convert Qwen/Qwen3-0.6B checkpoints/qwen3-0.6b --dtype bfloat16
""",
    add_flags=add_flags,
    run=run,
)
