"""`jaxprefill models`: the models that can be named without a path."""

import argparse
from dataclasses import asdict

from rich.filesize import decimal

from jaxprefill.cli.command import Command, add_output_flags
from jaxprefill.cli.streams import emit_json, note
from jaxprefill.cli.tables import emit_table


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Output only."""
    add_output_flags(parser, "one JSON object on a line for each model")


def run(args: argparse.Namespace) -> int:
    """Lists the models; opens none and imports no jax."""
    # The file formats behind `locate` take half a second to import, which --help need not wait for.
    from jaxprefill.weights.known import KNOWN_MODELS, is_cached

    if args.json:
        for model in KNOWN_MODELS:
            emit_json(asdict(model) | {"is_cached": is_cached(model.name)})
        return 0
    rows = [
        (
            model.name,
            model.description,
            model.licence,
            decimal(model.num_bytes),
            model.source,
            "yes" if is_cached(model.name) else "no",
        )
        for model in KNOWN_MODELS
    ]
    emit_table(("name", "description", "licence", ">size", "source", "cached"), rows)
    if not args.quiet:
        note("A Hugging Face folder or a GGUF file can be used as well: --model PATH")
    return 0


COMMAND = Command(
    name="models",
    summary="List the models that --model knows by name.",
    usage="[--json]",
    epilog="""\
A model is fetched when it is first used. A Hugging Face folder or a GGUF file is named by its
path instead, a model of the Hugging Face hub by owner/name (with the extra `hub`).

example:
  jaxprefill models --json | jq -r .name
""",
    add_flags=add_flags,
    run=run,
)
