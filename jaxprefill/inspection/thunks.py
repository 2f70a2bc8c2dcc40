"""Counts CUDA graphs in XLA's dump of what an executable launches."""

import re
from collections import Counter
from typing import NamedTuple

THUNK_DUMP = "thunk_sequence_after_thunk_passes.txt"  # the end of the dump's name
_THUNK = re.compile(r"^( *)\d+: (k\w+)", re.MULTILINE)
_GRAPH = "kCommandBuffer"


class ModuleGraphs(NamedTuple):
    """CUDA graphs of one executable, the launches in them, and what runs outside them, by kind."""

    num_graphs: int
    num_nodes: int
    outside: dict[str, int]


def read_graphs(text: str) -> ModuleGraphs:
    """What is indented runs inside the graph above it."""
    inside, outside = 0, Counter[str]()
    for indent, kind in _THUNK.findall(text):
        if indent:
            inside += 1
        else:
            outside[kind] += 1
    return ModuleGraphs(outside.pop(_GRAPH, 0), inside, dict(outside))
