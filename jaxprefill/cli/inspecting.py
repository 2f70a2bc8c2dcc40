"""What `jaxprefill inspect` does; it imports jax, so `inspect` imports it when it runs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxprefill.cli.flags import engine_config_of, given_flags
from jaxprefill.cli.streams import emit, emit_json, note, note_error
from jaxprefill.cli.tables import emit_table
from jaxprefill.errors import ConfigError, InspectionError, JaxPrefillError, RequestError
from jaxprefill.inspection import text
from jaxprefill.inspection.diff import Difference, compare
from jaxprefill.inspection.fold import fold, lines_of
from jaxprefill.inspection.model import KEEP_GRAPHS, ModelSource
from jaxprefill.inspection.page import render
from jaxprefill.inspection.records import Inspected, Operation, Summary
from jaxprefill.inspection.select import Source, pair_up, select, select_one
from jaxprefill.inspection.sources import analysed, calls_of, open_server, open_store
from jaxprefill.inspection.summary import (
    analyse,
    by_scope,
    operations,
    ranked,
    summarise,
)

FAILURE = 1
DIFFERENT, UNTOLD = 1, 2  # of `diff`, as of diff(1)


def run_action(args: argparse.Namespace) -> int:
    """Does what `args.action` says; returns the exit status.

    Raises:
        ConfigError: engine options for what is compiled already.
        JaxPrefillError: the source or the executable cannot be had.
    """
    unused = given_flags(args, leave_out=("executables", "store", "trust_executables"))
    if unused and (args.url is not None or args.folder is not None):
        source = "--store" if args.url is None else "--url"
        raise ConfigError(
            f"{source} shows executables as they are, so engine options must be left out, "
            f"got {', '.join(unused)}"
        )
    return _ACTIONS[args.action](args)


def open_source(args: argparse.Namespace) -> Source:
    """The store, the server or the model that the flags name."""
    if args.url is not None:
        return open_server(args.url, api_key=args.api_key)
    if args.folder is not None:
        return open_store(args.folder, is_trusted=args.trust_executables)
    return ModelSource(engine_config_of(args))


def _list(args: argparse.Namespace) -> int:
    source = open_source(args)
    summaries, num_failed = _summaries(source, args)
    if args.json:
        for one in summaries:
            emit_json(one.as_dict())
    elif summaries:
        emit_table(text.SUMMARY_COLUMNS, map(text.summary_row, summaries))
    if not args.quiet and not args.json:
        note(text.describe_chip(source.chip))
        for line in text.note_lines(summaries):
            note(line)
    return FAILURE if num_failed else 0


def _summaries(source: Source, args: argparse.Namespace) -> tuple[list[Summary], int]:
    """Of all that can be read; the number of the others, of which stderr says why."""
    names = list(dict.fromkeys(name for key in args.keys for name in select(source.names, key)))
    names = names or list(source.names)
    found: list[Summary] = []
    if args.measure:
        calls_of(source, names[0])  # refused before anything is read
    for name in names:
        if not args.quiet:
            note(f"{name} ...")
        try:
            found.append(summarise(analysed(source, name, repeats=args.measure)))
        except InspectionError as error:
            note_error(error)
    return found, len(names) - len(found)


def _show(args: argparse.Namespace) -> int:
    one = _open_one(args)
    whole = one.text(args.stage)
    shown = lines_of(whole, args.op) if args.no_fold else fold(whole, args.stage, op=args.op)
    if args.op is not None and not shown:
        raise InspectionError(
            f"{one.name}: no line of its {args.stage} runs {args.op!r}; all are shown without --op"
        )
    if args.json:
        emit_json({"name": one.name, "stage": args.stage, "text": shown})
    else:
        emit(shown + "\n")
    return 0


def _ops(args: argparse.Namespace) -> int:
    analysis = analyse(_open_one(args))
    found, findings = operations(analysis), analysis.findings
    scopes = by_scope(found)
    if args.json:
        emit_json(
            {
                "name": analysis.inspected.name,
                "operations": [each.as_dict() for each in found],
                "scopes": [each.as_dict() for each in scopes],
                "findings": [each.as_dict() for each in findings],
            }
        )
        return 0
    emit(f"{analysis.inspected.name}: by scope\n")
    emit_table(text.SCOPE_COLUMNS, map(text.scope_row, ranked(scopes, _bytes_of, args.top)))
    keys: tuple[tuple[str, Callable[[Operation], float | None]], ...] = (
        ("bytes", _bytes_of),
        ("FLOPs", lambda each: each.flops),
    )
    for name, key in keys:
        emit(f"operations by {name}\n")
        top = [each for each in ranked(found, key, args.top) if key(each)]
        emit_table(text.OPERATION_COLUMNS, map(text.operation_row, top))
    if findings:
        emit_table(text.FINDING_COLUMNS, map(text.finding_row, findings))
    else:
        emit("nothing that should not be there\n")
    if not args.quiet:
        note(text.describe_chip(analysis.inspected.chip))
    return 0


def _bytes_of(operation: Operation) -> float | None:
    return operation.num_bytes


def _diff(args: argparse.Namespace) -> int:
    try:
        return _told_diff(args)
    except JaxPrefillError as error:  # whatever it is, it does not mean that they differ
        note_error(error)
        return UNTOLD


def _told_diff(args: argparse.Namespace) -> int:
    pairs, alone = _pairs(args)
    found: list[Difference] = []
    for one, other in pairs:
        try:
            found.append(compare(analyse(one), analyse(other)))
        except InspectionError as error:
            note_error(error)
    for each in found:
        if args.json:
            emit_json(each.as_dict())
        elif not each.is_empty:
            _print_difference(each)
    for name, where in alone:
        if args.json:
            emit_json({"name": name, "only_in": where})
        else:
            emit(f"{name}: only in {where}\n")
    differing = [each for each in found if not each.is_empty]
    if not args.quiet:
        note(f"{len(differing)} of {len(found)} pairs differ, {len(alone)} have no counterpart")
    if len(found) < len(pairs):
        return UNTOLD
    return DIFFERENT if differing or alone else 0


def _print_difference(each: Difference) -> None:
    emit(f"{each.before}  =>  {each.after}\n")
    emit_table(text.CHANGE_COLUMNS, map(text.change_row, each.changes))
    emit_table(("", ">before", ">after", ">ratio"), text.number_rows(each.numbers))
    for name, (before, after) in each.facts.items():
        emit(f"{name}: {before}  =>  {after}\n")


def _pairs(
    args: argparse.Namespace,
) -> tuple[list[tuple[Inspected, Inspected]], list[tuple[str, str]]]:
    """What is to be compared, and the names that only one of two stores has."""
    if not _is_place(args.before) and not _is_place(args.after):
        source = open_source(args)
        keys = [select_one(source.names, key) for key in (args.before, args.after)]
        return [(source.open(keys[0]), source.open(keys[1]))], []
    one, other = _side(args, args.before), _side(args, args.after)
    if len(one[1]) == len(other[1]) == 1:
        return [(one[0].open(one[1][0]), other[0].open(other[1][0]))], []
    both = pair_up(_fingerprints(*one), _fingerprints(*other))
    alone = [(name, args.before) for name in one[1] if name not in both]
    alone += [(name, args.after) for name in other[1] if name not in both.values()]
    return [(one[0].open(name), other[0].open(same)) for name, same in both.items()], alone


def _fingerprints(source: Source, names: list[str]) -> dict[str, str | None]:
    """By name; a model's are not asked for, as it would be compiled for them."""
    is_model = isinstance(source, ModelSource)
    return {name: None if is_model else source.open(name).fingerprint for name in names}


