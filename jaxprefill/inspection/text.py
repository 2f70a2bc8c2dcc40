"""Records as rows of text tables. Numbers are short, and empty where they are not known."""

from collections.abc import Iterable, Mapping

from jaxprefill.inspection.diff import Change
from jaxprefill.inspection.findings import Finding
from jaxprefill.inspection.records import Chip, Operation, Summary
from jaxprefill.inspection.trace import Trace

SUMMARY_COLUMNS = (
    "executable",
    ">FLOPs",
    ">moved",
    ">needed",
    ">FLOPs/B",
    ">floor ms",
    ">ms",
    ">/floor",
    ">temp",
    ">args",
    ">out",
    ">code",
    "kernels",
    ">graphs",
    ">nodes",
    ">compile s",
    "fingerprint",
)
SCOPE_COLUMNS = ("scope", ">kernels", ">FLOPs", ">bytes", ">of floor")
CHANGE_COLUMNS = ("", "scope", "kind", "what", ">before", ">after")
OPERATION_COLUMNS = ("scope", "kind", "what", ">times", ">FLOPs", ">bytes", ">of floor")
FINDING_COLUMNS = ("found", "what", "scope", ">times", ">bytes", "meant, as")
TRACE_COLUMNS = ("kernel", ">a call", ">ms a call", ">of busy")
_UNITS = ("", " k", " M", " G", " T", " P")


def summary_row(one: Summary) -> list[str]:
    """For SUMMARY_COLUMNS."""
    sizes = (one.temp_bytes, one.argument_bytes, one.output_bytes, one.code_bytes)
    return [
        one.name,
        number(one.flops),
        num_bytes(one.num_bytes),
        num_bytes(one.needed_bytes),
        fixed(one.intensity, 1),
        milliseconds(one.floor_s),
        milliseconds(one.measured_s),
        fixed(one.ratio, 2),
        *map(num_bytes, sizes),
        counts(one.kernels),
        number(one.num_graphs),
        number(one.graph_nodes),
        fixed(one.compile_s, 1),
        (one.fingerprint or "")[:8],
    ]


def operation_row(one: Operation) -> list[str]:
    """For OPERATION_COLUMNS."""
    share = "" if one.floor_share is None else f"{one.floor_share:.1%}"
    scope = one.scope or "(no scope)"
    costs = (fixed_count(one.count), number(one.flops), num_bytes(one.num_bytes), share)
    return [scope, one.kind, one.what, *costs]


def finding_row(one: Finding) -> list[str]:
    """For FINDING_COLUMNS."""
    size = num_bytes(one.num_bytes) if one.num_bytes else ""
    return [one.kind, one.what, one.scope, fixed_count(one.count), size, one.expected]


def describe_chip(chip: Chip) -> str:
    """One line: the chip, and what the floors are made of."""
    if chip.bytes_per_s is None:
        return f"{chip.kind or chip.platform}: no floors, as {chip.source}"
    rates = ", ".join(f"{name} {number(rate)}FLOP/s" for name, rate in chip.flops_per_s.items())
    return f"{chip.kind}: {number(chip.bytes_per_s)}B/s, {rates} ({chip.source})"


def note_lines(summaries: Iterable[Summary]) -> list[str]:
    """Each note once, with how many executables it is about, or which where it is one."""
    names: dict[str, list[str]] = {}
    for one in summaries:
        for note in (*one.notes, *([f"no graphs: {one.graph_note}"] if one.graph_note else ())):
            names.setdefault(note, []).append(one.name)
    return [
        f"{note} ({found[0] if len(found) == 1 else f'{len(found)} executables'})"
        for note, found in names.items()
    ]


def counts(found: Mapping[str, int]) -> str:
    """`fusion 12, copy 1`."""
    return ", ".join(f"{name} {count}" for name, count in found.items())


def number(value: float | None) -> str:
    """With a unit of thousands: 12, 3.4 k, 13.9 G."""
    if value is None:
        return ""
    for unit in _UNITS[:-1]:
        if abs(value) < 999.5:  # which is printed as 1e+03
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}{_UNITS[-1]}"


def num_bytes(value: int | None) -> str:
    """With a unit of thousands of bytes."""
    if value is None:
        return ""
    shown = number(value)
    return f"{shown}B" if " " in shown else f"{shown} B"


def milliseconds(seconds: float | None) -> str:
    """Three digits."""
    return "" if seconds is None else f"{seconds * 1e3:.3g}"


def fixed(value: float | None, digits: int) -> str:
    """So many decimals."""
    return "" if value is None else f"{value:.{digits}f}"


def fixed_count(value: float) -> str:
    """A count, which in a branch may be a part."""
    return f"{value:.0f}" if value == round(value) else f"{value:.2f}"


def scope_row(one: Operation) -> list[str]:
    """For SCOPE_COLUMNS."""
    row = operation_row(one)
    return [row[0], *row[3:]]


def change_row(one: Change) -> list[str]:
    """For CHANGE_COLUMNS."""
    return [one.status, one.scope, one.kind, one.what, str(one.before), str(one.after)]


def number_rows(
    numbers: Mapping[str, tuple[float | None, float | None]],
) -> list[list[str]]:
    """Name, before, after, and the second to the first."""
    rows: list[list[str]] = []
    for name, (before, after) in numbers.items():
        ratio = f"{after / before:.3f}" if before and after is not None else ""
        rows.append([name, number(before), number(after), ratio])
    return rows


def trace_lines(trace: Trace) -> list[str]:
    """The totals, by call."""
    each = trace.num_calls
    busy = trace.busy_s / trace.span_s if trace.span_s else 0.0
    return [
        f"{each} calls in {milliseconds(trace.span_s)} ms: {milliseconds(trace.span_s / each)} ms "
        f"a call, busy {busy:.1%} of it",
        f"{trace.num_gaps} gaps, {milliseconds(trace.gap_s / each)} ms a call; the longest "
        f"{milliseconds(trace.longest_gap_s)} ms",
    ]


def trace_rows(trace: Trace, limit: int) -> list[list[str]]:
    """For TRACE_COLUMNS: the kernels that take longest."""
    return [
        [
            one.name,
            fixed(one.count / trace.num_calls, 1),
            milliseconds(one.total_s / trace.num_calls),
            f"{one.total_s / trace.busy_s:.1%}" if trace.busy_s else "",
        ]
        for one in trace.kernels[:limit]
    ]
