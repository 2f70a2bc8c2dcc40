"""Counts CUDA graphs in XLA's dump of what an executable launches."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

# Ends of the dump's name: the first is not written where no pass has changed anything, as where
# there is no graph.
THUNK_DUMPS = ("thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt")
_THUNK = re.compile(r"^( *)\d+: (k\w+)", re.MULTILINE)
_GRAPH = "kCommandBuffer"
_NONE_AS_LARGE = 100_000


class ModuleGraphs(NamedTuple):
    """CUDA graphs of one executable, the launches in them, and what runs outside them, by kind."""

    num_graphs: int
    num_nodes: int
    outside: dict[str, int]


def is_recorded(options: Mapping[str, Any]) -> bool:
    """Whether these compiler options let XLA record graphs: none is as large as they may ask."""
    return int(options.get("xla_gpu_graph_min_graph_size", 1)) < _NONE_AS_LARGE


def read_graphs(text: str) -> ModuleGraphs:
    """What is indented runs inside the graph above it."""
    inside, outside = 0, Counter[str]()
    for indent, kind in _THUNK.findall(text):
        if indent:
            inside += 1
        else:
            outside[kind] += 1
    return ModuleGraphs(outside.pop(_GRAPH, 0), inside, dict(outside))
