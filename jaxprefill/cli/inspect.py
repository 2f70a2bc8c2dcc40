"""`jaxprefill inspect`: what executables cost, hold and should not hold."""

import argparse
from collections.abc import Callable

from jaxprefill.cli.command import Command, add_output_flags, at_least, named
from jaxprefill.cli.flags import add_engine_flags

# Of engine options: `--store` names what is inspected here, and a model is compiled for it.
_OWN_FLAGS = ("executables", "store", "trust_executables")
_STAGES = ("jaxpr", "stablehlo", "hlo", "thunks", "ptx")
_USAGES = {
    "list": "[KEY ...] [--measure N]",
    "show": "KEY [--stage STAGE] [--op NAME] [--no-fold]",
    "ops": "KEY [--top N]",
    "diff": "A B",
    "html": "OUT.html [KEY ...] [--measure N]",
    "trace": "KEY [--calls N]",
}
_EXAMPLES = {
    "list": "inspect list --prefill-buckets 32,128",
    "show": "inspect show 32x16x8192 --op dot",
    "ops": "inspect ops greedy --store ./executables",
    "diff": "inspect diff ./before ./after",
    "html": "inspect html out.html --url http://127.0.0.1:8000",
    "trace": "inspect trace 32x16x8192 --calls 20",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One parser for each thing to do, all with the same sources."""
    actions = parser.add_subparsers(
        title="what to do", metavar="ACTION", required=True, prog="jaxprefill inspect"
    )
    for name, (summary, add_own, json_help) in _ACTIONS.items():
        one = actions.add_parser(
            name,
            usage=f"%(prog)s {_USAGES[name]} [--store DIR | --url URL | engine options]",
            help=summary,
            description=summary,
            epilog=f"example:\n  jaxprefill {_EXAMPLES[name]}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_own(one)
        one.set_defaults(action=name)
        _add_source_flags(one)
        add_output_flags(one, json_help)
        add_engine_flags(one, leave_out=_OWN_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Reads and prints; 1 where `diff` finds differences.

    Raises:
        JaxPrefillError: the source or the executable cannot be had.
    """
    # Importing jax takes a second, which --help and mistakes in flags need not wait for.
    from jaxprefill.cli.inspecting import run_action

    return run_action(args)


def _add_source_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "what is inspected", "By default a model, whose executables are compiled for it."
    )
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "--store", dest="folder", type=named, metavar="DIR", help="a folder of executables"
    )
    one.add_argument("--url", type=named, help="a running server, as http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY", help="of the server, where it asks for one")
    group.add_argument(
        "--trust-executables",
        action="store_true",
        help="read a store that others can write, too",
    )


def _of_list(parser: argparse.ArgumentParser) -> None:
    _add_keys(parser)


def _of_show(parser: argparse.ArgumentParser) -> None:
    _add_key(parser)
    parser.add_argument("--stage", choices=_STAGES, default="hlo", help="which text (default: hlo)")
    parser.add_argument(
        "--op", type=named, metavar="NAME", help="only lines of this operation; status 1 if none"
    )
    parser.add_argument("--no-fold", action="store_true", help="print what repeats each time")


def _of_ops(parser: argparse.ArgumentParser) -> None:
    _add_key(parser)
    parser.add_argument(
        "--top", type=at_least(1), default=12, metavar="N", help="lines (default: 12)"
    )


def _of_diff(parser: argparse.ArgumentParser) -> None:
    for name in ("before", "after"):
        parser.add_argument(
            name, metavar=name[0].upper(), help="a KEY, a store's folder, or DIR#KEY"
        )


def _of_html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT.html", help="the page to write")
    _add_keys(parser)


def _of_trace(parser: argparse.ArgumentParser) -> None:
    _add_key(parser)
    parser.add_argument("--calls", type=at_least(1), default=10, metavar="N", help="(default: 10)")
    parser.add_argument(
        "--top", type=at_least(1), default=12, metavar="N", help="kernels (default: 12)"
    )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="names, shapes or parts of names (default: all)"
    )
    parser.add_argument(
        "--measure",
        type=at_least(0),
        default=0,
        metavar="N",
        help="run each N times (a model's only)",
    )


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="a name, a shape, or a part of one name")


_ACTIONS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], str]] = {
    "list": (
        "One line an executable: cost, roofline, memory, kernels.",
        _of_list,
        "one JSON object on a line for each executable",
    ),
    "show": (
        "A program's text, repeated layers folded.",
        _of_show,
        "one JSON object: name, stage, text",
    ),
    "ops": (
        "Operations by cost and scope, and what should not be there.",
        _of_ops,
        "one JSON object: operations, scopes, findings",
    ),
    "diff": (
        "What sets two executables, or two stores, apart; status 1 if anything does, 2 if that "
        "cannot be told.",
        _of_diff,
        "one JSON object for each pair",
    ),
    "html": (
        "All of it on one HTML page that needs no network.",
        _of_html,
        "also print what `list --json` does",
    ),
    "trace": (
        "Runs an executable under the profiler: busy, gaps, top kernels.",
        _of_trace,
        "one JSON object",
    ),
}


COMMAND = Command(
    name="inspect",
    summary="Read what compiled executables cost, hold and should not hold.",
    usage="list|show|ops|diff|html|trace ... [--store DIR | --url URL | --model MODEL]",
    epilog="""\
A model's executables are compiled as an engine with these options would, and nothing is changed.

examples:
  jaxprefill inspect list --prefill-buckets 32,128
  jaxprefill inspect ops 32x16x8192
  jaxprefill inspect diff "prefill 32" "prefill 128"
""",
    add_flags=add_flags,
    run=run,
)
