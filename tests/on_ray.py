"""Runs Ray Data and Ray Serve with a tiny model, and prints as JSON what came out (test_ray.py).

python -m tests.on_ray all|load MODEL FOLDER
"""

import argparse
import json
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import ray
from ray import serve

from jaxprefill.offline import RayPredictor
from jaxprefill.remote.ray_serve import deployment
from tests.tiny import SMALL

TEXTS = [f"number {index} " + "ab" * (index % 7) for index in range(48)]
TEXTS[5] = "too long " * 50
BODY = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "logprobs": 1}
OPTIONS = SMALL | {"prefill_backend": "eager"}


class DyingPredictor(RayPredictor):
    """Is killed once, in the middle of a batch."""

    def __init__(self, folder: str, **options) -> None:
        super().__init__(**options)
        self._folder = Path(folder)

    def __call__(self, batch):
        (self._folder / f"actor-{os.getpid()}").touch()
        if any("number 20 " in text for text in batch["text"]):
            try:
                (self._folder / "died").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().__call__(batch)


def run_data(model: str, folder: Path) -> dict:
    rows = ray.data.from_items([{"id": index, "text": text} for index, text in enumerate(TEXTS)])
    options = {"folder": str(folder), "model": model, "task": "perplexity", **OPTIONS}
    found = rows.repartition(12).map_batches(
        DyingPredictor,
        fn_constructor_kwargs=options,
        compute=ray.data.ActorPoolStrategy(size=2),
        batch_size=4,
    )
    return {
        "rows": sorted(found.take_all(), key=lambda row: row["id"]),
        "vectors": write_vectors(model, rows.repartition(12), folder),
        "has_died": (folder / "died").exists(),
        "num_actors": len(list(folder.glob("actor-*"))),
    }


def write_vectors(model: str, rows, folder: Path) -> list[list[int]]:
    """Blocks with a row at fault and blocks without one make one table."""
    options = {"model": model, "task": "embed", **OPTIONS}
    rows.map_batches(
        RayPredictor,
        fn_constructor_kwargs=options,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=0,
        batch_size=4,
    ).write_parquet(str(folder / "out"))
    found = ray.data.read_parquet(str(folder / "out")).to_pandas()
    sizes = {len(vector) for vector in found["embedding"]}
    wrong = found["id"][[vector[0] != vector[0] for vector in found["embedding"]]]
    return [[len(found), *sizes], wrong.tolist()]


def start_serve() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    return f"http://127.0.0.1:{port}"


def states() -> dict[str, int]:
    status = serve.status().applications["default"].deployments["jaxprefill"]
    return {str(getattr(state, "value", state)): n for state, n in status.replica_states.items()}


def processes() -> dict[int, int]:
    """Replicas by the process of the engine of each."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"jaxprefill.remote.worker" not in path.read_bytes():
                continue
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if b"ServeReplica" in Path(f"/proc/{parent}/cmdline").read_bytes():
                found[int(path.parent.name)] = parent
        except OSError:  # it ended meanwhile
            continue
    return found


def run_serve(model: str) -> dict:
    url = start_serve()
    serve.run(deployment(model, min_replicas=1, max_replicas=2, **OPTIONS))
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as reply:
        chunks = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1]]
    return {
        "answer": httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json(),
        "wrong": httpx.post(f"{url}/v1/completions", json={"prompt": [-1]}).status_code,
        "health": httpx.get(f"{url}/health").status_code,
        "states": states(),
        "chunks": chunks,
        "streamed": "".join(texts),
    }


def wait_for(condition: Callable[[], bool], limit_s: float = 150.0) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + limit_s, f"{states()} after {limit_s} s"
        time.sleep(0.2)
    return time.monotonic() - began


class Load:
    """Clients that ask one after the other."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.statuses: Counter[int] = Counter()
        self._url = url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        body = BODY | {"max_tokens": 100, "ignore_eos": True}
        while not self._is_over.is_set():
            reply = httpx.post(f"{self._url}/v1/completions", json=body, timeout=120)
            self.statuses[reply.status_code] += 1

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def run_load(model: str) -> dict:
    url = start_serve()
    try:
        serve.run(deployment("/nonexistent"))
        refused = ""
    except RuntimeError as error:
        refused = str(error) + str(serve.status().applications["default"])
    delays = {"upscale_delay_s": 2, "downscale_delay_s": 3, "look_back_period_s": 2}
    options = OPTIONS | {"max_running_requests": 2, "autoscaling": delays}
    serve.run(deployment(model, min_replicas=1, max_replicas=2, **options))
    load, seen = Load(url, 12), {}
    try:
        seen["up_s"] = wait_for(lambda: states().get("RUNNING") == 2)
        most, killed = states()["RUNNING"], processes()
        os.kill(next(iter(killed.values())), signal.SIGKILL)
        seen["replaced_s"] = wait_for(
            lambda: len(processes().keys() - killed) == 1 and states().get("RUNNING") == 2
        )
    finally:
        load.stop()
    seen["down_s"] = wait_for(lambda: states() == {"RUNNING": 1})
    return seen | {
        "refused": refused,
        "most": most,
        "replaced": True,
        "least": len(processes()),
        "ok": load.statuses.pop(200, 0),
        "failed": load.statuses.total(),
        "statuses": [200, *load.statuses],
        "in_flight": 12,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("all", "load"))
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level=logging.ERROR,
        object_store_memory=100_000_000,
    )
    if args.what == "load":
        found = run_load(args.model)
    else:
        found = {
            "texts": TEXTS,
            "data": run_data(args.model, args.folder),
            "serve": run_serve(args.model),
        }
    found["processes"] = list(processes())
    serve.shutdown()
    ray.shutdown()
    print("\nFOUND " + json.dumps(found, default=str))


if __name__ == "__main__":
    main()
