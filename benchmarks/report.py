"""A latency benchmark's report: a table on the terminal and a plot."""

from pathlib import Path
from typing import Any


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
