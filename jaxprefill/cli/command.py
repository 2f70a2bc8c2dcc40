"""What a subcommand is, and the flags and prompts that several of them share."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

from jaxprefill.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand: its texts, its flags and its work.

    Attributes:
        summary: one line, shown in the list of commands and above the flags.
        usage: the flags that matter most, after the command's name.
        epilog: an example and notes, shown below the flags.
        run: does the work and returns the exit status.
    """

    name: str
    summary: str
    usage: str
    epilog: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_prompt_flag(parser: argparse.ArgumentParser) -> None:
    """`--prompt`, repeatable, required."""
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="a prompt; repeat it for several; - reads all of stdin as one; a text that starts "
        "with a dash is given as --prompt=-TEXT",
    )


def at_least(least: int) -> Callable[[str], int]:
    """Reads a flag's whole number, and refuses one below `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}, got {text!r}"
            )
        return number

    return read


def named(text: str) -> str:
    """A flag's text, such as a folder's name; refuses an empty one, as of a variable not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, got {text!r}")
    return text


def add_output_flags(parser: argparse.ArgumentParser, json_help: str) -> None:
    """`--json`, `--quiet` and `--verbose`."""
    parser.add_argument("--json", action="store_true", help=json_help)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress and no summary on stderr"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the log of this and other libraries"
    )


def read_prompts(given: list[str]) -> list[str]:
    """The prompts, `-` replaced by all of stdin.

    Raises:
        RequestError: a prompt is empty; stdin is not UTF-8, or is asked for twice.
    """
    if given.count("-") > 1:
        raise RequestError("--prompt - can be given once, as stdin can be read once")
    prompts = [_read_stdin() if prompt == "-" else prompt for prompt in given]
    for prompt in prompts:
        if not prompt:  # said before start-up, which takes a while
            raise RequestError(f"--prompt must be a text that is not empty, got {prompt!r}")
    return prompts


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompt - reads UTF-8 text, got other bytes: {error}") from None
