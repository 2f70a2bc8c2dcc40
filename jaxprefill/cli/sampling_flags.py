"""Flags made from the fields of SamplingParams, and the values they gave.

A flag that is not given leaves no attribute, so every default but one stays where the field is.
"""

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from jaxprefill.cli.flags import flag_name, help_text
from jaxprefill.request import MAX_STOP_STRINGS, MAX_TOP_LOGPROBS, SamplingParams

DEFAULT_MAX_TOKENS = 64

_SAMPLING_HELP = {
    "max_tokens": ("N", f"most tokens to generate (default: {DEFAULT_MAX_TOKENS})"),
    "temperature": ("T", "0: greedy; higher: more random"),
    "top_p": ("P", "sample among the likeliest tokens that together have this probability"),
    "top_k": ("K", "sample among the K likeliest tokens; 0: all"),
    "min_p": ("P", "leave out tokens less likely than P times the likeliest"),
    "n": ("N", "completions for each prompt"),
    "seed": ("SEED", "makes the samples repeatable (default: random)"),
    "stop": ("TEXT", f"end before this text; repeat it for several, {MAX_STOP_STRINGS} at most"),
    "stop_token_ids": ("ID", "end at this token; repeat it for several"),
    "ignore_eos": (None, "go on after the model's end-of-text token"),
    "min_tokens": ("N", "do not end before this many tokens"),
    "presence_penalty": ("X", "subtracted from logits of tokens generated so far, -2 to 2"),
    "frequency_penalty": ("X", "the same, times how often they were generated"),
    "repetition_penalty": ("X", "divides logits of tokens seen so far; 1: none"),
    "logit_bias": ("ID=VALUE", "add VALUE (-100 to 100) to a token's logit; repeatable"),
    "logprobs": ("K", f"report logprobs, with K alternatives (0 to {MAX_TOP_LOGPROBS}; --json)"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of SamplingParams."""
    group = parser.add_argument_group("sampling options")
    hints = get_type_hints(SamplingParams)
    for item in fields(SamplingParams):
        metavar, text = _SAMPLING_HELP[item.name]
        text = help_text(text, item)
        name, kinds = flag_name(item.name), {hints[item.name], *get_args(hints[item.name])}
        if bool in kinds:
            group.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        is_repeatable = item.name in _REPEATABLE
        group.add_argument(
            name,
            action="append" if is_repeatable else "store",
            type=_REPEATABLE[item.name] if is_repeatable else int if int in kinds else float,
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=text,
        )


def sampling_params_of(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags describe.

    Raises:
        RequestError: a value is out of range.
    """
    names = {item.name for item in fields(SamplingParams)}
    given: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS}
    given |= {name: value for name, value in vars(args).items() if name in names}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**given)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a token id and a number, such as 42=-100, got {text!r}"
        ) from None


# Fields of several values: the type of each; the other fields are numbers and booleans.
_REPEATABLE: dict[str, Callable[[str], Any]] = {
    "stop": str,
    "stop_token_ids": int,
    "logit_bias": _bias,
}
