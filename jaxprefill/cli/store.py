"""`jaxprefill store`: what is kept between starts, whether it is whole, and making room."""

import argparse
import re
from pathlib import Path

from rich.filesize import decimal

from jaxprefill.cli.command import Command, add_output_flags, named
from jaxprefill.cli.streams import emit_json, note
from jaxprefill.cli.tables import emit_table
from jaxprefill.errors import ConfigError
from jaxprefill.store.folder import Found, Store
from jaxprefill.store.machine import user_store

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Action, folder, output."""
    parser.add_argument(
        "action",
        choices=("list", "verify", "prune"),
        help="list: what there is; verify: compare every file with its checksum; prune: delete "
        "what was not used for a while, and what is damaged",
    )
    parser.add_argument(
        "--dir", type=named, metavar="DIR", help="the store (default: the user's own)"
    )
    parser.add_argument(
        "--unused",
        default="30d",
        metavar="TIME",
        help="prune what no start has used for so long: 12h, 30d; 0d: all (default: 30d)",
    )
    parser.add_argument(
        "--trust-executables",
        action="store_true",
        help="read a folder that others can write (nothing in it is run)",
    )
    add_output_flags(parser, "one JSON object on a line for each executable")


def run(args: argparse.Namespace) -> int:
    """Does it; `verify` ends with 1 if anything is damaged.

    Raises:
        JaxPrefillError: the folder is no store, or an argument is at fault.
    """
    unused_s = _seconds(args.unused)
    folder = Path(args.dir) if args.dir else user_store()
    if args.dir is None and not folder.exists():
        if not args.quiet:
            note(f"{folder}: nothing is kept yet")
        return 0
    store = Store.open(folder, is_trusted=args.trust_executables)
    if args.action == "prune":
        num_files, num_bytes = store.prune(unused_s=unused_s)
        if not args.quiet:
            note(f"{store.folder}: {num_files} files deleted, {decimal(num_bytes)}")
        return 0
    found = list(store.verify() if args.action == "verify" else store.found())
    _print(found, is_json=args.json)
    num_bad = sum(item.fault is not None for item in found)
    if not args.quiet:
        size = decimal(sum(item.num_bytes for item in found))
        note(f"{store.folder}: {len(found)} executables, {size}, {num_bad} damaged")
    return 1 if num_bad and args.action == "verify" else 0


def _print(found: list[Found], *, is_json: bool) -> None:
    for item in found if is_json else ():
        emit_json(_as_json(item))
    if not is_json:
        columns = ("executable", "model", "device", "jax", ">size", ">compile s", "written", "set")
        emit_table((*columns, "state"), map(_row, found))


def _row(item: Found) -> tuple[str, ...]:
    entry = item.entry
    if entry is None:
        name = item.manifest.stem
        return (name, *[""] * 6, item.manifest.parent.name, item.fault or "")
    facts, record = entry.facts, entry.record
    return (
        entry.name,
        entry.label,
        str(facts.get("device_kind", "")),
        str(facts.get("versions", {}).get("jax", "")),
        decimal(item.num_bytes),
        f"{record.get('lower_s', 0) + record.get('compile_s', 0):.1f}",
        entry.written,
        item.manifest.parent.name,
        item.fault or "ok",
    )


def _as_json(item: Found) -> dict[str, object]:
    told: dict[str, object] = {"manifest": str(item.manifest), "fault": item.fault}
    if item.entry is not None:
        entry = item.entry
        told |= {
            "name": entry.name,
            "model": entry.label,
            "fingerprint": entry.fingerprint,
            "bytes": item.num_bytes,
            "written": entry.written,
            "record": entry.record,
            "facts": entry.facts,
        }
    return told


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise ConfigError(f"--unused must be a number and s, m, h or d, such as 30d, got {text}")
    return float(found[1]) * _UNITS[found[2]]


COMMAND = Command(
    name="store",
    summary="List, verify or prune the executables that are kept between starts.",
    usage="{list,verify,prune} [--dir DIR] [--unused TIME] [--json]",
    epilog="""\
Starts of an engine write the user's own store; `jaxprefill compile --out DIR` writes others.

examples:
  jaxprefill store list
  jaxprefill store verify --dir executables/
  jaxprefill store prune --unused 7d
""",
    add_flags=add_flags,
    run=run,
)