def _side(args: argparse.Namespace, given: str) -> tuple[Source, list[str]]:
    """A source, and the executables of it that are meant."""
    if not _is_place(given):
        source = open_source(args)
        return source, [select_one(source.names, given)]
    place, _, key = given.partition("#")
    given_args = (
        {"url": place, "folder": None} if _is_url(place) else {"folder": place, "url": None}
    )
    source = open_source(argparse.Namespace(**(vars(args) | given_args)))
    return source, [select_one(source.names, key)] if key else list(source.names)


def _html(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if out.is_dir() or not out.absolute().parent.is_dir():  # told before anything is compiled
        raise RequestError(f"{out} must name a file in a folder that exists")
    source = open_source(args)
    summaries, num_failed = _summaries(source, args)
    if not summaries:
        return FAILURE
    drawn = next((one.name for one in summaries if one.shape), summaries[0].name)
    page = render(source.chip, summaries, analyse(source.open(drawn)))
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"{args.out} cannot be written: {error.strerror or error}; name another file"
        ) from error
    if args.json:
        for one in summaries:
            emit_json(one.as_dict())
    if not args.quiet:
        note(f"{args.out}: {len(summaries)} executables, {len(page)} characters")
    return FAILURE if num_failed else 0


def _trace(args: argparse.Namespace) -> int:
    source = open_source(args)
    name = select_one(source.names, args.key)
    trace = calls_of(source, name).trace(args.calls)
    if args.json:
        emit_json({"name": name} | trace.as_dict())
        return 0
    for line in text.trace_lines(trace):
        emit(line + "\n")
    emit_table(text.TRACE_COLUMNS, text.trace_rows(trace, args.top))
    if not args.quiet and source.chip.platform != "cpu":
        note(f"XLA leaves graphs out under a profiler; here {KEEP_GRAPHS} keeps them")
    return 0


def _is_place(given: str) -> bool:
    if _is_url(given) or Path(given.partition("#")[0]).expanduser().is_dir():
        return True
    if given.startswith(("/", ".", "~")):
        raise RequestError(f"{given} must be a store's folder, and there is none")
    return False


def _is_url(given: str) -> bool:
    return given.startswith(("http://", "https://"))


def _open_one(args: argparse.Namespace) -> Inspected:
    source = open_source(args)
    return source.open(select_one(source.names, args.key))


_ACTIONS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "list": _list,
    "show": _show,
    "ops": _ops,
    "diff": _diff,
    "html": _html,
    "trace": _trace,
}
