"""Counts CUDA graphs, their nodes and their re-recordings, from XLA's own dump and log.

`GraphLog` must be made before jax is imported: it sets XLA's environment and catches descriptor 2.
"""

import collections
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from jaxprefill.inspection.thunks import THUNK_DUMPS, read_graphs

_UPDATED = re.compile(r"Updated command buffer in (\d+) .s; num_commands=(\d+)")


class GraphUse(NamedTuple):
    """What the log says of a stretch of time."""

    executions: int
    updates: int
    updated_nodes: dict[int, int]  # graph size -> updates
    update_us: int


class GraphLog:
    """XLA's log of command buffers, and its dump of what each executable runs."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="xla-"))
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={self._folder}"
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
        os.environ["TF_CPP_VMODULE"] = "command_buffer_thunk=5"
        self._log = self._folder / "log.txt"
        terminal = os.dup(2)
        descriptor = os.open(self._log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 2)
        sys.stderr = os.fdopen(terminal, "w")
        self._seen = 0

    def read(self) -> GraphUse:
        """What was logged since the last call."""
        with self._log.open("rb") as log:
            log.seek(self._seen)
            data = log.read()
        self._seen += len(data)
        text = data.decode(errors="replace")
        found = [(int(us), int(nodes)) for us, nodes in _UPDATED.findall(text)]
        return GraphUse(
            executions=text.count("Execute command buffer"),
            updates=len(found),
            updated_nodes=dict(collections.Counter(nodes for _, nodes in found)),
            update_us=sum(us for us, _ in found),
        )

    def of_module(self, name: str) -> dict[str, Any]:
        """Graphs, launches in them and outside of the executable that XLA calls `jit_{name}`.

        Of several of that name, the last that was compiled. Ready for JSON.
        """
        dumps = [list(self._folder.glob(f"*.jit_{name}.*{end}")) for end in THUNK_DUMPS]
        paths = sorted(next(filter(None, dumps), []), key=_module_number)
        found = read_graphs("".join(path.read_text(errors="replace") for path in paths[-1:]))
        return {"graphs": found.num_graphs, "nodes": found.num_nodes, "outside": found.outside}


def _module_number(path: Path) -> int:
    """XLA counts the modules of a process in the names of its dumps."""
    found = re.match(r"module_(\d+)", path.name)
    return int(found[1]) if found else -1
