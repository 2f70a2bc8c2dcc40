"""Batch files of short prompts, packed by the scheduler, against one line after another.

    python -m benchmarks.batch [--model demo] [--lines 128] [--tokens 16] [OPTION=VALUE ...]

Options are the engine's. Both runs go through `jaxprefill.offline` and one engine; `--window 1` is
one by one. Prompts share no prefix. Prints a table and, with --output, writes JSON.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from benchmarks.meta import describe_run
from jaxprefill.config import make_config
from jaxprefill.offline.batch import DEFAULT_WINDOW, BatchJob
from jaxprefill.offline.lines import Source
from jaxprefill.offline.output import LineOutput
from jaxprefill.offline.session import OfflineSession
from jaxprefill.remote.client import EngineProcess


def lines(kind: str, count: int, tokens: int, *, seed: int) -> bytes:
    rng = random.Random(seed)
    found = []
    for index in range(count):
        ids = [rng.randrange(1000, 40000) for _ in range(tokens)]
        url, body = {
            "embed": ("/v1/embeddings", {"input": ids}),
            "classify": ("/v1/classify", {"input": ids, "label_token_ids": [504, 314]}),
            "generate": (
                "/v1/completions",
                {"prompt": ids, "max_tokens": 16, "temperature": 0, "ignore_eos": True},
            ),
        }[kind]
        found.append({"custom_id": str(index), "method": "POST", "url": url, "body": body})
    return "".join(json.dumps(one) + "\n" for one in found).encode()


async def timed(session: OfflineSession, folder: Path, data: bytes, window: int) -> dict:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(data)
    before = await session.stats()
    with Source(str(source)) as opened, LineOutput(str(target), "overwrite") as output:
        job = BatchJob(opened, output, window=window)
        began = time.perf_counter()
        await job.run(session)
        seconds = time.perf_counter() - began
    after = await session.stats()
    assert job.progress.num_failed == 0
    real, padding = (after[key] - before[key] for key in ("real_tokens", "padding_tokens"))
    passes = {name: n - before["passes"].get(name, 0) for name, n in after["passes"].items()}
    return {
        "lines": job.progress.num_lines,
        "ms_per_line": 1e3 * seconds / job.progress.num_lines,
        "padding_share": padding / (real + padding),
        "passes": passes,
    }


async def measure(args: argparse.Namespace) -> list[dict]:
    options = dict(option.split("=", 1) for option in args.options)
    engine = EngineProcess(make_config(model=args.model, **options))
    rows = []
    async with OfflineSession(engine) as session:
        await session.ready()
        with tempfile.TemporaryDirectory() as name:
            for seed, kind in enumerate(("classify", "embed", "generate")):
                for window, count in ((1, args.lines // 8), (DEFAULT_WINDOW, args.lines)):
                    data = lines(kind, count, args.tokens, seed=2 * seed + (window > 1))
                    found = await timed(session, Path(name), data, window)
                    rows.append({"kind": kind, "window": window} | found)
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lines", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--output", type=Path)
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of the engine")
    args = parser.parse_args()
    rows = asyncio.run(measure(args))
    for one, many in zip(rows[::2], rows[1::2], strict=True):
        ratio = one["ms_per_line"] / many["ms_per_line"]
        shares = f"padding {one['padding_share']:.0%} -> {many['padding_share']:.0%}"
        print(f"{one['kind']}: {ratio:.1f}x, {shares}")
    if args.output:
        args.output.write_text(
            json.dumps({"meta": describe_run("benchmarks.batch"), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
