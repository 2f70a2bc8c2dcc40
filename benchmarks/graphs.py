"""Counts CUDA graphs, their nodes and their re-recordings, from XLA's dump and log.

Both must be switched on before jax starts, and slow it down: a child process does the counting.
"""

import collections
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHILD_FLAG = "--graphs-child"


def count_graphs(timeout_s: float) -> dict[str, Any]:
    """Runs this same command as a child that executes a random mix, and reads what XLA wrote."""
    with tempfile.TemporaryDirectory(prefix="xla-dump-") as folder:
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}",
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CPP_VMODULE": "command_buffer_thunk=5",
        }
        try:
            done = subprocess.run(
                [*sys.orig_argv, CHILD_FLAG],
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {timeout_s} s"}
        keep_samples(Path(folder), done.stderr)
        if done.returncode:
            return {"error": done.stderr[-2000:]}
        return {"bodies": read_dump(Path(folder)), "mix": read_log(done.stderr)}


def read_dump(folder: Path) -> list[dict[str, Any]]:
    """One record a body: thunks outside and inside its command buffers."""
    records: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt")):
        text = path.read_text(errors="replace")
        kinds = collections.Counter(re.findall(r"\bk[A-Z]\w+", text))
        if kinds.total() < 20:
            continue  # a helper, not a body
        records.append(
            {
                "module": path.name.split(".thunk_sequence")[0],
                "command_buffers": kinds["kCommandBuffer"],
                "nodes": kinds.total() - kinds["kCommandBuffer"],
                "kinds": dict(kinds),
            }
        )
    return records


def read_log(text: str) -> dict[str, Any]:
    """Executions and re-recordings after the warm calls (`mark` lines part the two)."""
    warm, _, mix = text.partition("graphs-mix-begins")
    counts = {"executions": mix.count("Execute command buffer")}
    counts["updates"] = mix.count("Updated command buffer")
    counts["updates_while_warming"] = warm.count("Updated command buffer")
    nodes = [int(n) for n in re.findall(r"num_commands=(\d+)", text)]
    return counts | {"num_commands": dict(collections.Counter(nodes))}


def keep_samples(folder: Path, log: str) -> None:
    """Leaves the raw material in $GRAPHS_KEEP, where that is set."""
    keep = os.environ.get("GRAPHS_KEEP")
    if not keep:
        return
    lines = [line for line in log.splitlines() if "command_buffer" in line or "graphs-" in line]
    Path(keep, "graphs.log").write_text("\n".join(lines[-3000:]))
    dumps = sorted(
        folder.glob("*thunk_sequence_after_thunk_passes.txt"), key=lambda p: -p.stat().st_size
    )
    for path in dumps[:1]:
        Path(keep, "thunks.txt").write_bytes(path.read_bytes())
    for path in folder.glob(dumps[0].name.split(".thunk")[0] + "*after_optimizations.txt"):
        Path(keep, "hlo.txt").write_bytes(path.read_bytes()[:15_000_000])
        break
