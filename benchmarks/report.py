"""A latency benchmark's report: a table on the terminal and a plot."""

import json
from pathlib import Path
from typing import Any

_RUN = ("card", "commit", "date", "versions", "command", "floor")


def print_table(report: dict[str, Any]) -> None:
    meta = report["meta"]
    print(f"\n{meta['card']}, {meta['versions']}, {meta['attention']}, floor {meta['floor']}")
    names = ("wall_ms", "value_ms", "dispatch_ms", "hot_dispatch_ms", "busy_ms", "floor_ms")
    print(f"{'tokens':>7}{'reqs':>5}{'prefix':>7}  {'path':11}", *(f"{name:>15}" for name in names),
          " over floor  TFLOP/s  graphs  nodes  updates  temp_mb")  # fmt: skip
    for row in report["rows"]:
        numbers = [f"{row[name]:15.3f}" if name in row else " " * 15 for name in names]
        floor = next(one["floor_ms"] for one in report["rows"] if _same_case(one, row))
        facts = (row.get(n, "") for n in ("tflops_per_s", "graphs", "nodes", "graph_updates"))
        print(f"{row['tokens']:7}{row['requests']:5}{row['prefix']:7}  {row['path']:11}", *numbers,
              f"{row['wall_ms'] / floor:11.2f}", *(f"{fact!s:>7}" for fact in facts),
              f"{row.get('temp_bytes', 0) / 1e6:9.1f}")  # fmt: skip


def add_run(kept: Path | None, meta: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of one run; beside it the rows of an earlier report that it did not measure anew.

    A row's `run` says which of `meta["runs"]` it is from.
    """
    old = json.loads(kept.read_text()) if kept is not None and kept.exists() else None
    before, others = ({}, []) if old is None else (old["meta"], old["rows"])
    runs = before.get("runs") or [_run(before)][: len(others)]
    new = {_identity(row) for row in rows}
    both = [{"run": 0} | row for row in others if _identity(row) not in new]
    both += [row | {"run": len(runs)} for row in rows]
    both.sort(key=lambda row: row["path"].startswith("torch"))
    lasting = {name: before[name] for name in ("mix", "ladder", "peer") if name in before}
    return {"meta": lasting | meta | {"runs": [*runs, _run(meta)]}, "rows": both}


def _run(meta: dict[str, Any]) -> dict[str, Any]:
    return {name: meta.get(name) for name in _RUN}


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("shape", "tokens", "requests", "prefix", "path"))


def _same_case(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("tokens", "requests", "prefix"))


def plot(report: dict[str, Any], out: Path) -> None:
    """Time to sync over tokens of one request, a line a path, and the floor."""
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if row["requests"] == 1 and row["prefix"] == 0]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for path in dict.fromkeys(row["path"] for row in rows if row["path"] != "decode"):
        own = sorted((row["tokens"], row["wall_ms"]) for row in rows if row["path"] == path)
        axes.plot(*zip(*own, strict=True), marker="o", markersize=3, label=path)
    floor = sorted((row["tokens"], row["floor_ms"]) for row in rows if row["path"] == "full")
    axes.plot(*zip(*floor, strict=True), "k--", label="floor")
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="ms to sync")
    meta = report["meta"]
    axes.set_title(f"{rows[0]['shape']}, body and head, {meta['card']}, {meta['date']}")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.savefig(out, dpi=130)
