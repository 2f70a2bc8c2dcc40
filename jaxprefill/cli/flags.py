"""Flags made from the fields of EngineConfig, and the values they gave.

A flag that is not given leaves no attribute, so every default stays where the field is.
"""

import argparse
from collections.abc import Collection
from dataclasses import MISSING, Field
from typing import Any, Literal, get_args, get_origin

from jaxprefill.config import EngineConfig, engine_options, make_config

# --seed is the request's, which a user of the command line means; the engine's adds nothing then.
_NO_FLAG = frozenset({"seed"})
_ALIASES = {"prefill_max_context": "--context-bucket"}  # SGLang's name for it


def add_engine_flags(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """One flag for each engine option but some, parsed and checked by EngineConfig alone."""
    group = parser.add_argument_group(
        "engine options", "Counts may be written 4096, 200k (200000) or 256K (262144)."
    )
    for item, hint in engine_options():
        if item.name not in _NO_FLAG and item.name not in leave_out:
            names, keywords = option_flag(item, hint)
            group.add_argument(*names, **keywords)


def option_flag(item: "Field[Any]", hint: Any) -> tuple[list[str], dict[str, Any]]:
    """Names and keywords of an option's flag; texts that may be several are gathered in a list."""
    names = [flag_name(item.name)]
    names += [_ALIASES[item.name]] if item.name in _ALIASES else []
    text = help_text(str(item.metadata["help"]), item)
    if hint is bool:
        action = argparse.BooleanOptionalAction if item.default else "store_true"
        return names, {"action": action, "default": argparse.SUPPRESS, "help": text}
    return names, {
        "dest": item.name,
        "action": "append" if hint == tuple[str, ...] else "store",
        "default": argparse.SUPPRESS,
        "choices": get_args(hint) if get_origin(hint) is Literal else None,
        "metavar": item.metadata["metavar"],
        "help": text,
    }


def engine_config_of(args: argparse.Namespace) -> EngineConfig:
    """The options that the flags describe; EngineConfig parses their text.

    Raises:
        ConfigError: a value is out of range.
    """
    return make_config(**_given(args))


def given_flags(args: argparse.Namespace, *, leave_out: Collection[str] = ()) -> list[str]:
    """The flags of engine options that were given, but some."""
    return [flag_name(name) for name in _given(args) if name not in leave_out]


def _given(args: argparse.Namespace) -> dict[str, Any]:
    values = vars(args)
    names = [item.name for item, _ in engine_options() if item.name not in _NO_FLAG]
    return {name: values[name] for name in names if name in values}


def flag_name(field_name: str) -> str:
    """`max_tokens` as `--max-tokens`."""
    return "--" + field_name.replace("_", "-")


def help_text(text: str, item: "Field[Any]") -> str:
    """The help text with its default, unless there is none or the text says it."""
    default = item.default
    has_none = default is MISSING or default is None or isinstance(default, bool) or default == ()
    if not has_none and "(default:" not in text:
        text += (
            f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
        )
    return text.replace("%", "%%")
