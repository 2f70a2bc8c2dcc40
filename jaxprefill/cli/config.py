"""`jaxprefill config`: what every option is, and who said so."""

import argparse
from collections.abc import Mapping
from typing import Any

from jaxprefill.cli.command import Command, add_output_flags
from jaxprefill.cli.flags import add_engine_flags, engine_config_of, flag_name
from jaxprefill.cli.streams import emit_json, note
from jaxprefill.cli.tables import emit_table
from jaxprefill.config import EngineConfig, engine_options, prefill_keys


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Output and engine."""
    parser.add_argument(
        "--resolved",
        action="store_true",
        help="what an engine would take on this machine: opens the model, but loads and compiles "
        "nothing",
    )
    add_output_flags(parser, "one JSON object")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints every option.

    Raises:
        JaxPrefillError: an option or, with --resolved, the model is at fault.
    """
    config = engine_config_of(args)
    values = {name: (getattr(config, name), origin) for name, origin in _origins(args).items()}
    if args.resolved:
        values |= _resolve(config, values)
    if args.json:
        options = {
            name: {"value": value, "origin": origin} for name, (value, origin) in values.items()
        }
        emit_json({"options": options, "prefill_config": config.prefill_differences})
        return 0
    rows = [(flag_name(name), _shown(value), origin) for name, (value, origin) in values.items()]
    emit_table(("option", "value", "from"), rows)
    if not args.quiet and not args.resolved:
        note("What is left open is chosen from model and device: --resolved shows it")
    return 0


def _origins(args: argparse.Namespace) -> dict[str, str]:
    """Each option but `prefill_config` itself, and who says what it is."""
    given, told = vars(args), prefill_keys(vars(args).get("prefill_config"))
    origins: dict[str, str] = {}
    for item, _ in engine_options():
        if item.name != "prefill_config":
            is_flag = item.name in given
            origins[item.name] = "flag" if is_flag else "default"
            if item.name in told:
                origins[item.name] = "prefill_config" + (", over the flag" if is_flag else "")
    return origins


def _resolve(
    config: EngineConfig, values: Mapping[str, tuple[Any, str]]
) -> dict[str, tuple[Any, str]]:
    """The options that a plan decides, each with what it adds to the origin."""
    # Importing jax takes a second, which --help and mistakes in flags need not wait for.
    from jaxprefill.kernels.device import describe_device
    from jaxprefill.resolved import resolved_options
    from jaxprefill.tuning.chosen import choose_plan, user_results
    from jaxprefill.weights.locate import open_checkpoint

    plan = choose_plan(
        config, open_checkpoint(config.model).config, describe_device(), user_results()
    )
    found: dict[str, tuple[Any, str]] = {}
    for name, resolved in resolved_options(plan).items():
        value, origin = values[name]
        why = "" if resolved.value == value else f": {resolved.why}"
        found[name] = (resolved.value, origin + why)
    return found


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"  # pyright: ignore[reportUnknownArgumentType]
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


COMMAND = Command(
    name="config",
    summary="Show every option of an engine, its value, and where that comes from.",
    usage="[--resolved] [--json] [options]",
    epilog="""\
What --prefill-config says wins over flags, and flags win over defaults. What is left open (-,
auto) is chosen from model and device; what was said is never changed. With --json, prefill_config
holds the prefill options that differ from their defaults, as --prefill-config takes them.

examples:
  jaxprefill config --resolved --model Qwen/Qwen3-0.6B
  jaxprefill config --prefill-config '{"prefill_buckets": [64, 512], "strict_prefill": true}'
  jaxprefill config --prefill-backend full --json | jq .prefill_config > prefill.json
""",
    add_flags=add_flags,
    run=run,
)
