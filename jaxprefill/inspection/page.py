"""One self-contained page: roofline, memory, a layer's graph, and a table that can be sorted."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxprefill.inspection.hlo import Computation, Instruction
from jaxprefill.inspection.program import Kernel, scope_of
from jaxprefill.inspection.records import Chip, Operation, Summary
from jaxprefill.inspection.summary import Analysis, by_scope, operations
from jaxprefill.inspection.text import SUMMARY_COLUMNS, describe_chip, summary_row

_VIEWS = frozenset(("bitcast", "tuple", "get-tuple-element"))
_TEMPLATE = Path(__file__).with_name("page.html")
# The record's field behind each column of the table.
_KEYS = (
    *("name", "flops", "num_bytes", "needed_bytes", "intensity", "floor_s", "measured_s"),
    *("ratio_to_floor", "temp_bytes", "argument_bytes", "output_bytes", "code_bytes", "kernels"),
    *("num_graphs", "graph_nodes", "compile_s", "fingerprint"),
)


def render(chip: Chip, summaries: Sequence[Summary], layer: Analysis) -> str:
    """The page. `layer` is the executable whose scopes are drawn as a graph."""
    columns = [
        {"key": key, "title": title.lstrip(">")}
        for key, title in zip(_KEYS, SUMMARY_COLUMNS, strict=True)
    ]
    data = {
        "chip": asdict(chip),
        "chip_text": describe_chip(chip),
        "rate": _rate(chip, layer),
        "columns": columns,
        "executables": [one.as_dict() for one in summaries],
        "rows": [summary_row(one) for one in summaries],
        "layer": layer_graph(layer),
    }
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # ends no script
    return _TEMPLATE.read_text(encoding="utf-8").replace("DATA", text, 1)


def layer_graph(analysis: Analysis) -> dict[str, Any]:
    """The model's scopes in the order in which they run, and the values that go between them."""
    kernels = [each for each in analysis.program.kernels if each.scope]
    costs = {each.scope: each for each in by_scope(operations(analysis))}
    order = list(dict.fromkeys(each.scope for each in kernels))
    return {
        "name": analysis.inspected.name,
        "nodes": [_node(costs[scope], kernels) for scope in order],
        "links": [[one, other, count] for (one, other), count in _links(kernels).items()],
    }


def _node(cost: Operation, kernels: Sequence[Kernel]) -> dict[str, Any]:
    kinds = Counter(each.kind for each in kernels if each.scope == cost.scope)
    return cost.as_dict() | {"kinds": ", ".join(f"{kind} {n}" for kind, n in kinds.items())}


def _links(kernels: Sequence[Kernel]) -> Counter[tuple[str, str]]:
    """How many values go from one scope to another, within each computation."""
    own = {(each.computation.name, each.instruction.name): each.scope for each in kernels}
    found = Counter[tuple[str, str]]()
    for computation in {each.computation.name: each.computation for each in kernels}.values():
        scopes = {
            name: own.get((computation.name, name)) or scope_of(each.op_name)
            for name, each in computation.instructions.items()
        }
        for name, each in computation.instructions.items():
            if each.opcode in _VIEWS or not scopes[name]:
                continue
            for source in _sources(each, computation):
                if scopes[source] not in ("", scopes[name]):
                    found[scopes[source], scopes[name]] += 1
    known = set(own.values())
    return Counter({link: count for link, count in found.items() if set(link) <= known})


def _sources(each: Instruction, computation: Computation) -> Iterator[str]:
    """Whose results an instruction reads, whatever they are packed in."""
    for operand in computation.operands(each):
        if operand.opcode in _VIEWS:
            yield from _sources(operand, computation)
        else:
            yield operand.name


def _rate(chip: Chip, layer: Analysis) -> float | None:
    """Products a second of the dtype that the drawn executable mostly multiplies."""
    if not chip.flops_per_s:
        return None
    products = layer.cost.products
    main = max(products, key=lambda dtype: products[dtype]) if products else ""
    return chip.flops_per_s.get(main, min(chip.flops_per_s.values()))
