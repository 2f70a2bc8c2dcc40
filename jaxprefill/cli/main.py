"""The entry point: chooses a subcommand, and turns errors into messages and exit statuses.

Imports no jax, so that --help and --version are quick.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from jaxprefill import __version__
from jaxprefill.cli.command import Command
from jaxprefill.cli.streams import (
    discard_stdout,
    emit,
    logging_to_stderr,
    note,
    note_error,
    prepare_streams,
)
from jaxprefill.errors import ConfigError, JaxPrefillError, RequestError

COMMANDS = (
    *("serve", "generate", "logprobs", "compile", "store", "batch", "score-file", "convert"),
    *("inspect", "tune", "config", "models"),
)

FAILURE = 1
USAGE_ERROR = 2
BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        argv: arguments without the program's name; by default those of the process.
    """
    prepare_streams()
    try:
        status = _run(argv)
        emit("")  # flushes what argparse wrote
        return status
    except (ConfigError, RequestError) as error:
        return _fail(error, USAGE_ERROR)
    except JaxPrefillError as error:
        return _fail(error, FAILURE)
    except KeyboardInterrupt as stop:
        note("jaxprefill: interrupted")
        return 128 + (stop.args or (signal.SIGINT,))[0]  # as shells have it
    except BrokenPipeError:
        discard_stdout()
        return BROKEN_PIPE


def run() -> NoReturn:
    """The script entry: `main`, and the exit. What ends a process politely is as Ctrl-C.

    After that the process ends at once: at a normal exit Python would wait for the threads that
    compile.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, _interrupt)
    sys.unraisablehook = _interrupt_again
    status = main()
    if status > 128 and status != BROKEN_PIPE:
        os._exit(status)
    sys.exit(status)


def load_command(name: str) -> Command:
    """A subcommand. Its module is imported here: a start need not wait for those of the others."""
    return import_module(f"jaxprefill.cli.{name.replace('-', '_')}").COMMAND


def make_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of these subcommands; `command` in its result is the `Command`."""
    parser = argparse.ArgumentParser(
        prog="jaxprefill",
        description="LLM prefill on JAX/XLA from ahead-of-time compiled executables.",
        epilog="`jaxprefill COMMAND --help` lists the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxprefill {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in map(load_command, names):
        subparser = subparsers.add_parser(
            command.name,
            usage=f"%(prog)s {command.usage}",
            help=command.summary,
            description=command.summary,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_flags(subparser)
        subparser.set_defaults(command=command)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    names = given[:1] if given and given[0] in COMMANDS else COMMANDS
    try:
        args = make_parser(names).parse_args(given)
    except SystemExit as stop:  # argparse has printed help, version or a usage error
        return stop.code if isinstance(stop.code, int) else 0
    command: Command = args.command
    with logging_to_stderr(is_verbose=args.verbose):
        return command.run(args)


def _interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def _interrupt_again(lost: "sys.UnraisableHookArgs") -> None:
    """An interrupt that Python dropped, as it came in a callback of the collector: once more."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    number = (lost.exc_value.args or (signal.SIGINT,))[0]
    arguments = (threading.main_thread().ident, number)
    again = threading.Timer(0.1, signal.pthread_kill, arguments)  # in here it would be lost too
    again.daemon = True
    again.start()


def _fail(error: JaxPrefillError, status: int) -> int:
    note_error(error)
    return status
