"""Checks and times every Pallas kernel, and plain JAX in its place: one table for choices.

    python -m benchmarks.kernels attention --budget 300 --json attention.json
    python -m benchmarks.kernels latent_attention --case 'sparse/d*' --tiles heads=32,block=64
    python -m benchmarks.kernels experts top_k products --tiles default --budget 600
    python -m benchmarks.kernels all --interpret --tiles default       on a CPU: tiny sizes

A row is a case, a backend and a tiling: the kernel's own choice or, without --tiles, a list of
others. Cases come in the order of their weight, until the budget is spent; the JSON file always
holds what there is. Of a row:

    us      a call's time, median of some rounds: calls are chained in one executable, and take
            their operands in turn. Experts, choices and products have a launch more, of one number
    share   of that, what the chip needs at least: bytes and products at the rates that the project
            knows of it (`kernels.device.known_rates`)
    error   the norm of the error over that of a float32 reference, in rows spread over the result

What fails is a row that says why. A family runs in a process of its own, and in a new one after a
failure that ends it, or its device's work, or that takes longer than --limit.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from benchmarks.kernel_families import FAMILIES, family_of
from benchmarks.kernel_runs import POISONED, run_family
from benchmarks.meta import commit, describe_card

Row = dict[str, Any]
_GRACE_S = 30.0  # to finish a row that was begun before the budget was spent
_NUMBERS = ("us", "us_min", "us_max", "floor_us", "share", "tflops_per_s", "gb_per_s", "error")
_HEAD = f"{'case':26} {'backend':17} " + " ".join(f"{name:>12}" for name in _NUMBERS) + "  tiles"


def main() -> None:
    """See the module's docstring."""
    args = parse_args()
    if args.first is not None:
        run_worker(args)
        return
    until = time.monotonic() + args.budget
    run = {"commit": args.commit or commit(), "date": time.strftime("%Y-%m-%d")}
    run["command"] = "python -m benchmarks.kernels " + " ".join(sys.argv[1:])
    report: dict[str, Any] = {"meta": run, "rows": [], "not_measured": {}}

    def keep() -> None:
        report["fastest"] = fastest(report["rows"])
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    for family in args.families:

        def add(row: Row, family: str = family) -> None:
            report["rows"].append({"family": family} | row)
            print(line(report["rows"][-1]), flush=True)
            keep()

        print(f"\n{family}\n{_HEAD}", flush=True)
        session = Session(worker_command(args, family), limit_s=args.limit)
        left = session.run(add, until)
        report["meta"] = session.meta | report["meta"]
        report["not_measured"][family] = left
        if left:
            print(f"not measured, for want of time: {len(left)}, the first {left[0]}")
    keep()
    print_fastest(report["fastest"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="+", choices=(*FAMILIES, "all"))
    parser.add_argument("--case", default="", help="a pattern of names, such as '8192x*'")
    parser.add_argument("--backend", nargs="+", default=[], help="these alone")
    parser.add_argument("--tiles", nargs="+", help="'default', or overrides like heads=32,block=64")
    parser.add_argument("--budget", type=float, default=1e9, help="start nothing after, seconds")
    parser.add_argument("--limit", type=float, default=180.0, help="of one row, seconds")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    parser.add_argument("--interpret", action="store_true", help="on any device, at tiny sizes")
    parser.add_argument("--commit", default="", help="of the source, where git does not say")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)  # of a family's process
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.families = FAMILIES if "all" in args.families else tuple(args.families)
    return args


def worker_command(args: argparse.Namespace, family: str) -> Callable[[int, float], list[str]]:
    """(first variant, end by the monotonic clock) -> the command that runs a family from there."""
    words = [sys.executable, "-m", "benchmarks.kernels", family, "--case", args.case]
    words += ["--interpret"] if args.interpret else []
    for name, given in (("--backend", args.backend), ("--tiles", args.tiles)):
        words += [name, *given] if given else []
    return lambda first, until: [*words, "--first", str(first), "--until", str(until)]


def run_worker(args: argparse.Namespace) -> None:
    """One family's rows to standard output, as lines of JSON; before them what there will be."""
    out, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no row

    def write(value: Any) -> None:
        print(json.dumps(value), file=out, flush=True)

    family = family_of(args.families[0])
    variants = family.variants(args.case, args.backend, args.tiles, is_tiny=args.interpret)
    write({"meta": describe_card(), "variants": [" ".join(filter(None, one)) for one in variants]})
    variants = variants[args.first :]
    if not run_family(family, variants, write, interpret=args.interpret, until=args.until):
        os._exit(POISONED)  # clearing up would touch the device


