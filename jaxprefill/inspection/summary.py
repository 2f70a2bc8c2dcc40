"""From a program's text to the numbers of `list` and `ops`."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxprefill.inspection.cost import Cost, ProgramCost, cost_program
from jaxprefill.inspection.findings import Finding, find
from jaxprefill.inspection.hlo import parse_module
from jaxprefill.inspection.program import Kernel, Program, follow
from jaxprefill.inspection.records import Chip, Inspected, Missing, Operation, Summary
from jaxprefill.inspection.thunks import ModuleGraphs, is_recorded, read_graphs


@dataclass(frozen=True)
class Analysis:
    """An executable's program and its cost."""

    inspected: Inspected
    program: Program
    cost: ProgramCost

    @property
    def findings(self) -> list[Finding]:
        """What should not be there."""
        return find(self.program, self.cost, platform=self.inspected.chip.platform)


def analyse(inspected: Inspected) -> Analysis:
    """Reads the program.

    Raises:
        InspectionError: its HLO cannot be had or read.
    """
    program = follow(parse_module(inspected.text("hlo")))
    return Analysis(inspected, program, cost_program(program))


def summarise(analysis: Analysis) -> Summary:
    """One line of `list`."""
    one, cost = analysis.inspected, analysis.cost
    chip, kernels = one.chip, Counter[str]()
    for kernel in analysis.program.kernels:
        kernels[kernel.kind] += max(round(kernel.count), 1)
    memory_s = chip.seconds({}, cost.needed_bytes)
    floor_s = chip.seconds(cost.products, cost.needed_bytes)
    graphs = _graphs(one)
    return Summary(
        name=one.name,
        shape=one.shape,
        flops=cost.flops,
        num_bytes=cost.num_bytes,
        needed_bytes=cost.needed_bytes,
        floor_s=floor_s,
        bound="" if floor_s is None else "memory" if floor_s == memory_s else "compute",
        measured_s=one.measured_s,
        temp_bytes=one.temp_bytes,
        argument_bytes=one.argument_bytes,
        output_bytes=one.output_bytes,
        code_bytes=one.code_bytes or None,  # on a CPU XLA counts none
        kernels=dict(kernels.most_common()),
        num_graphs=graphs.num_graphs if isinstance(graphs, ModuleGraphs) else None,
        graph_nodes=graphs.num_nodes if isinstance(graphs, ModuleGraphs) else None,
        graph_note=graphs.reason if isinstance(graphs, Missing) else "",
        compile_s=one.compile_s,
        fingerprint=one.fingerprint,
        notes=tuple(_notes(analysis.program, cost, chip)),
    )


def _graphs(one: Inspected) -> ModuleGraphs | Missing:
    if one.chip.platform == "cpu":
        return Missing("a CPU has no graphs")
    options = one.facts.get("job", one.facts).get("options", {})
    if not is_recorded(options):
        return ModuleGraphs(0, 0, {})
    text = one.read_text("thunks")
    return text if isinstance(text, Missing) else read_graphs(text)


def _notes(program: Program, cost: ProgramCost, chip: Chip) -> list[str]:
    notes: list[str] = []
    if chip.bytes_per_s is None:
        notes.append(f"no floor: {chip.source}")
    if cost.num_untold:
        notes.append(f"{cost.num_untold} kernels, attention for one, do not tell their products")
    unknown = sum(turns is None for _, turns in program.loops)
    if unknown:
        notes.append(f"loops that turn as often as the batch says count once: {unknown}")
    return notes


def operations(analysis: Analysis) -> list[Operation]:
    """Kernels by scope, kind and shape, those with the longest floor first."""
    chip, cost = analysis.inspected.chip, analysis.cost
    whole = chip.seconds(cost.products, cost.needed_bytes)
    groups: dict[tuple[str, str, str], list[tuple[Kernel, Cost]]] = {}
    for kernel, one in zip(analysis.program.kernels, cost.by_kernel, strict=True):
        key = (kernel.scope, kernel.kind, describe(kernel))
        groups.setdefault(key, []).append((kernel, one))
    found = [_operation(key, members, chip, whole) for key, members in groups.items()]
    return sorted(found, key=lambda each: (-(each.floor_share or 0), -each.num_bytes))


def by_scope(found: Sequence[Operation]) -> list[Operation]:
    """The same, one for each scope."""
    groups: dict[str, list[Operation]] = {}
    for each in found:
        groups.setdefault(each.scope, []).append(each)
    return [
        Operation(
            kind="all",
            what=f"{len(members)} kinds of kernels",
            scope=scope,
            count=sum(each.count for each in members),
            flops=_sum_known([each.flops for each in members]),
            num_bytes=sum(each.num_bytes for each in members),
            floor_share=_sum_known([each.floor_share for each in members]),
        )
        for scope, members in groups.items()
    ]


def ranked(
    found: Sequence[Operation], key: Callable[[Operation], float | None], limit: int
) -> list[Operation]:
    """The largest by some number."""
    return sorted(found, key=lambda each: -(key(each) or 0))[:limit]


def describe(kernel: Kernel) -> str:
    """What a kernel makes, for people: `dot -> f32[32,96]`."""
    each = kernel.instruction
    inside = "dot" if "dot" in kernel.opcodes else each.target or each.opcode
    name = kernel.body.root.opcode if kernel.body is not None and inside == "fusion" else inside
    return f"{name} -> {each.shape}"


def _operation(
    key: tuple[str, str, str],
    members: list[tuple[Kernel, Cost]],
    chip: Chip,
    whole: float | None,
) -> Operation:
    floors = [
        (chip.seconds(cost.products or {}, cost.num_bytes) or 0) * kernel.count
        for kernel, cost in members
    ]
    return Operation(
        scope=key[0],
        kind=key[1],
        what=key[2],
        count=sum(kernel.count for kernel, _ in members),
        flops=_sum_known(
            [None if cost.flops is None else cost.flops * kernel.count for kernel, cost in members]
        ),
        num_bytes=round(sum(cost.num_bytes * kernel.count for kernel, cost in members)),
        floor_share=sum(floors) / whole if whole else None,
    )


def _sum_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