class Session:
    """One family's rows, from as many processes as it takes."""

    def __init__(self, command: Callable[[int, float], list[str]], *, limit_s: float) -> None:
        """`command` of the first variant and the end; a row may take `limit_s`."""
        self.meta: Row = {}
        self._command = command
        self._limit_s = limit_s
        self._variants: list[str] | None = None
        self._done = 0

    def run(self, add: Callable[[Row], None], until: float) -> list[str]:
        """Hands on each row; the variants that were not begun before `until`.

        Raises:
            RuntimeError: a process ended before it said what it would run.
        """
        while self._variants is None or self._done < len(self._variants):
            if time.monotonic() >= until:
                break
            why = self._run_once(add, until)
            if self._variants is None:
                raise RuntimeError(f"a family's process must say what it will run; it {why}")
            if why is None:
                break
            if why:
                failed = self._variants[self._done]
                add({"case": failed, "backend": "", "tiles": "", "failure": f"its process {why}"})
                self._done += 1
        return (self._variants or [])[self._done :]

    def _run_once(self, add: Callable[[Row], None], until: float) -> str | None:
        """Why the process ended; None: it was done; "": the last row says it."""
        command = self._command(self._done, until)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None, "it was asked for"
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
        wait_s = self._limit_s
        try:
            while (text := lines.get(timeout=wait_s)) is not None:
                value = json.loads(text)
                if "variants" in value:
                    self.meta, self._variants = value["meta"], value["variants"]
                else:
                    self._done += 1
                    add(value)
                wait_s = min(self._limit_s, max(until - time.monotonic(), 0) + _GRACE_S)
        except queue.Empty:
            process.kill()
            return f"did not answer in {wait_s:.3g} s"
        finally:
            status = process.wait()
        if status == 0:
            return None
        return "" if status == POISONED else f"ended with status {status}"


def _forward(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    with stream:
        for text in stream:
            lines.put(text)
    lines.put(None)


def line(row: Row) -> str:
    """Of the table on the terminal."""
    names = f"{row['case']:26} {row['backend']:17} "
    if "us" not in row:
        return f"{names}{row['failure']}" + (f"  ({row['tiles']})" if row["tiles"] else "")
    numbers = " ".join(f"{row.get(name, ''):>12}" for name in _NUMBERS)
    return f"{names}{numbers}  {row['tiles']}  {row.get('failure', '')}".rstrip()


def fastest(rows: list[Row]) -> list[Row]:
    """Of each case the fastest backend and tiling that is right, and how much slower others are.

    `others`: of each other backend its best time over the fastest. `default`: that of the fastest
    backend's own choice of tiles. `is_close`: no difference from the next row beyond their spread.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "us" in row and "failure" not in row:
            found.setdefault((row["family"], row["case"]), []).append(row)
    best: list[Row] = []
    for (family, case), own in found.items():
        first, *rest = sorted(own, key=lambda row: row["us"])
        others: dict[str, float] = {}
        for row in rest:
            if row["backend"] != first["backend"]:
                others.setdefault(row["backend"], round(row["us"] / first["us"], 3))
        same = [one for one in own if one["backend"] == first["backend"] and one["is_default"]]
        best.append(
            {
                "family": family,
                "case": case,
                **{name: first[name] for name in ("backend", "tiles", "us")},
                "default": round(same[0]["us"] / first["us"], 3) if same else None,
                "others": others,
                "is_close": bool(rest) and rest[0]["us_min"] <= first["us_max"],
            }
        )
    return best


def print_fastest(best: list[Row]) -> None:
    print("\nfastest of each case, with how many times longer others take")
    for row in best:
        others = ", ".join(f"{name} {times:.2f}" for name, times in row["others"].items())
        own = "" if row["default"] in (None, 1.0) else f"its own tiles {row['default']:.2f}"
        more = "; ".join(filter(None, (others, own, "within the spread" * row["is_close"])))
        name = f"{row['family']} {row['case']}"
        print(f"{name:44} {row['backend']:17} {row['us']:>10} us  {row['tiles']}  {more}".rstrip())


if __name__ == "__main__":
    main()
